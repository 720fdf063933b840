"""Live bytes of a stage over the forward and backward pass of one micro batch."""

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from trainyard.kernels.custom_op import WORKSPACE_BYTES
from trainyard.preflight.dryrun.live_memory import LiveBytes
from trainyard.preflight.dryrun.meta_ops import tensors_in
from trainyard.preflight.plan.trace.part_recorder import PartRecorder
from trainyard.preflight.plan.trace.stage_run import META, StageRun, TracedStage

ADD_IN_PLACE = torch.ops.aten.add_.Tensor


@dataclass(frozen=True)
class MemoryTrace:
    """Bytes besides those that exist before the micro batch. Parts are those of `part_recorder`."""

    forward_peaks: dict[int, int]
    """Peak of the forward pass, by part."""
    backward_peaks: dict[int, int]
    entry_bytes: dict[int, int]
    """Live bytes when the forward pass enters a part."""
    saved: int
    """Live bytes between forward and backward pass."""
    end_bytes: dict[int, int]
    """Live bytes at the last operator of a part's backward pass."""
    deferred_grads: dict[int, int]
    """Gradients from which weight gradients are computed, by part."""


@lru_cache(maxsize=4096)
def trace_memory(stage: TracedStage) -> MemoryTrace:
    recorder = _MemoryRecorder()
    run = StageRun(stage, recorder)
    for tensor in run.existing_tensors():
        recorder.live.track(tensor, "")
    recorder.existing_bytes = recorder.live.current
    recorder.gradient_storages = {id(gradient.untyped_storage()) for gradient in run.gradients.values()}
    run.run()
    return MemoryTrace(
        dict(recorder.peaks[False]),
        dict(recorder.peaks[True]),
        recorder.entry_bytes,
        recorder.saved,
        recorder.end_bytes,
        {part: sum(sizes.values()) for part, sizes in recorder.deferred.items()},
    )


class _MemoryRecorder(PartRecorder):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()
        self.live = LiveBytes(META)
        self.existing_bytes = self.saved = self.allocations = 0
        self.peaks: dict[bool, dict[int, int]] = {False: defaultdict(int), True: defaultdict(int)}
        self.entry_bytes: dict[int, int] = {}
        self.end_bytes: dict[int, int] = {}
        self.gradient_storages: set[int] = set()
        self.numbers: dict[int, int] = {}
        """Number of the allocation of each storage that exists in the backward pass."""
        self.sources: dict[int, dict[int, int]] = {}
        """The storages from which a storage was computed: number and size."""
        self.deferred: dict[int, dict[int, int]] = defaultdict(dict)

    @property
    def current(self) -> int:
        return self.live.current - self.existing_bytes

    def enter(self, part: int) -> None:
        super().enter(part)
        self.entry_bytes[part] = self.current

    def end_forward(self) -> None:
        self.saved = self.current

    def observe(self, function: Any, args: Any, kwargs: Any, out: Any) -> None:
        part = self.part
        known = self.live.storages
        for tensor in tensors_in(out):
            if self.in_backward and (key := id(tensor.untyped_storage())) not in known:
                self.allocations += 1
                self.numbers[key] = self.allocations
                self.sources[key] = self._gradients_in(args)
            self.live.track(tensor, "")
        workspace = WORKSPACE_BYTES.get(function)
        current = self.current + (workspace(*args, **kwargs) if workspace else 0)
        peaks = self.peaks[self.in_backward]
        peaks[part] = max(peaks[part], current)
        if self.in_backward:
            self.end_bytes[part] = self.current
            if function is ADD_IN_PLACE and id(args[0].untyped_storage()) in self.gradient_storages:
                self.deferred[part] |= self.sources.get(id(args[1].untyped_storage()), {})

    def _gradients_in(self, args: Any) -> dict[int, int]:
        found = {}
        for tensor in tensors_in(args):
            key = id(tensor.untyped_storage())
            if key in self.numbers and key in self.live.storages:
                found[self.numbers[key]] = self.live.storages[key][1]
        return found
