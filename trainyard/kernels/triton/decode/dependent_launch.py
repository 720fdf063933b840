"""Programmatic dependent launch: a kernel starts, and loads weights, while the kernel before it still runs."""

# A kernel calls `start` first, then reads only memory that no running kernel writes (weights, the lengths and the cache
# of earlier steps), then calls `wait`: from there on, everything that earlier kernels wrote is visible. Every kernel
# waits, so that the wait of one kernel covers all kernels before it. Kernels of torch do not overlap with others.

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_COUNTERS = 1 << 16


@functools.cache
def supports_dependent_launch() -> bool:
    """True on Hopper and later."""
    if triton.knobs.runtime.interpret:
        return False
    target = triton.runtime.driver.active.get_current_target()
    return isinstance(target.arch, int) and target.arch >= 90


def launch_options() -> dict[str, bool]:
    """Launch arguments of a kernel that calls `start` and `wait`."""
    return {"PDL": True, "launch_pdl": True} if supports_dependent_launch() else {"PDL": False}


@functools.cache
def arrival_counters(device: torch.device) -> Tensor:
    """Zeros with which the programs that share a result find out who is last. The last one sets its counter to zero
    again. All kernels of a device share them, so that they must run on one stream, and the first call must come before
    a graph is captured."""
    return torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=device)


@triton.jit
def start(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Let the next kernel start as soon as there is room for it."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait until all earlier kernels have ended."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def index_after_wait(index, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """`index`, known after all earlier kernels have ended: what is addressed with it is loaded after that.

    In a loop that Triton pipelines, loads that do not use it start before the wait. It must depend on the loop's
    variable, or it is computed before the loop.
    """
    if PDL:
        index = tl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.b32 $0, $1;", "=r,r", [index], tl.int32, is_pure=True, pack=1
        )
    return index


@triton.jit
def is_last_program(counter, programs):  # type: ignore[no-untyped-def]
    """True in the last of several programs to get here. It sees what the others stored before."""
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == programs - 1
    if last:
        tl.store(counter, 0)
    return last
