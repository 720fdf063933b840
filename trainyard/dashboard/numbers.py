"""Arrays of numbers from records, and numbers that JSON can hold."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainyard.metrics.json_lines import as_number

FloatArray = NDArray[np.float64]


def to_float(value: Any) -> float:
    """A number of a record; NaN for everything else."""
    number = as_number(value)
    return math.nan if number is None else float(number)


def to_floats(values: Sequence[Any]) -> FloatArray:
    if all(type(value) is float or (type(value) is int and -(2**53) < value < 2**53) for value in values):
        return np.array(values, np.float64)
    return np.array([to_float(value) for value in values], np.float64)


def to_json(values: Iterable[float]) -> list[float | None]:
    """Numbers with six significant digits; None where they are not finite."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]


def to_json_exact(values: Iterable[float]) -> list[float | int | None]:
    """Numbers as they are; whole ones without a fraction."""
    return [
        None if not math.isfinite(value) else int(value) if value == int(value) else round(value, 3) for value in values
    ]
