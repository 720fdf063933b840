"""Traces the steps of profile.steps with torch's profiler, and takes a memory snapshot, into profile/ of the run."""

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.profiler import profile

from trainyard.config.schema import ProfileSection
from trainyard.core.errors import UserError, one_line
from trainyard.devices import Device
from trainyard.metrics.kernel_profile import MEMORY_SUFFIX, TRACE_SUFFIX, profile_name
from trainyard.run.callbacks import Part, TrainerView

logger = logging.getLogger(__name__)


def check_profile_ranks(config: ProfileSection, ranks: int) -> None:
    """Raise UserError if profile.ranks names a rank that a run on `ranks` ranks does not have."""
    if config.steps and max(config.ranks) >= ranks:
        last = ranks - 1
        raise UserError(f"profile.ranks={list(config.ranks)}: the last rank of the run is {last}; nearest: [{last}]")


class StepProfiler(Part):
    """Profiles one rank. A file that cannot be written is a warning, not the end of the run."""

    def __init__(self, steps: Sequence[int], directory: Path, rank: int, device: Device) -> None:
        """`steps` are the first and the last to trace."""
        self.first, self.last = steps
        self.directory, self.rank, self.device = directory, rank, device
        self.profiler: Any = None

    @classmethod
    def create(
        cls, config: ProfileSection, run_directory: Path, rank: int, device: Device, next_step: int
    ) -> "StepProfiler | None":
        """The profiler of this rank; None if it traces nothing. A resumed run traces what is left of the steps."""
        if not config.steps or rank not in config.ranks:
            return None
        first, last = max(config.steps[0], next_step), config.steps[1]
        if first > last:
            logger.info("profile.steps=%s: the run has already made these steps", list(config.steps))
            return None
        return cls((first, last), run_directory / "profile", rank, device)

    def begin_step(self, step: int, logged: bool) -> None:
        """Start the trace before its first step."""
        if step == self.first:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise each trace prints two lines on stderr
            self.device.synchronize()
            self.device.record_memory_history(True)
            self.profiler = profile(activities=self.device.profiler_activities(), profile_memory=True)
            self.profiler.start()

    def end_step(self, step: int) -> None:
        """Write the trace after its last step."""
        if step == self.last:
            self._write_trace()

    def end_run(self, trainer: TrainerView, error: BaseException | None) -> None:
        """Write what was traced if the run ends before the last step."""
        self._write_trace()

    def _write_trace(self) -> None:
        profiler, self.profiler = self.profiler, None
        if not profiler:
            return
        self.device.synchronize()
        profiler.stop()
        name = profile_name(self.rank, self.first, self.last)
        try:
            self.directory.mkdir(exist_ok=True)
            self._write(name + TRACE_SUFFIX, profiler.export_chrome_trace)
            self._write(name + MEMORY_SUFFIX, self.device.dump_memory_snapshot)
        except (OSError, RuntimeError) as error:
            logger.warning("profile of steps %s to %s not written: %s", self.first, self.last, one_line(error))
        else:
            logger.info("profile of steps %s to %s: %s", self.first, self.last, self.directory / (name + TRACE_SUFFIX))
        finally:
            self.device.record_memory_history(False)

    def _write(self, name: str, write: Callable[[str], object]) -> None:
        """Let `write` write a file, which gets its name when it is complete; it may also write none."""
        path = self.directory / name
        temporary = self.directory / f".part-{name}"
        try:
            write(str(temporary))
            if temporary.exists():
                os.replace(temporary, path)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
