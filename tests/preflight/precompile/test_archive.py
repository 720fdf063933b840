"""Archives of compiled code: they restore exactly what was packed, and nothing else."""

import fcntl
import io
import json
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from trainyard.core.errors import UserError
from trainyard.preflight.precompile import cache_entries
from trainyard.preflight.precompile.archive import MANIFEST, pack_cache, unpack_cache

FINGERPRINT = {"torch": "2.13.0", "compiler": "g++ 12", "architecture": "x86_64-avx2"}
names = st.lists(st.text("abcxyz012", min_size=1, max_size=8), min_size=1, max_size=3).map("/".join)
trees = st.dictionaries(names, st.binary(max_size=200), min_size=1, max_size=6).filter(
    lambda tree: not any(other.startswith(f"{name}/") for name in tree for other in tree)
)


def write(directory: Path, tree: dict[str, bytes]) -> None:
    for name, content in tree.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)


def read(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def unpack(source: Path, directory: Path) -> None:
    unpack_cache(source, directory, FINGERPRINT, lambda done: None)


@examples(40)
@given(trees)
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, tree: dict[str, bytes]) -> None:
    base = tmp_path_factory.mktemp("pack")
    write(base / "from", tree)
    pack_cache(base / "from", base / "a.tar", list(tree), FINGERPRINT)
    unpack(base / "a.tar", base / "to")
    assert read(base / "to") == tree


@examples(120)
@given(trees, st.floats(0, 1, exclude_max=True), st.integers(1, 255))
def test_changed_byte_never_changes_a_file(
    tmp_path_factory: pytest.TempPathFactory, tree: dict[str, bytes], position: float, by: int
) -> None:
    """The archive is rejected without unpacking anything, or the byte was in unused space of the tar."""
    base = tmp_path_factory.mktemp("pack")
    write(base / "from", tree)
    pack_cache(base / "from", base / "a.tar", list(tree), FINGERPRINT)
    content = bytearray((base / "a.tar").read_bytes())
    content[int(position * len(content))] ^= by
    (base / "a.tar").write_bytes(content)
    try:
        unpack(base / "a.tar", base / "to")
    except UserError:
        assert not (base / "to").exists() or read(base / "to") == {}
    else:
        assert read(base / "to") == tree


@examples(60)
@given(trees, st.floats(0, 1, exclude_max=True))
def test_truncated_archive_is_rejected_or_complete(
    tmp_path_factory: pytest.TempPathFactory, tree: dict[str, bytes], fraction: float
) -> None:
    base = tmp_path_factory.mktemp("pack")
    write(base / "from", tree)
    pack_cache(base / "from", base / "a.tar", list(tree), FINGERPRINT)
    content = (base / "a.tar").read_bytes()
    (base / "a.tar").write_bytes(content[: int(fraction * len(content))])
    try:
        unpack(base / "a.tar", base / "to")
    except UserError:
        assert not (base / "to").exists() or read(base / "to") == {}
    else:
        assert read(base / "to") == tree


def forged_archive(
    path: Path, members: dict[str, bytes], listed: dict[str, bytes] | None = None, link: str = ""
) -> Path:
    """A handmade tar with a matching manifest."""
    from hashlib import sha256

    listed_files = members if listed is None else listed
    files = {name: (len(content), sha256(content).hexdigest()) for name, content in listed_files.items()}
    text = json.dumps({"format": 1, "fingerprint": FINGERPRINT, "files": files}).encode()
    with tarfile.open(path, "w") as tar:
        for name, content in {MANIFEST: text, **members}.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            if link and name != MANIFEST:
                info.type, info.linkname, info.size = tarfile.SYMTYPE, link, 0
            tar.addfile(info, io.BytesIO(content))
    return path


@pytest.mark.parametrize("name", ["../out", "a/../../out", "/tmp/out", "a\\..\\out"])
def test_no_file_leaves_the_cache(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="would leave the cache"):
        unpack(forged_archive(tmp_path / "a.tar", {name: b"x"}), tmp_path / "deep" / "to")
    assert not list(tmp_path.rglob("out"))


@pytest.mark.parametrize(
    "names",
    [["a", "a/b"], ["a/b", "a"], ["n" * 300], ["/".join(["deep"] * 300)], ["a//b"], ["\ud800"], ["caf\u00e9"]],
    ids=["file and directory", "directory and file", "long name", "long path", "two forms", "no text", "not ASCII"],
)
def test_names_that_are_no_files_are_one_line_errors(tmp_path: Path, names: list[str]) -> None:
    """Guards against tracebacks of the file system, and against a cache of which a part was unpacked."""
    members = {name.encode(errors="replace").decode(): b"x" for name in names}
    with pytest.raises(UserError, match=r"a\.tar: .*; refusing to unpack$") as error:
        unpack(forged_archive(tmp_path / "a.tar", members, dict.fromkeys(names, b"x")), tmp_path / "to")
    assert len(str(error.value)) < 200 + len(str(tmp_path))
    assert read(tmp_path / "to") == {}


def test_what_the_file_system_refuses_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "to" / "a").mkdir(parents=True)
    with pytest.raises(UserError, match=r"cannot be unpacked to .*: .*directory"):
        unpack(forged_archive(tmp_path / "a.tar", {"a": b"x"}), tmp_path / "to")


def test_deeply_nested_manifest_is_unreadable(tmp_path: Path) -> None:
    text = b"[" * 200_000
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        info = tarfile.TarInfo(MANIFEST)
        info.size = len(text)
        tar.addfile(info, io.BytesIO(text))
    with pytest.raises(UserError, match="unreadable manifest"):
        unpack(tmp_path / "a.tar", tmp_path / "to")


def test_links_and_unlisted_files_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not in the manifest"):
        unpack(forged_archive(tmp_path / "a.tar", {"a": b""}, link="/etc/passwd"), tmp_path / "to")
    with pytest.raises(UserError, match="not in the manifest"):
        unpack(forged_archive(tmp_path / "a.tar", {"a": b"x", "b": b"y"}, {"a": b"x"}), tmp_path / "to")
    with pytest.raises(UserError, match="lacks 1 file, such as"):
        unpack(forged_archive(tmp_path / "a.tar", {"a": b"x"}, {"a": b"x", "b": b"y"}), tmp_path / "to")
    assert read(tmp_path / "to") == {}


def test_different_toolchain_is_named(tmp_path: Path) -> None:
    source = forged_archive(tmp_path / "a.tar", {"a": b"x"})
    with pytest.raises(UserError, match=r"torch: 2\.13\.0, here 2\.14\.0"):
        unpack_cache(source, tmp_path / "to", {**FINGERPRINT, "torch": "2.14.0"}, lambda done: None)
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("content", [b"", b"not a tar", bytes(10_240)])
def test_other_files_are_rejected(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.tar").write_bytes(content)
    with pytest.raises(UserError, match=r"a\.tar: not an archive"):
        unpack(tmp_path / "a.tar", tmp_path / "to")


def test_damage_includes_entries_that_do_not_match_their_hash(tmp_path: Path) -> None:
    content = b"a compiled graph"
    path = tmp_path / "fxgraph" / "ab" / "fabc" / cache_entries.entry_hash(content)
    write(tmp_path, {str(path.relative_to(tmp_path)): content, "ab/cabc.py": b"code"})
    assert cache_entries.find_damage(tmp_path) == {}
    path.write_bytes(content[:-1])
    assert list(cache_entries.find_damage(tmp_path)) == [path]


def test_clear_locks_keeps_held_locks(tmp_path: Path) -> None:
    write(tmp_path, {"locks/a.lock": b"", "locks/b.lock": b""})
    with (tmp_path / "locks" / "a.lock").open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert cache_entries.clear_locks(tmp_path) == 1
        assert [path.name for path in cache_entries.active_locks(tmp_path)] == ["a.lock"]
    assert cache_entries.clear_locks(tmp_path) == 1
