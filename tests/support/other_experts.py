"""Families from outside the package with Mixtral's attention and the experts of gpt-oss, Llama 4 and Qwen2-MoE."""

from dataclasses import replace

from trainyard.families.builtin.mixtral import FAMILY as MIXTRAL
from trainyard.families.moe import MoeConfig, MoeStyle


class GptOssExperts(MoeConfig):
    """Experts with biases and clamped activations; logits with a bias."""

    @property
    def moe_style(self) -> MoeStyle:
        return MoeStyle(clamped_swiglu=(1.702, 0.7), logit_bias=True, expert_biases=True)


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


GPT_OSS = replace(MIXTRAL, name="gpt_oss_experts", config_class=GptOssExperts)
LLAMA4 = replace(MIXTRAL, name="llama4_experts", config_class=Llama4Experts)
QWEN2_MOE = replace(MIXTRAL, name="qwen2_experts", config_class=Qwen2Experts)
