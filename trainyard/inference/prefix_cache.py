"""Which slots hold the keys and values of which beginnings of prompts, so that prompts with the same one share them.

Only whole units of a prompt that were computed by themselves are reused: they have the same bits in every prompt, so a
text is the same with and without this cache. It needs no memory of its own: a slot keeps its prompt after its sequence
has ended, until another one needs the slot.

Layers with a sliding window keep the last tokens only, and a copy of their state at one place of each prompt. A prompt
then begins with all that a slot holds or with nothing of it. The place is before the last unit of a prompt, where the
next turn of a chat, or another sample of the same prompt, goes on; or, if some slot has the beginning of this prompt
and more that differs, where they part: others will begin so.
"""

import itertools
from collections.abc import Collection, Sequence
from typing import NamedTuple


class Prefix(NamedTuple):
    slot: int
    length: int


class PrefixCache:
    def __init__(self, slots: int, unit: int, longest: int | None = None, has_rings: bool = False) -> None:
        """`unit`: tokens of a long prompt that are computed at a time. Prompts longer than `longest` share nothing.
        `has_rings`: some layers keep the last tokens only."""
        self.unit, self.limit, self.has_rings = unit, longest, has_rings
        self._kept_until = [0] * slots
        self.held: list[Sequence[int]] = [()] * slots
        """The tokens of each slot that can be reused, a multiple of `unit`."""
        self._adapters = [0] * slots
        """The adapter that computed them. Others compute other keys and values."""
        self.released: set[int] = set()
        """Slots whose sequence has ended: their first position is in a copy."""
        self._last_used = [0] * slots
        self._clock = itertools.count(1)

    def begin(self, slot: int, prompt: Sequence[int], reused: int, adapter: int = 0) -> None:
        """The prompt of a slot will be computed, after the tokens that are reused."""
        same = (held for held, other in zip(self.held, self._adapters, strict=True) if other == adapter)
        shared = max((self._common(held, prompt) for held in same), default=0)
        self._kept_until[slot] = shared if shared > reused else (len(prompt) - 1) // self.unit * self.unit

    def hold(self, slot: int, prompt: Sequence[int], computed: int, adapter: int = 0) -> bool:
        """A slot has the first `computed` tokens of a prompt. Returns whether it must keep the state of its rings."""
        self._adapters[slot] = adapter
        self.released.discard(slot)
        self.touch(slot)
        if not self._shares(prompt):
            self.held[slot] = ()
        elif not self.has_rings or computed <= self._kept_until[slot]:
            self.held[slot] = prompt[: computed - computed % self.unit]
            return self.has_rings
        return False

    def touch(self, slot: int) -> None:
        self._last_used[slot] = next(self._clock)

    def _shares(self, prompt: Sequence[int]) -> bool:
        """Short prompts are computed with others, and share nothing."""
        return self.unit < len(prompt) <= (self.limit or len(prompt))

    def longest(self, prompt: Sequence[int], own_slot: int, adapter: int = 0) -> Prefix:
        """The slot with the longest beginning of a prompt, of which the last token must always be computed. Of several
        slots, it is that of the prompt itself."""
        if not self._shares(prompt):
            return Prefix(own_slot, 0)
        same = [held if self._adapters[slot] == adapter else () for slot, held in enumerate(self.held)]
        found = [Prefix(slot, self._common(held, prompt)) for slot, held in enumerate(same)]
        found = [p for p in found if not self.has_rings or p.length == len(self.held[p.slot])] or [Prefix(own_slot, 0)]
        return max(found, key=lambda prefix: (prefix.length, prefix.slot == own_slot))

    def _common(self, held: Sequence[int], prompt: Sequence[int]) -> int:
        end = min(len(held), (len(prompt) - 1) // self.unit * self.unit)
        units = range(0, end, self.unit)
        return next((at for at in units if held[at : at + self.unit] != prompt[at : at + self.unit]), end)

    def place_for(self, slot: int, free_slots: Collection[int]) -> int | None:
        """The free slot to which the tokens of `slot` should move before they are overwritten: the one that was used
        least recently; None if they are not worth it."""
        oldest = min(free_slots, key=self._last_used.__getitem__, default=None)
        is_newer = oldest is not None and self._last_used[oldest] < self._last_used[slot]
        return oldest if self.held[slot] and is_newer else None

    def move(self, source: int, target: int) -> None:
        self.held[target], self._last_used[target] = self.held[source], self._last_used[source]
        self._adapters[target], self.held[source] = self._adapters[source], ()
        self.released.add(target)
