"""The safetensors library reads written files and vice versa, bit for bit, and no corrupt file crashes the reader."""

import json
import random
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save_file
from torch import Tensor

from tests.support.examples import SCALE
from trainyard.checkpoint.safetensors_file import DTYPE_BY_CODE, TensorSpec, encode_header, write_tensor
from trainyard.core.errors import UserError
from trainyard.formats.io.safetensors_reader import open_safetensors

SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (3, 5), (7,), (0,), (4, 0, 2), (2, 3, 4, 5))


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert torch.equal(bits(actual), bits(expected))


def random_bits(dtype: torch.dtype, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """A tensor of random bits (signed zeros, infinities, NaNs); booleans are 0 or 1."""
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def all_dtypes_and_shapes() -> dict[str, Tensor]:
    """Every dtype in every shape, with sizes that leave the next tensor unaligned."""
    generator = torch.Generator().manual_seed(1)
    return {
        f"{code} {shape}": random_bits(dtype, shape, generator)
        for shape in SHAPES
        for code, dtype in DTYPE_BY_CODE.items()
    }


def write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    with path.open("wb") as file:
        file.write(
            encode_header(
                [TensorSpec(name, value.dtype, tuple(value.shape)) for name, value in tensors.items()], metadata or {}
            )
        )
        assert [write_tensor(file, value) for value in tensors.values()] == [value.nbytes for value in tensors.values()]


def test_all_dtypes_of_the_library_are_known() -> None:
    from safetensors.torch import _TYPES

    assert _TYPES.items() <= DTYPE_BY_CODE.items()


def test_the_library_reads_written_files(tmp_path: Path) -> None:
    expected = all_dtypes_and_shapes()
    write(tmp_path / "written", expected, {"format": "pt", "text": 'ä "quoted" \n line'})
    found = load_file(tmp_path / "written")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_same(found[name], value)


def test_files_of_the_library_are_read_in_any_slice(tmp_path: Path) -> None:
    expected = all_dtypes_and_shapes()
    save_file(expected, tmp_path / "by_library", {"format": "pt"})
    found = open_safetensors(tmp_path / "by_library")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, tuple(value.shape))
        assert_same(found[name].read(), value)
    indices = {(3, 5): (slice(1, 3), slice(2, 4)), (2, 3, 4, 5): (slice(1, 2), slice(0, 3), slice(1, 3), slice(4, 5))}
    for shape, index in indices.items():
        for code in DTYPE_BY_CODE:
            assert_same(found[f"{code} {shape}"].read(index), expected[f"{code} {shape}"][index])


def test_opening_reads_no_tensor(tmp_path: Path) -> None:
    """A sparse file of 128 GiB opens at once."""
    path = tmp_path / "large"
    specs = [TensorSpec("a", torch.float32, (4,)), TensorSpec("b", torch.bfloat16, (2**20, 2**16))]
    with path.open("wb") as file:
        file.write(encode_header(specs, {}))
        write_tensor(file, torch.arange(4.0))
        file.truncate(file.tell() + 2**37)
    found = open_safetensors(path)
    assert found["b"].shape == (2**20, 2**16)
    assert found["a"].read().tolist() == [0, 1, 2, 3]
    assert found["b"].read((slice(2**19, 2**19 + 1), slice(5, 7))).tolist() == [[0, 0]]


def test_noncontiguous_tensors_are_written_by_value(tmp_path: Path) -> None:
    value = torch.arange(12.0).view(3, 4)
    write(tmp_path / "file", {"a": value.T, "b": value[:, 1:3]})
    found = load_file(tmp_path / "file")
    assert_same(found["a"], value.T.contiguous())
    assert_same(found["b"], value[:, 1:3].contiguous())


# Corrupt files


def compare_with_library(path: Path) -> None:
    """What the library reads is read with the same values. What it refuses is refused, in one line with the name of the
    file."""
    by_library: dict[str, Tensor] | None = None
    with suppress(SafetensorError):
        by_library = load(path.read_bytes())
    tensors, message = None, ""
    try:
        tensors = {name: lazy.read() for name, lazy in open_safetensors(path).items()}
    except UserError as error:
        message = str(error)
    assert "\n" not in message
    assert (tensors is None) == (by_library is None), message
    assert tensors is not None or str(path) in message
    if by_library is not None and tensors is not None:
        assert tensors.keys() == by_library.keys()
        for name, value in by_library.items():
            assert_same(tensors[name], value)


def sample_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    kinds = {"w": torch.float32, "layers.0.b": torch.bfloat16, "n": torch.int64, "m": torch.bool}
    return {name: random_bits(dtype, (3, 4), generator) for name, dtype in kinds.items()}


def truncated(data: bytearray, rng: random.Random) -> bytes:
    return bytes(data[: rng.randrange(len(data))])


def with_flipped_bits(data: bytearray, rng: random.Random) -> bytes:
    end = 8 + struct.unpack("<Q", data[:8])[0]
    for _ in range(rng.choice((1, 1, 2, 8))):
        data[rng.randrange(end)] ^= 1 << rng.randrange(8)
    return bytes(data)


def with_changed_characters(data: bytearray, rng: random.Random) -> bytes:
    """Replace characters of the header by others that occur in headers: often it stays valid JSON."""
    for _ in range(rng.choice((1, 2, 4))):
        data[rng.randrange(8, 8 + struct.unpack("<Q", data[:8])[0])] = ord(rng.choice('0123456789[]{},:"-.eBFUI '))
    return bytes(data)


def random_bytes(data: bytearray, rng: random.Random) -> bytes:
    noise = rng.randbytes(rng.randrange(200))
    return noise if rng.random() < 0.5 else struct.pack("<Q", rng.randrange(len(noise) + 1)) + noise


def with_changed_table(data: bytearray, rng: random.Random) -> bytes:
    """A valid header with tensors that overlap, leave gaps, repeat each other or end before the file does."""
    end = 8 + struct.unpack("<Q", data[:8])[0]
    table = json.loads(data[8:end])
    for _ in range(rng.choice((1, 1, 2))):
        name, other = (rng.choice(list(table)) for _ in range(2))
        shift, start = rng.choice((-8, -1, 0, 1, 8)), rng.randrange(20)
        moved = [offset + shift for offset in table[name]["data_offsets"]]
        changes = (
            {name: table[name] | {"data_offsets": table[other]["data_offsets"]}},
            {name: table[name] | {"data_offsets": moved}},
            {name: table[other]},
            {name: table[name] | {"shape": [0], "data_offsets": [start, start]}},
            {f"{name} again": table[name]},
        )
        table |= rng.choice(changes)
    metadata: Any = rng.choice(({}, {}, {}, {"a": "b"}, {"a": 1}, None, [], "a"))
    text = json.dumps({"__metadata__": metadata} | table).encode()
    values = data[end:] + bytes(rng.choice((0, 0, 0, 1, 8)))
    return struct.pack("<Q", len(text)) + text + values[: len(values) - rng.choice((0, 0, 0, 12))]


@pytest.mark.parametrize(
    "corrupt", [truncated, with_flipped_bits, with_changed_characters, with_changed_table, random_bytes]
)
def test_corrupt_files(corrupt: Callable[[bytearray, random.Random], bytes], tmp_path: Path) -> None:
    save_file(sample_tensors(), tmp_path / "intact")
    intact = (tmp_path / "intact").read_bytes()
    for seed in range(max(50, round(150 * SCALE))):
        path = tmp_path / f"file-{seed}"
        path.write_bytes(corrupt(bytearray(intact), random.Random(seed)))
        compare_with_library(path)


ENTRY = '{"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]}'


def file_with_entry(**values: Any) -> bytes:
    """A file with this entry in its header, followed by 32 bytes of values."""
    return file_with_header(json.dumps({"w": json.loads(ENTRY) | values}).encode(), 32)


def file_with_header(text: bytes, size: int = 0) -> bytes:
    return struct.pack("<Q", len(text)) + text + bytes(size)


INVALID_FILES: dict[str, bytes] = {
    "float offsets": file_with_entry(data_offsets=[0.0, 32.0]),
    "infinite offset": file_with_entry(data_offsets=[0, 1e400]),
    "string offsets": file_with_entry(data_offsets=["0", "32"]),
    "one offset": file_with_entry(data_offsets=[0]),
    "no offsets": file_with_entry(data_offsets=None),
    "reversed offsets": file_with_entry(data_offsets=[32, 0]),
    "negative offset": file_with_entry(data_offsets=[-32, 0]),
    "offset past the end": file_with_entry(data_offsets=[48, 80]),
    "boolean size": file_with_entry(shape=[True, 8]),
    "float size": file_with_entry(shape=[2.0, 4]),
    "negative sizes": file_with_entry(shape=[-2, -4]),
    "huge empty shape": file_with_entry(shape=[0, 10**30], data_offsets=[0, 0]),
    "many dims": file_with_entry(shape=[1] * 63 + [8]),
    "no shape": file_with_entry(shape=None),
    "string shape": file_with_entry(shape="24"),
    "shape of another size": file_with_entry(shape=[2, 5]),
    "unknown dtype": file_with_entry(dtype="F31"),
    "list as dtype": file_with_entry(dtype=["F32"]),
    "unterminated list": file_with_entry(shape=[2, 4]).replace(b"[2, 4]", b"[" + b"1" * 4),
    "tensors that overlap": file_with_header(f'{{"v": {ENTRY}, "w": {ENTRY}}}'.encode(), 32),
    "two tensors of one name": file_with_header(f'{{"w": {ENTRY}, "w": {ENTRY}}}'.encode(), 32),
    "bytes after the last tensor": file_with_header(f'{{"w": {ENTRY}}}'.encode(), 33),
    "bytes before the first tensor": file_with_header(f'{{"w": {ENTRY}}}'.replace("0, 32", "8, 40").encode(), 40),
    "half of a surrogate pair": file_with_header(f'{{"\\ud800": {ENTRY}}}'.encode(), 32),
    "a size that overflows": file_with_entry(shape=[2**40, 2**40, 0], data_offsets=[0, 0])[:-32],
    "header is a list": file_with_header(b"[1, 2]"),
    "header is a number": file_with_header(b"7"),
    "not JSON": file_with_header(b"{"),
    "not text": file_with_header(b"\xff\xfe\x00"),
    "entry is a number": file_with_header(b'{"w": 1}'),
    "deeply nested header": file_with_header(b"[" * 200_000),
    "a long header": struct.pack("<Q", 2**63) + bytes(64),
    "empty file": b"",
    "three bytes": b"abc",
}


@pytest.mark.parametrize("name", INVALID_FILES)
def test_invalid_files_are_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    path.write_bytes(file_with_entry())
    assert list(open_safetensors(path)) == ["w"]  # each file is invalid for one reason
    path.write_bytes(INVALID_FILES[name])
    with pytest.raises(UserError, match=r"file\.safetensors: not a readable safetensors file: \S") as error:
        open_safetensors(path)
    assert "\n" not in str(error.value)


def test_missing_files_and_directories_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere: no such file"):
        open_safetensors(tmp_path / "nowhere")
    with pytest.raises(UserError, match=rf"^{tmp_path}: not a file$"):
        open_safetensors(tmp_path)


def test_a_file_that_changed_after_opening_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    save_file(sample_tensors(), path)
    found = open_safetensors(path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(UserError, match="changed after it was opened"):
        found["w"].read()
