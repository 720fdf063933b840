"""Our safetensors files are the library's and its files are ours, bit for bit; no file, however broken, is a crash."""

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

from trainyard.checkpoint.io.safetensors_file import DTYPE_BY_CODE, encode_header, open_safetensors, write_tensor
from trainyard.core.errors import UserError

SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (3, 5), (7,), (0,), (4, 0, 2), (2, 3, 4, 5))


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def same(found: Tensor, wanted: Tensor) -> None:
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    assert torch.equal(bits(found), bits(wanted))


def any_bits(dtype: torch.dtype, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Every bit at random (signs of zero, infinities, not-a-numbers); truth values are 0 or 1."""
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def all_kinds() -> dict[str, Tensor]:
    """Every dtype in every shape, of widths that leave the next one unaligned."""
    generator = torch.Generator().manual_seed(1)
    return {
        f"{code} {shape}": any_bits(dtype, shape, generator)
        for shape in SHAPES
        for code, dtype in DTYPE_BY_CODE.items()
    }


def write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    with path.open("wb") as file:
        file.write(
            encode_header([(name, value.dtype, tuple(value.shape)) for name, value in tensors.items()], metadata or {})
        )
        assert [write_tensor(file, value) for value in tensors.values()] == [value.nbytes for value in tensors.values()]


def test_all_that_the_library_knows_is_known() -> None:
    from safetensors.torch import _TYPES

    assert _TYPES.items() <= DTYPE_BY_CODE.items()


def test_the_library_reads_what_we_write(tmp_path: Path) -> None:
    wanted = all_kinds()
    write(tmp_path / "ours", wanted, {"format": "pt", "words": 'ä "quoted" \n line'})
    found = load_file(tmp_path / "ours")
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        same(found[name], value)


def test_we_read_what_the_library_writes_and_any_box_of_it(tmp_path: Path) -> None:
    wanted = all_kinds()
    save_file(wanted, tmp_path / "theirs", {"format": "pt"})
    found = open_safetensors(tmp_path / "theirs")
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, tuple(value.shape))
        same(found[name].read(), value)
    boxes = {(3, 5): (slice(1, 3), slice(2, 4)), (2, 3, 4, 5): (slice(1, 2), slice(0, 3), slice(1, 3), slice(4, 5))}
    for shape, box in boxes.items():
        for code in DTYPE_BY_CODE:
            same(found[f"{code} {shape}"].read(box), wanted[f"{code} {shape}"][box])


def test_opening_reads_no_tensor(tmp_path: Path) -> None:
    """A file of which but the beginning exists is opened at once; its end is a hole of no bytes on the disk."""
    path = tmp_path / "great"
    with path.open("wb") as file:
        file.write(encode_header([("a", torch.float32, (4,)), ("b", torch.bfloat16, (2**20, 2**16))], {}))
        write_tensor(file, torch.arange(4.0))
        file.truncate(file.tell() + 2**37)
    found = open_safetensors(path)
    assert found["b"].shape == (2**20, 2**16)
    assert found["a"].read().tolist() == [0, 1, 2, 3]
    assert found["b"].read((slice(2**19, 2**19 + 1), slice(5, 7))).tolist() == [[0, 0]]


def test_a_tensor_that_is_not_contiguous_is_written_as_it_reads(tmp_path: Path) -> None:
    value = torch.arange(12.0).view(3, 4)
    write(tmp_path / "file", {"a": value.T, "b": value[:, 1:3]})
    found = load_file(tmp_path / "file")
    same(found["a"], value.T.contiguous())
    same(found["b"], value[:, 1:3].contiguous())


# Broken files


def attempt(path: Path) -> None:
    """What the library reads is read, with its values. All else is, or is a UserError of one line with the file's name:
    the library also wants no byte between tensors or after them."""
    theirs: dict[str, Tensor] | None = None
    with suppress(SafetensorError):
        theirs = load(path.read_bytes())
    found, line = None, ""
    try:
        found = {name: lazy.read() for name, lazy in open_safetensors(path).items()}
    except UserError as error:
        line = str(error)
    assert "\n" not in line
    assert found is not None or (theirs is None and str(path) in line)
    if theirs is not None and found is not None:
        assert found.keys() == theirs.keys()
        for name, value in theirs.items():
            same(found[name], value)


def sample() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    kinds = {"w": torch.float32, "layers.0.b": torch.bfloat16, "n": torch.int64, "m": torch.bool}
    return {name: any_bits(dtype, (3, 4), generator) for name, dtype in kinds.items()}


def truncated(data: bytearray, draw: random.Random) -> bytes:
    return bytes(data[: draw.randrange(len(data))])


def flipped(data: bytearray, draw: random.Random) -> bytes:
    end = 8 + struct.unpack("<Q", data[:8])[0]
    for _ in range(draw.choice((1, 1, 2, 8))):
        data[draw.randrange(end)] ^= 1 << draw.randrange(8)
    return bytes(data)


def typed_over(data: bytearray, draw: random.Random) -> bytes:
    """Characters of the table for others that a table has: it often stays one."""
    for _ in range(draw.choice((1, 2, 4))):
        data[draw.randrange(8, 8 + struct.unpack("<Q", data[:8])[0])] = ord(draw.choice('0123456789[]{},:"-.eBFUI '))
    return bytes(data)


def noise(data: bytearray, draw: random.Random) -> bytes:
    made = draw.randbytes(draw.randrange(200))
    return made if draw.random() < 0.5 else struct.pack("<Q", draw.randrange(len(made) + 1)) + made


@pytest.mark.parametrize("harm", [truncated, flipped, typed_over, noise])
def test_harmed_files(harm: Callable[[bytearray, random.Random], bytes], tmp_path: Path) -> None:
    save_file(sample(), tmp_path / "whole")
    whole = (tmp_path / "whole").read_bytes()
    for seed in range(150):
        path = tmp_path / f"file-{seed}"
        path.write_bytes(harm(bytearray(whole), random.Random(seed)))
        attempt(path)


def table(**values: Any) -> bytes:
    """A file whose table says so, before 64 bytes of values."""
    text = json.dumps({"w": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]} | values}).encode()
    return struct.pack("<Q", len(text)) + text + bytes(64)


def raw(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


LIES: dict[str, bytes] = {
    "fractions": table(data_offsets=[0.0, 32.0]),
    "a fraction as large as all": table(data_offsets=[0, 1e400]),
    "words": table(data_offsets=["0", "32"]),
    "one end": table(data_offsets=[0]),
    "no ends": table(data_offsets=None),
    "backwards": table(data_offsets=[32, 0]),
    "before the file": table(data_offsets=[-32, 0]),
    "past the file": table(data_offsets=[48, 80]),
    "truth for a size": table(shape=[True, 8]),
    "a fraction for a size": table(shape=[2.0, 4]),
    "less than nothing": table(shape=[-2, -4]),
    "none of very many": table(shape=[0, 10**30], data_offsets=[0, 0]),
    "many dims": table(shape=[1] * 63 + [8]),
    "no shape": table(shape=None),
    "a word for a shape": table(shape="24"),
    "another size": table(shape=[2, 5]),
    "no such dtype": table(dtype="F31"),
    "a list for a dtype": table(dtype=["F32"]),
    "digits without end": table(shape=[2, 4]).replace(b"[2, 4]", b"[" + b"1" * 4),
    "not a table": raw(b"[1, 2]"),
    "a number": raw(b"7"),
    "no JSON": raw(b"{"),
    "not text": raw(b"\xff\xfe\x00"),
    "tensors that are none": raw(b'{"w": 1}'),
    "a deep table": raw(b"[" * 200_000),
    "a long header": struct.pack("<Q", 2**63) + bytes(64),
    "nothing": b"",
    "three bytes": b"abc",
}


@pytest.mark.parametrize("lie", LIES)
def test_tables_that_lie_are_refused(lie: str, tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    path.write_bytes(LIES[lie])
    with pytest.raises(UserError, match=r"file\.safetensors: not a readable safetensors file: \S") as error:
        open_safetensors(path)
    assert "\n" not in str(error.value)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere: no such file"):
        open_safetensors(tmp_path / "nowhere")
    with pytest.raises(UserError, match=rf"^{tmp_path}: not a file$"):
        open_safetensors(tmp_path)


def test_a_file_that_changes_after_it_was_opened_is_not_mixed_up(tmp_path: Path) -> None:
    path = tmp_path / "file"
    save_file(sample(), path)
    found = open_safetensors(path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(UserError, match="has changed since it was opened"):
        found["w"].read()
