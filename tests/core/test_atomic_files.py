"""Atomic files and directories: complete under their final name, or absent."""

import errno
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from trainyard.core.atomic_files import atomic_directory, atomic_file, atomic_write_text, fsync_directory


def test_a_file_appears_only_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with atomic_file(path) as file:
        file.write(b"1")
        assert not path.exists()
    assert path.read_bytes() == b"1"
    assert path.stat().st_mode & 0o777 == 0o644
    atomic_write_text(path, "2")
    assert path.read_text() == "2"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_keeps_the_old_file_and_leaves_no_temporary_one(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    atomic_write_text(path, "old")

    def write_half() -> None:
        with atomic_file(path) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_directory_replaces_the_old_one_only_if_the_block_succeeds(tmp_path: Path) -> None:
    path = tmp_path / "out"
    for content, succeeds in (("first", True), ("second", False), ("third", True)):
        try:
            with atomic_directory(path) as temporary:
                (temporary / content).touch()
                if not succeeds:
                    raise OSError("disk full")
        except OSError:
            assert [entry.name for entry in path.iterdir()] == ["first"]
    assert [entry.name for entry in path.iterdir()] == ["third"]
    assert list(tmp_path.iterdir()) == [path]


def replace_and_die(path: Path, renames: int) -> None:
    """Replace a directory, and kill this process before the given number of renames."""
    rename, done = os.rename, 0

    def rename_or_die(*args: str) -> None:
        nonlocal done
        if done == renames:
            os.kill(os.getpid(), signal.SIGKILL)
        done += 1
        rename(*args)

    os.rename = rename_or_die  # type: ignore[assignment]
    with atomic_directory(path) as temporary:
        (temporary / "new").touch()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(("renames", "content"), [(0, "old"), (1, "old"), (2, "new")])
def test_a_kill_while_a_directory_is_replaced_loses_nothing(renames: int, content: str, tmp_path: Path) -> None:
    """Guards against removing the old directory before the new one has its name."""
    path = tmp_path / "out"
    with atomic_directory(path) as temporary:
        (temporary / "old").touch()
    process = multiprocessing.get_context("fork").Process(target=replace_and_die, args=(path, renames))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    existing = path if path.exists() else tmp_path / ".out.old"
    assert [entry.name for entry in existing.iterdir()] == [content]

    def fail() -> None:
        with atomic_directory(path):
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert [entry.name for entry in path.iterdir()] == [content]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EBADF, errno.ENOTSUP])
def test_directories_of_file_systems_without_directory_fsync(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some network file systems refuse to fsync a directory; any other error, such as a full disk, counts."""

    def fsync(handle: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fsync)
    fsync_directory(tmp_path)
    code = errno.EIO
    with pytest.raises(OSError, match="Input/output error"):
        fsync_directory(tmp_path)
    with pytest.raises(FileNotFoundError):
        fsync_directory(tmp_path / "no such directory")
