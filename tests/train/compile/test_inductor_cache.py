"""The inductor cache: choice of directory, damaged files, atomic C++ builds, and removal of old files."""

import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from trainyard import compat, devices
from trainyard.core.errors import UserError
from trainyard.train.compile import inductor_cache

MOUNTS = {"/": "ext4", "/home": "nfs4", "/fsx": "lustre", "/home/local disk": "xfs"}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    directory = tmp_path_factory.mktemp("library")
    (directory / "a.c").write_text("int twice(int x) { return 2 * x; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "a.so", "a.c"], cwd=directory, check=True)
    return (directory / "a.so").read_bytes()


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/cache", "ext4"),
        ("/home/ann/.cache", "nfs4"),
        ("/home/local disk/cache", "xfs"),
        ("/fsx", "lustre"),
        ("/fsxother", "ext4"),
    ],
)
def test_file_system_of_the_closest_mount(path: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = [SimpleNamespace(mountpoint=point, fstype=fstype) for point, fstype in MOUNTS.items()]
    monkeypatch.setattr("psutil.disk_partitions", lambda all: mounts)
    assert inductor_cache.file_system(Path(path)) == kind


@pytest.mark.parametrize(("kind", "shared"), [("ext4", True), ("nfs4", False), ("lustre", False)])
def test_hosts_share_a_directory_only_if_locks_work(
    kind: str, shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(inductor_cache.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.delenv(inductor_cache.TORCH_CACHE_VARIABLE, raising=False)
    monkeypatch.setattr(inductor_cache, "file_system", lambda path: kind)
    directories = set()
    for host in ("one", "two"):
        monkeypatch.setattr("platform.node", lambda host=host: host)
        directories.add(inductor_cache.cache_dir(devices.select("cpu")))
    assert len(directories) == (1 if shared else 2)
    assert all(directory.is_relative_to(tmp_path) for directory in directories)


def test_default_directory_of_torch_is_not_a_user_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch sets the variable when its compiler is imported, which a kernel may have done."""
    monkeypatch.setenv(inductor_cache.CACHE_VARIABLE, str(tmp_path / "ours"))
    monkeypatch.setenv(inductor_cache.TORCH_CACHE_VARIABLE, compat.default_inductor_dir())
    assert inductor_cache.user_cache_dir() is None
    assert inductor_cache.cache_dir(devices.select("cpu")).is_relative_to(tmp_path / "ours")
    monkeypatch.setenv(inductor_cache.TORCH_CACHE_VARIABLE, str(tmp_path / "mine"))
    assert inductor_cache.cache_dir(devices.select("cpu")) == inductor_cache.user_cache_dir() == tmp_path / "mine"


def test_fingerprint_determines_the_directory() -> None:
    fingerprint = inductor_cache.fingerprint(devices.select("cpu"))
    assert {"torch", "triton", "compiler", "architecture"} <= fingerprint.keys()
    names = {inductor_cache.toolchain_name({**fingerprint, key: "other"}) for key in fingerprint}
    assert len(names | {inductor_cache.toolchain_name(fingerprint)}) == len(fingerprint) + 1


@pytest.mark.parametrize("text", ["many", "0", "-1", "inf", "nan"])
def test_invalid_size_limit_is_an_error(text: str) -> None:
    with pytest.raises(UserError, match=f"{inductor_cache.LIMIT_VARIABLE}={text}: must be a positive number"):
        inductor_cache.size_limit({inductor_cache.LIMIT_VARIABLE: text})


def test_trim_removes_least_recently_used_files(tmp_path: Path) -> None:
    now = time.time()
    for number in range(10):
        path = tmp_path / f"{number % 3}" / f"{number}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(1000))
        os.utime(path, (now - 1000 * number, now - 10**6))  # different access times, same modification time
    assert inductor_cache.trim(tmp_path, 10_000) == 0
    assert inductor_cache.trim(tmp_path, 6_000) == 6_000
    assert sorted(path.name for path in inductor_cache.list_files(tmp_path)) == ["0", "1", "2", "3"]


def test_complete_library_is_not_damaged(library: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.so").write_bytes(library)
    (tmp_path / "a.cpp").write_text("half a sour")
    assert inductor_cache.damaged_files(tmp_path) == []


@examples(50)
@given(fraction=st.floats(0, 1, exclude_max=True))
def test_truncated_library_is_damaged(
    library: bytes, tmp_path_factory: pytest.TempPathFactory, fraction: float
) -> None:
    directory = tmp_path_factory.mktemp("cut")
    path = directory / "a.so"
    path.write_bytes(library[: int(len(library) * fraction)])
    assert inductor_cache.damaged_files(directory) == [path]


def test_old_leftovers_of_killed_compilers_are_damage(tmp_path: Path) -> None:
    names = ["x.so.12.part", ".12.34.tmp", "fresh.so.13.part"]
    for name in names:
        (tmp_path / name).write_text("half")
    for name in names[:2]:
        os.utime(tmp_path / name, (0, 0))
    assert {path.name for path in inductor_cache.damaged_files(tmp_path)} == set(names[:2])


@pytest.fixture
def wrapped_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (inductor_cache.TORCH_CACHE_VARIABLE, "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(inductor_cache.CACHE_VARIABLE, str(tmp_path / "cache"))
    unwrapped = [path for path in os.environ["PATH"].split(os.pathsep) if not path.endswith("/.bin")]
    monkeypatch.setenv("PATH", os.pathsep.join(unwrapped))  # other tests may have put a wrapper there
    inductor_cache.prepare_cache(devices.select("cpu"))
    assert Path(shutil.which("g++") or "").is_relative_to(tmp_path / "cache")


@pytest.mark.usefixtures("wrapped_compiler")
def test_library_gets_its_name_when_it_is_complete(tmp_path: Path) -> None:
    """The compiler is killed as soon as the library exists under its final name."""
    lines = [f'extern "C" double f{i}(double x) {{ return x * {i}; }}' for i in range(1500)]
    (tmp_path / "big.cpp").write_text("\n".join(lines))
    subprocess.run(["g++", "-c", "-fPIC", "-o", "big.o", "big.cpp"], cwd=tmp_path, check=True)
    command = ["g++", "-shared", "-fPIC", "big.o", "-o", "big.so"]
    target = tmp_path / "big.so"
    process = subprocess.Popen(command, cwd=tmp_path, start_new_session=True)
    while not target.exists():
        time.sleep(0.0005)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    killed = target.read_bytes()
    target.unlink()
    subprocess.run(command, cwd=tmp_path, check=True)
    assert killed == target.read_bytes()


@pytest.mark.usefixtures("wrapped_compiler")
def test_failed_compile_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "bad.cpp").write_text("not C++")
    done = subprocess.run(["g++", "-c", "bad.cpp", "-o", "bad file.o"], cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode != 0
    assert done.stderr
    assert not list(tmp_path.glob("bad file*"))


def test_missing_compiler_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UserError, match="no C\\+\\+ compiler"):
        inductor_cache.prepare_cache(devices.select("cpu"))


@pytest.mark.usefixtures("wrapped_compiler")
def test_wrapper_is_not_wrapped_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a wrapper that calls itself without end."""
    path = os.environ["PATH"]
    monkeypatch.setenv(inductor_cache.CACHE_VARIABLE, str(tmp_path / "other"))
    monkeypatch.delenv(inductor_cache.TORCH_CACHE_VARIABLE)
    inductor_cache.prepare_cache(devices.select("cpu"))
    assert os.environ["PATH"] == path
    (tmp_path / "x.cpp").write_text("int x;")
    environment = {"PATH": path}  # nothing else of this process's environment is needed
    subprocess.run(["g++", "-c", "x.cpp", "-o", "x.o"], cwd=tmp_path, env=environment, timeout=240, check=True)
    assert (tmp_path / "x.o").is_file()
