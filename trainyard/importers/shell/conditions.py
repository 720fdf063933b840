"""Which branch of an `if` runs, as far as the script alone tells.

A condition is known if it compares known values with `[`, `[[` or `test`. Tests of files, commands and unknown values
are not known.
"""

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

TEST_COMMANDS = {"[": "]", "[[": "]]", "test": None}
"""Commands that test, and their last word."""
COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}
GLOB = re.compile(r"[*?\[]")


def evaluate_test(words: list[str], unknown_mark: str) -> bool | None:
    """The result of a test command after expansion; None if it is not known."""
    if not words or words[0] not in TEST_COMMANDS or any(unknown_mark in word for word in words):
        return None
    closing = TEST_COMMANDS[words[0]]
    match words[1:-1] if closing and words[-1] == closing else words[1:]:
        case ["!", *rest]:
            result = evaluate_test(["test", *rest], unknown_mark)
            return None if result is None else not result
        case ["-z", *value] if len(value) < 2:
            return not value or not value[0]  # an unquoted empty value is no word
        case ["-n", value]:
            return bool(value)
        case [a, "=" | "==" | "!=" as comparison, b] if not GLOB.search(b):
            return (a == b) == (comparison != "!=")
        case [a, comparison, b] if comparison in COMPARISONS and re.fullmatch(r"-?\d{1,18} -?\d{1,18}", f"{a} {b}"):
            return COMPARISONS[comparison](int(a), int(b))
    return None


@dataclass
class OpenBlock:
    """A compound command whose end has not been read: if, for, while, case, a function or a group."""

    end: str
    """Keyword that ends it."""
    runs: bool | None = None
    """True or False if its current branch is known to run or not to."""
    in_condition: bool = False
    """The statements are the condition of an if or elif."""
    condition: bool | None = None
    taken: bool | None = False
    """True if an earlier branch runs; None if that is not known."""

    def add_test(self, joined_by: str, result: bool | None) -> None:
        """Add a test to the condition, which && or || joins to the ones before it."""
        if joined_by == "&&":
            both = (self.condition, result)
            self.condition = False if False in both else None if None in both else True
        elif joined_by == "||":
            either = (self.condition, result)
            self.condition = True if True in either else None if None in either else False
        else:
            self.condition = result

    def start_branch(self, keyword: str) -> None:
        """Go on with `then`, `elif` or `else`."""
        if keyword == "elif":
            self.in_condition, self.condition, self.runs = True, None, None
            return
        condition = True if keyword == "else" else self.condition
        self.in_condition = False
        self.runs = False if self.taken or condition is False else None if None in (self.taken, condition) else True
        self.taken = True if self.runs else None if self.runs is None else self.taken
