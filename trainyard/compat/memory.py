"""The memory history of torch's caching allocators (torch 2.9 to 2.14). `package` is torch's package of a device."""

from typing import Any

MAX_EVENTS = 100_000
"""Allocations of which the history keeps the stack."""


def record_memory_history(package: Any, enabled: bool) -> None:
    """Start or stop recording allocations with their stacks."""
    package.memory._record_memory_history("all" if enabled else None, max_entries=MAX_EVENTS)


def dump_memory_snapshot(package: Any, path: str) -> None:
    """Write the history in the format of torch's memory viewer."""
    package.memory._dump_snapshot(path)
