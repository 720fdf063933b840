"""Arguments of a template."""

import re
from collections.abc import Callable, Sequence

ARGUMENT_NAME = re.compile(r"[\w -]{1,40}")


class TemplateArguments:
    """Arguments of a template by name, or by number from 1 on. A missing argument is empty."""

    def __init__(self, parts: Sequence[str]) -> None:
        self.values: dict[str, str] = {}
        self.count = 0
        for part in parts:
            name, equals, value = part.partition("=")
            if equals and ARGUMENT_NAME.fullmatch(name.strip()):
                self.values[name.strip()] = value.strip()
            else:
                self.count += 1
                self.values[str(self.count)] = part.strip()
        if "1" not in self.values:
            self.values["1"] = next(
                (self.values[key] for key in ("text", "quote", "content") if key in self.values), ""
            )

    def __getitem__(self, key: int | str) -> str:
        return self.values.get(str(key), "")

    def positional(self) -> list[str]:
        """The unnamed arguments, in order."""
        return [self[number] for number in range(1, self.count + 1)]


TemplateRule = Callable[[TemplateArguments], str]
