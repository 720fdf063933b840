"""Base class and number types of all configuration sections, and helpers for error messages."""

from math import isqrt
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]


class Section(BaseModel):
    """A section of the configuration: strict types, finite numbers, no unknown keys, a docstring below each field."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def nearest_multiples(value: int, unit: int) -> str:
    """Return the multiples of `unit` around `value` for an error message, such as `8 or 12`."""
    below, above = value // unit * unit, (value // unit + 1) * unit
    return f"{below} or {above}" if below > 0 else f"{above}"


def nearest_divisor(value: int, total: int) -> int:
    """Return the divisor of `total` nearest to `value`."""
    small = [d for d in range(1, isqrt(total) + 1) if total % d == 0]
    return min((*small, *(total // d for d in small)), key=lambda d: (abs(d - value), d))
