"""Features that only some versions of torch have."""

import torch

TORCH_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])


def supports_zero_bubble() -> bool:
    """True if zero-bubble schedules work with custom autograd functions: fails on torch 2.11, where their nodes lack
    metadata that the schedule reads, and works on 2.13."""
    return TORCH_VERSION >= (2, 13)


def supports_unsorted_groups() -> bool:
    """True if a process group can have its ranks in any order: torch 2.13 and later, not 2.11."""
    return TORCH_VERSION >= (2, 13)


def has_recorder_pipe_by_default() -> bool:
    """True if NCCL's flight recorder listens to its pipe unless told otherwise: torch 2.13 and later. Earlier versions
    want TORCH_NCCL_TRACE_BUFFER_SIZE, a name that they call deprecated in a warning (DumpPipe in
    ProcessGroupNCCL.hpp)."""
    return TORCH_VERSION >= (2, 13)
