"""What a run writes to its directory while it trains: metrics.jsonl and samples.jsonl (one JSON object per line), and
TensorBoard files."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from trainyard.core.atomic_files import atomic_write_text


class MetricsWriter:
    """Appends records to metrics.jsonl, samples.jsonl and TensorBoard."""

    def __init__(self, directory: Path, tensorboard: bool, resumed_step: int = 0) -> None:
        """A run that resumes at `resumed_step` drops what an earlier run wrote about later steps."""
        path, self.samples_path = directory / "metrics.jsonl", directory / "samples.jsonl"
        self.continues = path.is_file()
        """True if an earlier run has written to the directory."""
        _drop_later_steps(path, resumed_step)
        self.last_sample_step = _drop_later_steps(self.samples_path, resumed_step)
        self.file = path.open("a", encoding="utf-8", buffering=1)
        self.samples_file: TextIO | None = None
        self.purge_step = resumed_step + 1 if self.continues else None
        """The first step of which TensorBoard drops what was written before."""
        self.tensorboard_writer: Any = None
        self.tensorboard_directory = directory / "tensorboard" if tensorboard else None

    def write(self, record: dict[str, Any]) -> None:
        values = {name: _to_json(value) for name, value in record.items()}
        self.file.write(json.dumps(values) + "\n")
        self._open_tensorboard()
        if self.tensorboard_writer:
            for name, value in record.items():
                if isinstance(value, int | float) and name != "step":
                    tag = name if "/" in name else f"train/{name}"
                    self.tensorboard_writer.add_scalar(tag, value, record["step"])

    def write_samples(self, records: Sequence[dict[str, Any]]) -> None:
        """Append text samples of one step, one for each prompt."""
        if not self.samples_file:
            self.samples_file = self.samples_path.open("a", encoding="utf-8", buffering=1)
        self._open_tensorboard()
        for index, record in enumerate(records):
            self.samples_file.write(json.dumps(record) + "\n")
            if self.tensorboard_writer:
                # TensorBoard renders Markdown; an indented block shows the text as it is.
                text = (record["prompt"] + record["text"]).replace("\n", "\n    ")
                self.tensorboard_writer.add_text(f"samples/{index}", f"    {text}", record["step"])

    def _open_tensorboard(self) -> None:
        if self.tensorboard_directory and not self.tensorboard_writer:
            # The import takes two seconds, so it waits for the first record.
            from torch.utils.tensorboard.writer import SummaryWriter

            self.tensorboard_writer = SummaryWriter(str(self.tensorboard_directory), purge_step=self.purge_step)

    def close(self) -> None:
        self.file.close()
        if self.samples_file:
            self.samples_file.close()
        if self.tensorboard_writer:
            self.tensorboard_writer.close()


def _drop_later_steps(path: Path, last_step: int) -> float:
    """Keep only the lines of a file, if it exists, about steps up to `last_step`. Returns the step of the last line, 0
    if there is none."""
    if not path.is_file():
        return 0
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if _step_of_line(line) <= last_step]
    atomic_write_text(path, "".join(kept))
    return _step_of_line(kept[-1]) if kept else 0


def _step_of_line(line: str) -> float:
    """The step of a line; infinity if a kill cut the line off."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _to_json(value: Any) -> Any:
    """Non-finite numbers as text, since JSON has no NaN."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
