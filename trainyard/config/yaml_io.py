"""YAML as configurations are written in it, ours and others': read to plain data, every mistake one line."""

import re
from pathlib import Path
from typing import Any

import yaml

from trainyard.core.errors import UserError, one_line


class ConfigYamlLoader(yaml.SafeLoader):
    """YAML 1.1 with two mends: 3e-4 is a number, and a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = {key for key in keys if keys.count(key) > 1}
        if twice:
            raise yaml.MarkedYAMLError(
                problem=f"key {sorted(map(str, twice))[0]} is given twice", problem_mark=node.start_mark
            )
        return super().construct_mapping(node, deep)


ConfigYamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_yaml(path: Path) -> dict[str, Any]:
    """The YAML of a file as plain data."""
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), ConfigYamlLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise UserError(f"{path}:{line}: not valid YAML: {error.problem}") from None
    except (OSError, ValueError, OverflowError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{path}: cannot be read: {one_line(error)}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: not a configuration: a mapping of sections was expected")
    return data
