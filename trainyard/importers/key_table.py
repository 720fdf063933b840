"""Key tables for importing another system's configuration, and the report of what became of each key.

A table instead of code: each foreign key has one line that states its type and its meaning here. At the end, what the
importers have in common; errors name a key or flag as its own system spells it.
"""

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from trainyard.core.errors import UserError
from trainyard.core.yaml_io import format_value
from trainyard.devices.builtin.cuda import DEFAULT_GPU, GPUS_PER_NODE
from trainyard.devices.neuron.topology import INSTANCES

ConfigKeys = dict[str, Any]
"""Values by our dotted key."""


class KeyRule(NamedTuple):
    """The rule by which one foreign key (or flag) is imported."""

    value_type: str
    """A name in VALUE_TYPES."""
    action: Literal["copied", "maps", "ignored", "refused"]
    target: str
    """copied: our key; maps: our keys, separated by commas; otherwise the reason."""
    allowed: tuple[object, ...] = ()
    """refused: values that are accepted because they request nothing; ignored: values that need no warning."""
    default: object = None
    """copied: value if the key is absent."""


class KeyOutcome(NamedTuple):
    """One line of the import report."""

    source_key: str
    value: object
    outcome: str


class ImportedConfig(NamedTuple):
    """A foreign configuration after the import."""

    data: dict[str, Any]
    """Our configuration, not validated yet."""
    outcomes: list[KeyOutcome]
    warnings: list[str]
    missing_hint: str = ""
    """The usual source of missing keys, for the error about one."""


VALUE_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "a whole number"),
    "number": ((int, float), "a number"),
    "bool": ((bool,), "true or false"),
    "text": ((str,), "text"),
    "list": ((list,), "a list"),
    "mapping": ((dict,), "a mapping"),
    "digit": ((str, int), "'0' or '1'"),
    "any": ((object,), "anything"),
    "switch": ((bool,), "a flag without a value"),
    "words": ((list,), "words"),
}
MAX_NUMBER = 2**53
"""Larger numbers are mistakes; a float does not represent them exactly."""


def copies_to(value_type: str, target: str, default: object = None) -> KeyRule:
    """A key whose value is copied to ours. `default` is the value in the other system if the key is absent."""
    return KeyRule(value_type, "copied", target, default=default)


def maps_to(value_type: str, target: str) -> KeyRule:
    """A key that code converts to the listed trainyard keys."""
    return KeyRule(value_type, "maps", target)


def ignore(value_type: str, reason: str, *quiet_values: object) -> KeyRule:
    """A key without effect here. With `quiet_values`, every other value gets a warning."""
    return KeyRule(value_type, "ignored", reason, quiet_values)


def refuse(value_type: str, reason: str, *allowed: object) -> KeyRule:
    """A key that requests something we do not have, unless its value is in `allowed`."""
    return KeyRule(value_type, "refused", reason, (None, *allowed))


def split_names(rules: Mapping[str, KeyRule], prefix: str = "") -> dict[str, KeyRule]:
    """Return one entry per key, for a table in which several keys separated by spaces share a rule."""
    return {prefix + name: rule for names, rule in rules.items() for name in names.split()}


def check_values(
    values: dict[str, Any],
    rules: dict[str, KeyRule],
    warnings: list[str],
    dashes: str = "",
    refused: dict[str, str] | None = None,
) -> None:
    """Raise a UserError for a value of the wrong type or that is refused, and warn about ignored values. With
    `refused`, the reasons of all refused keys are added to it instead."""
    for key, value in values.items():
        rule, name = rules[key], f"{dashes}{key}={format_value(value)}"
        types, expected = VALUE_TYPES[rule.value_type]
        wrong_type = not isinstance(value, types) or (isinstance(value, bool) and not {bool, object} & set(types))
        if rule.action == "refused" and value not in rule.allowed:
            if refused is None:
                raise UserError(f"{name}: {rule.target}")
            refused[key] = f"{name}: {rule.target}"
            continue
        too_large = isinstance(value, int | float) and not abs(value) < MAX_NUMBER
        if (wrong_type or too_large) and value is not None:
            raise UserError(f"{name}: not {expected}{'' if wrong_type else ' of a sensible size'}")
        if rule.action == "ignored" and rule.allowed and value not in (None, *rule.allowed):
            warnings.append(f"{name}: no effect here: {rule.target}")


def check_choice(name: str, value: object, choices: Iterable[str], nearest: str = "") -> None:
    """Raise a UserError if a value is not one of the choices."""
    if value not in (known := list(choices)):
        hint = f"; nearest: {nearest}" if nearest else ""
        raise UserError(f"{name}={format_value(value)}: not one of {', '.join(known)}{hint}")


def set_keys(data: dict[str, Any], keys: ConfigKeys) -> None:
    """Set values in a configuration by dotted keys."""
    for dotted, value in keys.items():
        *sections, name = dotted.split(".")
        node = data
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value


def copied_keys(values: Mapping[str, Any], rules: Mapping[str, KeyRule]) -> ConfigKeys:
    """Return our keys that are copies of foreign keys or their defaults."""
    copied = {rule.target: values.get(name, rule.default) for name, rule in rules.items() if rule.action == "copied"}
    return {key: value for key, value in copied.items() if value is not None}


def key_outcome(name: str, value: object, rule: KeyRule, data: dict[str, Any]) -> KeyOutcome:
    """Report what became of a key, given the complete imported configuration."""
    if rule.action not in ("copied", "maps"):
        return KeyOutcome(name, value, f"no effect: {rule.target}" if rule.action == "ignored" else "same as here")
    if value is None:
        return KeyOutcome(name, value, "not set")
    found = [(dotted, _value_at(data, dotted)) for dotted in rule.target.split(", ")]
    shown = ", ".join(f"{dotted} = {format_value(new)}" for dotted, new in found if new is not None)
    return KeyOutcome(name, value, shown or f"{rule.target}: our default")


def _value_at(data: dict[str, Any], dotted: str) -> Any:
    node: Any = data
    for key in dotted.split("."):
        node = node.get(key) if isinstance(node, dict) else None
    return node


def nearest_name(name: str, known: Iterable[str]) -> str:
    """Return the known name most similar to `name`, or one whose last part is similar."""
    names, leaf = list(known), name.rsplit(".", 1)[-1]
    by_leaf = {known_name.rsplit(".", 1)[-1]: known_name for known_name in reversed(names)}
    close = difflib.get_close_matches(name, names, 1, 0.8) or difflib.get_close_matches(leaf, by_leaf, 1, 0.7)
    if close:
        return by_leaf.get(close[0], close[0])
    return difflib.get_close_matches(name, names, 1, 0.0)[0]


def hardware_of_ranks(ranks_per_node: int, nodes: int, gpus: bool) -> str | None:
    """Return the hardware of a cluster by the ranks on one node, such as `4 x trn1.32xlarge`; None if there is none.

    `gpus`: up to 8 ranks are GPUs, as for Megatron-LM; otherwise all ranks are Trainium's.
    """
    if gpus and 0 < ranks_per_node <= GPUS_PER_NODE:
        return f"{ranks_per_node * nodes} x {DEFAULT_GPU}"
    instance = INSTANCES.get(ranks_per_node)
    return f"{nodes} x {instance}" if instance else None


def find_path(name: str | Path, *, relative_to: Path = Path()) -> Path | None:
    """Return the existing file or directory `name`, as given or relative to a directory; None if there is none."""
    try:
        path = Path(name).expanduser()
        return next((candidate for candidate in (path, relative_to / path) if candidate.exists()), None)
    except (OSError, ValueError, RuntimeError):  # invalid file names, unknown home directories
        return None


def run_name(text: str) -> str:
    """Replace characters that log.name does not accept."""
    return "".join(char if char.isalnum() or char in "_.-" else "-" for char in text).strip("-") or "run"


def parse_blend(value: object, key: str) -> tuple[list[str], list[float]]:
    """Split `[0.3, a, 0.7, b]` or `[a]` into paths and weights."""
    if not isinstance(value, list) or not value:
        raise UserError(f"{key}={format_value(value)}: not a path or weights and paths in turn; nearest: [1.0, PATH]")
    if all(isinstance(item, str) and not positive_number(item) for item in value):
        return [str(path) for path in value], []
    weights, paths = [positive_number(item) for item in value[::2]], value[1::2]
    if len(value) % 2 or not all(weights) or not all(isinstance(path, str) for path in paths):
        hint = "nearest: [0.5, A, 0.5, B]"
        raise UserError(f"{key}={format_value(value)}: not weights above 0 and paths in turn; {hint}")
    return [str(path) for path in paths], [weight for weight in weights if weight]


def positive_number(value: object) -> float | None:
    """Return a number above 0, which may be written as text; None for anything else."""
    try:
        number = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else 0.0
    except (ValueError, OverflowError):
        return None
    return number if 0 < number < MAX_NUMBER else None


def check_family(family: str, chosen_by: str, found: Mapping[str, object], required: Mapping[str, object]) -> None:
    """Raise a UserError if a key has another value than the model family requires."""
    for name, value in found.items():
        if value != required[name]:
            raise UserError(
                f"{name}={format_value(value)}: not supported {chosen_by} (family {family}); "
                f"nearest: {format_value(required[name])}"
            )


def token_data(
    key: str, blend: object, order: str, cyclic: bool, split: str | None, resets: Mapping[str, bool]
) -> ConfigKeys:
    """Return our keys for .bin and .idx files.

    `blend` is the value of `key`; `order` the sample order of that system (data.order); `resets` says whether positions
    and masks restart in each document.
    """
    if len(set(resets.values())) > 1:
        raise UserError(f"{' and '.join(resets)}: supported only together (data.document_mask); nearest: both")
    paths, weights = parse_blend(blend, key)
    return {
        "data.source": "tokens",
        "data.paths": paths,
        "data.weights": weights,
        "data.order": "shuffled" if cyclic or (len(paths) > 1 and not weights) else order,
        "data.split": split,
        "data.document_mask": all(resets.values()),
    }


def gpt2_tokenizer(vocab_file: str | None, merges_file: str | None) -> ConfigKeys:
    """Return our keys for the GPT-2 tokenizer; none unless both files are given."""
    files = {"data.vocab_file": vocab_file, "data.merges_file": merges_file}
    return {"data.tokenizer": "gpt2", **files} if vocab_file and merges_file else {}
