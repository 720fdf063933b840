"""Captures the work of a micro batch as a graph and replays it, so that the host has almost nothing to do."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from trainyard.core.batch import Batch, batch_tensors, map_batch
from trainyard.devices import Device

MAX_GRAPHS = 4
"""Micro batch shapes that get a graph; other shapes run eagerly."""

ShapeKey = tuple[tuple[str, tuple[int, ...]], ...]
"""Name and shape of every field of a micro batch."""


class CapturedGraph(NamedTuple):
    """A graph and its inputs."""

    static_inputs: Batch
    """The tensors that a replay reads."""
    replay: Callable[[], None]


class CudaGraphRunner:
    """Runs the first micro batch of a shape eagerly, captures the second, and replays the graph from then on."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.graphs: dict[ShapeKey, CapturedGraph | None] = {}

    def __call__(self, micro: Batch, work: Callable[[Batch], None]) -> None:
        """Run `work(micro)`. Everything else that `work` reads or writes must keep its address."""
        tensors = batch_tensors(micro)
        shape = tuple(sorted((name, tuple(tensor.shape)) for name, tensor in tensors.items()))
        if shape not in self.graphs:
            # The first run does what cannot be captured: it compiles code and allocates workspaces.
            self.graphs[shape] = None
            work(micro)
            return
        graph = self.graphs[shape]
        if graph is None and sum(other is not None for other in self.graphs.values()) < MAX_GRAPHS:
            inputs = map_batch(torch.clone, micro)
            graph = self.graphs[shape] = CapturedGraph(inputs, self.device.capture_graph(lambda: work(inputs)))
        if graph is None:
            work(micro)
            return
        for name, static_input in batch_tensors(graph.static_inputs).items():
            static_input.copy_(tensors[name])
        graph.replay()
