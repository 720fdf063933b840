"""The shape of the tree: imports go one way, devices and private torch names stay where they belong."""

import ast
from pathlib import Path

import pytest

import trainyard

ROOT = Path(trainyard.__file__).parent
# A package may import those to its left. Within one entry no package imports another.
ORDER = [
    {"core"},
    {"compat"},
    {"kernels"},
    {"devices"},
    {"config"},
    {"parallel"},
    {"models"},
    {"data", "metrics", "checkpoint", "launch", "compile"},
    {"train"},
    {"dryrun", "verify", "tune"},
    {"plan", "audit", "precompile"},
    {"cli"},
]
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}
ROOTS = [f"/{name}/" for name in ("root", "work", "home")]
FILES = sorted(ROOT.rglob("*.py"))


def package(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(path: Path) -> list[str]:
    """Every module that a file imports, type-checking blocks included."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names] + [node.module]
    return found


def ours(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "trainyard" and len(parts) > 1 and parts[1] in LEVEL else None


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    here = package(path)
    if here in ("__init__", "__main__"):
        return
    for module in imported(path):
        there = ours(module)
        if there and there != here:
            assert LEVEL[there] < LEVEL[here], f"{here} imports {module}"


def test_no_file_imports_itself_in_a_circle() -> None:
    """Type-checking imports count too."""
    graph = {
        ".".join(("trainyard", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): imported(path)
        for path in FILES
        if path != ROOT / "__init__.py"
    }

    def reachable(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            here = todo.pop()
            for module in graph[here]:
                if module in graph and module not in seen and module != here:
                    seen.add(module)
                    todo.append(module)
        return seen

    for module in graph:
        assert module not in reachable(module), module


def test_the_check_sees_a_wrong_import(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text("from trainyard.cli import main\nimport trainyard.train.trainer\n")
    assert {ours(module) for module in imported(wrong)} >= {"cli", "train"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_that_stay_home(path: Path) -> None:
    text, here = path.read_text(), package(path)
    modules = imported(path)
    if here == "models":
        assert not any(module.startswith("torch.distributed") for module in modules)
    if here != "devices":
        assert not any(f'"{name}"' in text or f"torch.{name}" in text for name in ("cuda", "neuron", "xla"))
    if here != "compat":
        assert "torch._" not in text
        assert not any("._" in module for module in modules if module.startswith("torch"))


@pytest.mark.parametrize("name", ["llama", "gpt", "bert"])
def test_a_model_is_read_in_minutes(name: str) -> None:
    assert len((ROOT / "models" / f"{name}.py").read_text().splitlines()) <= 150


def test_no_machine_paths() -> None:
    for path in [*FILES, *(ROOT.parent / "recipes").glob("*.yaml")]:
        assert not any(root in path.read_text() for root in ROOTS)
