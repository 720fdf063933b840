"""The metrics that a run writes to its directory: metrics.jsonl (one JSON object per line) and TensorBoard files."""

import json
import math
from pathlib import Path
from typing import Any

from trainyard.core.atomic_files import atomic_write_text


class MetricsWriter:
    """Appends records to metrics.jsonl and TensorBoard."""

    def __init__(self, directory: Path, tensorboard: bool, resumed_step: int = 0) -> None:
        """A run that resumes at `resumed_step` drops what an earlier run wrote about later steps."""
        path = directory / "metrics.jsonl"
        continues = path.is_file()
        if continues:
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            atomic_write_text(path, "".join(line for line in lines if _step_of_line(line) <= resumed_step))
        self.file = path.open("a", encoding="utf-8", buffering=1)
        self.purge_step = resumed_step + 1 if continues else None
        """The first step of which TensorBoard drops what was written before."""
        self.tensorboard_writer: Any = None
        self.tensorboard_directory = directory / "tensorboard" if tensorboard else None

    def write(self, record: dict[str, Any]) -> None:
        values = {name: _to_json(value) for name, value in record.items()}
        self.file.write(json.dumps(values) + "\n")
        if self.tensorboard_directory and not self.tensorboard_writer:
            # The import takes two seconds, so it waits for the first record.
            from torch.utils.tensorboard.writer import SummaryWriter

            self.tensorboard_writer = SummaryWriter(str(self.tensorboard_directory), purge_step=self.purge_step)
        if self.tensorboard_writer:
            for name, value in record.items():
                if isinstance(value, int | float) and name != "step":
                    tag = name if "/" in name else f"train/{name}"
                    self.tensorboard_writer.add_scalar(tag, value, record["step"])

    def close(self) -> None:
        self.file.close()
        if self.tensorboard_writer:
            self.tensorboard_writer.close()


def _step_of_line(line: str) -> float:
    """The step of a line of metrics.jsonl; infinity if a kill cut the line off."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _to_json(value: Any) -> Any:
    """Non-finite numbers as text, since JSON has no NaN."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
