"""The shape of the tree: imports go one way, devices and private torch names stay in their packages, names are unique,
folders and files stay small, and the documentation names only things that exist."""

import ast
import io
import re
import runpy
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cached_property
from graphlib import TopologicalSorter
from itertools import pairwise
from pathlib import Path
from typing import get_args

from pydantic import BaseModel

from trainyard.config.schema import Config
from trainyard.families import ModelConfig, all_families
from trainyard.families.registry import FAMILIES

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "trainyard"
# A package may import the ones above it. Packages on one line do not import each other.
ORDER = [
    {"core"},
    {"compat", "remote"},
    {"kernels"},
    {"devices"},
    {"families"},
    {"importers"},
    {"config"},
    {"parallel"},
    {"models"},
    {"data", "metrics", "checkpoint", "launch"},
    {"formats"},
    {"inference", "prepare"},
    {"train"},
    {"run"},
    {"evaluate", "preflight"},
    {"cluster"},
    {"dashboard"},
    {"cli"},
]
BUDGETS = {
    "checkpoint": 570,
    "cli": 5140,
    "cluster": 2200,
    "compat": 530,
    "config": 1720,
    "core": 950,
    "dashboard": 1350,
    "data": 4320,
    "devices": 1600,
    "evaluate": 700,
    "families": 3640,
    "formats": 4280,
    "importers": 2170,
    "inference": 3000,
    "kernels": 3900,
    "launch": 550,
    "metrics": 1625,
    "models": 2200,
    "parallel": 1700,
    "preflight": 4300,
    "prepare": 2200,
    "remote": 2900,
    "run": 3415,
    "train": 3300,
}
"""Lines of code of each package at most; docstrings, comments and blank lines are free. A commit that needs more raises
the number and says why."""
SPINE_BUDGET = 23_900
"""Of the packages that a training step needs."""
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}
MAX_MODEL_LINES = 150
VAGUE_FILE_NAMES = {
    "alive",
    "flat",
    "held",
    "kept",
    "misc",
    "open",
    "own",
    "plain",
    "whole",
    "within",
    "helpers",
    "utils",
}
MACHINE_PATHS = [f"/{name}/" for name in ("root", "work", "home")]
DEVICE_NAMES = ("cuda", "neuron", "xla")
HTTP_CLIENTS = (
    *("fsspec", "s3fs", "huggingface_hub", "boto3", "botocore", "aiohttp", "httpx", "requests"),
    *("urllib.request", "http.client"),
)
OTHER_CLIENTS = {"metrics/loggers/builtin/wandb.py": "requests.utils.get_netrc_auth"}
"""W&B's own client looks for its key with this function; nothing is sent."""
CALLBACK_NAME = re.compile(r"`(on_[a-z_]+)")
CODE_SPAN = re.compile(r"`([a-z_]+(?:\.[a-z_0-9]+)+)(?:=[^`]*)?`")
NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}
NOT_KEYS = {
    "model.model_config",
    "model.moe.routing_algorithm",
    "model.log",
    "model.neff",
    "model.done",
    "samples.jsonl",
}
"""Code spans that look like configuration keys: keys of NxDT, files of the Neuron compiler and of a run."""
PYTHON_FILE = re.compile(r"(?<![\w./*{}-])((?:[a-z_0-9]+/)+[a-z_0-9]+\.py)\b")


class SourceFile:
    """A Python file, read and parsed once for all tests."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path.relative_to(PACKAGE))
        self.package = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        self.module = ".".join(("trainyard", *path.relative_to(PACKAGE).with_suffix("").parts))
        self.module = self.module.removesuffix(".__init__")
        self.text = path.read_text()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def imports(self) -> list[str]:
        return imported_modules(self.tree)


def imported_modules(tree: ast.Module) -> list[str]:
    """Every module that a file imports, type-checking blocks included."""
    modules: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules += [f"{node.module}.{alias.name}" for alias in node.names] + [node.module]
    return modules


def package_of(module: str) -> str | None:
    """The sub-package of trainyard that a module belongs to."""
    parts = module.split(".")
    return parts[1] if parts[0] == "trainyard" and len(parts) > 1 and parts[1] in LEVEL else None


FILES = [SourceFile(path) for path in sorted(PACKAGE.rglob("*.py"))]


def test_imports_go_one_way_and_have_no_cycles() -> None:
    for file in FILES:
        if file.package in ("__init__", "__main__"):
            continue
        for module in file.imports:
            imported = package_of(module)
            if imported and imported != file.package:
                assert LEVEL[imported] < LEVEL[file.package], f"{file.name} imports {module}"
    modules = {file.module for file in FILES} - {"trainyard"}
    graph = {file.module: modules & set(file.imports) - {file.module} for file in FILES}
    list(TopologicalSorter(graph).static_order())  # raises CycleError with the modules of a cycle
    wrong = ast.parse("from trainyard.cli import main\nimport trainyard.run.trainer\n")
    assert {package_of(module) for module in imported_modules(wrong)} >= {"cli", "run"}


def test_device_names_and_private_torch_names_stay_in_their_packages() -> None:
    for file in FILES:
        if file.package == "models":
            assert not any(module.startswith("torch.distributed") for module in file.imports), file.name
        if file.package != "devices":
            device_names = [name for name in DEVICE_NAMES if f'"{name}"' in file.text or f"torch.{name}" in file.text]
            assert not device_names, f"{file.name} names {device_names}"
        if file.package != "compat":
            assert "torch._" not in file.text, file.name
            assert not any("._" in module for module in file.imports if module.startswith("torch")), file.name


def test_only_remote_talks_to_the_hub_the_web_and_object_stores() -> None:
    for file in FILES:
        clients = [name for name in file.imports if any(f"{name}.".startswith(f"{client}.") for client in HTTP_CLIENTS)]
        other = OTHER_CLIENTS.get(file.name, "")
        found = [name for name in clients if not f"{other}.".startswith(f"{name}.")]
        assert file.package == "remote" or not found, f"{file.name} imports {found}"
    assert any("fsspec" in file.imports for file in FILES if file.package == "remote")


def test_families_are_named_in_their_own_files_only() -> None:
    """Importers read the names of other systems; `data bert` prepares files of that name."""
    classes = {family.config_class.__name__ for family in all_families().values()}
    allowed = (
        "families/",
        "importers/",
        "cli/commands/data/",
        "prepare/bert_files.py",
        "data/formats/conversations.py",
    )
    for file in FILES:
        own = {f"models/{name}.py" for name in FAMILIES.built_in}
        if file.name.startswith(allowed) or file.name in own:
            continue
        literals = {node.value for node in ast.walk(file.tree) if isinstance(node, ast.Constant)}
        names = {node.id for node in ast.walk(file.tree) if isinstance(node, ast.Name)}
        assert not literals & {*FAMILIES.built_in}, f"{file.name} names a family"
        assert not names & classes, f"{file.name} names the configuration of a family"


def test_no_two_public_classes_share_a_name() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for file in FILES:
        for node in file.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(file.name)
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


def test_folders_and_files_stay_small_and_have_telling_names() -> None:
    for folder in {file.path.parent for file in FILES}:
        modules = [path.stem for path in folder.glob("*.py") if path.stem != "__init__"]
        vague = [name for name in modules if name in VAGUE_FILE_NAMES or re.fullmatch(r"[a-z]+ed", name)]
        assert not vague, f"{folder.name}: {vague}"
    for name in FAMILIES.built_in:
        for path in (PACKAGE / "families" / "builtin" / f"{name}.py", PACKAGE / "models" / f"{name}.py"):
            assert not path.exists() or len(path.read_text().splitlines()) <= MAX_MODEL_LINES, path


def code_lines(file: SourceFile) -> int:
    """Lines with code: neither blank, nor a comment, nor part of a docstring."""
    strings = (node for node in ast.walk(file.tree) if isinstance(node, ast.Expr))
    docstrings = {
        line
        for node in strings
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    code = {
        line
        for token in tokenize.generate_tokens(io.StringIO(file.text).readline)
        if token.type not in NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(code - docstrings)


def test_packages_stay_within_their_budgets_of_code_lines() -> None:
    lines: Counter[str] = Counter()
    for file in FILES:
        if file.package not in ("__init__", "__main__"):
            lines[file.package] += code_lines(file)
    assert lines.keys() == BUDGETS.keys()
    assert {name: count for name, count in lines.items() if count > BUDGETS[name]} == {}
    spine = runpy.run_path(str(ROOT / "scripts" / "architecture.py"))["SPINE"]
    assert sum(lines[name] for name in spine) <= SPINE_BUDGET


def test_keys_callbacks_and_files_named_in_the_documentation_exist() -> None:
    callbacks = next(file for file in FILES if file.name == "run/callbacks.py")
    methods = {node.name for node in ast.walk(callbacks.tree) if isinstance(node, ast.FunctionDef)}
    unknown: dict[str, set[str]] = {}
    for page in _documentation_pages():
        text = page.read_text()
        spans = set(CODE_SPAN.findall(text)) - NOT_KEYS
        keys = {span for span in spans if span.partition(".")[0] in Config.model_fields and not span.endswith(".py")}
        unknown[str(page.relative_to(ROOT))] = (
            set(CALLBACK_NAME.findall(text)) - methods
            | {key for key in keys if not _key_exists(key) and not _is_module(key)}
            | _missing_files(text)
        )
    unknown |= {file.name: _missing_files(file.text) for file in FILES}
    assert {name: names for name, names in unknown.items() if names} == {}


def test_messages_count_in_singular_and_plural() -> None:
    """`1 files` is wrong: a length before a plural noun is written by core.counts.counted."""
    plural = re.compile(r" (?!bytes|of)(?:[a-z]+ )?(?!bytes|its|this|was|has)[a-z]+s\b(?!/)")
    found = [
        f"{file.name}:{node.lineno}: {ast.unparse(value.value)}{text.value}"
        for file in FILES
        for node in ast.walk(file.tree)
        if isinstance(node, ast.JoinedStr)
        for value, text in pairwise(node.values)
        if isinstance(value, ast.FormattedValue) and re.match(r"len\(", ast.unparse(value.value))
        if isinstance(text, ast.Constant) and plural.match(str(text.value))
    ]
    assert found == []


def _documentation_pages() -> Iterator[Path]:
    """All pages except lab notes, which tell what was true when they were written, and those with keys of other systems
    (test_docs.py)."""
    yield from (ROOT / "README.md", ROOT / "CONTRIBUTING.md")
    yield from (page for page in sorted((ROOT / "docs").rglob("*.md")) if not {"lab", "coming-from"} & {*page.parts})


def _key_exists(key: str) -> bool:
    """True if a dotted configuration key exists, whatever the variant of a section (such as the model's family)."""
    models: list[type[BaseModel]] = [Config]
    families = [family.config_class for family in all_families().values()]
    for part in key.split("."):
        fields = [model.model_fields[part] for model in models if part in model.model_fields]
        if not fields:
            return bool(models) and any(_is_mapping(model) for model in models)
        models = [model for field in fields for model in _models_in(field.annotation)]
        models = families if models == [ModelConfig] else models
    return True


def _models_in(annotation: object) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models_in(argument)]


def _is_mapping(model: type[BaseModel]) -> bool:
    return model.model_config.get("extra") == "allow"


def _is_module(name: str) -> bool:
    path = PACKAGE / Path(*name.split("."))
    return path.with_suffix(".py").exists() or path.is_dir()


def _missing_files(text: str) -> set[str]:
    """Python files of this repository that a text names by full path or path in the package, but that do not exist."""
    ours = {*LEVEL, "trainyard", "tests", "bench", "scripts"}
    paths = {path for path in PYTHON_FILE.findall(text) if path.partition("/")[0] in ours}
    return {path for path in paths if not (ROOT / path).exists() and not (PACKAGE / path).exists()}


def test_no_machine_paths() -> None:
    recipes = [path.read_text() for path in (ROOT / "recipes").glob("*.yaml")]
    for text in [*(file.text for file in FILES), *recipes]:
        assert not any(path in text for path in MACHINE_PATHS)
