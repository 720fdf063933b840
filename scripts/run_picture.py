"""Draw docs/run.svg, the picture of a run in the README: the console of a real `trainyard train`.

    python scripts/run_picture.py

Trains the default recipe for STEPS steps on this machine in a temporary directory. The numbers are those of that run.
"""

import io
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.control import Control

from trainyard.cli.commands.train import print_run_header, summary_lines
from trainyard.cli.train_console import TrainConsole, log_to_console
from trainyard.config.load import load
from trainyard.run.trainer import Trainer

TARGET = Path(__file__).parent.parent / "docs" / "run.svg"
STEPS = 60
OVERRIDES = [f"train.steps={STEPS}", "device.name=cpu"]
WIDTH = 126


class RecordingConsole(Console):
    """Terminal console that keeps what is printed, without the refreshes of the progress bar."""

    def __init__(self) -> None:
        super().__init__(force_terminal=True, width=WIDTH, file=io.StringIO(), highlight=False)
        self.printed: list[tuple[Any, dict[str, Any]]] = []

    def print(self, *objects: Any, **options: Any) -> None:
        if objects and not isinstance(objects[0], Control):
            self.printed.append((objects[0], options))
        super().print(*objects, **options)


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        console = RecordingConsole()
        config = load("tiny-llama", OVERRIDES)
        display = TrainConsole(console)
        with log_to_console(console):
            trainer = Trainer(config, callbacks=[display])
            print_run_header(console, trainer)
            summary = trainer.run()
        bar = display.bar.get_renderable() if display.bar else ""
    picture = Console(record=True, force_terminal=True, width=WIDTH, file=io.StringIO(), highlight=False)
    picture.print(f"[bold green]$[/] [bold]trainyard train {' '.join(OVERRIDES)}[/]")
    for line, options in console.printed:
        picture.print(line, **(options | {"soft_wrap": False}))
    picture.print(bar)
    for line in summary_lines(summary):
        picture.print(line, markup=False)
    svg = picture.export_svg(title="trainyard train")
    TARGET.write_text(re.sub(r"\s*@font-face \{.*?\}\n", "", svg, flags=re.DOTALL))


if __name__ == "__main__":
    main()
