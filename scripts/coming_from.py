"""Write the key tables of docs/coming-from from those of the importers and of the errors about unknown keys.

    python scripts/coming_from.py

A table replaces what is between `<!-- generated: keys -->` and `<!-- /generated -->` in a page; the rest is written by
hand. tests/test_docs.py fails if a table is stale.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from trainyard.config.foreign_keys import AXOLOTL, HF_TRAINER, TORCHTITAN, TRL, Rows
from trainyard.core.yaml_io import format_value
from trainyard.importers.key_table import KeyRule
from trainyard.importers.megatron.keys import MEGATRON_FLAGS
from trainyard.importers.nxdt.keys import NXDT_KEYS
from trainyard.importers.nxdt.sections import PRECISION_KINDS, RECOMPUTE_MODULES, SCHEDULES

DOCS = Path(__file__).parent.parent / "docs" / "coming-from"
GENERATED = re.compile(r"(<!-- generated: keys -->\n).*?(<!-- /generated -->)", re.DOTALL)
NXDT_VALUES = {
    "precision.type": ("precision.kind", PRECISION_KINDS),
    "model.optim.sched.name": ("schedule.kind", SCHEDULES),
    "model.activations_checkpoint_recompute": ("recompute.modules", RECOMPUTE_MODULES),
}
"""Values that have other names here: our key and our value by theirs."""


def nxdt_tables() -> Iterator[str]:
    yield from key_tables(NXDT_KEYS, "")
    yield from ("### Values with other names", "", "| NxDT | trainyard |", "|---|---|")
    for key, (ours, values) in NXDT_VALUES.items():
        yield from (f"| `{key}: {theirs}` | `{ours}: {value}` |" for theirs, value in values.items())


def key_tables(rules: Mapping[str, KeyRule], dashes: str) -> Iterator[str]:
    """Tables of the keys that map, by section of trainyard; of those without effect; and of those that are refused."""
    by_section: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, rule in rules.items():
        if rule.action in ("copied", "maps"):
            default = "" if rule.default is None else f" (absent: {format_value(rule.default)})"
            by_section[rule.target.partition(".")[0]][rule.target].append(f"`{dashes}{name}`{default}")
    for section, targets in by_section.items():
        yield from (f"### To `{section}`", "", "| theirs | trainyard |", "|---|---|")
        for target, names in targets.items():
            yield f"| {', '.join(names)} | {', '.join(f'`{key}`' for key in target.split(', '))} |"
        yield ""
    yield from ("### Keys without effect", "", "| reason | theirs |", "|---|---|")
    yield from _by_reason(rules, "ignored", dashes)
    yield from ("", "### Refused keys", "", "Each is an error in one line, unless it has a value in parentheses.", "")
    yield from ("| reason, and what to do instead | theirs |", "|---|---|")
    yield from _by_reason(rules, "refused", dashes)
    yield ""


def _by_reason(rules: Mapping[str, KeyRule], action: str, dashes: str) -> Iterator[str]:
    names: dict[str, list[str]] = defaultdict(list)
    for name, rule in rules.items():
        if rule.action == action:
            allowed = [format_value(value) for value in rule.allowed if value is not None]
            shown = f" ({', '.join(dict.fromkeys(allowed))})" if allowed and action == "refused" else ""
            names[rule.target.replace("|", "\\|")].append(f"`{dashes}{name}`{shown}")
    yield from (f"| {reason} | {', '.join(keys)} |" for reason, keys in names.items())


def row_tables(tables: Mapping[str, Rows], system: str, dashes: str) -> Iterator[str]:
    """One table for each subject, with notes."""
    for title, rows in tables.items():
        yield from (f"### {title}", "", f"| {system} | trainyard | |", "|---|---|---|")
        for names, (ours, note) in rows.items():
            theirs = ", ".join(f"`{dashes}{name}`" for name in names.split())
            yield f"| {theirs} | {', '.join(f'`{key}`' for key in ours.split(', ')) if ours else 'none'} | {note} |"
        yield ""


TABLES = {
    "nxd-training.md": lambda: nxdt_tables(),
    "megatron-lm.md": lambda: key_tables(MEGATRON_FLAGS, "--"),
    "hf-trainer.md": lambda: row_tables(HF_TRAINER, "TrainingArguments", ""),
    "trl.md": lambda: row_tables(TRL, "TRL and PEFT", ""),
    "axolotl.md": lambda: row_tables(AXOLOTL, "Axolotl", ""),
    "torchtitan.md": lambda: row_tables(TORCHTITAN, "torchtitan", "--"),
}


def with_tables(name: str) -> str:
    """A page with its tables as they should be."""
    tables = "\n".join(TABLES[name]()).rstrip("\n")
    return GENERATED.sub(lambda match: f"{match[1]}\n{tables}\n\n{match[2]}", (DOCS / name).read_text())


if __name__ == "__main__":
    for page in TABLES:
        (DOCS / page).write_text(with_tables(page))
