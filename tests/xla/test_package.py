"""The package itself installs next to torch 2.9, which is all that Trainium1 has, and trains there."""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.xla.conftest import TIMEOUT_S, VARIABLES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the installed package, made from a wheel as `pip install` does. Its dependencies come from this
    environment, which has torch without the CUDA libraries."""
    site = tmp_path_factory.mktemp("site")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--target", str(site)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(ROOT)], check=True, timeout=TIMEOUT_S)
    return site


def test_all_requirements_are_met(site: Path) -> None:
    """Guards against a package that demands a newer torch than torch_xla has: pip would replace it."""
    (package,) = metadata.distributions(name="trainyard", path=[str(site)])
    requirements = [Requirement(text) for text in package.requires or []]
    needed = [each for each in requirements if not each.marker or each.marker.evaluate({"extra": "trn1"})]
    assert {"torch", "torch-xla"} <= {each.name.replace("_", "-") for each in needed}
    unmet = [str(each) for each in needed if not each.specifier.contains(metadata.version(each.name).split("+")[0])]
    assert unmet == []


def test_the_installed_package_trains(site: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trainyard", "train", "tiny-llama", "--smoke", "train.steps=2", "device.name=xla"]
    environ = {**os.environ, **VARIABLES, "PYTHONPATH": str(site)}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    assert "on XLA on CPU" in done.stdout
    assert "step 2/2" in done.stdout
    assert "weights      runs/tiny-llama-smoke/model" in done.stdout
