"""What a run writes while it goes: metrics.jsonl, one JSON object a line, and TensorBoard files."""

import json
import math
from pathlib import Path
from typing import Any

from trainyard.errors import UserError


def new_directory(parent: Path, name: str) -> Path:
    """A fresh directory for a run: NAME, or NAME-2, NAME-3, ... where that exists. Nothing of an old run is touched."""
    number = 1
    while True:
        directory = parent / (name if number == 1 else f"{name}-{number}")
        try:
            directory.mkdir(parents=True)
        except FileExistsError:
            number += 1
        except OSError as error:
            raise UserError(f"log.directory={parent}: cannot be written: {error.strerror}") from None
        else:
            return directory


class Writers:
    def __init__(self, directory: Path, tensorboard: bool) -> None:
        self.file = (directory / "metrics.jsonl").open("a", encoding="utf-8", buffering=1)
        self.board: Any = None
        self.wanted = directory / "tensorboard" if tensorboard else None

    def write(self, record: dict[str, Any]) -> None:
        plain = {name: _json(value) for name, value in record.items()}
        self.file.write(json.dumps(plain) + "\n")
        if self.wanted and not self.board:
            # Takes two seconds to import: not before there is something to write.
            from torch.utils.tensorboard.writer import SummaryWriter

            self.board = SummaryWriter(str(self.wanted))
        if self.board:
            for name, value in record.items():
                if isinstance(value, int | float) and name != "step":
                    tag = name if "/" in name else f"train/{name}"
                    self.board.add_scalar(tag, value, record["step"])

    def close(self) -> None:
        self.file.close()
        if self.board:
            self.board.close()


def _json(value: Any) -> Any:
    """JSON has no NaN: a number that is not finite is written as text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
