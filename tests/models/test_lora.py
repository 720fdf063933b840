"""LoRA, DoRA and rsLoRA against their definitions: fused weights, initial values, dropout, and what is trained."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.configs import GPT, LLAMA, MOE, tiny_batch, tiny_config
from trainyard import models
from trainyard.config.load import dump, load, parse
from trainyard.core.errors import UserError
from trainyard.core.splits import ModelShard
from trainyard.families.linear_wrappers.lora import parameter_group
from trainyard.families.model_config import first_model_difference
from trainyard.kernels.fp8_linear import Fp8Options
from trainyard.kernels.frozen_linear import dequantize, quantize_frozen
from trainyard.kernels.nf4 import quantize_nf4
from trainyard.models import Fp8Layers, blueprint_of, build_model, fill_parameters
from trainyard.models.init import initial_values
from trainyard.models.lora import LoraLinear
from trainyard.models.sharding import shard_tensor, unshard_tensor

LINEARS = ("q", "k", "v", "output", "gate", "up", "down")


def model_section(model: dict[str, Any] | str = "llama", **lora: Any) -> models.ModelConfig:
    return tiny_config(model, lora=lora).model


def lora_model(section: models.ModelConfig, seed: int = 0, scale: float = 0.1, **options: Any) -> nn.Module:
    """A model whose adapters are random, B and magnitudes too."""
    values, generator = initial_values(blueprint_of(section), seed), torch.Generator().manual_seed(seed)

    def random_values(name: str) -> Tensor:
        blueprint = blueprint_of(section)
        value = values(name)
        # Part by part, so that fused and unfused models get the same values.
        for piece in blueprint.local_slices(name) if "lora" in name else ():
            generator.manual_seed(sum(map(ord, piece.name)))
            noise = scale * torch.randn(piece.sizes, generator=generator)
            start = sum(p.sizes[0] for p in blueprint.local_slices(name)[: blueprint.local_slices(name).index(piece)])
            value[start : start + piece.sizes[0]] += noise
        return value

    return fill_parameters(build_model(section, **options), random_values)


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    output = model(batch)
    logits = F.linear(output.hidden_for_head(), output.weight)
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten().long())


def merged_weight(linear: LoraLinear) -> Tensor:
    """The weight that the layer stands for, by the definitions."""
    weight, first = linear.weight.detach().clone(), 0
    for index, (start, stop) in enumerate(linear.columns):
        a = linear.lora_A[index * linear.rank : (index + 1) * linear.rank]
        rows = slice(first, first + stop - start)
        weight[start:stop] += linear.scale * linear.lora_B[rows] @ a
        if linear.lora_magnitude is not None:
            norm = weight[start:stop].norm(dim=1, keepdim=True)
            weight[start:stop] *= linear.lora_magnitude[rows, None] / norm
        first += stop - start
    return weight.detach()


@pytest.mark.parametrize("options", [{}, {"rank_stabilized": True}, {"dora": True}, {"targets": ["q", "v", "down"]}])
@pytest.mark.parametrize("family", [LLAMA, GPT], ids=lambda section: section["family"])
def test_layer_is_its_definition(family: dict[str, Any], options: dict[str, Any]) -> None:
    if "targets" in options and family is GPT:
        options = {"targets": ["q", "down"]}
    model = lora_model(model_section(family, rank=3, alpha=5.0, **options))
    layers = [module for module in model.modules() if isinstance(module, LoraLinear)]
    assert layers
    for linear in layers:
        x = torch.randn(2, 5, linear.weight.shape[1])
        torch.testing.assert_close(linear(x), F.linear(x, merged_weight(linear), linear.bias))
    assert layers[0].scale == 5 / (3**0.5 if "rank_stabilized" in options else 3)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("fp8", [False, True])
def test_gradients_equal_those_of_plain_autograd(dora: bool, fp8: bool) -> None:
    """The fused backward against autograd of the same formula; in fp8, the update's part of it is exact too."""
    section = model_section({**LLAMA, "ffn": 64}, rank=16, dora=dora)
    fp8_layers = Fp8Layers(Fp8Options(), range(2)) if fp8 else None
    model = lora_model(section, fp8=fp8_layers)
    linear = next(module for module in model.modules() if isinstance(module, LoraLinear))
    x = torch.randn(2, 5, 32, requires_grad=True)
    linear.weight.requires_grad_(False)
    dy = torch.randn(2, 5, linear.weight.shape[0])
    linear(x).backward(dy)
    tensors = [linear.lora_A, linear.lora_B, *([linear.lora_magnitude] if dora else [])]
    found = [tensor.grad for tensor in tensors]
    for tensor in tensors:
        tensor.grad = None
    x2 = x.detach().requires_grad_()
    y = linear.kernels.linear(x2, linear.weight, None, linear.fp8)
    update, first = torch.zeros_like(y), 0
    for index, (start, stop) in enumerate(linear.columns):
        rows = slice(first, first + stop - start)
        update[..., start:stop] = x2 @ linear.lora_A[index * 16 : index * 16 + 16].T @ linear.lora_B[rows].T
        first += stop - start
    y = y + linear.scale * update
    if dora:
        full = torch.cat([merged_weight(linear)])
        assert linear.lora_magnitude is not None
        norms = full.norm(dim=1) / linear.lora_magnitude.detach()  # 1: rows are normalized, then scaled
        plain = torch.cat(
            [
                (
                    linear.weight[start:stop]
                    + linear.scale * linear.lora_B[start:stop] @ linear.lora_A[index * 16 : index * 16 + 16]
                ).norm(dim=1)
                for index, (start, stop) in enumerate(linear.columns)
            ]
        ).detach()
        assert norms.abs().allclose(torch.ones(1))
        y = y * (linear.lora_magnitude / plain)
    y.backward(dy)
    for tensor, gradient in zip(tensors, found, strict=True):
        assert gradient is not None
        torch.testing.assert_close(tensor.grad, gradient, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(x2.grad, x.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"dora": True}, {"dropout": 0.3}])
def test_fused_and_unfused_weights_compute_the_same(options: dict[str, Any]) -> None:
    """One A and B for each of q, k, v, gate and up; one shared A would not pass."""
    batch = tiny_batch("llama")
    unfused = {**LLAMA, "fuse_qkv": False, "fuse_gate_up": False}
    losses = [loss_of(lora_model(model_section(section, rank=4, **options)), batch) for section in (LLAMA, unfused)]
    torch.testing.assert_close(losses[0], losses[1])


def test_adapters_start_without_effect() -> None:
    """Values of adapters are a function of their names, and the model is the same at first, with DoRA too."""
    batch = tiny_batch("llama")
    plain = tiny_config("llama").model
    before = loss_of(fill_parameters(build_model(plain), initial_values(blueprint_of(plain), 0)), batch)
    for options in ({}, {"dora": True}):
        section = model_section("llama", **options)
        model = fill_parameters(build_model(section), initial_values(blueprint_of(section), 0))
        torch.testing.assert_close(loss_of(model, batch), before)
        a = dict(model.named_parameters())["layers.0.attention.qkv.lora_A"]
        assert a.std().item() == pytest.approx((3 * 32) ** -0.5, rel=0.1)


def test_dropout_needs_no_layout() -> None:
    """A token's mask depends on its sample and position, not on the batch it is in; evaluation drops nothing."""
    model = lora_model(model_section("llama", dropout=0.5))
    batch = tiny_batch("llama")

    def hidden(rows: slice) -> Tensor:
        part = {key: value[rows] if key != "rng_key" else value for key, value in batch.items()}
        return model(part).hidden_for_head()

    full = hidden(slice(0, 3))
    torch.testing.assert_close(full[1:2], hidden(slice(1, 2)))
    model.eval()
    assert not torch.allclose(full, hidden(slice(0, 3)))
    torch.testing.assert_close(hidden(slice(0, 3)), hidden(slice(0, 3)))


def test_only_adapters_and_named_parameters_are_trained() -> None:
    def trained(**options: Any) -> set[str]:
        blueprint = blueprint_of(model_section(rank=2, **options))
        return {name for name in blueprint.parameter_names() if blueprint.spec(name).trained}

    adapters = trained()
    assert adapters == {name for name in adapters if "lora_" in name}
    assert len(adapters) == 2 * 2 * 4  # A and B of qkv, output, gate_up and down in two layers
    assert trained(train=["norms"]) - adapters == {
        "norm.weight",
        *(f"layers.{layer}.{name}_norm.weight" for layer in (0, 1) for name in ("attention", "mlp")),
    }
    assert trained(train=["embedding", "head"]) - adapters == {"embedding.weight", "output.weight"}
    assert trained(targets=["q"]) == {f"layers.{layer}.attention.qkv.lora_{x}" for layer in (0, 1) for x in "AB"}
    ratio = blueprint_of(model_section(lr_ratio=16.0)).spec("layers.0.mlp.down.lora_B")
    assert (ratio.lr_scale, ratio.weight_decay, ratio.shape) == (16.0, True, (32, 16))


def test_router_and_experts_stay_as_they_are() -> None:
    blueprint = blueprint_of(model_section({**MOE, "router_bias": True, "bias_update_rate": 0.1}))
    assert not any("lora" in name and ".mlp." in name for name in blueprint.parameter_names())
    assert all(not spec.load_step for spec in blueprint.specs)
    assert parameter_group(blueprint.spec("layers.0.mlp.router.weight")) == ""


@pytest.mark.parametrize("capacity", [None, 0.75])
def test_experts_are_their_definition(capacity: float | None) -> None:
    """A model with adapters of experts has the loss of one whose experts are W + s B A."""
    section = model_section({**MOE, "capacity_factor": capacity}, rank=3, alpha=5.0, targets=["experts"])
    adapted, plain = lora_model(section), lora_model(section.without_wrappers)
    merged, batch = dict(plain.named_parameters()), tiny_batch("llama")
    assert (loss_of(adapted, batch) - loss_of(plain, batch)).abs() > 1e-4
    values = dict(adapted.named_parameters())
    assert not any("attention" in name for name in values if "lora" in name)
    for layer in range(section.layers):
        for matrix in ("gate_up", "down"):
            name = f"layers.{layer}.mlp.experts.{matrix}"
            weight, a, b = (values[name + end].detach() for end in ("", "_lora_A", "_lora_B"))
            for expert in range(MOE["experts"]):
                w, a_e, b_e = (each.view(MOE["experts"], -1, each.shape[1])[expert] for each in (weight, a, b))
                rows = slice(expert * len(w), (expert + 1) * len(w))
                merged[name].data[rows] = w + 5 / 3 * b_e @ a_e
    torch.testing.assert_close(loss_of(adapted, batch), loss_of(plain, batch), rtol=1e-5, atol=1e-6)


def test_adapters_of_experts_in_the_blueprint() -> None:
    """Experts are a target of their own; their adapters count as many FLOP as experts that a token uses."""
    blueprint = blueprint_of(model_section(MOE, rank=2, targets=["all-linear", "experts"]))
    trained = {name.split(".", 2)[2] for name in blueprint.trained_names()}
    experts = {f"mlp.experts.{matrix}_lora_{letter}" for matrix in ("gate_up", "down") for letter in "AB"}
    assert trained == experts | {f"attention.{name}.lora_{letter}" for name in ("qkv", "output") for letter in "AB"}
    a, b = (blueprint.spec(f"layers.0.mlp.experts.gate_up_lora_{letter}") for letter in "AB")
    assert (a.shape, b.shape) == ((2 * 4, 32), (4 * 2 * MOE["ffn"], 2))
    assert (a.experts, a.flops_share, b.flops_share, a.matmul_passes) == (4, 0.5, 0.5, 3)
    half = [piece.name for piece in blueprint.local_slices("layers.0.mlp.experts.gate_up_lora_A", ModelShard(ep=2))]
    assert half == [f"layers.0.mlp.experts.{expert}.gate_up.lora_A" for expert in (0, 1)]
    full = torch.randn(blueprint.spec("layers.0.mlp.experts.down_lora_B").shape)
    ranks = [ModelShard(tp=2, tp_rank=tp, ep=2, ep_rank=ep) for ep in (0, 1) for tp in (0, 1)]
    shards = [shard_tensor(blueprint, "layers.0.mlp.experts.down_lora_B", full, rank) for rank in ranks]
    assert torch.equal(unshard_tensor(blueprint, "layers.0.mlp.experts.down_lora_B", shards, ep=2), full)
    for options, message in (
        ({"dropout": 0.1}, r"lora\.dropout=0\.1: not with targets=experts, where PEFT has none; nearest: 0\.0"),
        ({"dora": True}, r"dora=true: not with targets=experts, where PEFT has none; nearest: false"),
        ({"targets": ["all-linear", "experts", "q"]}, r"includes the others; nearest: \[all-linear, experts\]"),
    ):
        with pytest.raises(UserError, match=message):
            model_section(MOE, **{"targets": ["experts"], **options})
    with pytest.raises(UserError, match=r"lora\.targets=experts: not one of all-linear, down, "):
        blueprint_of(model_section(targets=["experts"]))


def test_section_of_a_file(tmp_path: Path) -> None:
    """`lora` is a section of its own in a file, in overrides, in what a run writes and in errors."""
    config = tiny_config(lora={"rank": 4})
    text = dump(config)
    assert "\nlora:\n  rank: 4\n" in text
    assert "linear: {}" in text
    (tmp_path / "c.yaml").write_text(text)
    assert load(tmp_path / "c.yaml") == config
    assert load(tmp_path / "c.yaml", ["lora.rank=8"]).model.linear.wrappers()[0][1].rank == 8  # type: ignore[attr-defined]
    assert not load(tmp_path / "c.yaml", ["lora=null"]).model.linear.wrappers()
    for section, message in (
        ({"rank": 0}, "lora.rank=0: must be at least 1; nearest: 1"),
        ({"rnak": 1}, "lora.rnak=1: unknown key; nearest: lora.rank"),
        ({"targets": ["all-linear", "q"]}, "lora.targets=['all-linear', 'q']: all-linear includes the others"),
    ):
        with pytest.raises(UserError, match=message.replace("[", r"\[").replace("]", r"\]")):
            tiny_config(lora=section)
    with pytest.raises(UserError, match=r"lora\.targets=qproj: not one of all-linear, down, gate, k, output, q, up, v"):
        blueprint_of(model_section(targets=["qproj"]))
    with pytest.raises(UserError, match="loar"):
        parse({"loar": {"rank": 1}, "model": LLAMA, "train": {"steps": 1}})


BASE = {**LLAMA, "hidden": 64, "ffn": 128}
STORE = {"nf4": quantize_nf4, "fp8": lambda weight: quantize_frozen(weight, "tensor")}


@pytest.mark.parametrize("options", [{}, {"dora": True}, {"dropout": 0.3}, {"targets": ["v"]}], ids=str)
@pytest.mark.parametrize("base", STORE)
def test_stored_base_is_a_layer_of_its_values(base: str, options: dict[str, Any]) -> None:
    """Loss and gradients of a model with a base in nf4 equal those of one whose weights are the dequantized values; in
    fp8, those of one that casts these values at each use."""
    section = model_section(BASE, rank=4, base=base, **options)
    fp8 = Fp8Layers(Fp8Options(), range(2)) if base == "fp8" else None
    stored, twin, batch = lora_model(section), lora_model(section, fp8=fp8), tiny_batch("llama")
    blueprint = blueprint_of(section)
    matrices = {
        name: STORE[base](parameter.detach())
        for name, parameter in stored.named_parameters()
        if blueprint.spec(name).storage
    }
    assert len(matrices) == 2 * 4
    models.store_weights(stored, matrices)
    for name, parameter in twin.named_parameters():
        parameter.requires_grad_(blueprint.is_trained(name))
        if name in matrices:
            assert (parameter - dequantize(matrices[name], torch.float32)).norm() > 0.01 * parameter.norm()
            parameter.data = dequantize(matrices[name], torch.float32)
    for name, parameter in stored.named_parameters():
        parameter.requires_grad_(blueprint.is_trained(name))
    losses = [loss_of(model, batch) for model in (stored, twin)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
    gradients = {name: parameter.grad for name, parameter in stored.named_parameters()}
    assert gradients.keys() == dict(twin.named_parameters()).keys() - matrices.keys()
    for name, parameter in twin.named_parameters():
        if parameter.grad is not None:
            found = gradients[name]
            assert found is not None
            assert (found - parameter.grad).norm() <= 1e-4 * parameter.grad.norm() + 1e-9, name


def test_bases_that_cannot_be_stored() -> None:
    with pytest.raises(
        UserError, match=r"lora\.base=nf4: layers\.\*\.attention\.qkv\.weight has 32 columns, not a multiple"
    ):
        blueprint_of(model_section("llama", base="nf4"))
    with pytest.raises(UserError, match=r"precision\.kind=fp8: lora\.base=nf4 multiplies in bf16; nearest: bf16"):
        tiny_config(BASE, lora={"base": "nf4"}, precision={"kind": "fp8"})
    with pytest.raises(UserError, match=r"lora\.base=fp8: in all layers"):
        tiny_config(BASE, lora={"base": "fp8"}, precision={"kind": "fp8", "bf16_first_layers": 1})


def test_models_differ_in_the_keys_that_change_logits() -> None:
    section = model_section(rank=8)
    assert first_model_difference(section, model_section(rank=8, lr_ratio=4.0, dropout=0.1, init_from="a")) is None
    assert first_model_difference(section, model_section(rank=8, alpha=3.0)) == ("linear.lora.alpha", 32.0, 3.0)
    assert first_model_difference(section, section.without_wrappers) == ("linear.lora.rank", 8, None)
