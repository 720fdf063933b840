"""Damage to the bytes of a file, as generated cases, and what has to be said about it."""

from hypothesis import strategies as st

NUMBERS = (0, 1, -1, 2**31 - 1, -(2**31), 2**62, 2**63 - 1, -(2**63), 7, 255)
EDITS = st.lists(
    st.tuples(
        st.sampled_from(["cut", "more", "drop", "byte", "bit", "short", "long"]),
        st.integers(0, 1 << 20),
        st.sampled_from(NUMBERS),
    ),
    min_size=1,
    max_size=4,
)


def mutate(data: bytes, edits: list[tuple[str, int, int]]) -> bytes:
    """Each edit: what to do, where (modulo the length), and a number to do it with."""
    out = bytearray(data)
    for what, place, number in edits:
        at = place % (len(out) + 1)
        if what == "cut":
            del out[at:]
        elif what == "more":
            out += bytes([number & 255]) * (place % 30)
        elif what == "drop":
            del out[at : at + 1 + number % 20]
        elif what == "byte":
            out[at : at + 1] = bytes([number & 255])
        elif what == "bit" and at < len(out):
            out[at] ^= 1 << number % 8
        else:
            size = 4 if what == "short" else 8
            out[at : at + size] = (number % (1 << 8 * size)).to_bytes(size, "little")
    return bytes(out)


def in_one_line(error: Exception) -> None:
    assert "\n" not in str(error)
    assert str(error)
