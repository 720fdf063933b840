"""What layers keep of sequences instead of keys and values: tensors of fixed shapes, one of each for every slot."""

import torch
from torch import Tensor, nn

from trainyard.inference.cached_attention import CacheSize, CacheState, LayerCache


class SlotStates(nn.Module, LayerCache):
    """The states of a layer (`trainyard.models.module_factory.LayerState`), in fp32. Like a ring, they cannot go back
    to an earlier token."""

    reads_lengths = is_ring = is_state = True

    def __init__(self, size: CacheSize, state: CacheState, shapes: tuple[tuple[int, ...], ...]) -> None:
        super().__init__()
        self.max_seq_len, self.state, self.names = (
            size.max_seq_len,
            state,
            [f"state{index}" for index in range(len(shapes))],
        )
        for name, shape in zip(self.names, shapes, strict=True):
            self.register_buffer(name, torch.zeros(size.slots, *shape, device=size.device), persistent=False)

    @property
    def caches(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, name) for name in self.names)

    def read(self, rows: int) -> tuple[Tensor, list[Tensor]]:
        if self.state.decoding:  # a slot that is free or in the middle of its prompt has no token
            return self.state.is_active[:rows], [tensor[:rows] for tensor in self.caches]
        before = [tensor[self.state.slots] for tensor in self.caches]
        return self.state.counts, before if self.state.start else [torch.zeros_like(tensor) for tensor in before]

    def write(self, *states: Tensor) -> None:
        for tensor, state in zip(self.caches, states, strict=True):
            if self.state.decoding:
                tensor[: len(state)] = state
            else:
                tensor[self.state.slots] = state
