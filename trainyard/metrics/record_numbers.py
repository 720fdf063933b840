"""Numbers of records, which come from files that may hold anything."""

import math
from typing import Any

NOT_FINITE = ("nan", "inf", "-inf")
"""How a run writes numbers that JSON does not have."""


def as_number(value: Any) -> float | None:
    """A number of a record, also one that is not finite; None for anything else."""
    if isinstance(value, str):
        return float(value) if value in NOT_FINITE else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if isinstance(value, float) or abs(value) < 2**1000 else None  # a larger int is no float


def to_finite(value: Any) -> float | None:
    number = as_number(value)
    return float(number) if number is not None and math.isfinite(number) else None


def to_count(value: Any) -> int | None:
    """A step or another count; None if it is not one that JavaScript can hold exactly."""
    number = to_finite(value)
    return int(number) if number is not None and 0 <= number < 2**53 else None
