"""Families from outside the package with the experts of gpt-oss, of Llama 4 and of Qwen2-MoE, and Mixtral's attention."""

from dataclasses import replace
from typing import Any

from trainyard.families import Family
from trainyard.families.builtin.mixtral import FAMILY as MIXTRAL
from trainyard.families.moe import MoeConfig, MoeStyle


def with_style(name: str, **style: Any) -> Family:
    class Styled(MoeConfig):
        """A mixture of experts."""

        @property
        def moe_style(self) -> MoeStyle:
            return MoeStyle(**style)

    return replace(MIXTRAL, name=name, config_class=Styled)


GPT_OSS = with_style("gpt_oss_experts", clamped_swiglu=(1.702, 0.7), logit_bias=True, expert_biases=True)
LLAMA4 = with_style("llama4_experts", scales_inputs=True)
QWEN2_MOE = with_style("qwen2_experts", shared_gate=True)
