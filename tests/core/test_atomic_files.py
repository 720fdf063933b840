"""Atomic files and directories: complete under their final name, or absent."""

import errno
import os
from functools import partial
from pathlib import Path

import pytest

from tests.support.kill_points import killed_before_change
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


def fill(path: Path, name: str) -> None:
    with atomic_directory(path) as temporary:
        (temporary / name).touch()


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_kill_while_a_directory_is_replaced_loses_nothing(
    can_exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill before each call that changes the file system. Where two names cannot be exchanged in one step, the old
    directory may have another name until the next call."""
    if not can_exchange:
        monkeypatch.setattr("trainyard.core.atomic_files._exchange", lambda first, second: False)
    contents = []
    for change in range(1, 100):
        path = tmp_path / str(change) / "out"
        fill(path, "old")
        if not killed_before_change(partial(fill, path, "new"), change):
            break
        assert path.exists() or not can_exchange
        existing = path if path.exists() else path.with_name(".out.old")
        contents += [entry.name for entry in existing.iterdir()]

        def fail(path: Path = path) -> None:
            with atomic_directory(path):
                raise OSError("disk full")

        with pytest.raises(OSError, match="disk full"):
            fail()
        assert [entry.name for entry in path.iterdir()] == contents[-1:]
        assert list(path.parent.iterdir()) == [path]
    assert sorted(contents, reverse=True) == contents
    assert {"old", "new"} == set(contents)


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
