"""README.md of a model on the Hub: what it is, how it was trained, what was measured.

Paths are reduced to their last component, and the license is left to the owner.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import yaml

from trainyard import __version__
from trainyard.config.schema import Config
from trainyard.core.quantities import counted
from trainyard.dashboard.run_files import RunDirectoryReader
from trainyard.dashboard.run_summary import RunRow, read_summary, run_state
from trainyard.families import ModelConfig, family_of
from trainyard.preflight.plan.compare_measured import ComparisonRow
from trainyard.remote.credentials import redact
from trainyard.remote.location import find_model_location

MARKER = "<!-- written by trainyard push; remove this line to keep your edits -->"
"""A card without it is somebody's own, and is not replaced."""
PATH_KEYS = {"directory", "paths", "vocab_file", "merges_file", "memory_directory", "init_from", "resume", "tokenizer"}


@dataclass(frozen=True)
class CardFacts:
    """What a card tells."""

    name: str
    model: ModelConfig
    weights: int
    """Number of weights."""
    config: Config | None = None
    """Of the training run; None for weights that came from elsewhere."""
    step: int | None = None
    samples: int | None = None
    """Samples that were trained on."""
    run: RunRow | None = None
    plan: list[ComparisonRow] = field(default_factory=list)

    @property
    def tokens(self) -> int | None:
        """None if the lengths of samples differ."""
        if not self.samples or not self.config or self.config.data.buckets:
            return None
        return self.samples * self.config.data.seq_len


def read_run(directory: Path) -> RunRow | None:
    """What the files of a run say; None if there is no run in the directory."""
    if not (directory / "metrics.jsonl").is_file():
        return None
    path = directory.resolve()
    reader = RunDirectoryReader(path.parent, path.name)
    return read_summary(reader, run_state(reader))


def make_card(facts: CardFacts) -> str:
    sections = [_summary(facts), _training(facts), _data(facts), _evaluation(facts), _plan(facts), _config(facts)]
    return f"---\n{_metadata(facts)}---\n\n{MARKER}\n\n" + "\n\n".join(filter(None, sections)) + "\n"


def _metadata(facts: CardFacts) -> str:
    causal = family_of(facts.model).is_causal
    task = "text-generation" if causal else "fill-mask"
    data: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": task}
    data["tags"] = ["trainyard", facts.model.family]
    init_from = facts.config.checkpoint.init_from if facts.config else None
    if init_from and (base := find_model_location(init_from)):
        data["base_model"] = base.repo
    if facts.run and facts.run.evaluation is not None:
        metrics = [{"type": "loss", "name": "Validation loss", "value": round(facts.run.evaluation, 5)}]
        dataset = {"name": "held-out part of the training data", "type": "custom"}
        result = {"task": {"type": task}, "dataset": dataset, "metrics": metrics}
        data["model-index"] = [{"name": facts.name, "results": [result]}]
    text: str = yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
    return "# license: add the license that you choose\n" + text


def _summary(facts: CardFacts) -> str:
    lines = [f"# {facts.name}", ""]
    about = f"A {facts.model.family} model with {facts.weights:,} weights"
    if facts.step:
        about += f", trained for {counted(facts.step, 'step', ',')}"
    if facts.tokens:
        about += f" on {counted(facts.tokens, 'token', ',')}"
    return "\n".join([*lines, f"{about}. Written by trainyard {__version__}."])


def _training(facts: CardFacts) -> str:
    config, run = facts.config, facts.run
    if not config:
        return ""
    rows = {
        "steps": f"{facts.step or 0:,} of {config.train.steps:,}",
        "tokens": f"{facts.tokens:,}" if facts.tokens else "",
        "global batch": f"{config.train.global_batch:,} x {config.data.seq_len:,} tokens",
        "optimizer": f"{config.optimizer.kind}, lr {config.optimizer.lr:g}, schedule {config.schedule.kind}",
        "precision": config.precision.kind,
        "layout": " ".join(f"{k}={getattr(config.layout, k)}" for k in ("tp", "pp", "cp", "ep", "zero")),
        "seed": str(config.train.seed),
        "started from": _base_name(config.checkpoint.init_from) if config.checkpoint.init_from else "",
        "device": f"{run.ranks or 1} x {run.device}" if run and run.device else "",
        "final loss": f"{run.loss:.4f}" if run and run.loss is not None else "",
        "tokens per second": f"{run.tokens_per_second:,.0f}" if run and run.tokens_per_second else "",
    }
    return "## Training\n\n" + _table(("", ""), [(name, value) for name, value in rows.items() if value])


def _data(facts: CardFacts) -> str:
    if not facts.config:
        return ""
    data = facts.config.data
    names = ", ".join(map(_base_name, data.paths)) or "a small built-in text"
    weights = f" with weights {', '.join(f'{weight:g}' for weight in data.weights)}" if data.weights else ""
    tokenizer = (
        f"Tokenizer: {_base_name(data.tokenizer)}."
        if data.has_flag("makes_tokens") or data.tokenizer != "bytes"
        else ""
    )
    return f"## Data\n\n`data.source={data.source}`: {names}{weights}. {tokenizer}".rstrip()


def _evaluation(facts: CardFacts) -> str:
    if not facts.run or facts.run.evaluation is None:
        return ""
    return "## Evaluation\n\n" + _table(("metric", "value"), [("validation loss", f"{facts.run.evaluation:.4f}")])


def _plan(facts: CardFacts) -> str:
    rows = [(row.name, _number(row.predicted), _number(row.measured), f"{row.ratio:.2f}") for row in facts.plan]
    return "## Plan and measurement\n\n" + _table(("", "planned", "measured", "ratio"), rows) if rows else ""


def _config(facts: CardFacts) -> str:
    if not facts.config:
        return ""
    data = _without_paths(facts.config.model_dump(mode="json", exclude_defaults=True))
    data["model"] = {"family": facts.model.family, **data.get("model", {})}
    text = redact(yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120))
    return f"## Configuration\n\n```yaml\n{text}```"


def _without_paths(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _without_paths(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [_without_paths(inner, key) for inner in value]
    return _base_name(value) if isinstance(value, str) and key in PATH_KEYS else value


def _base_name(path: str) -> str:
    """The last component of a path; the name of a model on the Hub and URLs without credentials stay."""
    if "://" in path or find_model_location(path):
        return redact(path)
    return PurePath(path).name or path


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
