"""New tokens of a step, on their way from the device to the host."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from trainyard.devices import Device


class NextTokens(NamedTuple):
    """New tokens of some slots, on the host."""

    tokens: list[int]
    logprobs: list[float] | None
    top_logprobs: list[list[tuple[int, float]]] | None
    """MAX_LOGPROBS pairs of token and log-probability for each slot."""

    @classmethod
    def from_tensors(cls, tensors: Sequence[Tensor]) -> "NextTokens":
        """From tokens alone, or from tokens and what `token_logprobs` returns."""
        tokens, *rest = (tensor.tolist() for tensor in tensors)
        if not rest:
            return cls(tokens, None, None)
        logprobs, top_ids, top_values = rest
        tops = [list(zip(ids, values, strict=True)) for ids, values in zip(top_ids, top_values, strict=True)]
        return cls(tokens, logprobs, tops)


ReadLater = Callable[[], NextTokens]
"""Waits for the tokens of a step, not for later ones."""


def start_reading(device: Device, results: Sequence[Tensor]) -> ReadLater:
    """Start copying results to the host. The copies are queued before the step that overwrites the results."""
    copies = [device.copy_to_host(tensor) for tensor in results]
    return lambda: NextTokens.from_tensors([copy() for copy in copies])


class GraphedStep:
    """A step that is captured together with the copies of its results, which between two graphs would take as long as
    several kernels. Two graphs take turns, so that a step is read while the next one runs."""

    def __init__(self, device: Device, work: Callable[[], Sequence[Tensor]], results: Sequence[Tensor]) -> None:
        """`results` are what `work` returned when it ran before."""
        self.graphs = itertools.cycle([_Graph(device, work, results) for _ in range(2)])

    def __call__(self) -> ReadLater:
        return next(self.graphs).replay()


class _Graph:
    def __init__(self, device: Device, work: Callable[[], Sequence[Tensor]], results: Sequence[Tensor]) -> None:
        self.device = device
        self.on_host = [device.alloc_host_buffer(tensor.shape, tensor.dtype) for tensor in results]
        self.read: ReadLater | None = None

        def work_and_copy() -> None:
            for host, tensor in zip(self.on_host, work(), strict=True):
                host.copy_(tensor, non_blocking=True)

        self.run = device.capture_graph(work_and_copy)

    def replay(self) -> ReadLater:
        if self.read:
            self.read()  # a caller that is two steps behind still gets its tokens
        self.run()
        wait_until_done = self.device.record_progress()

        @functools.cache
        def read() -> NextTokens:
            wait_until_done()
            return NextTokens.from_tensors(self.on_host)

        self.read = read
        return read
