"""Routers and blocks of experts against the classes of transformers that have them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    GptOssConfig,
    Llama4TextConfig,
    Qwen2MoeConfig,
)
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

from tests.support import configs
from trainyard.checkpoint.weights import local_values, unfused_tensors
from trainyard.families import blueprint_of, find_family
from trainyard.families.moe import MoeConfig, moe_blueprint
from trainyard.formats.hf import InMemoryWeights, hf_tensors, weights_from_tensors
from trainyard.formats.io.lazy_tensor import InlineTensor
from trainyard.kernels.reference import Kernels
from trainyard.models.init import initial_values
from trainyard.models.mlp import make_mlp
from trainyard.models.module_factory import ModuleFactory
from trainyard.models.moe import MoeMLP
from trainyard.models.rank_model import fill_parameters
from trainyard.parallel.axes import Axes

D, F, E, K = 16, 12, 8, 3
SIZES = {"hidden_size": D, "num_attention_heads": 2, "num_experts_per_tok": K}
DEEPSEEK = {**SIZES, "n_routed_experts": E, "moe_intermediate_size": F, "n_shared_experts": 2, "n_group": 4}
DEEPSEEK |= {"topk_group": 2, "routed_scaling_factor": 2.5}
GROUPS = {"expert_groups": 4, "top_k_groups": 2, "routed_scale": 2.5, "shared_ffn": 2 * F}
V3 = {**GROUPS, "router_scores": "sigmoid", "router_bias": True, "group_score": "top2"}
V2 = {**GROUPS, "group_score": "max", "normalize_top_k": False}
GREEDY = {"routed_scale": 2.5, "shared_ffn": 2 * F, "normalize_top_k": False}


def ours(family: str) -> Any:
    return find_family(family).config_class


CASES: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "deepseek-v3": (DeepseekV3MoE, DeepseekV3Config(**DEEPSEEK, norm_topk_prob=True), MoeConfig, V3),
    "deepseek-v3-unnormalized": (
        DeepseekV3MoE, DeepseekV3Config(**DEEPSEEK, norm_topk_prob=False), MoeConfig, {**V3, "normalize_top_k": False},
    ),
    "deepseek-v2": (DeepseekV2Moe, DeepseekV2Config(**DEEPSEEK, topk_method="group_limited_greedy"), MoeConfig, V2),
    "deepseek-v2-greedy": (DeepseekV2Moe, DeepseekV2Config(**DEEPSEEK, topk_method="greedy"), MoeConfig, GREEDY),
    "qwen2-moe": (
        Qwen2MoeSparseMoeBlock,
        Qwen2MoeConfig(
            **SIZES, num_experts=E, moe_intermediate_size=F, shared_expert_intermediate_size=20, norm_topk_prob=True
        ),
        ours("qwen2_moe"), {"shared_ffn": 20},
    ),
    "gpt-oss": (
        GptOssMLP, GptOssConfig(**SIZES, num_local_experts=E, intermediate_size=F, swiglu_limit=0.7), ours("gpt_oss"),
        {"swiglu_limit": 0.7},
    ),
    "llama4": (
        Llama4TextMoe, Llama4TextConfig(**SIZES, num_local_experts=E, intermediate_size=F), ours("llama4_text"),
        {"router_scores": "sigmoid", "normalize_top_k": False, "shared_ffn": F},
    ),
}  # fmt: skip


def values_of(hf: nn.Module) -> dict[str, Tensor]:
    """Our parameters by the last part of their names, from those of a block of transformers."""
    found = {name: value.detach() for name, value in [*hf.named_parameters(), *hf.named_buffers()]}
    kind = type(hf).__name__
    values = {}
    for name, value in found.items():
        if ".e_score" in name:
            values["router.bias"] = value
        elif name in ("gate.weight", "router.weight"):
            values["router.weight"] = value
        elif name == "router.bias":
            values["router.logit_bias"] = value
        elif name == "shared_expert_gate.weight":
            values["shared_gate.weight"] = value
        elif name.startswith("shared_expert"):
            values[f"shared.{name.split('.')[1].removesuffix('_proj')}.weight"] = value
        elif kind in ("GptOssMLP", "Llama4TextMoe") and value.dim() == 3:
            values[name.removesuffix("_proj")] = value.mT
        else:
            values[name.replace("_proj", "")] = value
    if kind == "GptOssMLP":  # whose gate and up alternate
        for name in ("experts.gate_up", "experts.gate_up_bias"):
            values[name] = torch.cat((values[name][:, ::2], values[name][:, 1::2]), 1)
    if "shared.gate.weight" in values:
        values["shared.gate_up.weight"] = torch.cat((values.pop("shared.gate.weight"), values.pop("shared.up.weight")))
    return values


def blocks(case: str, **changes: Any) -> tuple[nn.Module, MoeMLP]:
    """A random block of transformers, and ours with its weights."""
    hf_class, hf_config, config_class, keys = CASES[case]
    hf_config._experts_implementation = "eager"
    torch.manual_seed(3)
    hf = hf_class(hf_config)
    with torch.no_grad():
        for value in (*hf.parameters(), *hf.buffers()):
            value.copy_(torch.randn_like(value) * 0.5)
    sizes = {**configs.LLAMA, "family": "moe", "hidden": D, "heads": 2, "ffn": F, "experts": E, "top_k": K}
    section = config_class.model_validate({**sizes, "balance_loss": 0.0, **keys, **changes})
    blueprint = moe_blueprint(section)
    ours = make_mlp(section, ModuleFactory(blueprint, Axes(), Kernels()), "layers.0.mlp")
    assert isinstance(ours, MoeMLP)
    values = values_of(hf)
    assert set(values) == {name for name, _ in ours.named_parameters()}
    fill_parameters(ours, lambda name: values[name].reshape(blueprint.spec(f"layers.0.mlp.{name}").shape).clone())
    return hf, ours


def output(block: nn.Module, x: Tensor) -> Tensor:
    y = block(x)
    y = y[0] if isinstance(y, tuple) else y
    return y.view_as(x)


@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_a_block_equals_that_of_transformers(case: str, slots: bool) -> None:
    """Output and gradients; also in slots, as on a device without grouped GEMMs, where nothing is sorted."""
    hf, ours = blocks(case, **({"capacity_factor": 10.0} if slots else {}))
    ours.has_grouped_gemm = not slots
    x, dy = torch.randn(2, 24, D, requires_grad=True), torch.randn(2, 24, D)
    expected, actual = output(hf, x), output(ours, x)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    parameters = dict(ours.named_parameters())
    bias = parameters.pop("router.bias", None)
    (expected * dy).sum().backward()
    expected_dx = x.grad
    hf_parameters = dict(hf.named_parameters())
    grads = torch.autograd.grad(actual, (x, *parameters.values()), dy)
    torch.testing.assert_close(grads[0], expected_dx, atol=2e-5, rtol=1e-5)
    with torch.no_grad():
        for parameter in hf_parameters.values():
            parameter.copy_(parameter.grad)
    for name, gradient in zip(parameters, grads[1:], strict=True):
        expected_gradient = values_of(hf)[name].reshape(gradient.shape)
        assert expected_gradient.any()
        torch.testing.assert_close(gradient, expected_gradient, atol=5e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    assert (bias is not None) == case.startswith("deepseek-v3")


def test_groups_and_the_bias_matter() -> None:
    """Each door changes the result of these random weights, so that the comparisons above see it."""
    x = torch.randn(2, 24, D)
    for case, change in (
        ("deepseek-v3", {"expert_groups": 1}),
        ("deepseek-v3", {"group_score": "max"}),
        ("deepseek-v3", {"routed_scale": 1.0}),
        ("deepseek-v2", {"expert_groups": 1}),
        ("deepseek-v2", {"group_score": "top2"}),
        ("llama4", {"router_scores": "softmax"}),
    ):
        hf, ours = blocks(case, **change)
        assert (output(hf, x) - output(ours, x)).abs().max() > 0.05, (case, change)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"expert_groups": 3}, "expert_groups=3: does not divide experts=8; nearest: 2"),
        (
            {"expert_groups": 4, "top_k_groups": 1},
            "top_k_groups=1: top_k=3 experts must .* 4 groups of 2; nearest: 2",
        ),
        ({"expert_groups": 4, "top_k_groups": 5}, "top_k_groups=5: .* nearest: 4"),
        ({"expert_groups": 8, "top_k_groups": 4}, "group_score=top2: a group has one expert; nearest: max"),
        ({"dense_layers": "0-2"}, "'0-2': the model's 2 layers are 0 to 1"),
    ],
)
def test_impossible_groups_are_refused(keys: dict[str, Any], message: str) -> None:
    sizes = {**configs.MOE, "experts": E, "top_k": K}
    with pytest.raises(ValueError, match=message):
        MoeConfig.model_validate({**sizes, **keys})


@pytest.mark.parametrize(("case", "family"), [("gpt-oss", "gpt_oss"), ("llama4", "llama4_text")])
def test_stacked_experts_are_read_and_written_as_transformers_does(case: str, family: str) -> None:
    """From the tensors of a block of transformers, and back bit for bit; slice by slice too."""
    hf, ours = blocks(case)
    keys = {**CASES[case][3], "family": family, "layers": 1}
    sizes = {**configs.LLAMA, "hidden": D, "heads": 2, "ffn": F, "experts": E, "top_k": K}
    section: Any = configs.tiny_config({**sizes, **keys}).model
    prefix = f"model.layers.0.{'mlp' if case == 'gpt-oss' else 'feed_forward'}."
    of_block = {prefix + name: value.detach() for name, value in hf.state_dict().items()}
    random = initial_values(blueprint_of(section), 0)
    own = dict(hf_tensors(InMemoryWeights(section, random)))
    assert set(of_block) < set(own)
    weights = weights_from_tensors(section, {name: InlineTensor(value) for name, value in {**own, **of_block}.items()})
    values = local_values(weights)
    for name, parameter in ours.named_parameters():
        assert torch.equal(values(f"layers.0.mlp.{name}"), parameter), name
    written = dict(hf_tensors(weights))
    assert all(torch.equal(written[name], value) for name, value in of_block.items())
    for piece in unfused_tensors(section).values():
        if ".experts." in piece.name and piece.sizes[0] > 5:
            assert torch.equal(weights.read(piece.narrow(0, 2, 5)), weights.read(piece)[2:5])
