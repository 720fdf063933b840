"""A torch_neuronx to pretend with: names and signatures of the real one (2.13), work on the CPU.

A real one cannot be had without AWS's package index, nor run without a chip. This one shows that our side of the talk
holds together, not what the chip would answer.
"""

from pathlib import Path

MODULE = '''
"""Pretends to be TorchNeuron."""
from contextlib import contextmanager
from types import SimpleNamespace

import torch
import torch.distributed as dist

graphs = []
options_seen = []


def _autoload():
    torch.utils.rename_privateuse1_backend("neuron")
    torch.neuron = SimpleNamespace(is_available=lambda: False)  # no tensors live there: they stay on the CPU
    dist.Backend.register_backend(
        "neuron", lambda store, rank, size, timeout: dist.ProcessGroupGloo(store, rank, size, timeout), devices=["cpu"]
    )


def compile_graph(graph, inputs, *, options=None, mode="default"):
    assert mode == "default", mode
    assert all(isinstance(size, int) for each in inputs if isinstance(each, torch.Tensor) for size in each.shape)
    options = {} if options is None else options
    options["prepared"] = True  # the real one writes into what it is given as well
    options_seen.append(options)
    graphs.append(graph)
    return graph.forward


class Event:
    recorded = False

    def record(self, stream=None):
        self.recorded = True

    def synchronize(self):
        assert self.recorded


class Stream:
    def __init__(self, device=None):
        self.waited = []

    def wait_stream(self, other):
        self.waited.append(other)

    def wait_event(self, event):
        assert event.recorded
        self.waited.append(event)

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event


_main = Stream()


def current_stream(device=None):
    return _main


@contextmanager
def stream(chosen):
    yield


def synchronize(device=None):
    return None


def max_memory_allocated(device=None):
    return 12345
'''
ENTRY_POINTS = """[torch.backends]
torch_neuronx = torch_neuronx:_autoload

[torch_dynamo_backends]
neuron = torch_neuronx:compile_graph
"""


def install(directory: Path, version: str = "2.13.3.0") -> None:
    """As pip would put it there."""
    (directory / "torch_neuronx.py").write_text(MODULE)
    about = directory / f"torch_neuronx-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch-neuronx\nVersion: {version}\n")
    (about / "entry_points.txt").write_text(ENTRY_POINTS)
