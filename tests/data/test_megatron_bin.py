"""Megatron's token files: what is written comes back, and a file that cannot be right is named in one line."""

import struct
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.data.file_damage import EDITS, in_one_line, mutate
from trainyard.core.errors import UserError
from trainyard.data.formats import megatron_bin
from trainyard.data.formats.megatron_bin import MegatronTokens, MegatronTokensWriter, prefix_of, token_dtype

DOCUMENTS = st.lists(st.lists(st.lists(st.integers(0, 120), max_size=6), max_size=4), max_size=8)
"""Documents of sequences of tokens."""
DTYPES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}
BASE = [[[1, 2, 3]], [[4, 5], [6]], [], [[7, 8, 9, 10]]]


def write(prefix: Path, documents: list[list[list[int]]], dtype: str = "uint16", together: int = 1) -> None:
    """`together`: documents handed over at a time."""
    with MegatronTokensWriter(prefix, dtype) as writer:
        for start in range(0, len(documents), together):
            some = documents[start : start + together]
            rows = [row for document in some for row in document]
            tokens = np.array([token for row in rows for token in row], dtype)
            sizes = np.array([len(row) for row in rows], np.int32)
            writer.add(tokens, sizes, np.array([len(document) for document in some], np.int64))


@given(DOCUMENTS, st.sampled_from(sorted(DTYPES)), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_what_is_written_comes_back(documents: list[list[list[int]]], dtype: str, together: int) -> None:
    with TemporaryDirectory() as directory:
        prefix = Path(directory) / "x"
        with patch.object(megatron_bin, "BLOCK", 8):  # two sizes at a time
            write(prefix, documents, dtype, together)
        data = MegatronTokens(prefix)
        rows = [row for document in documents for row in document]
        assert [data.sequence(number).tolist() for number in range(len(data))] == rows
        assert np.diff(data.document_bounds).tolist() == [len(document) for document in documents]
        assert data.dtype == dtype
        assert data.contiguous is True
        assert sorted(path.name for path in Path(directory).iterdir()) == ["x.bin", "x.idx"]


def test_the_index_is_laid_out_as_the_reference_reads_it(tmp_path: Path) -> None:
    write(tmp_path / "x", BASE)
    index = (tmp_path / "x.idx").read_bytes()
    assert index[:9] == b"MMIDIDX\x00\x00"
    assert struct.unpack_from("<QBQQ", index, 9) == (1, 8, 4, 5)
    assert struct.unpack_from("<4i", index, 34) == (3, 2, 1, 4)
    assert struct.unpack_from("<4q", index, 50) == (0, 6, 10, 12)
    assert struct.unpack_from("<5q", index, 82) == (0, 1, 3, 3, 4)
    assert len(index) == 122
    assert (tmp_path / "x.bin").read_bytes() == np.arange(1, 11, dtype="<u2").tobytes()


def test_small_vocabularies_take_two_bytes() -> None:
    assert [token_dtype(vocab) for vocab in (257, 65499, 65500, 128000)] == ["uint16", "uint16", "int32", "int32"]


@pytest.mark.parametrize("name", ["a.b/x", "a.b/x.bin", "a.b/x.idx"])
def test_any_of_the_names_will_do(name: str) -> None:
    assert prefix_of(Path(name)) == Path("a.b/x")


def test_nothing_is_left_of_a_set_that_was_not_finished(tmp_path: Path) -> None:
    write(tmp_path / "x", BASE)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def fail() -> None:
        with MegatronTokensWriter(tmp_path / "x", "int32") as writer:
            writer.add(np.zeros(3, np.int32), np.array([3], np.int32), np.array([1]))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def put(place: int, form: str, value: int) -> Callable[[bytes], bytes]:
    def edit(data: bytes) -> bytes:
        out = bytearray(data)
        struct.pack_into(form, out, place, value)
        return bytes(out)

    return edit


@pytest.mark.parametrize(
    ("file", "edit", "words"),
    [
        ("idx", lambda data: b"", "not an index of tokens"),
        ("idx", lambda data: b"TNTIDX\x00\x00" + data, "TNTIDX"),
        ("idx", lambda data: data[:20], "too few for an index"),
        ("idx", lambda data: data[:-1], "4 sequences and 5 document entries take 122"),
        ("idx", lambda data: data + b"12", "124 bytes"),
        ("idx", put(9, "<Q", 2), "version 2"),
        ("idx", put(17, "<B", 6), "dtype code 6"),
        ("idx", put(17, "<B", 200), "dtype code 200"),
        ("idx", put(18, "<Q", 2**63), "take"),
        ("idx", put(34, "<i", -1), "sequence 0 is said to be"),
        ("idx", put(34, "<i", 2**31 - 1), "sequence 0 is said to be"),
        ("idx", put(58, "<q", 7), "not multiples of 2"),
        ("idx", put(58, "<q", -4), "sequence 1 is said to be"),
        ("idx", put(58, "<q", 2**62), "sequence 1 is said to be"),
        ("idx", put(82, "<q", 1), "do not rise from 0 to 4"),
        ("idx", put(90, "<q", 9), "do not rise from 0 to 4"),
        ("idx", put(114, "<q", 3), "do not rise from 0 to 4"),
        ("bin", lambda data: data[:-1], "not whole uint16 tokens"),
        ("bin", lambda data: data[:-2], "sequence 3 is said to be 6 to 10"),
        ("bin", lambda data: b"", "sequence 0 is said to be"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, file: str, edit: Callable[[bytes], bytes], words: str) -> None:
    write(tmp_path / "x", BASE)
    path = tmp_path / f"x.{file}"
    path.write_bytes(edit(path.read_bytes()))
    with pytest.raises(UserError, match=words) as caught:
        MegatronTokens(tmp_path / "x")
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "x.") in str(caught.value)


@pytest.mark.parametrize("gone", ["idx", "bin"])
def test_both_files_are_needed(tmp_path: Path, gone: str) -> None:
    write(tmp_path / "x", BASE)
    (tmp_path / f"x.{gone}").unlink()
    with pytest.raises(UserError, match=rf"x\.{gone}: no such file"):
        MegatronTokens(tmp_path / "x")


def test_a_start_so_large_that_its_end_is_beyond_64_bits(tmp_path: Path) -> None:
    write(tmp_path / "x", BASE, "uint8")
    path = tmp_path / "x.idx"
    path.write_bytes(put(58, "<q", 2**63 - 1)(path.read_bytes()))
    with pytest.raises(UserError, match="sequence 1 is said to be"):
        MegatronTokens(tmp_path / "x")


def test_sequences_need_not_lie_in_order(tmp_path: Path) -> None:
    write(tmp_path / "x", BASE)
    path = tmp_path / "x.idx"
    path.write_bytes(put(58, "<q", 0)(path.read_bytes()))
    data = MegatronTokens(tmp_path / "x")
    assert data.sequence(1).tolist() == [1, 2]
    assert data.contiguous is False


def test_sets_of_more_than_text_have_a_byte_more_for_each_sequence(tmp_path: Path) -> None:
    write(tmp_path / "x", BASE)
    path = tmp_path / "x.idx"
    path.write_bytes(path.read_bytes() + bytes(4))
    assert [len(MegatronTokens(tmp_path / "x").sequence(number)) for number in range(4)] == [3, 2, 1, 4]


def expected(index: bytes, tokens: bytes) -> list[list[int]]:
    """A reading of the two files by their description alone."""
    _, code, count, _ = struct.unpack_from("<QBQQ", index, 9)
    dtype = np.dtype({number: name for name, number in DTYPES.items()}[code])
    sizes = struct.unpack_from(f"<{count}i", index, 34)
    offsets = struct.unpack_from(f"<{count}q", index, 34 + 4 * count)
    return [
        np.frombuffer(tokens, dtype, size, offset).tolist() if size else []
        for size, offset in zip(sizes, offsets, strict=True)
    ]


@given(st.sampled_from(["idx", "bin"]), st.one_of(EDITS, st.binary(max_size=150)), st.sampled_from(sorted(DTYPES)))
@settings(max_examples=250, deadline=None)
@example("idx", [("long", 58, 2**63 - 1)], "uint8")
def test_damaged_files_are_refused_or_read_right(file: str, damage: object, dtype: str) -> None:
    with TemporaryDirectory() as directory:
        prefix = Path(directory) / "x"
        write(prefix, BASE, dtype)
        path = Path(f"{prefix}.{file}")
        path.write_bytes(damage if isinstance(damage, bytes) else mutate(path.read_bytes(), damage))
        try:
            data = MegatronTokens(prefix)
        except UserError as error:
            in_one_line(error)
            return
        found = [data.sequence(number).tolist() for number in range(len(data))]
        assert found == expected(Path(f"{prefix}.idx").read_bytes(), Path(f"{prefix}.bin").read_bytes())
        assert data.document_bounds[-1:].tolist() in ([len(data)], [])
