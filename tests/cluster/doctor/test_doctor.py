"""`trainyard doctor`: what it finds on machines with and without trouble, and what it fixes."""

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.forkserver import ForkServer
from trainyard.cluster.doctor.file_system import file_system_findings
from trainyard.cluster.doctor.host import host_findings, leftover_findings
from trainyard.cluster.doctor.node_worker import local_findings
from trainyard.core.finding import Finding
from trainyard.devices.health import device_findings


def by_subject(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.subject: finding for finding in findings}


def test_command(cli: ForkServer, tmp_path: Path) -> None:
    done = cli.run(["doctor", "--directory", tmp_path])
    assert done.returncode == 0, done.stdout
    for subject in ("versions", "open files", "memory", "host name", "disk", "locks", "renames", "leftovers"):
        assert f"{subject}: " in done.stdout
    findings = json.loads(cli.run(["doctor", "--json", "--directory", tmp_path]).stdout)
    assert {"subject", "level", "text", "fix"} == set(findings[0])
    assert all(finding["fix"] for finding in findings if finding["level"] != "ok")
    assert list(tmp_path.iterdir()) == []


def test_fix_needs_somebody_to_ask(cli: ForkServer, tmp_path: Path) -> None:
    done = cli.run(["doctor", "--fix", "--directory", tmp_path])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "trainyard: --fix: asks before each repair, but its input is not a terminal; nearest: run it in a terminal\n"
    )


def test_few_open_files_are_a_warning(tmp_path: Path) -> None:
    code = (
        "from trainyard.cluster.doctor.host import host_findings\n"
        "print([finding for finding in host_findings() if finding.level != 'ok'])"
    )
    done = subprocess.run(
        ["bash", "-c", f'ulimit -S -n 200; {sys.executable} -c "$0"', code], capture_output=True, text=True, check=True
    )
    assert "subject='open files', level='warning', text='200;" in done.stdout
    assert by_subject(list(host_findings()))["open files"].level == "ok"


def trainium(root: Path, module: str = "neuron 385024 0 - Live 0x0", chips: int = 2) -> Path:
    """The files of a Trainium machine."""
    for directory in ("dev", "proc", "sys/devices/virtual/dmi/id"):
        (root / directory).mkdir(parents=True)
    (root / "sys/devices/virtual/dmi/id/product_name").write_text("trn1.32xlarge\n")
    (root / "proc/modules").write_text(f"ext4 1 1 - Live 0x0\n{module}\n")
    for index in range(chips):
        (root / f"dev/neuron{index}").touch()
    return root


def test_neuron_driver(tmp_path: Path) -> None:
    environ = {"NEURON_COMPILE_CACHE_URL": str(tmp_path / "cache")}

    def driver(root: Path) -> Finding:
        return list(device_findings(root, environ))[-1]

    assert driver(trainium(tmp_path / "good")).text == "loaded, 2 chips, in use by 0"
    absent = driver(trainium(tmp_path / "absent", module=""))
    assert (absent.level, absent.fix.startswith("sudo modprobe neuron")) == ("error", True)
    assert driver(trainium(tmp_path / "chips", chips=0)).level == "error"
    held = driver(trainium(tmp_path / "held", module="neuron 385024 3 - Live 0x0"))
    assert held.text == "the driver counts 3 users, but no process has a chip open"


def test_process_that_holds_a_chip_is_named(tmp_path: Path) -> None:
    root = trainium(tmp_path, module="neuron 385024 1 - Live 0x0")
    process = root / "proc/4711"
    (process / "fd").mkdir(parents=True)
    (process / "fd/3").symlink_to("/dev/neuron0")
    (process / "cmdline").write_bytes(b"python\0train.py\0")
    finding = by_subject(list(device_findings(root, {})))["neuron cores"]
    assert (finding.text, finding.fix) == ("process 4711 holds them: python train.py", "kill 4711")


def test_stale_compiler_locks_are_cured(tmp_path: Path) -> None:
    entry = tmp_path / "cache/neuronxcc-2.21.33363.0+82129205/MODULE_123+00000001"
    entry.mkdir(parents=True)
    lock = entry / "model.hlo_module.pb.lock"
    lock.touch()
    os.utime(lock, (0, 0))
    root = trainium(tmp_path / "root")
    finding = list(device_findings(root, {"NEURON_COMPILE_CACHE_URL": str(tmp_path / "cache")}))[-1]
    assert "1 lock of compilers that no longer run" in finding.text
    assert finding.repair
    assert finding.repair() == "1 lock removed"
    assert not lock.exists()


def test_gpu_that_another_process_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\ncase $1 in\n"
        "--query-gpu*) echo '0, NVIDIA H200, 143771, 4096, 2';;\n"
        "*) echo '4711, 4000, python';;\nesac\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    texts = [(finding.level, finding.text) for finding in device_findings(tmp_path, {})]
    assert ("ok", "NVIDIA H200, 140 GiB, 4096 MiB in use") in texts
    assert ("error", "2 uncorrectable memory errors") in texts
    assert ("warning", "process 4711 holds 4000 MiB: python") in texts


def test_directory_that_does_not_exist_yet(tmp_path: Path) -> None:
    findings = by_subject(list(file_system_findings(tmp_path / "runs" / "x")))
    assert [finding.level for finding in findings.values()] == ["ok", "ok", "ok"]
    assert list(tmp_path.iterdir()) == []


def test_full_disk_is_one_of_the_findings(tmp_path: Path) -> None:
    """A limit on the size of files makes the kernel refuse to write, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        findings = local_findings(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [finding.text for finding in findings if finding.level == "error"] == [
        f"{tmp_path}: cannot be written: File too large"
    ]
    assert {"memory", "ports", "devices", "locks", "leftovers"} <= set(by_subject(findings))
    assert list(tmp_path.iterdir()) == []


def test_rank_without_launcher_is_found_and_ended(tmp_path: Path) -> None:
    (tmp_path / "trainyard.py").write_text("import time\ntime.sleep(100)\n")
    start = f"RANK=0 PYTHONPATH={tmp_path} {sys.executable} -m trainyard train > /dev/null 2>&1 & echo $!"
    done = subprocess.run(["sh", "-c", start], cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True)
    pid = int(done.stdout)
    deadline = time.monotonic() + 10
    while psutil.Process(pid).ppid() != 1 and time.monotonic() < deadline:
        time.sleep(0.05)
    finding = next(finding for finding in leftover_findings() if str(pid) in finding.text)
    assert finding.repair
    assert finding.repair() == f"process {pid} ended"
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_abandoned_copies_in_memory_are_found_and_removed(tmp_path: Path) -> None:
    runs = tmp_path / f"trainyard-{os.getuid()}"
    for name, age in (("old", 7200), ("new", 10)):
        file = runs / name / "step_00000010/rank_00000.safetensors"
        file.parent.mkdir(parents=True)
        file.write_bytes(b"x" * 100)
        os.utime(file, (time.time() - age,) * 2)
    (finding,) = (finding for finding in leftover_findings(tmp_path) if "copies" in finding.text)
    assert finding.fix == f"rm -r {runs / 'old'}"
    assert finding.repair
    finding.repair()
    assert [path.name for path in runs.iterdir()] == ["new"]
