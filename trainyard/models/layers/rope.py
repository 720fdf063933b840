"""Tables of rotary positions: what transformers' modeling_rope_utils.py computes, for each kind of RoPE in a model."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainyard.families.rope import LongRopeScaling, Rope, YarnRopeScaling
from trainyard.kernels.reference import Kernels


class PositionTable(NamedTuple):
    """What one kind of layers reads about the positions of tokens."""

    cos: Tensor | None
    """[T, R] or, if positions differ between samples, [B, 1, T, R], for the R dims that rotate; None: none does."""
    sin: Tensor | None
    query_scale: Tensor | None
    """Factor of queries, [T, 1] or [B, 1, T, 1]."""


class PositionTables(nn.Module):
    """The tables of all kinds of RoPE in a model, computed once for a batch. A layer takes that of its kind."""

    def __init__(self, ropes: Sequence[Rope | None], kernels: Kernels) -> None:
        super().__init__()
        self.kernels, self.ropes = kernels, ropes
        limits = [rope.static_length for rope in ropes if rope and rope.static_length]
        self.static_length = min(limits, default=None)
        for index, rope in enumerate(ropes):
            if rope and rope.size:
                self.register_buffer(f"frequencies{index}", rope_frequencies(rope), persistent=False)

    def forward(self, position: Tensor, length: int | Tensor) -> tuple[PositionTable, ...]:
        """`position` is [T] or [B, 1, T]; `length` that of the sequences, for all or [B, 1, 1]."""
        return tuple(self._table(index, rope, position, length) for index, rope in enumerate(self.ropes))

    def _table(self, index: int, rope: Rope | None, position: Tensor, length: int | Tensor) -> PositionTable:
        if rope is None:
            return PositionTable(None, None, None)
        cos = sin = query_scale = None
        if rope.size:
            frequency = getattr(self, f"frequencies{index}")
            choose = CHOICES.get(rope.scaling.kind) if rope.scaling else None
            frequency = choose(rope, frequency, length) if choose else frequency[0]
            cos, sin = self.kernels.rope_angles(position, frequency, rope.attention_factor)
        if scale := rope.query_scale:
            query_scale = 1 + scale.weight * torch.log1p(((position + 1) / scale.interval).floor())[..., None]
        return PositionTable(cos, sin, query_scale)


def rope_frequencies(rope: Rope) -> Tensor:
    """Radians per position of each rotated dim, [1, R]. Kinds that depend on the length have two rows: what
    `CHOICES` needs."""
    exponent = torch.arange(0, rope.size, 2, dtype=torch.float32) / rope.size
    frequency = 1.0 / rope.theta**exponent
    if rope.scaling:
        frequency = KINDS[rope.scaling.kind](rope, frequency, exponent)
    frequency = frequency.view(-1, rope.pairs)
    return frequency.repeat_interleave(2, -1) if rope.interleaved else torch.cat([frequency] * 2, -1)


def _linear(rope: Any, frequency: Tensor, exponent: Tensor) -> Tensor:
    return frequency / rope.scaling.factor


def _llama3(rope: Any, frequency: Tensor, exponent: Tensor) -> Tensor:
    scaling = rope.scaling
    turns = scaling.original_max_positions * frequency / (2 * torch.pi)
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = smooth.clamp(0, 1)
    return frequency * ((1 - smooth) / scaling.factor + smooth)


def _yarn(rope: Any, frequency: Tensor, exponent: Tensor) -> Tensor:
    scaling: YarnRopeScaling = rope.scaling

    def pair_with(turns: float) -> float:
        """The pair that turns this often over the trained context."""
        context = scaling.original_max_positions / (turns * 2 * math.pi)
        return rope.size * math.log(context) / (2 * math.log(rope.theta))

    first, last = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.size - 1)
    last = last + 0.001 if first == last else last
    scaled = ((torch.arange(len(frequency), dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    return frequency / scaling.factor * scaled + frequency * (1 - scaled)


def _longrope(rope: Any, frequency: Tensor, exponent: Tensor) -> Tensor:
    scaling: LongRopeScaling = rope.scaling
    return 1.0 / (torch.tensor([scaling.short_factor, scaling.long_factor]) * rope.theta**exponent)


def _dynamic(rope: Any, frequency: Tensor, exponent: Tensor) -> Tensor:
    return torch.stack((frequency, exponent))


KINDS: dict[str, Callable[[Rope, Tensor, Tensor], Tensor]] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
"""Frequencies by kind of scaling, from those without and their exponents of 1 / theta."""


def _choose_divisors(rope: Any, frequencies: Tensor, length: int | Tensor) -> Tensor:
    is_long = length > rope.scaling.original_max_positions
    if isinstance(is_long, Tensor):
        return torch.where(is_long[..., None], frequencies[1], frequencies[0])
    return frequencies[int(is_long)]


def _grow_base(rope: Any, frequencies: Tensor, length: int | Tensor) -> Tensor:
    factor, original = rope.scaling.factor, rope.scaling.original_max_positions
    growth = length * (factor / original) - (factor - 1)
    power = rope.size / (rope.size - 2)
    growth = growth.clamp(min=1)[..., None] ** power if isinstance(growth, Tensor) else max(growth, 1.0) ** power
    return frequencies[0] * growth ** -frequencies[1]


CHOICES: dict[str, Callable[[Rope, Tensor, int | Tensor], Tensor]] = {
    "dynamic": _grow_base,
    "longrope": _choose_divisors,
}
"""Frequencies of sequences of a length, [R] or [B, 1, 1, R], for kinds that depend on it."""
