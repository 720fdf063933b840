"""What every section of the configuration shares: strict types, unknown keys refused, a docstring on each field."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


def nearest_multiples(value: int, unit: int) -> str:
    """The multiples of `unit` next to `value`, for error lines: `8 or 12`."""
    below, above = value // unit * unit, (value // unit + 1) * unit
    return f"{below} or {above}" if below > 0 else f"{above}"


def nearest_divisor(value: int, total: int) -> int:
    """The divisor of `whole` nearest to `value`."""
    return min((d for d in range(1, total + 1) if total % d == 0), key=lambda d: (abs(d - value), d))
