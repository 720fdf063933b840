"""Messages from many nodes through the one output of srun.

srun passes lines on whole only up to 1024 bytes; longer ones from several nodes get mixed. A message is therefore cut
into short lines that name their node. Lines that something else prints on a node are ignored.
"""

import json
from typing import Any

PREFIX = "@trainyard"
MAX_CHUNK = 700
"""Characters of a message in one line."""


def encode_message(node: str, message: Any) -> str:
    """The lines of a message; the last one is marked."""
    text = json.dumps(message)
    chunks = [text[start : start + MAX_CHUNK] for start in range(0, len(text), MAX_CHUNK)]
    marks = ["more"] * (len(chunks) - 1) + ["end"]
    return "".join(f"{PREFIX} {node} {mark} {chunk}\n" for mark, chunk in zip(marks, chunks, strict=True))


class MessageReader:
    """Puts the messages of all nodes together again."""

    def __init__(self) -> None:
        self.parts: dict[str, str] = {}

    def read_line(self, line: str) -> tuple[str, Any] | None:
        """The node and its message, if this line completes one."""
        words = line.rstrip("\n").split(" ", 3)
        if len(words) != 4 or words[0] != PREFIX:
            return None
        _, node, mark, chunk = words
        text = self.parts.pop(node, "") + chunk
        if mark == "more":
            self.parts[node] = text
            return None
        return node, json.loads(text)
