"""Qwen3-Next's decoder.

B batch, T tokens, D hidden, H heads, K head size; of gated delta nets: G key heads, R value heads of each, K and V the
widths of keys and values, C channels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainyard.families.builtin.qwen3_next import Qwen3NextConfig
from trainyard.kernels.gated_delta import causal_convolution
from trainyard.kernels.reference import apply_rope
from trainyard.models.layers.gated_delta import DeltaRule
from trainyard.models.llama import Llama, LlamaAttention, LlamaBlock, reduce_output
from trainyard.models.module_factory import ModuleFactory
from trainyard.parallel.recompute import Recomputable


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


class GatedDeltaNet(Recomputable):
    """Linear attention with a state of fixed size. The rows of its projections are in groups of a key head with its
    value heads."""

    recompute_name = "attention"

    def __init__(self, c: Qwen3NextConfig, make: ModuleFactory, name: str) -> None:
        super().__init__()
        self.tp, self.groups = make.tp, c.delta_key_heads // make.tp.size
        values = c.delta_value_heads // c.delta_key_heads * c.delta_value_dim
        self.group_widths = [c.delta_key_dim, c.delta_key_dim, values, values]
        self.projections = make.linears(self, name, ["qkvz", "ba"])
        self.conv = make.parameters(f"{name}.conv", ["weight"])
        self.log_rate, self.rate_bias = (make.parameter(f"{name}.{x}") for x in ("log_rate", "rate_bias"))
        self.delta_rule = DeltaRule(self.groups, c.delta_key_dim, c.delta_value_dim)
        self.norm = make.rms_norm(f"{name}.norm", c.norm_eps)
        self.out = make.linear(f"{name}.out")

    def forward(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor, documents_BT: Tensor | None) -> Tensor:
        qkvz, ba = self.tp.column_parallel(x_BTD, *self.projections, keep_gathered=self.keep_gathered)
        *qkv, z = qkvz.unflatten(-1, (self.groups, -1)).split(self.group_widths, -1)
        beta, step = (x.flatten(2).float() for x in ba.unflatten(-1, (self.groups, -1)).chunk(2, -1))
        g_BTH = -self.log_rate.float().exp() * F.softplus(step + self.rate_bias.float())
        x_BTC = torch.cat([x.flatten(2) for x in qkv], -1).float()
        x_BTC, _ = causal_convolution(x_BTC, self.conv["weight"].flatten(1).float(), documents_BT=documents_BT)
        y_BTHV = self.delta_rule(F.silu(x_BTC), g_BTH, beta.sigmoid(), documents_BT).to(qkvz.dtype)
        gate = F.silu(z.reshape(y_BTHV.shape).float())
        y_BTHV = (self.norm(y_BTHV)[1] * gate).to(qkvz.dtype)
        return self.tp.reduce_output(self.out(y_BTHV.flatten(2)))


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
