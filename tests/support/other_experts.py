"""Families from outside the package with Mixtral's attention and the experts of Llama 4 and Qwen2-MoE."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from trainyard.families import Family
from trainyard.families.builtin.mixtral import FAMILY as MIXTRAL
from trainyard.families.decoder import decoder_hf_names
from trainyard.families.family import HfNameMap, HfTensor
from trainyard.families.moe import LAYER, MoeConfig, MoeStyle, stacked_hf_names


class Llama4Experts(MoeConfig):
    """Experts whose inputs are weighted."""

    @property
    def moe_style(self) -> MoeStyle:
        return MoeStyle(scales_inputs=True)


class Qwen2Experts(MoeConfig):
    """A shared expert with a gate."""

    @property
    def moe_style(self) -> MoeStyle:
        return MoeStyle(shared_gate=True)


def llama4_names(c: Llama4Experts) -> HfNameMap:
    hf = "model.layers.*.feed_forward."
    names = {
        f"{LAYER}shared.{x}.weight": HfTensor(f"{hf}shared_expert.{x}_proj.weight") for x in ("gate", "up", "down")
    }
    names |= {f"{LAYER}router.weight": HfTensor(f"{hf}router.weight")}
    return decoder_hf_names(c, {**names, **stacked_hf_names(c, f"{hf}experts.")})


def with_names(name: str, config_class: type[MoeConfig], names: Callable[[Any], HfNameMap]) -> Family:
    return replace(MIXTRAL, name=name, config_class=config_class, hf=replace(MIXTRAL.hf, names=names))


LLAMA4 = with_names("llama4_experts", Llama4Experts, llama4_names)
QWEN2_MOE = replace(MIXTRAL, name="qwen2_experts", config_class=Qwen2Experts)
