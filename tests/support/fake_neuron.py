"""A fake torch_neuronx with the names and signatures of the real one (2.13) that runs on the CPU.

The real package needs AWS's package index and a chip. The fake one shows that our side of the interface is consistent,
not how the chip behaves.
"""

from pathlib import Path

MODULE = '''
"""A fake TorchNeuron."""
from contextlib import contextmanager
from types import SimpleNamespace

import torch
import torch.distributed as dist

graphs = []
options_seen = []


def _autoload():
    torch.utils.rename_privateuse1_backend("neuron")
    torch.neuron = SimpleNamespace(is_available=lambda: False)  # tensors stay on the CPU
    dist.Backend.register_backend(
        "neuron", lambda store, rank, size, timeout: dist.ProcessGroupGloo(store, rank, size, timeout), devices=["cpu"]
    )


def compile_graph(graph, inputs, *, options=None, mode="default"):
    assert mode == "default", mode
    assert all(isinstance(size, int) for each in inputs if isinstance(each, torch.Tensor) for size in each.shape)
    options = {} if options is None else options
    options["prepared"] = True  # the real one also writes into its options
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
    """Install the package as pip would."""
    (directory / "torch_neuronx.py").write_text(MODULE)
    dist_info = directory / f"torch_neuronx-{version}.dist-info"
    dist_info.mkdir()
    (dist_info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch-neuronx\nVersion: {version}\n")
    (dist_info / "entry_points.txt").write_text(ENTRY_POINTS)
