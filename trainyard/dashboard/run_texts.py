"""Texts of a run: what it was trained on, what it wrote as text samples, and what it was rewarded for."""

from itertools import groupby
from typing import Any

from trainyard.dashboard.run_files import RunDirectoryReader
from trainyard.metrics.json_lines import parse_lines, to_count, to_finite

TEXTS_BYTES = 1 << 18
INPUTS_BYTES = 1 << 20
ROLLOUTS_BYTES = 1 << 20
"""The end of rollouts.jsonl that is read."""
MAX_PARTS = 4096
MAX_TEXTS = 60
MAX_TEXT_CHARS = 4000
MAX_GROUPS = 20
MAX_COMPLETIONS = 64
MAX_REWARDS = 16
PAIR_TEXTS = ("prompt", "chosen", "rejected")


def read_texts(run: RunDirectoryReader) -> list[dict[str, Any]]:
    """Text samples, latest first."""
    found = []
    for record in reversed(parse_lines(run.read_tail(TEXTS_BYTES, "samples.jsonl").rpartition(b"\n")[0])):
        step, text = to_count(record.get("step")), record.get("text")
        if step is not None and isinstance(text, str):
            found.append({"step": step, "prompt": _text(record.get("prompt")), "text": _text(text)})
    return found[:MAX_TEXTS]


def read_training_texts(run: RunDirectoryReader) -> list[dict[str, Any]]:
    """The samples of inputs.jsonl: their texts in parts, each with whether it is trained. Of preferences, each is a
    pair with three such texts."""
    found = []
    for record in parse_lines(run.read_head(INPUTS_BYTES, "inputs.jsonl").rpartition(b"\n")[0])[:MAX_TEXTS]:
        is_pair = "chosen" in record
        numbers = {name: to_count(record.get(name)) for name in ("sample", *(("pair", "pairs") if is_pair else ()))}
        texts = {name: _parts(record.get(name)) for name in PAIR_TEXTS} if is_pair else _parts(record)
        if texts is None or None in (*texts.values(), *numbers.values()) or not isinstance(record.get("source"), str):
            continue
        found.append({**numbers, "source": _text(record["source"]), **texts})
    return found


def _parts(record: Any) -> dict[str, Any] | None:
    """A text in parts, with the number of its tokens; None if `record` is no such text."""
    if not isinstance(record, dict) or not isinstance(record.get("parts"), list):
        return None
    numbers = {name: to_count(record.get(name)) for name in ("tokens", "trained", "shown")}
    pairs = [part for part in record["parts"][:MAX_PARTS] if isinstance(part, list) and len(part) == 2]
    parts = [[text, trained is True] for text, trained in pairs if isinstance(text, str)]
    return None if None in numbers.values() else {**numbers, "parts": parts}


def read_rollouts(run: RunDirectoryReader) -> list[dict[str, Any]]:
    """Groups of completions of one prompt: the latest step first, and in a group the best reward."""
    groups: dict[tuple[int, int], list[dict[str, Any]]] = {}
    records = parse_lines(run.read_tail(ROLLOUTS_BYTES, "rollouts.jsonl").rpartition(b"\n")[0])
    for key, members in groupby(records, lambda record: (to_count(record.get("step")), to_count(record.get("group")))):
        if key[0] is not None and key[1] is not None:
            groups[key[0], key[1]] = [record for record in members if isinstance(record.get("completion"), str)]
    state = run.state("rollouts.jsonl")
    if state and state.size > ROLLOUTS_BYTES and len(groups) > 1:
        del groups[next(iter(groups))]  # its first completions may be missing
    found = []
    for (step, number), group in sorted(groups.items(), key=lambda item: (-item[0][0], item[0][1]))[:MAX_GROUPS]:
        completions = sorted(map(_completion, group), key=lambda each: -(each["reward"] or 0.0))[:MAX_COMPLETIONS]
        if completions:
            found.append({"step": step, "group": number, "prompt": _text(group[0].get("prompt")), "texts": completions})
    return found


def _completion(record: dict[str, Any]) -> dict[str, Any]:
    rewards = record.get("rewards")
    named = list(rewards.items())[:MAX_REWARDS] if isinstance(rewards, dict) else []
    return {
        "text": _text(record["completion"]),
        **{name: to_finite(record.get(name)) for name in ("reward", "advantage")},
        "rewards": {name[:80]: to_finite(value) for name, value in named},
        "tokens": to_count(record.get("tokens")),
        "is_cut": record.get("finished") is False,
    }


def _text(value: Any) -> str:
    return value[:MAX_TEXT_CHARS] if isinstance(value, str) else ""
