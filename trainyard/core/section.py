"""Base class and value types of all configuration sections, and helpers for error messages."""

import re
from collections.abc import Callable, Mapping
from math import isqrt
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler, Strict, ValidationError
from pydantic_core import CoreSchema, InitErrorDetails, core_schema

from trainyard.core.registry import Registry
from trainyard.core.user_code import nearest_name

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
USER_PATH = r"^[\w.]+:\w+$"
FunctionPath = Annotated[str, Field(pattern=USER_PATH)]
"""`module:name`, imported when the run starts, with the current directory on the Python path."""

ONE_OR_MORE = BeforeValidator(lambda value: (value,) if isinstance(value, str) and value else value)
"""Annotates a list of texts: a text stands for a list of one."""
Paths = Annotated[tuple[str, ...], Strict(False), ONE_OR_MORE]


class NameOrPath:
    """Annotates a key that takes built-in names, or `module:name` of the user's code."""

    def __init__(
        self,
        *names: str,
        registry: Registry[Any] | None = None,
        path: str = "module:function",
        example: str = "",
        aliases: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """The built-in names are `names` and those of a registry. `path` is how documentation writes the values that
        are not built in; `example` is one, for values that are close to no name. `aliases` returns other words and the
        names that they mean, for messages."""
        self.names = (*names, *(registry.built_in if registry else ()))
        self.registry, self.path, self.aliases = registry, path, aliases
        self.example = f"; nearest: {example}" if example else ""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def check(self, value: str) -> str:
        if value in self.names or re.fullmatch(USER_PATH, value):
            return value
        names = (*self.names, *(self.registry.installed() if self.registry else ()))
        if value not in names:
            meant = self.aliases().get(value.lower())  # before the nearest name: gpu means cuda, and is close to cpu
            nearest = f"; nearest: {meant}" if meant else nearest_name(value, names) or self.example
            raise ValueError(f"not one of {', '.join(names)}, or {self.path}{nearest}")
        return value


class Section(BaseModel):
    """A section of the configuration: strict types, finite numbers, no unknown keys, a docstring below each field."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


SectionT = TypeVar("SectionT", bound=Section)


def validate_at(loc: tuple[str, ...], section: type[SectionT], value: object) -> SectionT:
    """A section from its values. The location of a mistake begins with `loc`, as where the class of a section depends
    on a value."""
    try:
        return section.model_validate(value)
    except ValidationError as error:
        details: list[InitErrorDetails] = [
            InitErrorDetails(
                type=mistake["type"], loc=(*loc, *mistake["loc"]), input=mistake["input"], ctx=mistake.get("ctx", {})
            )
            for mistake in error.errors()
        ]
        raise ValidationError.from_exception_data(error.title, details) from None


def nearest_multiples(value: int, unit: int) -> str:
    """Return the multiples of `unit` around `value` for an error message, such as `8 or 12`."""
    below, above = value // unit * unit, (value // unit + 1) * unit
    return f"{below} or {above}" if below > 0 else f"{above}"


def nearest_divisor(value: int, total: int) -> int:
    """Return the divisor of `total` nearest to `value`."""
    small = [d for d in range(1, isqrt(total) + 1) if total % d == 0]
    return min((*small, *(total // d for d in small)), key=lambda d: (abs(d - value), d))
