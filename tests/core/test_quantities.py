"""Counts and sizes as text: nouns follow their number, and no size hides the difference it is about."""

import pytest

from trainyard.core.quantities import counted, shortage_text, size_text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1536, "1.5 KiB"),
        (5 << 20, "5.0 MiB"),
        (3 << 30, "3.0 GiB"),
        (2 << 50, "2,048.0 TiB"),
    ],
)
def test_a_size_has_the_unit_that_shows_it(size: int, text: str) -> None:
    assert size_text(size) == text


def test_sizes_that_read_the_same_are_given_to_the_byte() -> None:
    assert shortage_text(3 << 20, 2 << 20) == "needs 3.0 MiB, but only 2.0 MiB are free"
    assert shortage_text((3 << 30) + 1, 3 << 30) == "needs 3,221,225,473 B, but only 3,221,225,472 B are free"


@pytest.mark.parametrize(
    ("number", "noun", "form", "text"),
    [
        (1, "file", "", "1 file"),
        (0, "file", "", "0 files"),
        (2, "micro batch", "", "2 micro batches"),
        (3, "entry", "", "3 entries"),
        (4, "key", "", "4 keys"),
        (12345, "token", ",", "12,345 tokens"),
        (1, "token", ",", "1 token"),
    ],
)
def test_nouns_follow_their_number(number: int, noun: str, form: str, text: str) -> None:
    assert counted(number, noun, form) == text
