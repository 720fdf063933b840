"""Causal attention over a preallocated cache of keys and values, with one slot for each sequence of a batch."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainyard.core.counter_rng import RowSeeds
from trainyard.core.splits import head_range
from trainyard.models.layers import CoreAttention


@dataclass
class CacheState:
    """What all layers need to know about the tokens of a forward pass. The engine sets it before each one."""

    lengths: Tensor
    """Tokens of each slot that are in the cache, int32 [slots]."""
    adapters: Tensor
    """The number of each slot's adapter, int32 [slots]; 0: the model alone."""
    is_active: Tensor
    """1 for slots that decode continues; the others compute a token that nobody reads; int32 [slots]."""
    decoding: bool = False
    """True: one new token for each of the first slots. False: tokens `start`, ... of the slots in `slots`."""
    visible: int = 0
    """While decoding: no slot has more tokens than this, the new one included."""
    slots: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """The slot of each row of a prefill."""
    start: int = 0
    """The position of a prefill's first token. If it is not 0, there is one row."""
    counts: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """Tokens of each row of a prefill, without padding."""


@dataclass(frozen=True)
class CacheSize:
    slots: int
    max_seq_len: int
    """Tokens of a slot at most."""
    has_rings: bool
    """False: the caches of windowed layers have full length, too."""
    head_size: int
    value_size: int
    dtype: torch.dtype
    device: torch.device

    def length(self, window: int | None) -> int:
        """Tokens of a slot that the cache of a layer with this window has room for."""
        return cache_length(window if self.has_rings else None, self.max_seq_len)


def cache_length(window: int | None, max_seq_len: int) -> int:
    """Tokens of a slot that a cache has room for: all, or those of the window if it has less than half of them, because
    a ring comes with a copy (`Engine.keep_state`)."""
    return window if window and 2 * window < max_seq_len else max_seq_len


class LayerCache:
    """What the engine knows about a layer that keeps something of the tokens of every slot."""

    max_seq_len: int
    reads_lengths = False
    """True if a decode step reads only what each slot has, without a bound on the visible positions."""
    is_ring = False
    is_state = False
    """True if a decode step that is repeated changes it again."""

    @property
    def caches(self) -> tuple[Tensor, ...]:
        """Tensors [slots, groups, positions, ...]; of a ring or a state, any that begin with slots."""
        raise NotImplementedError


class CachedAttention(CoreAttention, LayerCache):
    """Stores the keys and values of new tokens, and attends to all tokens of their sequences. With a window, the cache
    is a ring as long as the window: token p is at p modulo its length."""

    k_cache: Tensor
    """[slots, G, S, K]; that of values has their width."""
    v_cache: Tensor

    def __init__(self, size: CacheSize, state: CacheState, heads: int, kv_heads: int, *arguments: Any) -> None:
        super().__init__(heads, kv_heads, *arguments)
        tp = arguments[3]
        first, end = head_range(kv_heads, tp.size, tp.rank)
        self.reads_lengths = self.kernels.has_decode_attention
        self.state, groups = state, heads // tp.size if self.uneven_kv else end - first
        length = size.length(self.window)
        self.max_seq_len, self.is_ring = size.max_seq_len, length < size.max_seq_len
        for name, width in (("k_cache", size.head_size), ("v_cache", size.value_size)):
            shape = (size.slots, groups, length, width)
            self.register_buffer(name, torch.zeros(shape, dtype=size.dtype, device=size.device), persistent=False)

    @property
    def caches(self) -> tuple[Tensor, ...]:
        return self.k_cache, self.v_cache

    def forward(
        self,
        q_BHTK: Tensor,
        k_BGTK: Tensor,
        v_BGTK: Tensor,
        documents_BT: Tensor | None = None,
        seeds: RowSeeds | None = None,
    ) -> Tensor:
        k_BGTK, v_BGTK = self.even_kv_heads(k_BGTK), self.even_kv_heads(v_BGTK)
        if self.state.decoding:
            lengths, visible = self.state.lengths[: len(q_BHTK)], self.state.visible
            k_cache, v_cache = self.caches
            inputs = (q_BHTK, k_BGTK, v_BGTK, k_cache, v_cache, lengths)
            return self.kernels.decode_attention(*inputs, visible, self.window, self.scores)
        return self._prefill(q_BHTK, k_BGTK, v_BGTK)

    def _prefill(self, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> Tensor:
        """Rows may be padded at the end: what padding leaves in the cache is overwritten before any token sees it."""
        slots, start, tokens = self.state.slots, self.state.start, q_BHTK.shape[2]
        (end, first), past = (start + tokens, 0), None
        if self.is_ring:
            first, k_BGTK, v_BGTK = self._write_rings(k_BGTK, v_BGTK)
        else:
            self.k_cache[:, :, start:end].index_copy_(0, slots, k_BGTK)
            self.v_cache[:, :, start:end].index_copy_(0, slots, v_BGTK)
            if start:
                k_BGTK, v_BGTK = self.k_cache[slots, :, :end], self.v_cache[slots, :, :end]
        if self.kernels.is_batch_invariant:
            first_B = torch.full((len(q_BHTK),), start, dtype=torch.int32, device=q_BHTK.device)
            return self.kernels.attention(q_BHTK, k_BGTK, v_BGTK, first_B, None, self.window, self.scores)
        if start or (self.window and self.window < end):
            position = torch.arange(first, end, device=q_BHTK.device)
            query = position[start - first :, None]
            past = position <= query
            if self.window:
                past &= position > query - self.window
        return self._plain_attention(q_BHTK, k_BGTK, v_BGTK, past, self.scores)

    def _write_rings(self, k_BGTK: Tensor, v_BGTV: Tensor) -> tuple[int, Tensor, Tensor]:
        """Store the tokens of a prefill that later ones see. Returns the position of the first key that its queries
        see, and all these keys and values."""
        slots, start, counts, size = self.state.slots, self.state.start, self.state.counts, self.k_cache.shape[2]
        first = max(start - size + 1, 0)
        earlier = torch.arange(first, start, device=slots.device) % size
        # Each place gets the last of the row's tokens that belongs there, or keeps what it has.
        last_R1 = (start + counts - 1)[:, None]
        position_RS = last_R1 - (last_R1 - torch.arange(size, device=slots.device)) % size
        is_new, row = (position_RS >= start)[:, None, :, None], (position_RS - start).clamp(min=0)[:, None, :, None]
        seen: list[Tensor] = []
        for cache, x in ((self.k_cache, k_BGTK), (self.v_cache, v_BGTV)):
            old = cache[slots]
            seen.append(torch.cat((old[:, :, earlier], x), 2) if start else x)
            new = x.gather(2, row.expand(-1, x.shape[1], -1, x.shape[3]))
            cache.index_copy_(0, slots, torch.where(is_new, new, old))
        return first, seen[0], seen[1]
