"""Latent attention: keys and values that are made of one narrow vector of each token, around any core attention.

B batch, T tokens, H heads of this rank, C latent with the key that all heads share, K width of queries and keys.
"""

import torch
from torch import Tensor, nn

from trainyard.models.layers.attention import CoreAttention
from trainyard.parallel.tensor_parallel import Linear


class LatentAttention(nn.Module):
    """Expands latents to the keys and values of all heads."""

    def __init__(self, core: CoreAttention, latent_size: int, key_size: int, value_size: int) -> None:
        """A row of latents has `latent_size` columns for keys and values, and `key_size` of a key that heads share."""
        super().__init__()
        self.core, self.latent_size, self.key_size, self.value_size = core, latent_size, key_size, value_size

    def forward(self, q_BHTK: Tensor, c_BTC: Tensor, kv_b: Linear, documents_BT: Tensor | None) -> Tensor:
        """Attention [B, H, T, value_size]. `kv_b` makes the part of the keys without positions, and the values. The
        last columns of queries meet the shared key."""
        return self.core(q_BHTK, *self.keys_and_values(c_BTC, kv_b), documents_BT)

    def keys_and_values(self, c_BTC: Tensor, kv_b: Linear) -> tuple[Tensor, Tensor]:
        heads, (latent, shared) = self.core.local_heads, torch.split(c_BTC, [self.latent_size, self.key_size], -1)
        expanded_BTHE = kv_b(latent).view(*latent.shape[:2], heads, -1)
        return self.core.kernels.join_keys(expanded_BTHE, shared, self.value_size)
