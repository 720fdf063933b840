"""Training on the neuron device with a fake torch_neuronx."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_neuron import install
from trainyard.launch.launcher import reserved_port

ROOT = Path(__file__).parents[2]
RUN = [sys.executable, "-m", "tests.devices.neuron_run"]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("packages")
    install(directory)
    return directory


def environment(packages: Path, home: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(packages), str(ROOT)]),
        "XDG_CACHE_HOME": str(home),
        "OMP_NUM_THREADS": "1",
    }


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16_sr", marks=pytest.mark.nightly)])
def test_one_rank(packages: Path, tmp_path: Path, precision: str) -> None:
    """The losses equal those of the CPU device, and all blocks share one graph."""
    done = subprocess.run(
        [*RUN, "{}", precision, str(tmp_path)],
        env=environment(packages, tmp_path),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert result["losses"] == pytest.approx(result["cpu_losses"], rel=1e-6)
    assert len(result["losses"]) == 4
    assert sum(result["attention_calls"]) == 1, "four blocks share one graph"
    assert len(result["attention_calls"]) > 1, "the loss and the update are compiled too"
    assert result["option_objects"] == 1
    assert result["memory"] == 12345
    assert result["device"] == "neuron"
    assert result["core"] == "0"
    assert result["cache"] == str(tmp_path / "trainyard" / "neff")
    assert result["stream_waits"] >= 1, "the optimizer step waits for the checkpoint copy"
    assert result["checkpoint"]


@pytest.mark.nightly
@pytest.mark.parametrize("layout", [{"tp": 2, "sequence_parallel": True}, {"cp": 2}], ids=["tp", "cp"])
def test_two_ranks(packages: Path, tmp_path: Path, layout: dict[str, Any]) -> None:
    """Both ranks use the neuron process group, one core each and the same graphs, and have the losses of one rank."""

    def start(layout: dict[str, Any], **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*RUN, json.dumps(layout), "fp32", str(tmp_path)],
            env=environment(packages, tmp_path) | variables,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def result(process: subprocess.Popen[str]) -> dict[str, Any]:
        out, errors = process.communicate(timeout=200)
        assert process.returncode == 0, errors + out
        return dict(json.loads(out.splitlines()[-1]))

    with reserved_port() as port:
        common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        processes = [start(layout, **common, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(2)]
        results = [result(process) for process in processes]
    assert [rank["core"] for rank in results] == ["0", "1"]
    assert {rank["group"] for rank in results} == {"neuron"}
    assert {rank["object_group"] for rank in results} == {"gloo"}, "pickled objects must not travel through the chip"
    assert results[0]["code"] == results[1]["code"]
    assert sum(results[0]["attention_calls"]) == 1, "four blocks share one graph"
    single = result(start({}))
    for rank in results:
        assert rank["losses"] == pytest.approx(single["cpu_losses"], rel=1e-5)


@pytest.mark.nightly
def test_machine_without_a_chip_is_an_error(packages: Path, tmp_path: Path) -> None:
    """The package registers itself with torch, but the machine has no chip."""
    done = subprocess.run(
        [sys.executable, "-m", "trainyard", "train", "device.name=neuron"],
        env=environment(packages, tmp_path),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("trainyard: device.name=neuron: no chip on this machine")
    assert done.stderr.count("\n") == 1
