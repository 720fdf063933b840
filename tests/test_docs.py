"""The documentation matches the tree: generated pages are current; links, keys, commands, paths and error messages
exist; the site has every page."""

import ast
import re
import runpy
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainyard.cli.commands.convert_nxd import build_parser
from trainyard.cli.main import COMMANDS, load_command
from trainyard.config.schema_docs import schema_keys
from trainyard.importers.key_table import KeyRule
from trainyard.importers.megatron.keys import MEGATRON_FLAGS
from trainyard.importers.nxdt.keys import NXDT_KEYS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
ROOT_PAGES = [ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
"""Pages of the site that lie outside docs/."""
PAGES = [ROOT / "README.md", *ROOT_PAGES, *sorted(DOCS.rglob("*.md"))]
SECTIONS = (
    "model|data|train|optimizer|schedule|precision|layout|recompute|compile|checkpoint|evaluate|samples|log|profile"
    "|device"
)
DELIBERATE_MISTAKES = ("train.lr",)
"""Keys that pages show together with the error they cause."""
MAX_LINES_WITHOUT_HEADING = 110
"""Two screens."""
README_LINES = 45
"""One screen."""
MIN_QUOTED_SHARE = 0.4
"""Share of a quoted error message that consists of texts in the source; the rest are values."""
FILE_SUFFIXES = ("md", "py", "sh", "pt", "hdf5", "json", "jsonl", "yaml", "svg", "idx", "bin", "parquet", "safetensors")
COMPILE_CACHE_FILES = ("model.neff", "model.done", "model.log", "model.hlo_module")
"""Files of neuronx-cc whose names look like keys."""
page_parameter = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def test_reference_pages_are_current() -> None:
    pages = runpy.run_path(str(ROOT / "scripts" / "reference.py"))["PAGES"]
    found = {path.relative_to(DOCS / "reference").as_posix() for path in (DOCS / "reference").rglob("*.md")}
    assert found == set(pages)
    for name, page in pages.items():
        assert page() == (DOCS / "reference" / name).read_text(), "run: python scripts/reference.py"


@pytest.mark.parametrize(
    "name", ["nxd-training.md", "megatron-lm.md", "hf-trainer.md", "trl.md", "axolotl.md", "torchtitan.md"]
)
def test_tables_of_foreign_keys_are_current(name: str) -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "coming_from.py"))
    assert script["with_tables"](name) == (DOCS / "coming-from" / name).read_text(), (
        "run: python scripts/coming_from.py"
    )


@pytest.mark.parametrize("rules", [NXDT_KEYS, MEGATRON_FLAGS], ids=["nxdt", "megatron"])
def test_keys_that_importers_set_exist(rules: dict[str, KeyRule]) -> None:
    targets = {key for rule in rules.values() if rule.action in ("copied", "maps") for key in rule.target.split(", ")}
    assert targets <= known_keys()


def test_arguments_of_transformers_exist() -> None:
    spec = find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / "training_args.py").read_text()
    (arguments,) = (node for node in ast.parse(source).body if getattr(node, "name", "") == "TrainingArguments")
    known = {
        node.target.id
        for node in ast.walk(arguments)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    page = (DOCS / "coming-from" / "hf-trainer.md").read_text()
    tables = page.split("## Keys")[1].split("## Arguments")[0]
    named = {name for row in re.findall(r"^\| (`.*?) \|", tables, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert len(named) > 50
    assert named <= known, named - known


def test_site_has_every_page() -> None:
    listed = list(_nav_pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert len(listed) == len(set(listed))
    expected = {page.name for page in ROOT_PAGES} | {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert set(listed) == expected


def _nav_pages(node: Any) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    else:
        for child in node.values() if isinstance(node, dict) else node:
            yield from _nav_pages(child)


@pytest.mark.nightly
def test_site_builds(tmp_path: Path) -> None:
    """Build in a copy of the tracked files, as `make docs` in a new clone does: warnings are errors, and no page loads
    anything from another host."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    done = subprocess.run(["make", "docs"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for page in (tmp_path / "site").rglob("*.html"):
        loaded = re.findall(
            r"<(?:script|img|iframe)[^>]*src=\"(https?:[^\"]*)|<link[^>]*href=\"(https?:[^\"]*)", page.read_text()
        )
        assert not loaded, (page, loaded)


@page_parameter
def test_headings_are_at_most_two_screens_apart(page: Path) -> None:
    text = re.sub(r"^```.*?^```", lambda block: block[0].replace("#", " "), page.read_text(), flags=re.M | re.S)
    lines = text.splitlines()
    headings = [-1, *(number for number, line in enumerate(lines) if re.match(r"#{1,4} ", line)), len(lines)]
    gaps = [(second - first, first + 1) for first, second in pairwise(headings)]
    assert max(gaps)[0] <= MAX_LINES_WITHOUT_HEADING, f"line {max(gaps)[1]}"


UNIDIOMATIC = re.compile(
    r"\b(?:[Cc]ures?|goes on|(?:is|are) told|thus not|of ours|so many|[Aa] kill\b|[Aa]fter a kill|makes? of (?:it|them)"
    r"|time for complete|final name before|(?:is|are) one line (?:and|before|that)|[Ll]osses are those of|Most new"
    r"|counts nothing|(?:serve|serves) samples|[Aa]s it says|commands of this machine)\b"
)
"""Phrases that native readers stumble over, each replaced once already."""


def test_pages_and_help_have_no_phrase_that_was_replaced() -> None:
    texts = {str(page.relative_to(ROOT)): page.read_text() for page in PAGES if "lab" not in page.parts}
    del texts["CHANGELOG.md"]
    found = {name: UNIDIOMATIC.findall(" ".join(text.split())) for name, text in texts.items()}
    assert {name: phrases for name, phrases in found.items() if phrases} == {}


def test_readme_fits_one_screen() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


def test_quoted_error_messages_exist() -> None:
    """Every quoted line `trainyard: MESSAGE` consists of texts in the source, apart from values."""
    texts = {
        node.value.strip()
        for path in (ROOT / "trainyard").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value.strip()) > 5
    }
    quoted = re.findall(r"^    trainyard: (.*)$", "\n".join(page.read_text() for page in PAGES), re.MULTILINE)
    assert len(quoted) > 20
    for message in quoted:
        covered = set()
        for text in texts:
            start = message.find(text)
            if start >= 0:
                covered |= set(range(start, start + len(text)))
        assert len(covered) >= MIN_QUOTED_SHARE * len(message), message


def test_architecture_picture_is_current() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "architecture.py"))
    assert script["draw"]() == script["TARGET"].read_text(), "run: python scripts/architecture.py"


def test_architecture_names_every_package() -> None:
    table = (DOCS / "internals" / "architecture.md").read_text().split("## Packages")[1].split("##")[0]
    named = {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert named == {path.parent.name for path in (ROOT / "trainyard").glob("*/__init__.py")}


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
def known_keys() -> frozenset[str]:
    """Keys, and sections within sections."""
    keys = {re.sub(r"\[\w+\]", "", key.name) for key in schema_keys()}
    return frozenset(keys | {key.rpartition(".")[0] for key in keys} | {"model.from_hf"})


def our_text(page: Path) -> str:
    """A page without the columns of its tables that name keys and files of another system."""
    text = page.read_text()
    if page.parent.name == "coming-from":
        text = re.sub(r"<!-- generated: keys -->.*?<!-- /generated -->", "", text, flags=re.DOTALL)
        text = re.sub(r"^\| [^|]* \|", "|", text, flags=re.MULTILINE)
    return text


@page_parameter
def test_configuration_keys_exist(page: Path) -> None:
    known = known_keys()
    if page.name in ("import.md", "llama-nxdt.md"):  # they also name keys of NxD Training
        known = known | {".".join(key.split(".")[:2]) for key in NXDT_KEYS}
    for name in re.findall(rf"(?<![\w./-])((?:{SECTIONS})\.[a-z_0-9]+)(?![\w(*])", our_text(page)):
        is_file = name.rpartition(".")[2] in FILE_SUFFIXES or name in COMPILE_CACHE_FILES
        if not is_file and name not in DELIBERATE_MISTAKES:
            assert name in known, name


@page_parameter
def test_paths_exist(page: Path) -> None:
    text = our_text(page)
    for name in re.findall(r"`((?:trainyard|tests|bench|scripts|docs|recipes)/[\w./-]+)`", text):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"`(\w+(?:/\w+)*/\w+\.py)`", text):  # relative to the repository or to the package
        assert (ROOT / name).exists() or (ROOT / "trainyard" / name).exists(), name


@page_parameter
def test_commands_and_their_options_exist(page: Path) -> None:
    for line in _command_lines(page.read_text()):
        words = _words(line)
        if words[1:] in (["--version"], ["--help"], ["--install-completion"]) or len(words) == 1 or words[1].isupper():
            continue
        assert words[1] in COMMANDS, line
        options = _options(words[1], words[2] if len(words) > 2 else "")
        for word in words[2:]:
            if word == "--":  # what follows belongs to Megatron-LM
                break
            if word.startswith("-") and not word.startswith("-]"):
                assert word.strip("[]").partition("=")[0] in options, line


@page_parameter
def test_keys_of_commands_exist(page: Path) -> None:
    for line in _command_lines(page.read_text()):
        for word in _words(line)[2:]:
            if match := re.match(rf"((?:{SECTIONS})(?:\.\w+)+)=", word):
                key = match[1]
                assert key in known_keys() or key in DELIBERATE_MISTAKES or key.rpartition(".")[0] in known_keys(), line


def _words(line: str) -> list[str]:
    """Words of a command up to the first operator of the shell, without variables set before it."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in lexer:
        if word and set(word) <= set("|&;<>"):
            break
        words.append(word)
    return words


def _command_lines(text: str) -> list[str]:
    """Lines of code blocks and inline code that start with `trainyard`, with continued lines joined."""
    blocks = re.findall(r"^```(?:bash|sh|console)?(?: title=.*)?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    blocks.append("\n".join(line[4:] for line in text.splitlines() if line.startswith("    ")))
    joined = "\n".join(blocks).replace("\\\n", " ")
    lines = [line.strip().removeprefix("$ ") for line in joined.splitlines()]
    lines += [code for code in re.findall(r"`(trainyard [^`\n]+)`", text) if "[" not in code and "..." not in code]
    return [line for line in lines if re.match(r"trainyard [a-z-]+( |$)", line) and " [" not in line]


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
