"""Micro batches whose work is recorded once and then replayed, so that the host has next to nothing to do for them."""

from collections.abc import Callable
from typing import NamedTuple

from trainyard.devices import Device
from trainyard.models import Batch

MAX_GRAPHS = 4
"""Shapes of micro batch that are recorded; others run as they come."""

ShapeKey = tuple[tuple[str, tuple[int, ...]], ...]


class CapturedGraph(NamedTuple):
    static_inputs: Batch
    """What a replay reads."""
    replay: Callable[[], None]


class CudaGraphRunner:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.graphs: dict[ShapeKey, CapturedGraph | None] = {}

    def __call__(self, micro: Batch, work: Callable[[Batch], None]) -> None:
        """Do `work` on a micro batch. What else it reads or changes must be at the same place in memory every time."""
        shape = tuple(sorted((name, tuple(tensor.shape)) for name, tensor in micro.items()))
        if shape not in self.graphs:
            # The first time things get ready that cannot be recorded: compiled code, workspaces.
            self.graphs[shape] = None
            work(micro)
            return
        recorded = self.graphs[shape]
        if recorded is None and sum(each is not None for each in self.graphs.values()) < MAX_GRAPHS:
            inputs = {name: tensor.clone() for name, tensor in micro.items()}
            recorded = self.graphs[shape] = CapturedGraph(inputs, self.device.capture_graph(lambda: work(inputs)))
        if recorded is None:
            work(micro)
            return
        for name, tensor in micro.items():
            recorded.static_inputs[name].copy_(tensor)
        recorded.replay()
