"""Atomic files and directories: complete under their final name, or absent."""

from pathlib import Path

import pytest

from trainyard.core.atomic_files import atomic_directory, atomic_file, atomic_write_text


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
