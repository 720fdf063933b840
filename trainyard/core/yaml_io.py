"""Reading YAML into plain data, with every mistake reported as one line, and formatting values as YAML would."""

import re
from pathlib import Path
from typing import Any

import yaml

from trainyard.core.errors import UserError, one_line

MAX_VALUE_CHARS = 60
MAX_VALUES = 100_000


class ConfigYamlLoader(yaml.SafeLoader):
    """YAML 1.1 with three corrections: 3e-4 is a number, and a duplicate key is an error, as is an anchor that contains
    itself."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if node in self.recursive_objects:
            raise yaml.MarkedYAMLError(problem="an anchor contains itself", problem_mark=node.start_mark)
        return super().construct_object(node, deep=True)  # at once, so that a node inside itself is noticed

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        duplicates = {str(key) for key in keys if keys.count(key) > 1}
        if duplicates:
            raise yaml.MarkedYAMLError(problem=f"duplicate key {min(duplicates)}", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


ConfigYamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read the top-level mapping of a YAML file."""
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), ConfigYamlLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise UserError(f"{path}:{line}: not valid YAML: {error.problem}") from None
    except (OSError, ValueError, OverflowError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{path}: cannot be read: {one_line(error)}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: not a configuration: expected a mapping of sections")
    _check_size(data, path)
    return data


def _check_size(data: Any, path: Path) -> None:
    """Refuse aliases of aliases that stand for more values than any walk over the file would finish."""
    stack, count = [data], 0
    while stack:
        node = stack.pop()
        count += 1
        if count > MAX_VALUES:
            raise UserError(f"{path}: not a configuration: its aliases stand for more than {MAX_VALUES:,} values")
        if isinstance(node, dict | list):
            stack += node.values() if isinstance(node, dict) else node


def format_value(value: object) -> str:
    """Format a value for an error message or a report: as YAML writes it, on one line, shortened."""
    value = list(value) if isinstance(value, tuple) else value
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    text = " ".join(text.split())
    return text if len(text) <= MAX_VALUE_CHARS else text[: MAX_VALUE_CHARS - 3] + "..."
