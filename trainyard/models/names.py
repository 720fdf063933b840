"""Between our parameter names and Hugging Face's, both ways, from one table per family.

The table's left side is a blueprint part (what a parameter is called unfused); several parts may live in one Hugging
Face tensor (GPT-2's c_attn), in the order of the table.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainyard.errors import UserError
from trainyard.models.blueprint import Blueprint, Slice
from trainyard.models.init import Values

# Buffers that older versions of transformers saved; they hold no weights.
BUFFERS = re.compile(r"(rotary_emb\.inv_freq|embeddings\.position_ids|attn\.(masked_)?bias)$")


@dataclass(frozen=True)
class Hf:
    name: str
    transposed: bool = False
    """Stored [in, out] (GPT-2's Conv1D) where ours is [out, in]."""


@dataclass(frozen=True)
class Names:
    table: dict[str, Hf]
    ties: dict[str, str] = field(default_factory=dict)
    """Hugging Face names that are copies of another one (tied weights): read past, not written."""


@dataclass(frozen=True)
class _Held:
    """A part inside our parameter `owner`, at [start, stop) of its first dim when fused."""

    part: str
    owner: str
    start: int
    stop: int
    fused: bool


def to_hf(blueprint: Blueprint, names: Names, values: Values) -> Iterator[tuple[str, Tensor]]:
    """Every Hugging Face tensor, one at a time, from whole tensors of ours."""
    for hf, group in _groups(blueprint, names).items():
        pieces = []
        for held in group:
            value = values(held.owner)
            pieces.append(value[held.start : held.stop] if held.fused else value)
        whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        yield hf.name, (whole.T if hf.transposed else whole).contiguous()


def from_hf(blueprint: Blueprint, names: Names, found: Iterable[str], read: Callable[[str], Tensor]) -> Values:
    """Values of ours, read tensor by tensor with `read`; `found` are the names that the files hold."""
    places: dict[str, tuple[Hf, int, int]] = {}
    for hf, group in _groups(blueprint, names).items():
        start = 0
        for held in group:
            size = held.stop - held.start
            places[held.part] = (hf, start, size if len(group) > 1 else -1)
            start += size
    wanted = {hf.name for hf, _, _ in places.values()}
    found = set(found)
    missing, extra = sorted(wanted - found), sorted(found - wanted - set(names.ties))
    extra = [name for name in extra if not BUFFERS.search(name)]
    if missing or extra:
        what = f"{missing[0]} is missing" if missing else f"{extra[0]} has no place in this model"
        raise UserError(f"checkpoint does not fit the model: {what} ({len(missing)} missing, {len(extra)} unknown)")

    def part(piece: Slice) -> Tensor:
        hf, start, size = places[piece.name]
        value = read(hf.name)
        value = value.T if hf.transposed else value
        value = value if size < 0 else value[start : start + size]
        if tuple(value.shape) != piece.shape:
            raise UserError(
                f"checkpoint does not fit the model: {hf.name} is {list(value.shape)}, wanted {list(piece.shape)}"
            )
        return value.float()

    def values(name: str) -> Tensor:
        pieces = [part(piece) for piece in blueprint.slices(name)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    return values


def _groups(blueprint: Blueprint, names: Names) -> dict[Hf, list[_Held]]:
    """For each Hugging Face tensor, the parts of ours that make it up."""
    held: dict[str, _Held] = {}
    for owner in blueprint.names():
        start, fused = 0, bool(blueprint.row(owner).parts)
        for piece in blueprint.slices(owner):
            size = piece.shape[0]
            held[piece.name] = _Held(piece.name, owner, start, start + size, fused)
            start += size
    groups: dict[Hf, list[_Held]] = {}
    for ours, hf in names.table.items():
        for i in range(blueprint.layers if "*" in ours else 1):
            whole = Hf(hf.name.replace("*", str(i)), hf.transposed)
            groups.setdefault(whole, []).append(held.pop(ours.replace("*", str(i))))
    assert not held, f"no Hugging Face name for {sorted(held)[0]}"
    return groups
