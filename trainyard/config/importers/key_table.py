"""What reading another system's configuration takes: a table of its keys, checked values, a report of what became of
each. Tables and not code, so that every key of theirs has one line that says what it is here."""

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from trainyard.core.errors import UserError


class KeyRule(NamedTuple):
    """One key (or flag) of theirs."""

    value_type: str
    """A name in KINDS."""
    action: Literal["maps", "ignored", "refused"]
    target: str
    """maps: our keys, separated by commas; else why."""
    allowed: tuple[object, ...] = ()
    """refused: values that may stay, for they ask for nothing; ignored: values that are not worth a warning."""


class KeyOutcome(NamedTuple):
    """One line of the report."""

    source_key: str
    value: object
    outcome: str


class ImportedConfig(NamedTuple):
    data: dict[str, Any]
    """Our configuration, not yet checked."""
    outcomes: list[KeyOutcome]
    warnings: list[str]
    missing_hint: str = ""
    """What would bring the keys that are still missing."""


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
"""Beyond this a number of theirs is a mistake, and a float no longer holds it."""


def maps_to(value_type: str, target: str) -> KeyRule:
    return KeyRule(value_type, "maps", target)


def ignore(value_type: str, why: str, *fine: object) -> KeyRule:
    """Without `fine`, the line in the report is all that is said."""
    return KeyRule(value_type, "ignored", why, fine)


def refuse(value_type: str, why: str, *fine: object) -> KeyRule:
    return KeyRule(value_type, "refused", why, (None, *fine))


def check_value(name: str, value: object, key: KeyRule) -> None:
    """That a value is of its kind, and nothing that our models or runs do not have."""
    types, words = VALUE_TYPES[key.value_type]
    wrong = not isinstance(value, types) or (isinstance(value, bool) and not {bool, object} & set(types))
    if key.action == "refused" and value not in key.allowed:
        raise UserError(f"{name}={format_value(value)}: {key.target}")
    large = isinstance(value, int | float) and not abs(value) < MAX_NUMBER
    if (wrong or large) and value is not None:
        raise UserError(
            f"{name}={format_value(value)}: not {words}{' of a sensible size' if large and not wrong else ''}"
        )


def set_key(data: dict[str, Any], dotted: str, value: object) -> None:
    section, _, name = dotted.partition(".")
    data.setdefault(section, {})[name] = value


def get_key(data: dict[str, Any], dotted: str) -> object:
    """A value by its dotted name; None where there is none."""
    section, _, name = dotted.partition(".")
    return data.get(section, {}).get(name)


def key_outcome(name: str, value: object, key: KeyRule, data: dict[str, Any]) -> KeyOutcome:
    """What became of a key, once all are mapped."""
    if key.action != "maps":
        return KeyOutcome(name, value, f"no effect: {key.target}" if key.action == "ignored" else "as here")
    if value is None:
        return KeyOutcome(name, value, "not set")
    found = [(ours, get_key(data, ours)) for ours in key.target.split(", ")]
    shown = [f"{ours} = {format_value(value)}" for ours, value in found if value is not None]
    return KeyOutcome(name, value, ", ".join(shown) or f"{key.target}: our default")


def ignored_warnings(name: str, value: object, key: KeyRule) -> list[str]:
    """The warning that an ignored value deserves, if any."""
    worth = key.action == "ignored" and key.allowed and value is not None and value not in key.allowed
    return [f"{name}={format_value(value)}: no effect here: {key.target}"] if worth else []


def nearest_name(name: str, known: Iterable[str]) -> str:
    """The known name that looks most like it; where only the last part of a dotted one is misspelt, that one."""
    names, leaf = list(known), name.rsplit(".", 1)[-1]
    leaves = {each.rsplit(".", 1)[-1]: each for each in reversed(names)}
    close = difflib.get_close_matches(name, names, 1, 0.8) or difflib.get_close_matches(leaf, leaves, 1, 0.7)
    if close:
        return leaves.get(close[0], close[0])
    return difflib.get_close_matches(name, names, 1, 0.0)[0]


def format_value(value: object) -> str:
    """A value in a line of ours: as YAML would write it, and not too long."""
    value = list(value) if isinstance(value, tuple) else value
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    text = " ".join(text.split())
    return text if len(text) <= 60 else text[:57] + "..."


def find_path(name: str | Path, *, relative_to: Path = Path()) -> Path | None:
    """The file or directory of that name, as named or in `within`; None where there is none."""
    try:
        path = Path(name).expanduser()
        return next((each for each in (path, relative_to / path) if each.exists()), None)
    except (OSError, ValueError, RuntimeError):  # names that no system takes, homes of nobody
        return None


def run_name(text: str) -> str:
    """A name as log.name takes it."""
    return "".join(each if each.isalnum() or each in "_.-" else "-" for each in text).strip("-") or "run"
