"""Dropout by global element index, recompute without random state, and FLOP counts against torch's counter."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.models.test_parity import batch_for
from tests.support import configs
from trainyard import models
from trainyard.config.schema import RecomputeSection
from trainyard.core.counter_rng import RowSeeds, key32
from trainyard.kernels.reference import Kernels
from trainyard.models.flops import flops_per_sample
from trainyard.models.layers import CoreAttention, Dropout, token_seeds
from trainyard.parallel import recompute
from trainyard.parallel.context_parallel import ContextAxis
from trainyard.parallel.process_group import Group
from trainyard.parallel.tensor_parallel import TensorAxis


def draw(samples: list[int], tokens: range = range(16), step: int = 1) -> RowSeeds:
    key = torch.tensor(key32(0, "step", step), dtype=torch.int32)
    batch = {"rng_key": key, "sample_ids": torch.tensor(samples, dtype=torch.int32)}
    return token_seeds(batch, torch.tensor(tokens, dtype=torch.int32))


def test_masks_follow_the_sample_not_its_place_in_the_micro_batch() -> None:
    dropout = Dropout(0.3, "site", Kernels())
    x = torch.ones(4, 16, 32)
    whole = dropout(x, draw([0, 1, 2, 3]))
    assert torch.equal(dropout(x[:2], draw([2, 3])), whole[2:])
    assert torch.equal(dropout(x, draw([3, 2, 1, 0])), whole.flip(0))
    halves = [dropout(x[:, :8], draw([0, 1, 2, 3], part)) for part in (range(8), range(8, 16))]
    assert torch.equal(torch.cat(halves, 1), whole)


def test_masks_change_with_step_site_and_sample() -> None:
    x = torch.ones(2, 16, 64)
    a = Dropout(0.5, "a", Kernels())(x, draw([0, 1]))
    for other in (Dropout(0.5, "b", Kernels())(x, draw([0, 1])), Dropout(0.5, "a", Kernels())(x, draw([0, 1], step=2))):
        assert 0.4 < (a == other).float().mean() < 0.6
    assert not torch.equal(a[0], a[1])
    assert 0.4 < (a[0] == a[1]).float().mean() < 0.6


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_keeps_the_mean(p: float) -> None:
    y = Dropout(p, "s", Kernels())(torch.ones(8, 16, 4096), draw(list(range(8))))
    assert (y == 0).float().mean() == pytest.approx(p, abs=3e-3)
    assert y.mean() == pytest.approx(1.0, abs=5e-3)
    assert torch.equal(Dropout(p, "s", Kernels()).eval()(torch.ones(1, 16, 4), draw([0])), torch.ones(1, 16, 4))


def test_attention_dropout_follows_global_heads_and_matches_its_mean() -> None:
    q, k, v = (torch.randn(3, 4, 16, 8) for _ in range(3))
    whole = CoreAttention(4, 4, True, 0.2, "s", TensorAxis(), ContextAxis())
    y = whole(q, k, v, seeds=draw([0, 1, 2]))
    upper = CoreAttention(4, 4, True, 0.2, "s", TensorAxis(Group((0, 1), 1)), ContextAxis())
    assert torch.equal(upper(q[:, 2:], k[:, 2:], v[:, 2:], seeds=draw([0, 1, 2])), y[:, 2:])
    mean = torch.stack([whole(q, k, v, seeds=draw([0, 1, 2], step=step)) for step in range(400)]).mean(0)
    torch.testing.assert_close(mean, whole.eval()(q, k, v), atol=0.15, rtol=0.1)


@pytest.mark.parametrize("causal", [False, True])
def test_a_copy_of_kv_heads_for_each_query_head_changes_nothing(causal: bool) -> None:
    """In fp32, where the device's attention does not take fewer kv heads."""
    given = [torch.randn(2, heads, 16, 8) for heads in (6, 2, 2)]
    found = []
    for groups in (True, False):
        kernels = Kernels()
        kernels.has_fp32_gqa = groups
        core = CoreAttention(6, 2, causal, 0.0, "s", TensorAxis(), ContextAxis(), kernels)
        parts = [x.clone().requires_grad_() for x in given]
        y = core(*parts)
        y.square().sum().backward()
        found.append([y.detach(), *(x.grad for x in parts)])
    for grouped, copied in zip(*found, strict=True):
        torch.testing.assert_close(copied, grouped)


@pytest.mark.parametrize("kind", ["attention", "full", "norm", "mlp", "activation", "core_attention", "attention+mlp"])
@pytest.mark.parametrize("family", configs.TINY_MODELS)
def test_recompute_changes_no_bit(family: str, kind: str) -> None:
    section = configs.tiny_config(
        {
            **configs.TINY_MODELS[family],
            **({} if family == "llama" else {"hidden_dropout": 0.1, "attention_dropout": 0.1}),
        }
    ).model
    gradients = []
    for recomputed in (False, True):
        model = configs.tiny_model(section)
        if recomputed:
            config = (
                RecomputeSection(kind=kind)
                if kind in ("attention", "full")
                else RecomputeSection(kind="selective", modules=kind.split("+"))
            )
            assert recompute.apply_recompute(list(model.layers.children()), config) >= 2
        output = model(batch_for(family) | {"tokens": batch_for(family)["tokens"] % 60})
        output.logits().square().mean().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert gradient is None or torch.equal(gradient, gradients[1][name]), name


def test_recompute_saves_memory() -> None:
    section = configs.tiny_config({**configs.LLAMA, "layers": 4}).model
    saved = {}
    for kind in ("none", "attention", "full"):
        model = configs.tiny_model(section)
        recompute.apply_recompute(list(model.layers.children()), RecomputeSection(kind=kind))
        sizes: list[int] = []

        def keep(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(batch_for("llama"))
        saved[kind] = sum(sizes)
    assert saved["full"] < 0.3 * saved["none"]
    assert saved["attention"] < saved["none"]


@pytest.mark.parametrize("family", configs.TINY_MODELS)
def test_flops_match_torchs_counter(family: str) -> None:
    section = configs.tiny_config(family).model
    model = configs.tiny_model(section)
    batch = batch_for(family) | {"tokens": batch_for(family)["tokens"] % 60}
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # it knows no CPU flash kernel
        output = model.eval()(batch)
        output.logits()
    blueprint = models.family_of(section).blueprint(section)
    flops = flops_per_sample(section, blueprint, 24, 6)
    samples, forward = 3, flops.full_attention / 3
    assert counter.get_total_flops() == pytest.approx(samples * forward, rel=1e-6)
    assert (
        flops.causal_attention == flops.full_attention
        if family == "bert"
        else flops.causal_attention < flops.full_attention
    )
