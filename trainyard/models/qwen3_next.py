"""Qwen3-Next's decoder.

B batch, T tokens, D hidden, H heads, K head size; of gated delta nets: G key heads, R value heads of each, K and V the
widths of keys and values, C channels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainyard.core.splits import head_range
from trainyard.families.builtin.qwen3_next import Qwen3NextConfig
from trainyard.kernels.gated_delta import causal_convolution
from trainyard.kernels.reference import apply_rope
from trainyard.models.layers import RMSNorm
from trainyard.models.layers.gated_delta import DeltaRule
from trainyard.models.llama import Llama, LlamaMLP
from trainyard.models.module_factory import ModuleFactory
from trainyard.parallel.recompute import Recomputable


class CenteredNorm(RMSNorm):
    def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.kernels.add_rms_norm(x, y, 1 + self.weight, self.eps)


def centered_norm(c: Qwen3NextConfig, make: ModuleFactory, name: str) -> CenteredNorm:
    return CenteredNorm(make.parameter(f"{name}.weight"), c.norm_eps, make.kernels)


class GatedAttention(Recomputable):
    """Attention whose output is multiplied by the sigmoid of a gate, which each head has beside its query."""

    recompute_name = "attention"

    def __init__(self, c: Qwen3NextConfig, make: ModuleFactory, name: str) -> None:
        super().__init__()
        self.tp, self.head_size = make.tp, c.head_size
        first, end = head_range(c.num_kv_heads, self.tp.size, self.tp.rank)
        self.local_heads = (c.heads // self.tp.size, end - first)
        self.qkv_linears = make.linears(self, name, ["qkv"] if c.fuse_qkv else ["q", "k", "v"])
        self.q_norm, self.k_norm = (centered_norm(c, make, f"{name}.{x}_norm") for x in "qk")
        self.core_attention = make.core_attention(c.heads, c.num_kv_heads, True, 0.0, name)
        self.output = make.linear(f"{name}.output")

    def forward(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor, documents_BT: Tensor | None) -> Tensor:
        projections = self.tp.column_parallel(x_BTD, *self.qkv_linears, keep_gathered=self.keep_gathered)
        qkv = projections[0] if len(projections) == 1 else torch.cat(projections, -1)
        (heads, kv_heads), size = self.local_heads, self.head_size
        q, k, v = qkv.split([2 * heads * size, kv_heads * size, kv_heads * size], -1)
        q, gate = q.unflatten(-1, (heads, 2 * size)).chunk(2, -1)
        k, v = (x.unflatten(-1, (kv_heads, size)) for x in (k, v))
        q, k = (
            rotate(norm(x.contiguous())[1].transpose(1, 2), cos_TK, sin_TK)
            for norm, x in ((self.q_norm, q), (self.k_norm, k))
        )
        y = self.core_attention(q, k, v.transpose(1, 2), documents_BT).transpose(1, 2)
        return self.tp.reduce_output(self.output((y * gate.sigmoid()).flatten(2)))


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
        self.output = make.linear(f"{name}.output")

    def forward(self, x_BTD: Tensor, documents_BT: Tensor | None) -> Tensor:
        qkvz, ba = self.tp.column_parallel(x_BTD, *self.projections, keep_gathered=self.keep_gathered)
        *qkv, z = qkvz.unflatten(-1, (self.groups, -1)).split(self.group_widths, -1)
        beta, step = (x.flatten(2).float() for x in ba.unflatten(-1, (self.groups, -1)).chunk(2, -1))
        g_BTH = -self.log_rate.float().exp() * F.softplus(step + self.rate_bias.float())
        x_BTC = torch.cat([x.flatten(2) for x in qkv], -1).float()
        x_BTC, _ = causal_convolution(x_BTC, self.conv["weight"].flatten(1).float(), documents_BT=documents_BT)
        y_BTHV = self.delta_rule(F.silu(x_BTC), g_BTH, beta.sigmoid(), documents_BT).to(qkvz.dtype)
        gate = F.silu(z.reshape(y_BTHV.shape).float())
        y_BTHV = (self.norm(y_BTHV)[1] * gate).to(qkvz.dtype)
        return self.tp.reduce_output(self.output(y_BTHV.flatten(2)))


class Qwen3NextBlock(nn.Module):
    def __init__(self, c: Qwen3NextConfig, make: ModuleFactory, name: str) -> None:
        super().__init__()
        self.attention_norm = centered_norm(c, make, f"{name}.attention_norm")
        self.has_attention = f"{name}.attention.output.weight" in make.blueprint
        if self.has_attention:
            self.attention = GatedAttention(c, make, f"{name}.attention")
        else:
            self.delta = GatedDeltaNet(c, make, f"{name}.delta")
        self.mlp_norm = centered_norm(c, make, f"{name}.mlp_norm")
        self.mlp = LlamaMLP(c, make, f"{name}.mlp")

    def forward(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor, documents_BT: Tensor | None) -> Tensor:
        x_BTD, y_BTD = self.attention_norm(x_BTD)
        if self.has_attention:
            y_BTD = self.attention(y_BTD, cos_TK, sin_TK, documents_BT)
        else:
            y_BTD = self.delta(y_BTD, documents_BT)
        x_BTD, y_BTD = self.mlp_norm(x_BTD, y_BTD)
        return x_BTD + self.mlp(y_BTD)


class Qwen3Next(Llama):
    def __init__(self, c: Qwen3NextConfig, make: ModuleFactory) -> None:
        super().__init__(c, make)
        self.layers = make.blocks(lambda name: Qwen3NextBlock(c, make, name))
        self.norm = centered_norm(c, make, "norm")
        size = int(c.head_size * c.rotary_share)
        frequency = 1.0 / c.rope_theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
        self.register_buffer("frequency", torch.cat([frequency] * 2), persistent=False)
