"""Suggests the key that an unknown name stands for: a misspelled one, one of another section, or one of another system.

A wrong suggestion is worse than none, so nothing is suggested below a similarity.
"""

import difflib
from collections.abc import Collection, Iterator
from functools import cache
from typing import NamedTuple

from trainyard.config.foreign_keys import COMMON, HF_TRAINER, OLMO_CORE, TORCHTITAN
from trainyard.config.schema_docs import schema_keys, without_tags
from trainyard.families import all_families
from trainyard.importers.megatron.keys import MEGATRON_FLAGS
from trainyard.importers.nxdt.keys import NXDT_KEYS

KEYS_COMMAND = "see trainyard config --keys"
SIMILAR_KEY = 0.6
"""Similarity of names of one section."""
SIMILAR_NAME = 0.8
"""Similarity to any other name."""
MAX_SAME_NAME = 4
"""A name that more sections have says too little."""


class ForeignKey(NamedTuple):
    """What a name of another system is here."""

    keys: tuple[str, ...]
    """Keys, perhaps with a value, or commands; may be empty."""
    note: str

    def describe(self, value: str) -> str:
        if not self.keys:
            return self.note
        takes_value = len(self.keys) == 1 and not {"=", " "} & set(self.keys[0])
        keys = f"{self.keys[0]}={value}" if takes_value and value and not self.note else " and ".join(self.keys)
        return f"nearest: {keys}" + (f" ({self.note})" if self.note else "")


def suggest_key(name: str, siblings: Collection[str] = (), value: str = "") -> str:
    """The end of an error message about the unknown key `name`, such as `nearest: optimizer.lr`. `siblings` are the
    keys of its section, if the section exists; `value` is added to the key."""
    section, _, leaf = name.rpartition(".")
    own_keys = [f"{section}.{sibling}" for sibling in siblings] if section else list(siblings)
    every_key = _own_keys()
    assigned = f"={value}" if value else ""
    if name in every_key:
        return f"nearest: {name}{assigned}"
    by_leaf = _by_last_part().get(_normalized(leaf))
    if foreign := _foreign_keys().get(_normalized(name)):
        return foreign.describe(value)
    if by_leaf and set(by_leaf.keys) & set(own_keys):
        return by_leaf.describe(value)
    if close := difflib.get_close_matches(leaf.lower(), siblings, 1, SIMILAR_KEY):
        return f"nearest: {section}{'.' if section else ''}{close[0]}{assigned}"
    if by_leaf:
        return by_leaf.describe(value)
    same_name = sorted(key for key in every_key if key.rpartition(".")[2] == leaf.lower())
    if 0 < len(same_name) <= MAX_SAME_NAME:
        return f"nearest: {' or '.join(key + assigned for key in same_name)}"
    if close := difflib.get_close_matches(name.lower(), every_key, 1, SIMILAR_NAME):
        return f"nearest: {close[0]}{assigned}"
    if close := difflib.get_close_matches(_normalized(leaf), _by_last_part(), 1, SIMILAR_NAME):
        return _by_last_part()[close[0]].describe(value)
    return KEYS_COMMAND


def _normalized(name: str) -> str:
    return name.replace("-", "_").lower()


@cache
def _own_keys() -> frozenset[str]:
    return frozenset(without_tags(doc.name) for doc in schema_keys())


@cache
def _foreign_keys() -> dict[str, ForeignKey]:
    found: dict[str, ForeignKey] = {}
    for name, key in (*_rows_of_tables(), *_rules_of_importers(), *_names_of_families()):
        found.setdefault(_normalized(name), key)
    return found


@cache
def _by_last_part() -> dict[str, ForeignKey]:
    """The same by the last part of a dotted name, as far as that has one meaning, and none here."""
    common = {name for names in COMMON for name in names.split()}
    own = {key.rpartition(".")[2] for key in _own_keys()}
    found: dict[str, ForeignKey] = {}
    ambiguous: set[str] = set()
    for name, key in _foreign_keys().items():
        leaf = name.rpartition(".")[2]
        if leaf in own and leaf != name:
            continue
        if found.setdefault(leaf, key).keys != key.keys and leaf not in common:
            ambiguous.add(leaf)
    return {leaf: key for leaf, key in found.items() if leaf not in ambiguous}


def _rows_of_tables() -> Iterator[tuple[str, ForeignKey]]:
    for rows in (COMMON, *HF_TRAINER.values(), *TORCHTITAN.values(), OLMO_CORE):
        for names, (keys, note) in rows.items():
            for name in names.split():
                yield name, ForeignKey(tuple(filter(None, keys.split(", "))), note)


def _rules_of_importers() -> Iterator[tuple[str, ForeignKey]]:
    for name, rule in (*NXDT_KEYS.items(), *MEGATRON_FLAGS.items()):
        if rule.action in ("copied", "maps"):
            yield name, ForeignKey(tuple(rule.target.split(", ")), "")
        else:  # the rest of a reason names keys of the other system
            yield name, ForeignKey((), rule.target.partition("; nearest")[0])


def _names_of_families() -> Iterator[tuple[str, ForeignKey]]:
    for family in all_families().values():
        for key, (hf_key, _) in family.hf.keys.items():
            if key != hf_key:
                yield hf_key, ForeignKey((f"model.{key}",), "")
