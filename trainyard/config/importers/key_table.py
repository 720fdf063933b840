"""What reading another system's configuration takes: a table of its keys, checked values, a report of what became of
each. Tables and not code, so that every key of theirs has one line that says what it is here."""

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from trainyard.core.errors import UserError


class Key(NamedTuple):
    """One key (or flag) of theirs."""

    takes: str
    """A name in KINDS."""
    does: Literal["maps", "ignored", "refused"]
    says: str
    """maps: our keys, separated by commas; else why."""
    fine: tuple[object, ...] = ()
    """refused: values that may stay, for they ask for nothing; ignored: values that are not worth a warning."""


class Row(NamedTuple):
    """One line of the report."""

    theirs: str
    value: object
    ours: str


class Mapped(NamedTuple):
    data: dict[str, Any]
    """Our configuration, not yet checked."""
    rows: list[Row]
    warnings: list[str]
    hint: str = ""
    """What would bring the keys that are still missing."""


KINDS: dict[str, tuple[tuple[type, ...], str]] = {
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

LARGEST = 2**53
"""Beyond this a number of theirs is a mistake, and a float no longer holds it."""


def to(takes: str, ours: str) -> Key:
    return Key(takes, "maps", ours)


def ignored(takes: str, why: str, *fine: object) -> Key:
    """Without `fine`, the line in the report is all that is said."""
    return Key(takes, "ignored", why, fine)


def refused(takes: str, why: str, *fine: object) -> Key:
    return Key(takes, "refused", why, (None, *fine))


def check(name: str, value: object, key: Key) -> None:
    """That a value is of its kind, and nothing that our models or runs do not have."""
    types, words = KINDS[key.takes]
    wrong = not isinstance(value, types) or (isinstance(value, bool) and not {bool, object} & set(types))
    if key.does == "refused" and value not in key.fine:
        raise UserError(f"{name}={plain(value)}: {key.says}")
    large = isinstance(value, int | float) and not abs(value) < LARGEST
    if (wrong or large) and value is not None:
        raise UserError(f"{name}={plain(value)}: not {words}{' of a sensible size' if large and not wrong else ''}")


def put(data: dict[str, Any], dotted: str, value: object) -> None:
    section, _, name = dotted.partition(".")
    data.setdefault(section, {})[name] = value


def look(data: dict[str, Any], dotted: str) -> object:
    """A value by its dotted name; None where there is none."""
    section, _, name = dotted.partition(".")
    return data.get(section, {}).get(name)


def row(name: str, value: object, key: Key, data: dict[str, Any]) -> Row:
    """What became of a key, once all are mapped."""
    if key.does != "maps":
        return Row(name, value, f"no effect: {key.says}" if key.does == "ignored" else "as here")
    if value is None:
        return Row(name, value, "not set")
    found = [(ours, look(data, ours)) for ours in key.says.split(", ")]
    shown = [f"{ours} = {plain(value)}" for ours, value in found if value is not None]
    return Row(name, value, ", ".join(shown) or f"{key.says}: our default")


def warned(name: str, value: object, key: Key) -> list[str]:
    """The warning that an ignored value deserves, if any."""
    worth = key.does == "ignored" and key.fine and value is not None and value not in key.fine
    return [f"{name}={plain(value)}: no effect here: {key.says}"] if worth else []


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that looks most like it; where only the last part of a dotted one is misspelt, that one."""
    names, leaf = list(known), name.rsplit(".", 1)[-1]
    leaves = {each.rsplit(".", 1)[-1]: each for each in reversed(names)}
    close = difflib.get_close_matches(name, names, 1, 0.8) or difflib.get_close_matches(leaf, leaves, 1, 0.7)
    if close:
        return leaves.get(close[0], close[0])
    return difflib.get_close_matches(name, names, 1, 0.0)[0]


def plain(value: object) -> str:
    """A value in a line of ours: as YAML would write it, and not too long."""
    value = list(value) if isinstance(value, tuple) else value
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    text = " ".join(text.split())
    return text if len(text) <= 60 else text[:57] + "..."


def there(named: str | Path, *, within: Path = Path()) -> Path | None:
    """The file or directory of that name, as named or in `within`; None where there is none."""
    try:
        path = Path(named).expanduser()
        return next((each for each in (path, within / path) if each.exists()), None)
    except (OSError, ValueError, RuntimeError):  # names that no system takes, homes of nobody
        return None


def run_name(text: str) -> str:
    """A name as log.name takes it."""
    return "".join(each if each.isalnum() or each in "_.-" else "-" for each in text).strip("-") or "run"
