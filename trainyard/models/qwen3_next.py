"""Qwen3-Next's decoder.

B batch, T tokens, D hidden, K the rotated dims of a head.
"""

import torch
from torch import Tensor, nn

from trainyard.families.builtin.qwen3_next import Qwen3NextConfig
from trainyard.kernels.reference import apply_rope
from trainyard.models.gated_delta import GatedDeltaNet
from trainyard.models.llama import Llama, LlamaAttention, LlamaBlock, reduce_output
from trainyard.models.module_factory import ModuleFactory


class GatedAttention(LlamaAttention):
    """Attention whose output is multiplied by the sigmoid of a gate, which each head has beside its query."""

    def forward(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor, documents_BT: Tensor | None) -> Tensor:
        projections = self.tp.column_parallel(x_BTD, *self.qkv_linears, keep_gathered=self.keep_gathered)
        qkv = projections[0] if len(projections) == 1 else torch.cat(projections, -1)
        heads, kv_heads = self.local_heads
        qg, k, v = qkv.unflatten(-1, (2 * (heads + kv_heads), -1)).split([2 * heads, kv_heads, kv_heads], 2)
        q, gate = qg.unflatten(2, (heads, 2)).unbind(3)
        q, k = (
            rotate(norm(x.contiguous())[1].transpose(1, 2), cos_TK, sin_TK)
            for norm, x in ((self.q_norm, q), (self.k_norm, k))
        )
        y = self.core_attention(q, k, v.transpose(1, 2), documents_BT).transpose(1, 2)
        return reduce_output(self.tp, self.output, (y * gate.sigmoid()).flatten(2))


def rotate(x_BHTK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of the first dims of each head."""
    size = cos.shape[-1]
    return torch.cat((apply_rope(x_BHTK[..., :size], cos, sin), x_BHTK[..., size:]), -1)


def mixer(c: Qwen3NextConfig, make: ModuleFactory, name: str) -> nn.Module:
    """What a block has in the place of attention."""
    return GatedDeltaNet(c, make, name) if f"{name}.qkvz.weight" in make.blueprint else GatedAttention(c, make, name)


class Qwen3NextBlock(LlamaBlock):
    attention_class = staticmethod(mixer)


class Qwen3Next(Llama):
    block_class = Qwen3NextBlock

    def __init__(self, c: Qwen3NextConfig, make: ModuleFactory) -> None:
        super().__init__(c, make)
        size = int(c.head_size * c.rotary_share)
        frequency = 1.0 / c.rope_theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
        self.register_buffer("frequency", torch.cat([frequency] * 2), persistent=False)
