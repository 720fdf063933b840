"""What layers keep of sequences instead of keys and values: tensors of fixed shapes, one of each for every slot."""

import torch
from torch import Tensor, nn

from trainyard.inference.cached_attention import CacheSize, CacheState


class SlotStates(nn.Module):
    """The states of a layer (`trainyard.models.module_factory.LayerState`), in fp32."""

    def __init__(self, size: CacheSize, state: CacheState, shapes: tuple[tuple[int, ...], ...]) -> None:
        super().__init__()
        self.state, self.names = state, [f"state{index}" for index in range(len(shapes))]
        for name, shape in zip(self.names, shapes, strict=True):
            self.register_buffer(name, torch.zeros(size.slots, *shape, device=size.device), persistent=False)

    @property
    def tensors(self) -> list[Tensor]:
        return [getattr(self, name) for name in self.names]

    def read(self, rows: int) -> tuple[Tensor, list[Tensor]]:
        if self.state.decoding:  # a slot that is free or in the middle of its prompt has no token
            return self.state.is_active[:rows], [tensor[:rows] for tensor in self.tensors]
        before = [tensor[self.state.slots] for tensor in self.tensors]
        return self.state.counts, before if self.state.start else [torch.zeros_like(tensor) for tensor in before]

    def write(self, *states: Tensor) -> None:
        for tensor, state in zip(self.tensors, states, strict=True):
            if self.state.decoding:
                tensor[: len(state)] = state
            else:
                tensor[self.state.slots] = state
