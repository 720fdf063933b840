"""Where compiled code is kept: which directory, what counts as damaged, what goes first when it grows too large."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainyard import compat, devices
from trainyard.compile import inductor_cache
from trainyard.core.errors import UserError

MOUNTS = """\
/dev/root / ext4 rw,relatime 0 0
fs-1.efs:/ /home nfs4 rw,vers=4.1 0 0
10.0.0.1@tcp:/fsx /fsx lustre rw,flock 0 0
/dev/nvme1n1 /home/local\\040disk xfs rw 0 0
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    place = tmp_path_factory.mktemp("library")
    (place / "a.c").write_text("int twice(int x) { return 2 * x; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "a.so", "a.c"], cwd=place, check=True)
    return (place / "a.so").read_bytes()


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
def test_the_file_system_is_the_closest_mount(path: str, kind: str) -> None:
    assert inductor_cache.file_system(Path(path), MOUNTS) == kind


@pytest.mark.parametrize(("kind", "shared"), [("ext4", True), ("nfs4", False), ("lustre", False)])
def test_hosts_share_a_directory_only_where_locks_hold(
    kind: str, shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(inductor_cache.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.delenv(inductor_cache.TORCH_CACHE_VARIABLE, raising=False)
    monkeypatch.setattr(inductor_cache, "file_system", lambda path: kind)
    places = set()
    for host in ("one", "two"):
        monkeypatch.setattr("platform.node", lambda host=host: host)
        places.add(inductor_cache.cache_dir(devices.select("cpu")))
    assert len(places) == (1 if shared else 2)
    assert all(place.is_relative_to(tmp_path) for place in places)


def test_a_place_that_torch_chose_is_nobodys_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch sets the variable when its compiler is imported, which kernels may do before a run asks."""
    monkeypatch.setenv(inductor_cache.CACHE_VARIABLE, str(tmp_path / "ours"))
    monkeypatch.setenv(inductor_cache.TORCH_CACHE_VARIABLE, compat.default_inductor_dir())
    assert inductor_cache.user_cache_dir() is None
    assert inductor_cache.cache_dir(devices.select("cpu")).is_relative_to(tmp_path / "ours")
    monkeypatch.setenv(inductor_cache.TORCH_CACHE_VARIABLE, str(tmp_path / "mine"))
    assert inductor_cache.cache_dir(devices.select("cpu")) == inductor_cache.user_cache_dir() == tmp_path / "mine"


def test_what_code_depends_on_changes_its_directory() -> None:
    facts = inductor_cache.fingerprint(devices.select("cpu"))
    assert {"torch", "triton", "compiler", "architecture"} <= facts.keys()
    names = {inductor_cache.toolchain_name({**facts, key: "other"}) for key in facts}
    assert len(names | {inductor_cache.toolchain_name(facts)}) == len(facts) + 1


@pytest.mark.parametrize("text", ["many", "0", "-1", "inf", "nan"])
def test_a_limit_that_is_none_is_one_line(text: str) -> None:
    with pytest.raises(UserError, match=f"{inductor_cache.LIMIT_VARIABLE}={text}: must be a number"):
        inductor_cache.size_limit({inductor_cache.LIMIT_VARIABLE: text})


def test_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    now = time.time()
    for number in range(10):
        path = tmp_path / f"{number % 3}" / f"{number}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(1000))
        os.utime(path, (now - 1000 * number, now - 10**6))  # read at different times, written at the same
    assert inductor_cache.trim(tmp_path, 10_000) == 0
    assert inductor_cache.trim(tmp_path, 6_000) == 6_000
    assert sorted(path.name for path in inductor_cache.list_files(tmp_path)) == ["0", "1", "2", "3"]


def test_a_whole_library_is_not_damaged(library: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.so").write_bytes(library)
    (tmp_path / "a.cpp").write_text("half a sour")
    assert inductor_cache.damaged_files(tmp_path) == []


@settings(max_examples=50)
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_library_cut_anywhere_is_damaged(
    library: bytes, tmp_path_factory: pytest.TempPathFactory, share: float
) -> None:
    place = tmp_path_factory.mktemp("cut")
    path = place / "a.so"
    path.write_bytes(library[: int(len(library) * share)])
    assert inductor_cache.damaged_files(place) == [path]


def test_what_killed_compilers_left_is_found_when_it_is_old(tmp_path: Path) -> None:
    names = ["x.so.12.part", ".12.34.tmp", "fresh.so.13.part"]
    for name in names:
        (tmp_path / name).write_text("half")
    for name in names[:2]:
        os.utime(tmp_path / name, (0, 0))
    assert {path.name for path in inductor_cache.damaged_files(tmp_path)} == set(names[:2])


def test_a_library_gets_its_name_when_it_is_whole(tmp_path: Path) -> None:
    """torch's compiler is asked in a process that is killed as soon as anything has the library's name."""
    program = f"""
import os, signal, threading, time
from pathlib import Path
from trainyard import compat
compat.build_whole()
from torch._inductor import cpp_builder
target = Path({str(tmp_path / "big.so")!r})
def watch():
    while not target.exists():
        time.sleep(0.0005)
    os.killpg(os.getpgrp(), signal.SIGKILL)
threading.Thread(target=watch, daemon=True).start()
cpp_builder.run_compile_cmd(f"g++ -shared -fPIC {tmp_path / "big.o"} -o {{target}}", {str(tmp_path)!r})
"""
    lines = [f'extern "C" double f{i}(double x) {{ return x * {i}; }}' for i in range(1500)]
    (tmp_path / "big.cpp").write_text("\n".join(lines))
    subprocess.run(["g++", "-c", "-fPIC", "-o", "big.o", "big.cpp"], cwd=tmp_path, check=True)
    subprocess.run([sys.executable, "-c", program], start_new_session=True, check=False)
    killed = (tmp_path / "big.so").read_bytes()
    (tmp_path / "big.so").unlink()
    compat.install_atomic_cpp_builds()
    subprocess.run(["g++", "-shared", "-fPIC", "big.o", "-o", "big.so"], cwd=tmp_path, check=True)
    assert killed == (tmp_path / "big.so").read_bytes()


def test_no_compiler_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UserError, match="no C\\+\\+ compiler"):
        inductor_cache.prepare_cache(devices.select("cpu"))
