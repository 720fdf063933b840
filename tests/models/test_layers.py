"""Dropout by global element index, recompute without random state, and FLOP counts against torch's counter."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers.integrations.neftune import neftune_post_forward_hook

from tests.support import configs
from tests.support.configs import tiny_batch, tiny_model
from tests.support.frozen_linear import frozen
from trainyard import models
from trainyard.config.schema import RecomputeSection
from trainyard.core.counter_rng import RowSeeds, key32
from trainyard.families.flops import flops_per_sample
from trainyard.kernels.reference import Kernels
from trainyard.models.init import initial_values
from trainyard.models.layers import CoreAttention, Dropout, MlpActivation, RMSNorm, token_seeds
from trainyard.parallel.context_parallel import ContextAxis
from trainyard.parallel.process_group import Group
from trainyard.parallel.recompute import apply_recompute
from trainyard.parallel.tensor_parallel import TensorAxis


def seeds(samples: list[int], positions: range = range(16), step: int = 1) -> RowSeeds:
    key = torch.tensor(key32(0, "step", step), dtype=torch.int32)
    batch: models.Batch = {"rng_key": key, "sample_ids": torch.tensor(samples, dtype=torch.int32)}
    return token_seeds(batch, torch.tensor(positions, dtype=torch.int32))


def test_masks_follow_the_sample_not_its_index_in_the_micro_batch() -> None:
    dropout = Dropout(0.3, "site", Kernels())
    x = torch.ones(4, 16, 32)
    full = dropout(x, seeds([0, 1, 2, 3]))
    assert torch.equal(dropout(x[:2], seeds([2, 3])), full[2:])
    assert torch.equal(dropout(x, seeds([3, 2, 1, 0])), full.flip(0))
    halves = [dropout(x[:, :8], seeds([0, 1, 2, 3], positions)) for positions in (range(8), range(8, 16))]
    assert torch.equal(torch.cat(halves, 1), full)


def test_masks_change_with_step_site_and_sample() -> None:
    x = torch.ones(2, 16, 64)
    a, b = Dropout(0.5, "a", Kernels()), Dropout(0.5, "b", Kernels())
    y = a(x, seeds([0, 1]))
    for other in (b(x, seeds([0, 1])), a(x, seeds([0, 1], step=2))):
        assert 0.4 < (y == other).float().mean() < 0.6
    assert not torch.equal(y[0], y[1])
    assert 0.4 < (y[0] == y[1]).float().mean() < 0.6


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_keeps_the_mean(p: float) -> None:
    y = Dropout(p, "s", Kernels())(torch.ones(8, 16, 4096), seeds(list(range(8))))
    assert (y == 0).float().mean() == pytest.approx(p, abs=3e-3)
    assert y.mean() == pytest.approx(1.0, abs=5e-3)
    assert torch.equal(Dropout(p, "s", Kernels()).eval()(torch.ones(1, 16, 4), seeds([0])), torch.ones(1, 16, 4))


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gpt", "bert"])
def test_embedding_noise_is_that_of_neftune(family: str) -> None:
    """The distribution of transformers' noise, in training only, another one at each step and position."""
    model, batch = tiny_model(configs.tiny_config(family).model), tiny_batch(family)
    batch["tokens"] = batch["tokens"].repeat(40, 1)
    batch["sample_ids"] = torch.arange(120, dtype=torch.int32)
    batch["rng_key"] = torch.tensor(key32("step", 1), dtype=torch.int32)
    table = torch.nn.Embedding(1, 32)
    table.neftune_noise_alpha = 5.0
    plain, other_step = (
        model.embed_tokens(batch),
        {**batch, "rng_key": torch.tensor(key32("step", 2), dtype=torch.int32)},
    )
    theirs = neftune_post_forward_hook(table, (), torch.zeros_like(plain))
    model.noise_bound = 5.0 / (24 * 32) ** 0.5
    noise = model.embed_tokens(batch) - plain
    assert noise.abs().max() == pytest.approx(theirs.abs().max().item(), rel=1e-3)
    assert noise.std() == pytest.approx(theirs.std().item(), rel=2e-2)
    assert noise.mean().abs() < 4 * theirs.std() / noise.numel() ** 0.5
    rows = torch.cat([noise.flatten(0, 1), (model.embed_tokens(other_step) - plain).flatten(0, 1)])
    assert len({tuple(row) for row in rows[:, :3].tolist()}) == len(rows)
    assert torch.equal(model.eval().embed_tokens(batch), plain)


def test_attention_dropout_follows_global_heads_and_keeps_the_mean() -> None:
    q, k, v = (torch.randn(3, 4, 16, 8) for _ in range(3))
    full = CoreAttention(4, 4, True, 0.2, "s", TensorAxis(), ContextAxis())
    y = full(q, k, v, seeds=seeds([0, 1, 2]))
    upper_half = CoreAttention(4, 4, True, 0.2, "s", TensorAxis(Group((0, 1), 1)), ContextAxis())
    assert torch.equal(upper_half(q[:, 2:], k[:, 2:], v[:, 2:], seeds=seeds([0, 1, 2])), y[:, 2:])
    mean = torch.stack([full(q, k, v, seeds=seeds([0, 1, 2], step=step)) for step in range(400)]).mean(0)
    torch.testing.assert_close(mean, full.eval()(q, k, v), atol=0.15, rtol=0.1)


@pytest.mark.parametrize("causal", [False, True])
def test_repeated_kv_heads_equal_grouped_attention(causal: bool) -> None:
    """The fp32 fallback for devices whose attention kernel does not take fewer kv heads than query heads."""
    inputs = [torch.randn(2, heads, 16, 8) for heads in (6, 2, 2)]
    results = []
    for has_gqa in (True, False):
        kernels = Kernels()
        kernels.has_fp32_gqa = has_gqa
        core = CoreAttention(6, 2, causal, 0.0, "s", TensorAxis(), ContextAxis(), kernels)
        qkv = [x.clone().requires_grad_() for x in inputs]
        y = core(*qkv)
        y.square().sum().backward()
        results.append([y.detach(), *(x.grad for x in qkv)])
    for grouped, repeated in zip(*results, strict=True):
        torch.testing.assert_close(repeated, grouped)


@pytest.mark.parametrize("kind", ["attention", "full", "norm", "mlp", "activation", "core_attention", "attention+mlp"])
@pytest.mark.parametrize("family", configs.TINY_MODELS)
def test_recompute_is_bit_exact(family: str, kind: str) -> None:
    dropout = {} if family == "llama" else {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    section = configs.tiny_config({**configs.TINY_MODELS[family], **dropout}).model
    gradients = []
    for recompute in (False, True):
        model = configs.tiny_model(section)
        if recompute:
            config = (
                RecomputeSection(kind=kind)
                if kind in ("attention", "full")
                else RecomputeSection(kind="selective", modules=kind.split("+"))
            )
            assert apply_recompute(list(model.layers.children()), config) >= 2
        model(tiny_batch(family)).logits().square().mean().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert gradient is None or torch.equal(gradient, gradients[1][name]), name


def test_recompute_saves_memory() -> None:
    section = configs.tiny_config({**configs.LLAMA, "layers": 4}).model
    saved_elements = {}
    for kind in ("none", "attention", "full"):
        model = configs.tiny_model(section)
        apply_recompute(list(model.layers.children()), RecomputeSection(kind=kind))
        sizes: list[int] = []

        def pack(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(tiny_batch("llama"))
        saved_elements[kind] = sum(sizes)
    assert saved_elements["full"] < 0.3 * saved_elements["none"]
    assert saved_elements["attention"] < saved_elements["none"]


@pytest.mark.parametrize(("fused", "lora"), [(False, False), (True, True)])
def test_recompute_of_norms_and_activations_drops_their_results(fused: bool, lora: bool) -> None:
    """Their result is what memory goes to: the matmul that reads it saves it."""
    section = configs.tiny_config("llama", **({"lora": {"rank": 2}} if lora else {})).model
    alive: dict[str, int] = {}
    for modules in ((), ("norm", "activation")):
        model = models.fill_parameters(models.build_model(section), initial_values(models.blueprint_of(section), 0))
        blocks = list(model.layers.children())
        results: list[weakref.ref[torch.UntypedStorage]] = []

        def note(module: Any, inputs: Any, output: Any, results: list[Any] = results) -> None:
            tensor = output if isinstance(output, torch.Tensor) else output[1]
            results.append(weakref.ref(tensor.untyped_storage()))

        named = [each for block in blocks for each in block.modules() if isinstance(each, MlpActivation | RMSNorm)]
        for module in named:
            module.saves_inputs_only = fused
            module.register_forward_hook(note)
        if modules:
            assert apply_recompute(blocks, RecomputeSection(kind="selective", modules=modules)) == len(named)
        loss = model(tiny_batch("llama")).logits().square().mean()
        gc.collect()
        alive[str(modules)] = sum(result() is not None for result in results)
        loss.backward()
    assert [*alive.values()] == [len(named), 0]


@pytest.mark.parametrize("family", configs.TINY_MODELS)
def test_flops_match_torchs_counter(family: str) -> None:
    section = configs.tiny_config(family).model
    model = configs.tiny_model(section)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # it has no rule for CPU flash
        model.eval()(tiny_batch(family)).logits()
    blueprint = models.family_of(section).blueprint(section)
    flops = flops_per_sample(section, blueprint, 24, 6)
    samples, forward = 3, flops.full_attention / 3
    assert counter.get_total_flops() == pytest.approx(samples * forward, rel=1e-6)
    is_causal = family != "bert"
    assert (flops.causal_attention < flops.full_attention) == is_causal


@pytest.mark.parametrize("family", configs.TINY_MODELS)
def test_flops_of_frozen_matrices_match_torchs_counter(family: str) -> None:
    """Forward and backward; the gradient of a matrix that is not trained is not computed."""
    section = configs.tiny_config(frozen(configs.TINY_MODELS[family], pattern="qkv|mlp|^output|pooler")).model
    blueprint, model = models.blueprint_of(section), configs.tiny_model(section)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(blueprint.is_trained(name))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        output = model.eval()(tiny_batch(family))
        logits = [output.logits(), *([] if output.next_sentence is None else [output.next_sentence])]
        torch.cat([each.flatten() for each in logits]).sum().backward()
    flops = flops_per_sample(section, blueprint, 24, 6)
    assert counter.get_total_flops() == pytest.approx(3 * flops.full_attention, rel=1e-6)
    all_trained = flops_per_sample(section, models.family_of(section).blueprint(section), 24, 6)
    assert flops.full_attention < all_trained.full_attention
