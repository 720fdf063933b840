"""Megatron's token files: round trips, the reference layout, and one-line errors for invalid files."""

import struct
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.file_damage import EDITS, assert_one_line, mutate
from tests.support.token_files import write_documents
from trainyard.core.errors import UserError
from trainyard.data.formats import megatron_bin
from trainyard.data.formats.megatron_bin import MegatronTokens, MegatronTokensWriter, prefix_of, token_dtype

DOCUMENTS = st.lists(st.lists(st.lists(st.integers(0, 120), max_size=6), max_size=4), max_size=8)
"""Documents of sequences of tokens."""
DTYPES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}
BASE = [[[1, 2, 3]], [[4, 5], [6]], [], [[7, 8, 9, 10]]]


@given(DOCUMENTS, st.sampled_from(sorted(DTYPES)), st.integers(1, 4))
@examples(60)
def test_written_documents_are_read_back(documents: list[list[list[int]]], dtype: str, documents_per_add: int) -> None:
    with TemporaryDirectory() as directory:
        prefix = Path(directory) / "x"
        with patch.object(megatron_bin, "COPY_BYTES", 8):  # two lengths at a time
            write_documents(prefix, documents, dtype, documents_per_add)
        data = MegatronTokens(prefix)
        sequences = [sequence for document in documents for sequence in document]
        assert [data.sequence(index).tolist() for index in range(len(data))] == sequences
        assert np.diff(data.document_bounds).tolist() == [len(document) for document in documents]
        assert data.dtype == dtype
        assert sorted(path.name for path in Path(directory).iterdir()) == ["x.bin", "x.idx"]


def test_index_has_the_reference_layout(tmp_path: Path) -> None:
    write_documents(tmp_path / "x", BASE)
    index = (tmp_path / "x.idx").read_bytes()
    assert index[:9] == b"MMIDIDX\x00\x00"
    assert struct.unpack_from("<QBQQ", index, 9) == (1, 8, 4, 5)
    assert struct.unpack_from("<4i", index, 34) == (3, 2, 1, 4)
    assert struct.unpack_from("<4q", index, 50) == (0, 6, 10, 12)
    assert struct.unpack_from("<5q", index, 82) == (0, 1, 3, 3, 4)
    assert len(index) == 122
    assert (tmp_path / "x.bin").read_bytes() == np.arange(1, 11, dtype="<u2").tobytes()


def test_small_vocabularies_use_uint16() -> None:
    assert [token_dtype(vocab_size) for vocab_size in (257, 65499, 65500, 128000)] == [
        "uint16",
        "uint16",
        "int32",
        "int32",
    ]


@pytest.mark.parametrize("name", ["a.b/x", "a.b/x.bin", "a.b/x.idx"])
def test_prefix_of_either_file_name(name: str) -> None:
    assert prefix_of(Path(name)) == Path("a.b/x")


def test_interrupted_writer_keeps_the_old_files(tmp_path: Path) -> None:
    write_documents(tmp_path / "x", BASE)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def fail() -> None:
        with MegatronTokensWriter(tmp_path / "x", "int32") as writer:
            writer.add(np.zeros(3, np.int32), np.array([3], np.int32), np.array([1]))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def overwrite(offset: int, form: str, value: int) -> Callable[[bytes], bytes]:
    def edit(data: bytes) -> bytes:
        out = bytearray(data)
        struct.pack_into(form, out, offset, value)
        return bytes(out)

    return edit


@pytest.mark.parametrize(
    ("file", "edit", "message"),
    [
        ("idx", lambda data: b"", "not a token index"),
        ("idx", lambda data: b"TNTIDX\x00\x00" + data, "TNTIDX"),
        ("idx", lambda data: data[:20], "too few for an index"),
        ("idx", lambda data: data[:-1], "4 sequences and 5 document entries take 122"),
        ("idx", lambda data: data + b"12", "124 bytes"),
        ("idx", overwrite(9, "<Q", 2), "version 2"),
        ("idx", overwrite(17, "<B", 6), "dtype code 6"),
        ("idx", overwrite(17, "<B", 200), "dtype code 200"),
        ("idx", overwrite(18, "<Q", 2**63), "take"),
        ("idx", overwrite(34, "<i", -1), "sequence 0 has -1 tokens"),
        ("idx", overwrite(34, "<i", 2**31 - 1), "sequence 1 starts at byte 6, the previous one ends at 4294967294"),
        ("idx", overwrite(46, "<i", 5), "10 tokens, but by the index 11"),
        ("idx", overwrite(58, "<q", 7), "sequence 1 starts at byte 7, the previous one ends at 6"),
        ("idx", overwrite(58, "<q", -4), "sequence 1 starts at byte -4"),
        ("idx", overwrite(58, "<q", 2**62), "sequence 1 starts at byte 4611686018427387904"),
        ("idx", overwrite(82, "<q", 1), "do not increase from 0 to 4"),
        ("idx", overwrite(90, "<q", 9), "do not increase from 0 to 4"),
        ("idx", overwrite(114, "<q", 3), "do not increase from 0 to 4"),
        ("bin", lambda data: data[:-1], "not a whole number of uint16 tokens"),
        ("bin", lambda data: data[:-2], "9 tokens, but by the index 10; truncated"),
        ("bin", lambda data: data + b"12", "11 tokens, but by the index 10"),
        ("bin", lambda data: b"", "0 tokens, but by the index 10"),
    ],
)
def test_invalid_files_are_refused(tmp_path: Path, file: str, edit: Callable[[bytes], bytes], message: str) -> None:
    write_documents(tmp_path / "x", BASE)
    path = tmp_path / f"x.{file}"
    path.write_bytes(edit(path.read_bytes()))
    with pytest.raises(UserError, match=message) as caught:
        MegatronTokens(tmp_path / "x")
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "x.") in str(caught.value)


@pytest.mark.parametrize("missing", ["idx", "bin"])
def test_both_files_are_required(tmp_path: Path, missing: str) -> None:
    write_documents(tmp_path / "x", BASE)
    (tmp_path / f"x.{missing}").unlink()
    with pytest.raises(UserError, match=rf"x\.{missing}: no such file"):
        MegatronTokens(tmp_path / "x")


def test_offset_whose_end_overflows_is_refused(tmp_path: Path) -> None:
    write_documents(tmp_path / "x", BASE, "uint8")
    path = tmp_path / "x.idx"
    path.write_bytes(overwrite(58, "<q", 2**63 - 1)(path.read_bytes()))
    with pytest.raises(UserError, match="sequence 1 starts at byte 9223372036854775807"):
        MegatronTokens(tmp_path / "x")


@given(st.integers(0, 7), st.integers(-(2**31), 2**31 - 1))
@examples(60)
def test_one_overwritten_integer_is_refused_when_opening(number: int, value: int) -> None:
    """Lengths and offsets determine each other, so no single wrong one may reach training as other samples."""
    with TemporaryDirectory() as directory:
        write_documents(Path(directory) / "x", BASE)
        path = Path(directory) / "x.idx"
        before = path.read_bytes()
        offset, form = (34 + 4 * number, "<i") if number < 4 else (50 + 8 * (number - 4), "<q")
        path.write_bytes(after := overwrite(offset, form, value)(before))
        if after == before:
            assert len(MegatronTokens(path)) == 4
        else:
            with pytest.raises(UserError, match=r"x\.(idx|bin): ") as caught:
                MegatronTokens(path)
            assert_one_line(caught.value)


def test_multimodal_index_has_one_more_byte_per_sequence(tmp_path: Path) -> None:
    write_documents(tmp_path / "x", BASE)
    path = tmp_path / "x.idx"
    path.write_bytes(path.read_bytes() + bytes(4))
    assert [len(MegatronTokens(tmp_path / "x").sequence(index)) for index in range(4)] == [3, 2, 1, 4]


def reference_read(index: bytes, tokens: bytes) -> list[list[int]]:
    """The sequences by the description of the format alone."""
    _, code, count, _ = struct.unpack_from("<QBQQ", index, 9)
    dtype = np.dtype({number: name for name, number in DTYPES.items()}[code])
    sizes = struct.unpack_from(f"<{count}i", index, 34)
    offsets = struct.unpack_from(f"<{count}q", index, 34 + 4 * count)
    return [
        np.frombuffer(tokens, dtype, size, offset).tolist() if size else []
        for size, offset in zip(sizes, offsets, strict=True)
    ]


@given(st.sampled_from(["idx", "bin"]), st.one_of(EDITS, st.binary(max_size=150)), st.sampled_from(sorted(DTYPES)))
@examples(250)
@example("idx", [("int64", 58, 2**63 - 1)], "uint8")
def test_damaged_files_are_refused_or_read_correctly(file: str, damage: object, dtype: str) -> None:
    with TemporaryDirectory() as directory:
        prefix = Path(directory) / "x"
        write_documents(prefix, BASE, dtype)
        path = Path(f"{prefix}.{file}")
        path.write_bytes(damage if isinstance(damage, bytes) else mutate(path.read_bytes(), damage))
        try:
            data = MegatronTokens(prefix)
        except UserError as error:
            assert_one_line(error)
            return
        sequences = [data.sequence(index).tolist() for index in range(len(data))]
        assert sequences == reference_read(Path(f"{prefix}.idx").read_bytes(), Path(f"{prefix}.bin").read_bytes())
        assert data.document_bounds[-1:].tolist() in ([len(data)], [])
