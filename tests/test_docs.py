"""The documentation matches the tree: generated pages are current; links, keys, commands and paths exist."""

import re
import runpy
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from trainyard.cli.commands.convert_nxd import build_parser
from trainyard.cli.main import COMMAND_HELP, load_command
from trainyard.config.schema_docs import schema_keys

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
SECTIONS = "data|train|optimizer|schedule|precision|layout|recompute|compile|checkpoint|evaluate|log|profile|device"
DELIBERATE_MISTAKES = ("train.lr",)
"""Keys that pages show together with the error they cause."""
FILE_SUFFIXES = ("md", "py", "sh", "pt", "hdf5", "json", "jsonl", "yaml", "svg", "idx", "bin", "parquet")
page_parameter = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@pytest.mark.parametrize("name", ["keys.md", "cli.md", "api.md"])
def test_reference_pages_are_current(name: str) -> None:
    pages = runpy.run_path(str(ROOT / "scripts" / "reference.py"))["PAGES"]
    assert pages[name]() == (ROOT / "docs" / "reference" / name).read_text(), "run: python scripts/reference.py"


def test_architecture_picture_is_current() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "architecture.py"))
    assert script["draw"]() == script["TARGET"].read_text(), "run: python scripts/architecture.py"


@page_parameter
def test_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        if anchor and linked.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}, (
                target
            )


@cache
def known_keys() -> set[str]:
    """Keys, and sections within sections."""
    keys = {re.sub(r"\[\w+\]", "", key.name) for key in schema_keys()}
    return keys | {key.rpartition(".")[0] for key in keys}


@page_parameter
def test_configuration_keys_exist(page: Path) -> None:
    known = known_keys()
    for name in re.findall(rf"(?<![\w./-])((?:{SECTIONS})\.[a-z_0-9]+)(?![\w(*])", page.read_text()):
        if name.rpartition(".")[2] not in FILE_SUFFIXES and name not in DELIBERATE_MISTAKES:
            assert name in known, name


@page_parameter
def test_paths_exist(page: Path) -> None:
    text = page.read_text()
    for name in re.findall(r"`((?:trainyard|tests|bench|scripts|docs|recipes)/[\w./-]+)`", text):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"`(\w+(?:/\w+)*/\w+\.py)`", text):  # relative to the repository or to the package
        assert (ROOT / name).exists() or (ROOT / "trainyard" / name).exists(), name


@page_parameter
def test_commands_and_their_options_exist(page: Path) -> None:
    for line in _command_lines(page.read_text()):
        words = shlex.split(line, comments=True)
        if words[1:] in (["--version"], ["--help"], ["--install-completion"]) or len(words) == 1 or words[1].isupper():
            continue
        assert words[1] in COMMAND_HELP, line
        options = _options(words[1], words[2] if len(words) > 2 else "")
        for word in words[2:]:
            if word == "--":  # what follows belongs to Megatron-LM
                break
            if word.startswith("-") and not word.startswith("-]"):
                assert word.strip("[]").partition("=")[0] in options, line


def _command_lines(text: str) -> list[str]:
    """Lines of code blocks and inline code that start with `trainyard`, with continued lines joined."""
    blocks = re.findall(r"^```(?:bash|sh|console)?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    blocks.append("\n".join(line[4:] for line in text.splitlines() if line.startswith("    ")))
    joined = "\n".join(blocks).replace("\\\n", " ")
    lines = [line.strip().removeprefix("$ ") for line in joined.splitlines()]
    lines += [code for code in re.findall(r"`(trainyard [^`\n]+)`", text) if "[" not in code and "..." not in code]
    return [line for line in lines if re.match(r"trainyard [a-z-]+( |$)", line) and "|" not in line and "[" not in line]


@cache
def _options(command: str, subcommand: str) -> set[str]:
    if command == "convert-nxd":
        return {option for action in build_parser()._actions for option in action.option_strings}
    loaded: Any = load_command(command)
    if hasattr(loaded, "commands") and subcommand in loaded.commands:
        loaded = loaded.commands[subcommand]
    return {option for parameter in loaded.params for option in [*parameter.opts, *parameter.secondary_opts]} | {
        "--help"
    }
