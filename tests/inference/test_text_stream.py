"""A stream of tokens becomes the text that decoding all of them gives, and no half character or stop string shows."""

from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from tests.support.examples import examples
from trainyard.data.text.tokenizer import ByteTokenizer, FastTokenizer, SentencePieceTokenizer, Tokenizer
from trainyard.inference.text.text_stream import MAX_PENDING, REPLACEMENT, TextStream

CORPUS = ["the naïve cat sat on the 日本語 mat 🙂 and the dog did not, did it?", "the the cat cat  the\n\n\tmat"] * 50
TEXT = st.text(st.sampled_from("the cat  \n,.?ïé日本語語🙂👍🏽\u0301z"), max_size=40)


def byte_level_bpe(_: Path) -> Tokenizer:
    fast = Fast(models.BPE())
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["</s>"], initial_alphabet=alphabet)  # type: ignore[call-arg]
    fast.train_from_iterator(CORPUS, trainer)
    return FastTokenizer(fast, None, "test")


def llama2_bpe(_: Path) -> Tokenizer:
    """Spaces as ▁, rare characters as byte tokens, and the decoder of Llama 2's tokenizer.json."""
    vocab = {"</s>": 0, "<unk>": 1} | {f"<0x{byte:02X}>": byte + 2 for byte in range(256)}
    for piece in [*"▁thecas", "th", "he", "▁th", "▁the", "ca", "at", "▁c", "▁cat"]:
        vocab.setdefault(piece, len(vocab))
    merges = [("t", "h"), ("▁", "th"), ("▁th", "e"), ("a", "t"), ("▁", "c"), ("▁c", "at")]
    fast = Fast(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    fast.decoder = decoders.Sequence(steps)
    return FastTokenizer(fast, None, "test")


def sentencepiece_unigram(directory: Path) -> Tokenizer:
    prefix = directory / "pieces"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_prefix=prefix, vocab_size=290, byte_fallback=True, minloglevel=2
    )
    return SentencePieceTokenizer(prefix.with_suffix(".model"), None)


def word_piece(_: Path) -> Tokenizer:
    words = ["[UNK]", "[SEP]", "the", "cat", "c", "##a", "##t", ",", ".", "?", "t", "##h", "##e", "日", "本", "語"]
    fast = Fast(models.WordPiece({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    return FastTokenizer(fast, None, "test")


MAKERS: list[Callable[[Path], Tokenizer]] = [
    lambda _: ByteTokenizer(),
    byte_level_bpe,
    llama2_bpe,
    sentencepiece_unigram,
    word_piece,
]
NAMES = ["bytes", "byte-level", "llama2", "sentencepiece", "wordpiece"]


@pytest.fixture(scope="module", params=MAKERS, ids=NAMES)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    made: Tokenizer = request.param(tmp_path_factory.mktemp("tokenizer"))
    return made


def shown_parts(stream: TextStream, tokens: list[int]) -> list[str]:
    return [*(stream.push(token) for token in tokens), stream.finish()]


def test_the_stop_string_that_ends_first_wins() -> None:
    """Also if one token has both of them, in any order of the request."""
    words = ["[UNK]", "[SEP]", "one two three four"]
    fast = Fast(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer = FastTokenizer(fast, None, "test")
    for stop in [("two", "four"), ("four", "two"), ("e two", "o", "four"), ("three four", "two")]:
        stream = TextStream(tokenizer, stop)
        ends_first = min((words[2].index(text) + len(text), words[2].index(text)) for text in stop)[1]
        assert stream.push(2) == words[2][:ends_first], stop
        assert stream.stopped


@examples(400)
@given(text=TEXT)
def test_parts_join_to_the_decoded_text(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode([text])[0].tolist()
    expected = tokenizer.decode(tokens)
    stream = TextStream(tokenizer)
    parts = shown_parts(stream, tokens)
    assert "".join(parts) == expected
    assert stream.decoded_length == stream.shown_length == len(expected)
    if REPLACEMENT not in expected:
        assert not any(REPLACEMENT in part for part in parts)


@examples(400)
@given(
    data=st.binary(max_size=60)
    | st.lists(st.sampled_from([b"\xf0\x9f\x98", b"\x80", b"a", "é".encode()])).map(b"".join)
)
def test_invalid_utf8_is_shown_as_decoding_all_of_it_shows_it(data: bytes) -> None:
    parts = shown_parts(TextStream(ByteTokenizer()), list(data))
    assert "".join(parts) == data.decode(errors="replace")


@examples(400)
@given(data=st.binary(max_size=60))
def test_text_waits_for_few_tokens_and_costs_the_same_for_any_length(tokenizer: Tokenizer, data: bytes) -> None:
    """Whatever the tokens are, the decoded window stays short."""
    windows: list[int] = []

    class Counting(ByteTokenizer):
        vocab_size, end_id = tokenizer.vocab_size, tokenizer.end_id

        def decode(self, tokens: list[int]) -> str:
            windows.append(len(tokens))
            return tokenizer.decode(tokens)

    stream = TextStream(Counting())
    for number in data * 3:
        stream.push(number % tokenizer.vocab_size)
    assert max(windows, default=0) <= 2 * MAX_PENDING + 1
    assert len(windows) <= 8 * len(data * 3)


@examples(600)
@given(text=TEXT, stops=st.lists(st.text(st.sampled_from("the ca日語🙂"), min_size=1, max_size=5), max_size=4))
def test_stop_strings_end_the_text_before_them(tokenizer: Tokenizer, text: str, stops: list[str]) -> None:
    tokens = tokenizer.encode([text])[0].tolist()
    full = tokenizer.decode(tokens)
    ends = [end for end in range(len(full) + 1) if any(full[:end].endswith(stop) for stop in stops)]
    matched = next((stop for stop in sorted(stops, key=len)[::-1] if ends and full[: ends[0]].endswith(stop)), None)
    stream = TextStream(tokenizer, tuple(stops))
    shown = ""
    for token in tokens:
        shown += stream.push(token)
        assert full.startswith(shown)
        assert not any(stop in shown for stop in stops)
    shown += stream.finish()
    assert stream.stopped == (matched is not None)
    assert shown == (full[: ends[0] - len(matched)] if matched else full)
    assert stream.push(tokens[0] if tokens else 0) == "" or not stream.stopped


def test_examples() -> None:
    tokenizer = ByteTokenizer()
    emoji = TextStream(tokenizer)
    assert [emoji.push(byte) for byte in "a🙂".encode()] == ["a", "", "", "", "🙂"]
    assert shown_parts(TextStream(tokenizer), list("\ufffd日".encode()))[-2:] == ["\ufffd日", ""]
    stream = TextStream(tokenizer, ("\nuser:",))
    assert [stream.push(byte) for byte in b"x\nuz\nuser:"] == ["x", "", "", "\nuz", "", "", "", "", "", ""]
    assert stream.stopped
    assert stream.finish() == ""
    held = TextStream(tokenizer, ("END",))
    assert [held.push(byte) for byte in b"EN"] == ["", ""]
    assert held.finish() == "EN"


def test_sentencepiece_spaces_between_tokens_are_kept(tmp_path: Path) -> None:
    tokenizer = llama2_bpe(tmp_path)
    the = tokenizer.token_id("▁the")
    assert the is not None
    stream = TextStream(tokenizer)
    assert [stream.push(the), stream.push(the)] == ["the", " the"]
