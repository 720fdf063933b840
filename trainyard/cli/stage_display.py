"""What a command that waits is doing: one line on stderr for a stage that takes longer than two seconds."""

import sys
import threading
from typing import Self

INTERVAL_S = 2.0


class StageDisplay:
    """`with StageDisplay() as report: report("waiting for nodes")`. Quick commands print nothing."""

    def __init__(self) -> None:
        self.stage = self.printed = ""
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._print_stages, daemon=True)

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __call__(self, stage: str) -> None:
        self.stage = stage

    def _print_stages(self) -> None:
        while not self.ended.wait(INTERVAL_S):
            if self.stage != self.printed:
                self.printed = self.stage
                print(f"trainyard: {self.printed}", file=sys.stderr, flush=True)

    def __exit__(self, *error: object) -> None:
        self.ended.set()
        self.thread.join()
