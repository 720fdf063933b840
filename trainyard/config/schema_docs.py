"""Documentation of every key, derived from the schema: for `trainyard config --keys`, docs/reference and errors."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from trainyard.config.schema import Config
from trainyard.core.section import NameOrPath, Section
from trainyard.core.yaml_io import format_value
from trainyard.families import all_families
from trainyard.families.linear_wrapper import LINEAR_WRAPPERS
from trainyard.families.rope import ROPE_SCALING_CLASSES

TYPE_NAMES: dict[Any, str] = {int: "whole number", float: "number", bool: "true or false", str: "text", dict: "mapping"}
BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


@cache
def tagged_unions() -> dict[str, dict[str, type[Section]]]:
    """Sections with several classes, by the value of their tag (`family` or `kind`)."""
    models: dict[str, type[Section]] = {name: family.config_class for name, family in all_families().items()}
    return {"model": models, "model.rope_scaling": ROPE_SCALING_CLASSES}


@dataclass(frozen=True)
class KeyDoc:
    """Documentation of one key."""

    name: str
    """Dotted name; `model[llama].tie_embeddings` if the key belongs to one class of a tagged union."""
    allowed: str
    default: str
    meaning: str


def schema_keys(section: type[Section] = Config, prefix: str = "") -> Iterator[KeyDoc]:
    """Yield the documentation of every key of the schema."""
    docs = field_docstrings(section)
    for name, field in section.model_fields.items():
        dotted = prefix + name
        classes = tagged_unions().get(without_tags(dotted))
        if classes:
            for tag, tagged_section in classes.items():
                yield from schema_keys(tagged_section, f"{dotted}[{tag}].")
            if dotted == "model":  # what is put around its linear layers has sections of their own in a file
                for wrapper in LINEAR_WRAPPERS.built_in:
                    yield from schema_keys(LINEAR_WRAPPERS.find(wrapper).keys, f"{wrapper}.")
        elif isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from schema_keys(field.annotation, f"{dotted}.")
            if field.annotation.model_config.get("extra") == "allow":  # its keys are those of installed packages
                yield KeyDoc(dotted, TYPE_NAMES[dict], "{}", docs.get(name, ""))
        else:
            default = "required" if field.is_required() else format_value(field.get_default(call_default_factory=True))
            yield KeyDoc(dotted, allowed_values(field), default, docs.get(name, ""))


@cache
def field_docstrings(section: type[Section]) -> dict[str, str]:
    """Return the strings below the fields of a section, each on one line.

    Read from the source when needed: pydantic's use_attribute_docstrings parses all classes at every start.
    """
    docs: dict[str, str] = {}
    for cls in reversed(section.__mro__):
        if not issubclass(cls, Section) or cls is Section:
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        assert isinstance(tree, ast.ClassDef)
        for field, doc in pairwise(tree.body):
            match field, doc:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(ast.Constant(str(text))):
                    docs[name] = " ".join(text.split())
    return docs


def without_tags(dotted: str) -> str:
    """Return `model.heads` for `model[llama].heads`."""
    return re.sub(r"\[\w+\]", "", dotted)


def allowed_values(field: FieldInfo) -> str:
    """Describe the values of a field: its choices, or its type and range."""
    if choices := next((item for item in field.metadata if isinstance(item, NameOrPath)), None):
        return ", ".join((*choices.names, choices.path))
    names: list[str] = []
    bounds: list[str] = []
    queue: list[Any] = [field.annotation, *field.metadata]
    while queue:
        item = queue.pop(0)
        if get_origin(item) is Literal:
            names += [format_value(choice) for choice in get_args(item)]
        elif get_origin(item) is dict:
            names.append(TYPE_NAMES[dict])
        elif get_args(item):
            queue += get_args(item)
        elif isinstance(item, FieldInfo):
            queue += item.metadata
        elif item in TYPE_NAMES:
            names.append(TYPE_NAMES[item])
        else:
            bounds += [f"{sign} {getattr(item, bound)}" for bound, sign in BOUNDS.items() if hasattr(item, bound)]
    return ", ".join(dict.fromkeys(names + bounds)) or "null"
