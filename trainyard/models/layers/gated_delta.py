"""A gated delta net: linear attention with a convolution before it and a gated norm behind it.

B batch, T tokens, D hidden, G key heads, R value heads of each, H = G R, K width of keys, V of values, C channels.
"""

from torch import Tensor

from trainyard.kernels.gated_delta import gated_delta_chunks, normalize_keys
from trainyard.parallel.recompute import Recomputable


class DeltaRule(Recomputable):
    """The gated delta rule of this rank's heads, from channels after the convolution."""

    recompute_name = "core_attention"

    def __init__(self, key_heads: int, key_dim: int, value_dim: int) -> None:
        super().__init__()
        self.key_heads, self.key_dim, self.value_dim = key_heads, key_dim, value_dim

    def forward(self, x_BTC: Tensor, g_BTH: Tensor, beta_BTH: Tensor, documents_BT: Tensor | None) -> Tensor:
        return gated_delta_chunks(*self.heads(x_BTC), g_BTH, beta_BTH, documents_BT=documents_BT)[0]

    def heads(self, x_BTC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys [B, T, G, K] and values [B, T, H, V]."""
        keys = self.key_heads * self.key_dim
        q, k, v = x_BTC.split([keys, keys, x_BTC.shape[-1] - 2 * keys], -1)
        q, k = (normalize_keys(x.unflatten(-1, (-1, self.key_dim))) for x in (q, k))
        return q * self.key_dim**-0.5, k, v.unflatten(-1, (-1, self.value_dim))
