"""The installed package: what is in it, what commands import, and what a missing optional package says."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import h5py
import pytest

from tests.cli.conftest import Call, fail
from trainyard.cli.main import EXTRA_BY_MODULE
from trainyard.config.recipes import recipe_names
from trainyard.dashboard.app import static_files

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize(
    "arguments",
    [["recipes"], ["config", "llama3-70b", "--smoke"], ["train", "--help"], ["train", "nope.yaml"], ["--version"]],
)
def test_commands_that_only_read_configurations_do_not_import_torch(arguments: list[str], tmp_path: Path) -> None:
    """Importing torch takes seconds, and `recipes` needed four."""
    code = "import sys\nsys.modules['torch'] = None\nfrom trainyard.cli.main import main\nmain()"
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == (2 if "nope.yaml" in arguments else 0), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("module", ["h5py", "sentencepiece", "pyarrow"])
def test_a_missing_optional_package_is_one_line_that_names_the_extra(
    module: str, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    h5py.File(tmp_path / "x.hdf5", "w").close()
    for name in ("x.model", "x.parquet", "x.txt"):
        (tmp_path / name).write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, module, None)
    tokenize = ["data", "tokenize", "--output-prefix", "out", "--workers", "1"]
    arguments = {
        "h5py": ["data", "inspect", "x.hdf5"],
        "sentencepiece": [*tokenize, "--input", "x.txt", "--tokenizer", "x.model"],
        "pyarrow": [*tokenize, "--input", "x.parquet", "--tokenizer", "bytes"],
    }
    extra = EXTRA_BY_MODULE[module]
    fail(call(*arguments[module]), rf".*package {module}, which is not installed: pip install 'trainyard\[{extra}\]'")
    assert any(requirement.startswith(module) for requirement in PROJECT["optional-dependencies"][extra])


def test_package_is_typed_and_has_metadata() -> None:
    assert (ROOT / "trainyard/py.typed").exists()
    assert "Typing :: Typed" in PROJECT["classifiers"]


def test_locks_have_every_package_that_the_project_names() -> None:
    """`make train` and `make test` install nothing but the locks."""
    extras = PROJECT["optional-dependencies"]
    run = PROJECT["dependencies"] + extras["data"] + extras["serve"]
    for lock, needs in (("requirements.lock", run), ("requirements-test.lock", run + extras["test"] + extras["lint"])):
        locked = {line.partition("==")[0] for line in (ROOT / lock).read_text().splitlines()}
        names = {re.split(r"[<>=!~\[ ]", need, maxsplit=1)[0].lower().replace("_", "-") for need in needs}
        assert names <= locked, lock


@pytest.mark.nightly
def test_wheel_contains_types_recipes_and_the_page(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", tmp_path, ROOT]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "trainyard/py.typed" in names
    assert {
        f"trainyard/dashboard/static/{name}" for name in (*static_files(), "uplot/LICENSE", "uplot/VERSION")
    } <= names
    assert {f"trainyard/recipes/{name}.yaml" for name in recipe_names()} <= names
