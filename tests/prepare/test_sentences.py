"""Sentence splitting: typical cases, no loss of text, linear time."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from trainyard.prepare.sentences import split_sentences

CASES = {
    "titles": ["Mr. Smith met Dr. Jones on St. James Street.", "They spoke."],
    "initials": ["J. R. R. Tolkien wrote it.", "So did C. S. Lewis.", "J. A. I. Champion did not."],
    "latin": ["Fruit, e.g. Apples, i.e. Malus, was sold.", "Tea, cf. Coffee, was not."],
    "country": ["He came to the U.S. Senate in May.", "He left the U.S.", "The rest stayed."],
    "company": ["Acme Inc. Boston sold it.", "It was made by Acme Inc.", "They closed."],
    "decimals": ["It cost 3.14 dollars, or .5 of that.", "Version 2.0.1 came next."],
    "ellipsis": ["He waited... and waited.", "Nobody came...", "He left…", "Then it rained."],
    "quotes": ['"Stop!" he said.', '"Why?"', "“It is late.”", "(It was.)", "He went."],
    "several": ["What?!", "No!!!", "Yes."],
    "marks": ["It was so.[1][23]", "It still is.[4]"],
    "name with a stop": ["Yahoo! is a company.", "So was AOL."],
    "numbered": ["1. First things come first.", "Then others."],
    "letter": ["It has vitamin C.", "It also has iron."],
    "time": ["At 5 p.m. John left.", "At 6 p.m.", "He came back."],
    "hindi": ["यह पहला है।", "यह दूसरा है।"],
}
TEXTS = st.text(st.sampled_from("aAbI1 .?!…。！\n\r\t\"')]»「」([ U.S. Mr. \u2028\x1c\x85"), max_size=80)


@pytest.mark.parametrize("sentences", CASES.values(), ids=CASES.keys())
def test_typical_sentences(sentences: list[str]) -> None:
    assert split_sentences(" ".join(sentences)) == sentences


def test_chinese_and_japanese_stops_need_no_space() -> None:
    assert split_sentences("他来了。她走了！“真的吗？”好。") == ["他来了。", "她走了！", "“真的吗？”", "好。"]
    assert split_sentences("「行こう。」と言った。雨だ。") == ["「行こう。」", "と言った。", "雨だ。"]


def test_a_line_ends_a_sentence() -> None:
    assert split_sentences("A heading\n\nSome text goes\r\nhere. More  \n") == [
        "A heading",
        "Some text goes",
        "here.",
        "More",
    ]
    assert split_sentences(" \n\t ") == split_sentences("") == []


def test_keep_newlines_attaches_white_space_to_the_sentence_before() -> None:
    assert split_sentences("\nOne.  Two.\n\nThree", keep_newlines=True) == ["\nOne.  ", "Two.\n\n", "Three"]


@examples(400)
@given(TEXTS | st.text(max_size=60))
def test_no_text_is_lost(text: str) -> None:
    sentences = split_sentences(text)
    end = 0
    for sentence in sentences:
        assert sentence == sentence.strip() != ""
        start = text.index(sentence, end)
        assert not text[end:start].strip()
        end = start + len(sentence)
    assert not text[end:].strip()
    with_newlines = split_sentences(text, keep_newlines=True)
    assert "".join(with_newlines) == (text if text.strip() else "")
    assert [sentence.strip() for sentence in with_newlines] == sentences


@pytest.mark.parametrize("unit", [".", " ", ". ", '.""', ".[1", "\n", "A. ", "(", "1. A ", "Mr. ", "。"])
def test_time_is_linear(unit: str) -> None:
    start = time.monotonic()
    split_sentences("a. " + unit * 100_000)
    assert time.monotonic() - start < 20
