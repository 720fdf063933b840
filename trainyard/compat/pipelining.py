"""Pipeline schedules that only some versions of torch support."""

from trainyard.compat.version import TORCH_VERSION


def supports_zero_bubble() -> bool:
    """True if zero-bubble schedules work with custom autograd functions: fails on torch 2.11, where their nodes lack
    metadata that the schedule reads, and works on 2.13."""
    return TORCH_VERSION >= (2, 13)
