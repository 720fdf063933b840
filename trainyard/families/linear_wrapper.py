"""Linear wrappers: what one may put around the linear layers of a model, such as adapters. No torch in here.

A wrapper says which parameters it adds to a linear layer, and names the module that computes with them. The parameters
are rows of the blueprint like all others, so that initial values, layouts, updates, checkpoints and plans follow.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import ConfigDict, model_validator

from trainyard.core.errors import UserError
from trainyard.core.registry import Registry
from trainyard.core.section import Section, validate_at
from trainyard.families.blueprint import Blueprint, ParamSpec

# Without a key, as families: a checkpoint must not run code from the directory in which it lies.
LINEAR_WRAPPERS: Registry[Any] = Registry(
    "trainyard.families.linear_wrappers",
    "WRAPPER",
    "trainyard.linear_wrappers",
    "trainyard.families.linear_wrapper:LinearWrapper",
)
"""Objects of LinearWrapper by the keys of model.linear."""


class LinearWrapper:
    """Base class of what goes around linear layers. An object is found by name, and holds no state of a run."""

    keys: ClassVar[type[Section]]
    """Its keys in model.linear.NAME."""
    training_keys: ClassVar[frozenset[str]] = frozenset()
    """Those of its keys that change neither weights nor logits, so that a run may resume with another value."""
    module: str | Callable[..., Any]
    """Makes the module, of a subclass of `Linear`, from (linear, make, name, options): the layer to replace, the
    ModuleFactory, the layer's name (`layers.3.mlp.down`) and the values of `keys`. As text, `package.module:Class`, it
    is imported when a model is built."""

    def specs(self, options: Any, weight: ParamSpec) -> Sequence[ParamSpec]:
        """The parameters that it adds to the layer with this weight; none: the layer stays as it is. The name of each
        is that of the layer and one more part; fused parts are named after those of the weight."""
        raise NotImplementedError

    def check(self, options: Any, config: Any) -> None:
        """Raise ValueError if the options do not go with other sections of the Config."""

    def extend(self, blueprint: Blueprint, options: Any) -> Blueprint:
        """The blueprint with its parameters behind the layers that they belong to."""

        def rows() -> Iterator[ParamSpec]:
            for spec in blueprint.specs:
                yield spec
                if spec.is_linear:
                    yield from (replace(added, layers=spec.layers) for added in self.specs(options, spec))

        return replace(blueprint, specs=tuple(rows()))


class LinearSection(Section):
    """What is put around the linear layers of blocks, by name: each name has a section of its own."""

    model_config = ConfigDict(extra="allow")  # names of installed packages; their values are sections, too

    @model_validator(mode="before")
    @classmethod
    def _validate_options(cls, sections: Any) -> Any:
        if not isinstance(sections, dict):
            return sections
        found = {}
        for name, options in sections.items():
            try:
                keys = LINEAR_WRAPPERS.find(name).keys
            except UserError as error:
                raise ValueError(f"{name}: {error}") from None
            found[name] = validate_at((name,), keys, {} if options is None else options)
        return found

    @staticmethod
    def keys_of(name: str) -> type[Section] | None:
        """The class of the section `name`; None if no wrapper has this name."""
        try:
            keys: type[Section] = LINEAR_WRAPPERS.find(name).keys
        except UserError:
            return None
        return keys

    def wrappers(self) -> list[tuple[LinearWrapper, Section]]:
        """The wrappers and their options, from the innermost on."""
        return [(LINEAR_WRAPPERS.find(name), options) for name, options in (self.model_extra or {}).items()]
