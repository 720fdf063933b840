"""A gated delta net: linear attention behind a convolution, with a state of fixed size instead of keys and values.

B batch, T tokens, D hidden, G key heads, R value heads of each, H = G R, K width of keys, V of values, C channels.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainyard.families.gated_delta import GatedDeltaConfig
from trainyard.kernels.gated_delta import (
    causal_convolution,
    gated_delta_chunks,
    gated_delta_step,
    normalize_keys,
)
from trainyard.models.module_factory import ModuleFactory
from trainyard.parallel.recompute import Recomputable


class DeltaRule(Recomputable):
    """The gated delta rule of this rank's heads, from channels behind the convolution."""

    recompute_name = "core_attention"

    def __init__(self, key_heads: int, key_dim: int, value_dim: int) -> None:
        super().__init__()
        self.keys, self.key_dim, self.value_dim = key_heads * key_dim, key_dim, value_dim

    def forward(self, x_BTC: Tensor, g_BTH: Tensor, beta_BTH: Tensor, documents_BT: Tensor | None) -> Tensor:
        return gated_delta_chunks(*self.heads(x_BTC), g_BTH, beta_BTH, documents_BT=documents_BT)[0]

    def heads(self, x_BTC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys [B, T, G, K] and values [B, T, H, V]."""
        B, T, C = x_BTC.shape
        q, k, v = torch.split(x_BTC, [self.keys, self.keys, C - 2 * self.keys], -1)
        q, k = (normalize_keys(x.view(B, T, -1, self.key_dim)) for x in (q, k))
        return q * self.key_dim**-0.5, k, v.view(B, T, -1, self.value_dim)


class GatedDeltaNet(Recomputable):
    """In the place of attention. The rows of its projections are in groups, of a key head with its value heads."""

    recompute_name = "attention"

    def __init__(self, c: GatedDeltaConfig, make: ModuleFactory, name: str) -> None:
        super().__init__()
        self.tp, self.groups = make.tp, c.delta_key_heads // make.tp.size
        K, V, heads = c.delta_key_dim, c.delta_value_dim, c.delta_value_heads // make.tp.size
        values = heads // self.groups * V
        self.widths = [K, K, values, values]
        self.projections = make.linears(self, name, ["qkvz", "ba"])
        self.conv = make.parameters(f"{name}.conv", ["weight"])
        self.log_rate, self.rate_bias = (make.parameter(f"{name}.{x}") for x in ("log_rate", "rate_bias"))
        self.delta_rule = DeltaRule(self.groups, K, V)
        self.norm = make.rms_norm(f"{name}.norm", c.norm_eps)
        self.out = make.linear(f"{name}.out")
        self.state = make.layer_state((c.conv_width - 1, 2 * self.groups * K + heads * V), (heads, K, V))

    def forward(self, x_BTD: Tensor, positions: Any, documents_BT: Tensor | None) -> Tensor:
        qkvz, ba = self.tp.column_parallel(x_BTD, *self.projections, keep_gathered=self.keep_gathered)
        *qkv, z = torch.split(qkvz.view(*qkvz.shape[:2], self.groups, -1), self.widths, -1)
        # Not `chunk`, whose backward concatenates: the gradient of b looks like images in channels_last, of which
        # torch.cat returns other strides than torch's compiler expects (2.13).
        rows = ba.view(*ba.shape[:2], self.groups, 2, -1).float()
        beta_BTH, rate_BTH = (rows[..., index, :].flatten(2) for index in range(2))
        g_BTH = -self.log_rate.float().exp() * F.softplus(rate_BTH + self.rate_bias.float())
        x_BTC = torch.cat([x.flatten(2) for x in qkv], -1).float()
        if self.state:
            y_BTHV = self._continue(x_BTC, g_BTH, beta_BTH.sigmoid())
        else:
            x_BTC, _ = causal_convolution(x_BTC, self._conv_weight(), documents_BT=documents_BT)
            y_BTHV = self.delta_rule(F.silu(x_BTC), g_BTH, beta_BTH.sigmoid(), documents_BT)
        _, y_BTHV = self.norm(y_BTHV.to(qkvz.dtype))
        y_BTHV = y_BTHV * F.silu(z.reshape(y_BTHV.shape).float())
        return self.tp.reduce_output(self.out(y_BTHV.to(qkvz.dtype).flatten(2)))

    def _continue(self, x_BTC: Tensor, g_BTH: Tensor, beta_BTH: Tensor) -> Tensor:
        """The next tokens of sequences. Those that do not count leave no trace in the state."""
        assert self.state
        T = x_BTC.shape[1]
        tokens_B, (window, matrix) = self.state.read(len(x_BTC))
        counts_BT1 = (torch.arange(T, device=x_BTC.device) < tokens_B[:, None])[..., None]
        g_BTH, beta_BTH = g_BTH * counts_BT1, beta_BTH * counts_BT1
        x_BTC, inputs = causal_convolution(x_BTC, self._conv_weight(), window)
        last = tokens_B[:, None] + torch.arange(window.shape[1], device=x_BTC.device)
        window = inputs.gather(1, last[..., None].expand_as(window))
        q, k, v = self.delta_rule.heads(F.silu(x_BTC))
        if T == 1:
            y_BHV, matrix = gated_delta_step(q[:, 0], k[:, 0], v[:, 0], g_BTH[:, 0], beta_BTH[:, 0], matrix)
            y_BTHV = y_BHV[:, None]
        else:
            y_BTHV, matrix = gated_delta_chunks(q, k, v, g_BTH, beta_BTH, matrix)
        self.state.write(window, matrix)
        return y_BTHV

    def _conv_weight(self) -> Tensor:
        return self.conv["weight"].flatten(1).float()
