"""A linear wrapper that adds nothing and freezes every other row of the blueprint, or rows by name."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from trainyard import LinearWrapper
from trainyard.core.section import Section
from trainyard.families import Blueprint, ParamSpec


class FreezeKeys(Section):
    pattern: str = ""
    """Regular expression of the names of rows that are not trained; empty: every other row."""
    lr_scale: float = 1.0
    """Learning rate of every third row, as a multiple of the run's."""


class Freeze(LinearWrapper):
    keys = FreezeKeys

    def specs(self, options: Any, weight: ParamSpec) -> Sequence[ParamSpec]:
        return ()

    def extend(self, blueprint: Blueprint, options: Any) -> Blueprint:
        def is_frozen(index: int, spec: ParamSpec) -> bool:
            return bool(re.search(options.pattern, spec.name)) if options.pattern else index % 2 == 1

        rows = (
            replace(spec, trained=not is_frozen(index, spec), lr_scale=1.0 if index % 3 else options.lr_scale)
            for index, spec in enumerate(blueprint.specs)
        )
        return replace(blueprint, specs=tuple(rows))


WRAPPER = Freeze()


def frozen(model: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The model section with rows that are not trained."""
    return {**model, "linear": {"tests.support.frozen_linear:WRAPPER": options}}
