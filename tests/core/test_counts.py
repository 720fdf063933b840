"""Numbers of things in messages."""

import pytest

from trainyard.core.counts import counted


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
