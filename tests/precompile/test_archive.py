"""Packs of compiled code: what goes in comes out, and nothing else ever does."""

import fcntl
import io
import json
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainyard.core.errors import UserError
from trainyard.precompile import cache_entries
from trainyard.precompile.archive import MANIFEST, pack_cache, unpack_cache

FACTS = {"torch": "2.13.0", "compiler": "g++ 12", "architecture": "x86_64-avx2"}
names = st.lists(st.text("abcxyz012", min_size=1, max_size=8), min_size=1, max_size=3).map("/".join)
trees = st.dictionaries(names, st.binary(max_size=200), min_size=1, max_size=6).filter(
    lambda tree: not any(other.startswith(f"{name}/") for name in tree for other in tree)
)


def write(place: Path, tree: dict[str, bytes]) -> None:
    for name, content in tree.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(content)


def read(place: Path) -> dict[str, bytes]:
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}


def take(source: Path, place: Path) -> None:
    unpack_cache(source, place, FACTS, lambda done: None)


@settings(max_examples=40)
@given(trees)
def test_what_goes_in_comes_out(tmp_path_factory: pytest.TempPathFactory, tree: dict[str, bytes]) -> None:
    base = tmp_path_factory.mktemp("pack")
    write(base / "from", tree)
    pack_cache(base / "from", base / "a.tar", list(tree), FACTS)
    take(base / "a.tar", base / "to")
    assert read(base / "to") == tree


@settings(max_examples=120)
@given(trees, st.floats(0, 1, exclude_max=True), st.integers(1, 255))
def test_a_changed_byte_changes_no_file(
    tmp_path_factory: pytest.TempPathFactory, tree: dict[str, bytes], where: float, by: int
) -> None:
    """It is refused, with nothing put in place, or was in what a tar does not use."""
    base = tmp_path_factory.mktemp("pack")
    write(base / "from", tree)
    pack_cache(base / "from", base / "a.tar", list(tree), FACTS)
    content = bytearray((base / "a.tar").read_bytes())
    content[int(where * len(content))] ^= by
    (base / "a.tar").write_bytes(content)
    try:
        take(base / "a.tar", base / "to")
    except UserError:
        assert not (base / "to").exists() or read(base / "to") == {}
    else:
        assert read(base / "to") == tree


@settings(max_examples=60)
@given(trees, st.floats(0, 1, exclude_max=True))
def test_a_cut_pack_is_refused_or_whole(
    tmp_path_factory: pytest.TempPathFactory, tree: dict[str, bytes], share: float
) -> None:
    base = tmp_path_factory.mktemp("pack")
    write(base / "from", tree)
    pack_cache(base / "from", base / "a.tar", list(tree), FACTS)
    content = (base / "a.tar").read_bytes()
    (base / "a.tar").write_bytes(content[: int(share * len(content))])
    try:
        take(base / "a.tar", base / "to")
    except UserError:
        assert not (base / "to").exists() or read(base / "to") == {}
    else:
        assert read(base / "to") == tree


def forged(path: Path, members: dict[str, bytes], listed: dict[str, bytes] | None = None, link: str = "") -> Path:
    """A tar by hand, with a list that fits it."""
    from hashlib import sha256

    said = members if listed is None else listed
    files = {name: (len(content), sha256(content).hexdigest()) for name, content in said.items()}
    text = json.dumps({"format": 1, "fingerprint": FACTS, "files": files}).encode()
    with tarfile.open(path, "w") as tar:
        for name, content in {MANIFEST: text, **members}.items():
            about = tarfile.TarInfo(name)
            about.size = len(content)
            if link and name != MANIFEST:
                about.type, about.linkname, about.size = tarfile.SYMTYPE, link, 0
            tar.addfile(about, io.BytesIO(content))
    return path


@pytest.mark.parametrize("name", ["../out", "a/../../out", "/tmp/out", "a\\..\\out"])
def test_no_file_leaves_the_cache(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="would leave the cache"):
        take(forged(tmp_path / "a.tar", {name: b"x"}), tmp_path / "deep" / "to")
    assert not list(tmp_path.rglob("out"))


def test_links_and_unlisted_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not in its list"):
        take(forged(tmp_path / "a.tar", {"a": b""}, link="/etc/passwd"), tmp_path / "to")
    with pytest.raises(UserError, match="not in its list"):
        take(forged(tmp_path / "a.tar", {"a": b"x", "b": b"y"}, {"a": b"x"}), tmp_path / "to")
    with pytest.raises(UserError, match="1 files are missing"):
        take(forged(tmp_path / "a.tar", {"a": b"x"}, {"a": b"x", "b": b"y"}), tmp_path / "to")
    assert read(tmp_path / "to") == {}


def test_another_toolchain_is_said(tmp_path: Path) -> None:
    source = forged(tmp_path / "a.tar", {"a": b"x"})
    with pytest.raises(UserError, match=r"torch: 2\.13\.0, here 2\.14\.0"):
        unpack_cache(source, tmp_path / "to", {**FACTS, "torch": "2.14.0"}, lambda done: None)
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("content", [b"", b"not a tar", bytes(10_240)])
def test_what_is_no_pack_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.tar").write_bytes(content)
    with pytest.raises(UserError, match=r"a\.tar: not a pack"):
        take(tmp_path / "a.tar", tmp_path / "to")


def test_verify_finds_entries_that_are_not_what_their_name_says(tmp_path: Path) -> None:
    content = b"a compiled graph"
    path = tmp_path / "fxgraph" / "ab" / "fabc" / cache_entries.entry_hash(content)
    write(tmp_path, {str(path.relative_to(tmp_path)): content, "ab/cabc.py": b"code"})
    assert cache_entries.find_damage(tmp_path) == {}
    path.write_bytes(content[:-1])
    assert list(cache_entries.find_damage(tmp_path)) == [path]


def test_a_lock_in_use_stays(tmp_path: Path) -> None:
    write(tmp_path, {"locks/a.lock": b"", "locks/b.lock": b""})
    with (tmp_path / "locks" / "a.lock").open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert cache_entries.clear_locks(tmp_path) == 1
        assert [path.name for path in cache_entries.active_locks(tmp_path)] == ["a.lock"]
    assert cache_entries.clear_locks(tmp_path) == 1
