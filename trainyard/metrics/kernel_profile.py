"""Traces of torch's profiler by kind of kernel: the files of profile.steps, and the time in each kind."""

import gzip
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from trainyard.core.errors import UserError, one_line

DIRECTORY = "profile"
TRACE_SUFFIX, MEMORY_SUFFIX = ".trace.json.gz", ".memory.pickle"
TRACE_NAME = re.compile(r"rank-(\d+)-steps-(\d+)-(\d+)" + re.escape(TRACE_SUFFIX))
DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of the events that an accelerator has timed."""
HOST_CATEGORY = "cpu_op"

KERNEL_KINDS = [
    ("communication", r"nccl|c10d|gloo|all_?reduce|all_?gather|reduce_?scatter|send_?recv|wait_tensor"),
    ("attention", r"fmha|flash|sdpa|cudnn.*attn|attention|attend|dot_do_o|convert_dq|^_forward$|^_dq$|^_dkdv$"),
    ("matmul", r"gemm|cutlass|nvjet|xmma|cublas|splitk|s16816|wgmma|aten::(addmm|bmm|baddbmm|mm|matmul|linear)\b"),
    ("norm", r"norm"),
    ("activation", r"swiglu|_gelu|aten::(silu|gelu)"),
    ("rope", r"rope"),
    ("loss", r"softmax|logsumexp|cross_?entropy|nll_loss"),
    ("update", r"adam|lpnorm|l2norm|multi_tensor|LpNorm|_foreach"),
    ("fp8 cast", r"_cast|_amax|fp8"),
    ("compiled", r"^triton_|^graph_\d"),
    (
        "add, copy, fill",
        r"elementwise|copy|fill|memset|memcpy|CatArray|reduce|index|embedding"
        r"|aten::(add|sub|mul|div|neg|cat|stack|sum|zero|clone|contiguous|to|empty|where|arange|pow|clamp|sqrt|rsqrt)",
    ),
]
"""Kinds and the names of their kernels and operators; the first that matches counts."""


class StepTrace(NamedTuple):
    """A trace of one rank."""

    path: Path
    rank: int
    first_step: int
    last_step: int

    @property
    def steps(self) -> int:
        return self.last_step - self.first_step + 1


class KernelTime(NamedTuple):
    """Time in one kernel, or on a CPU in one operator without those that it calls."""

    milliseconds: float
    calls: int


class KernelTimes(NamedTuple):
    """The contents of a trace."""

    kernels: dict[str, KernelTime]
    on_device: bool
    """False if these are operators on the host's CPU."""
    peak_bytes: int | None
    """Largest total of the profiler's memory events, if it recorded any."""


def kernel_kind(name: str) -> str:
    """The kind of a kernel or operator."""
    return next((kind for kind, pattern in KERNEL_KINDS if re.search(pattern, name, re.IGNORECASE)), "other")


def time_by_kind(milliseconds: Mapping[str, float]) -> dict[str, float]:
    """The time of each kind, largest first, from the time of each kernel."""
    kinds: dict[str, float] = defaultdict(float)
    for name, value in milliseconds.items():
        kinds[kernel_kind(name)] += value
    return dict(sorted(kinds.items(), key=lambda item: -item[1]))


def profile_name(rank: int, first: int, last: int) -> str:
    """The name of a profile's files, without suffix."""
    return f"rank-{rank:05d}-steps-{first}-{last}"


def find_traces(run_directory: Path) -> list[StepTrace]:
    """The traces of a run, newest first."""
    try:
        paths = [path for path in (run_directory / DIRECTORY).iterdir() if path.is_file()]
    except OSError:
        return []
    matches = [(path, match) for path in paths if (match := TRACE_NAME.fullmatch(path.name))]
    traces = [StepTrace(path, *(int(group) for group in match.groups())) for path, match in matches]
    return sorted(traces, key=lambda trace: (-trace.last_step, -trace.first_step, trace.rank))


def read_trace(path: Path) -> KernelTimes:
    """Read a Chrome trace, gzipped or not. Raises UserError if it is malformed."""
    try:
        raw = path.read_bytes()
        trace = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
        events = [event for event in trace["traceEvents"] if isinstance(event, dict)]
        return kernel_times(events)
    except OSError as error:
        if error.strerror:
            raise UserError(f"{path}: {error.strerror}") from None
        raise UserError(f"{path}: not a trace: {one_line(error)}") from None
    except (ValueError, TypeError, KeyError, EOFError, zlib.error, RecursionError) as error:
        raise UserError(f"{path}: not a trace of torch's profiler: {one_line(error) or type(error).__name__}") from None


def kernel_times(events: Iterable[dict[str, Any]]) -> KernelTimes:
    """The time of each kernel; without an accelerator, of each operator of the CPU."""
    by_category: dict[str, list[dict[str, Any]]] = defaultdict(list)
    memory: dict[Any, int] = {}
    for event in events:
        if event.get("ph") == "X":
            by_category[str(event.get("cat"))].append(event)
        elif event.get("name") == "[memory]":
            details = event.get("args", {})
            device = details.get("Device Type")
            memory[device] = max(memory.get(device, 0), int(details.get("Total Allocated", 0)))
    on_device = [event for category in DEVICE_CATEGORIES for event in by_category[category]]
    times: dict[str, list[float]] = defaultdict(list)
    if on_device:
        for event in on_device:
            times[str(event["name"])].append(float(event["dur"]) / 1000)
    else:
        for name, milliseconds in self_times(by_category[HOST_CATEGORY]):
            times[name].append(milliseconds)
    kernels = {name: KernelTime(sum(values), len(values)) for name, values in times.items()}
    return KernelTimes(kernels, bool(on_device), max(memory.values()) if memory else None)


def self_times(events: Iterable[dict[str, Any]]) -> Iterable[tuple[str, float]]:
    """(name, milliseconds) of each event without the events inside it, which the same thread has run."""
    by_thread: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)
    for event in events:
        start, duration = float(event["ts"]), float(event["dur"])
        by_thread[str(event.get("tid"))].append((start, -duration, str(event["name"])))
    for calls in by_thread.values():
        stack: list[tuple[float, str, list[float]]] = []
        for start, negative_duration, name in sorted(calls):
            while stack and stack[-1][0] <= start:
                _, ended, remaining = stack.pop()
                yield ended, max(remaining[0], 0.0) / 1000
            if stack:
                stack[-1][2][0] += negative_duration
            stack.append((start - negative_duration, name, [-negative_duration]))
        for _, ended, remaining in stack:
            yield ended, max(remaining[0], 0.0) / 1000
