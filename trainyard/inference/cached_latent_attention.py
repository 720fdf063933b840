"""Latent attention over a cache of latents: a token takes as many numbers as its latent and
the key that all heads share have, whatever the number of heads.

While decoding, keys and values are never made. The matrix that would make the keys multiplies the queries instead, and
the one of the values multiplies the weighted sum of latents, so that a step reads the latents only. A prefill has many
queries for each key, and makes them.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainyard.inference.cached_attention import CacheSize, CacheState, LayerCache
from trainyard.models.layers import LatentAttention
from trainyard.parallel.tensor_parallel import Linear


class CachedLatentAttention(LatentAttention, LayerCache):
    """Stores the latents of new tokens, and attends to all tokens of their sequences."""

    latents: Tensor
    """[slots, 1, max_seq_len, C]."""

    def __init__(self, size: CacheSize, state: CacheState, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.state, self.kernels, self.max_seq_len = state, self.core.kernels, size.max_seq_len
        shape = (size.slots, 1, size.max_seq_len, self.latent_size + self.key_size)
        self.register_buffer("latents", torch.zeros(shape, dtype=size.dtype, device=size.device), persistent=False)

    @property
    def caches(self) -> tuple[Tensor, ...]:
        return (self.latents,)

    def forward(self, q_BHTK: Tensor, c_BTC: Tensor, kv_b: Linear, documents_BT: Tensor | None) -> Tensor:
        return self._decode(q_BHTK, c_BTC, kv_b) if self.state.decoding else self._prefill(q_BHTK, c_BTC, kv_b)

    def _decode(self, q_BHTK: Tensor, c_BTC: Tensor, kv_b: Linear) -> Tensor:
        matrix_HNC = weight_of(kv_b, q_BHTK.dtype).view(q_BHTK.shape[1], -1, self.latent_size)
        sizes = [matrix_HNC.shape[1] - self.value_size, self.value_size]
        keys_HNC, values_HVC = torch.split(matrix_HNC, sizes, 1)
        nope = keys_HNC.shape[1]
        q_HBC = q_BHTK[:, :, 0, :nope].transpose(0, 1) @ keys_HNC
        q_BHC = torch.cat((q_HBC.transpose(0, 1), q_BHTK[:, :, 0, nope:]), -1)
        y_BHC = self.kernels.decode_latent_attention(
            q_BHC, c_BTC, self.latents, self.state.lengths[: len(q_BHC)], self.state.visible, self.latent_size,
            self.core.scores.scale_of(q_BHTK.shape[-1]),
        )  # fmt: skip
        return (y_BHC.transpose(0, 1) @ values_HVC.transpose(1, 2)).transpose(0, 1)[:, :, None]

    def _prefill(self, q_BHTK: Tensor, c_BTC: Tensor, kv_b: Linear) -> Tensor:
        slots, start, end = self.state.slots, self.state.start, self.state.start + c_BTC.shape[1]
        self.latents[:, 0, start:end].index_copy_(0, slots, c_BTC)
        past = None
        if start:
            position, c_BTC = torch.arange(end, device=c_BTC.device), self.latents[slots, 0, :end]
            past = position <= position[start:, None]
        keys, values = self.keys_and_values(c_BTC, kv_b)
        scale = self.core.scores.scale_of(q_BHTK.shape[-1])
        return F.scaled_dot_product_attention(q_BHTK, keys, values, past, is_causal=past is None, scale=scale)


def weight_of(linear: Linear, dtype: torch.dtype) -> Tensor:
    """The matrix of a linear layer with what is put around it, such as an adapter."""
    if type(linear) is Linear and type(linear.weight) is nn.Parameter:
        return linear.weight
    identity = torch.eye(linear.weight.shape[1], dtype=dtype, device=linear.weight.device)
    return linear.matmul(identity[None])[0].T
