"""Generated damage to the bytes of a file, and the form of the error that it must cause."""

import zlib
from pathlib import Path

from hypothesis import strategies as st

from trainyard.checkpoint.safetensors_file import TensorSpec, encode_checked_header, parse_header

VALUES = (0, 1, -1, 2**31 - 1, -(2**31), 2**62, 2**63 - 1, -(2**63), 7, 255)
EDITS = st.lists(
    st.tuples(
        st.sampled_from(["cut", "append", "drop", "byte", "bit", "int32", "int64"]),
        st.integers(0, 1 << 20),
        st.sampled_from(VALUES),
    ),
    min_size=1,
    max_size=4,
)


def mutate(data: bytes, edits: list[tuple[str, int, int]]) -> bytes:
    """Apply edits of the form (action, position modulo the length, value)."""
    out = bytearray(data)
    for action, position, value in edits:
        offset = position % (len(out) + 1)
        if action == "cut":
            del out[offset:]
        elif action == "append":
            out += bytes([value & 255]) * (position % 30)
        elif action == "drop":
            del out[offset : offset + 1 + value % 20]
        elif action == "byte":
            out[offset : offset + 1] = bytes([value & 255])
        elif action == "bit" and offset < len(out):
            out[offset] ^= 1 << value % 8
        else:
            size = 4 if action == "int32" else 8
            out[offset : offset + size] = (value % (1 << 8 * size)).to_bytes(size, "little")
    return bytes(out)


def assert_one_line(error: Exception) -> None:
    assert "\n" not in str(error)
    assert str(error)


def renew_checksums(path: Path) -> None:
    """Make the checksums of a changed safetensors file agree with it, as if its writer had made the mistake."""
    data = path.read_bytes()
    entries, _ = parse_header(lambda start, stop: data[start:stop], len(data))
    specs = [TensorSpec(name, entry.dtype, entry.shape) for name, entry in entries.items()]
    checksums = {name: zlib.crc32(data[entry.start : entry.stop]) for name, entry in entries.items()}
    start = min(entry.start for entry in entries.values())
    path.write_bytes(encode_checked_header(specs, checksums, {}) + data[start:])
