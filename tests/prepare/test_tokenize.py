"""Text to token files: the bytes of Megatron's algorithm, from any kind of input, for any number of workers."""

import bz2
import codecs
import gzip
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet
from reference import ReferenceGpt2Encoder, reference_token_files
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from tests.support.examples import examples
from tests.support.forkserver import ForkServer
from trainyard.cli.console import SkipReporter
from trainyard.core.errors import UserError
from trainyard.data.formats import documents
from trainyard.data.formats.documents import UnreadableRecord
from trainyard.data.formats.megatron_bin import MegatronTokens
from trainyard.data.loading.demo_corpus import make_stories
from trainyard.data.text import gpt2_fast_bpe
from trainyard.data.text.gpt2_fast_bpe import FastGpt2Encoder
from trainyard.data.text.tokenizer import TokenizerSpec, load_tokenizer
from trainyard.prepare.tokenize import TokenizeOptions, tokenize_files

UNUSUAL_TEXTS = [
    "don't I'll we've you're it's he'd I'm 'tis 'S 'LL ''s  's\n's\t'll'll'x's",
    "  two  spaces   and\n\n\nlines \t tabs\u00a0\u2003wide\u3000 end   ",
    "naïve café 東京 ２０２４ ½ ²³ Ⅷ ١٢٣ 𝒳𝒴 🤖🤖👩‍👩‍👧 e\u0301 ﬁ",
    "a1b2 3.14 x_y __init__ $100 (a)[b]{c} <|endoftext|> \x00\x01\x1c\x85 \u200b",
    "averyveryverylongwordthatdoesnotfit pneumonoultramicroscopic 123456789012345678901234567890",
    "",
    " ",
    "\n",
    "'",
    "x",
]


@pytest.fixture(scope="module")
def gpt2_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a small vocab.json and merges.txt, in the order of training."""
    directory = tmp_path_factory.mktemp("gpt2")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([*UNUSUAL_TEXTS, *make_stories(50)], trainer)
    tokenizer.model.save(str(directory))
    return directory


def gpt2_spec(gpt2_files: Path) -> TokenizerSpec:
    return TokenizerSpec("gpt2", str(gpt2_files / "vocab.json"), str(gpt2_files / "merges.txt"))


def reference_encoder(gpt2_files: Path) -> ReferenceGpt2Encoder:
    return ReferenceGpt2Encoder(gpt2_files / "vocab.json", gpt2_files / "merges.txt")


FRAGMENTS = st.sampled_from(
    ["'", "s", "'s", "'ll", "'re", "t", " ", "  ", "\n", "\t", "é", "東", "1", "½", "!", "…", "_", "A", "'t"]
)
TEXTS = st.lists(
    st.one_of(
        st.lists(FRAGMENTS, max_size=12).map("".join),
        st.text(st.characters(exclude_categories=["Cs", "Cn"]), max_size=20),
    ),
    max_size=6,
)


@given(TEXTS)
@examples(300)
def test_encoder_equals_the_reference(gpt2_files: Path, texts: list[str]) -> None:
    tokenizer = load_tokenizer(gpt2_spec(gpt2_files))
    tokens, counts = tokenizer.encode(texts)
    expected = [reference_encoder(gpt2_files).encode(text) for text in texts]
    assert counts.tolist() == [len(ids) for ids in expected]
    assert tokens.tolist() == [token for ids in expected for token in ids]


def test_full_word_table_and_small_batches(gpt2_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that starts over and batches of any size give the same tokens."""
    long_words = [" ".join(letter * length for letter in "ab") for length in range(16, 40)]
    texts = [*UNUSUAL_TEXTS, *make_stories(30), *long_words] * 2
    expected = [token for text in texts for token in reference_encoder(gpt2_files).encode(text)]
    for table_tokens, characters in ((1 << 20, 1 << 19), (1 << 20, 50), (200, 50), (0, 50)):
        monkeypatch.setattr(gpt2_fast_bpe, "MAX_TABLE_TOKENS", table_tokens)
        monkeypatch.setattr(gpt2_fast_bpe, "BATCH_CHARACTERS", characters)
        tokenizer = load_tokenizer(gpt2_spec(gpt2_files))
        assert isinstance(tokenizer.gpt2_encoder, FastGpt2Encoder)
        assert tokenizer.encode(texts)[0].tolist() == expected
        assert len(tokenizer.gpt2_encoder.words.token_ids) < table_tokens + 1000


def test_text_of_long_words_only(gpt2_files: Path) -> None:
    """Long words are looked up like all others."""
    for texts in (["averyveryverylongwordindeed" * 3], ["a", "averyveryverylongwordindeed" * 50, "b"]):
        tokens, _ = load_tokenizer(gpt2_spec(gpt2_files)).encode(texts)
        assert tokens.tolist() == [token for text in texts for token in reference_encoder(gpt2_files).encode(text)]


def write_json_lines(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text, "title": text[:5]}) + "\n" for text in texts))


def run(paths: list[Path], prefix: Path, options: TokenizeOptions, workers: int = 1) -> list[UnreadableRecord]:
    unreadable: list[UnreadableRecord] = []
    tokenize_files(paths, prefix, options, workers, unreadable.append, lambda *_: None)
    return unreadable


@pytest.mark.parametrize("append", [False, True])
def test_files_equal_the_reference_for_any_number_of_workers(
    gpt2_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, append: bool
) -> None:
    texts = [*UNUSUAL_TEXTS, *make_stories(40)]
    write_json_lines(tmp_path / "a.jsonl", texts)
    monkeypatch.setattr(documents, "SLICE_BYTES", 700)
    encoder = reference_encoder(gpt2_files)
    end = [encoder.token_ids["<|endoftext|>"]] if append else []
    expected = reference_token_files([[encoder.encode(text) + end] for text in texts if text], "<u2", 8)
    for workers in (1, 3):
        run(
            [tmp_path / "a.jsonl"], tmp_path / "out", TokenizeOptions(gpt2_spec(gpt2_files), append_eod=append), workers
        )
        for data, suffix in zip(expected, (".bin", ".idx"), strict=True):
            assert (tmp_path / f"out_text_document{suffix}").read_bytes() == data
    assert not list(tmp_path.glob(".*"))


def test_every_kind_of_input_gives_the_same_tokens(
    gpt2_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    texts = [text for text in [*UNUSUAL_TEXTS, *make_stories(30)] if text]
    write_json_lines(tmp_path / "a.jsonl", texts)
    data = (tmp_path / "a.jsonl").read_bytes()
    (tmp_path / "b.json").write_bytes(data.rstrip(b"\n"))  # no newline at the end
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(data))
    with pa.output_stream(str(tmp_path / "d.jsonl.zst"), compression="zstd") as out:
        out.write(data)
    half = data.index(b"\n", len(data) // 2) + 1  # pbzip2 writes several streams
    (tmp_path / "h.jsonl.bz2").write_bytes(bz2.compress(data[:half]) + bz2.compress(data[half:]))
    (tmp_path / "i.jsonl").write_bytes(codecs.BOM_UTF8 + data)
    (tmp_path / "j.jsonl.gz").write_bytes(gzip.compress(data[:half] + codecs.BOM_UTF8 + data[half:]))
    parquet.write_table(pa.table({"id": range(len(texts)), "text": texts}), tmp_path / "e.parquet", row_group_size=7)
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(str(tmp_path / "f"), num_shards=2)
    (tmp_path / "g" / "more").mkdir(parents=True)
    for name in ("notes.md", ".hidden.txt", "more/text.txt"):  # left out
        (tmp_path / "g" / name).write_text("not a document")
    for number, text in enumerate(texts):
        bom = codecs.BOM_UTF8 if number % 2 else b""
        (tmp_path / "g" / f"{number:04}.txt").write_bytes(bom + text.encode())
    monkeypatch.setattr(documents, "SLICE_BYTES", 500)
    tokens = {}
    for path in sorted(tmp_path.glob("[a-j]*")):
        inputs = documents.resolve_inputs([str(path)])
        assert run(inputs, tmp_path / f"out-{path.name}", TokenizeOptions(gpt2_spec(gpt2_files)), 1) == []
        tokens[path.name] = (tmp_path / f"out-{path.name}_text_document.bin").read_bytes()
        assert documents.total_bytes(inputs) > 0
    assert len(tokens) == 10
    assert len(set(tokens.values())) == 1


def test_truncated_dataset_is_refused(gpt2_files: Path, tmp_path: Path) -> None:
    """Arrow itself reads a stream without its end marker as if it were complete."""
    import datasets

    datasets.Dataset.from_dict({"text": make_stories(5)}).save_to_disk(str(tmp_path / "a"))
    file = next((tmp_path / "a").glob("*.arrow"))
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(UserError, match="truncated"):
        run([tmp_path / "a"], tmp_path / "out", TokenizeOptions(gpt2_spec(gpt2_files)))
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_inputs_are_names_or_globs(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "a[1].jsonl"):
        (tmp_path / name).touch()
    assert documents.resolve_inputs([str(tmp_path / "a[1].jsonl")]) == [tmp_path / "a[1].jsonl"]
    assert documents.resolve_inputs([str(tmp_path / "[ab].jsonl")]) == [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]


def test_directory_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("text")
    with pytest.raises(UserError, match=r"a directory without files of a supported kind; supported: JSON lines"):
        documents.resolve_inputs([str(tmp_path)])


def test_sentences_become_sequences(gpt2_files: Path, tmp_path: Path) -> None:
    write_json_lines(tmp_path / "a.jsonl", ["One is here. Two is there! Is three?", "", "Alone."])
    options = TokenizeOptions(gpt2_spec(gpt2_files), append_eod=True, split_sentences=True)
    run([tmp_path / "a.jsonl"], tmp_path / "out", options)
    data = MegatronTokens(tmp_path / "out_text_sentence")
    assert data.document_bounds.tolist() == [0, 3, 4]
    tokenizer = load_tokenizer(gpt2_spec(gpt2_files))
    assert [tokenizer.decode(data.sequence(index).tolist()) for index in range(4)] == [
        "One is here.",
        "Two is there!",
        "Is three?<|endoftext|>",
        "Alone.<|endoftext|>",
    ]


def test_each_text_key_gets_its_own_files(gpt2_files: Path, tmp_path: Path) -> None:
    write_json_lines(tmp_path / "a.jsonl", ["some longer text"])
    run([tmp_path / "a.jsonl"], tmp_path / "out", TokenizeOptions(gpt2_spec(gpt2_files), ("text", "title")))
    tokenizer = load_tokenizer(gpt2_spec(gpt2_files))
    texts = [
        tokenizer.decode(MegatronTokens(tmp_path / f"out_{key}_document").sequence(0).tolist())
        for key in ("text", "title")
    ]
    assert texts == ["some longer text", "some "]


def test_sentencepiece_model(tmp_path: Path) -> None:
    import sentencepiece

    (tmp_path / "text").write_text("\n".join(make_stories(300)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(tmp_path / "tokenizer"), vocab_size=150, minloglevel=2
    )
    texts = make_stories(5)
    write_json_lines(tmp_path / "a.jsonl", texts)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    expected = reference_token_files([[[*processor.encode(text), processor.eos_id()]] for text in texts], "<u2", 8)
    for path in (tmp_path / "tokenizer.model", tmp_path):  # the file, or its directory
        run([tmp_path / "a.jsonl"], tmp_path / "out", TokenizeOptions(TokenizerSpec(str(path)), append_eod=True))
        assert (tmp_path / "out_text_document.bin").read_bytes() == expected[0]
    (tmp_path / "bad.model").write_bytes(b"not a model")
    with pytest.raises(UserError, match="not a SentencePiece model"):
        load_tokenizer(TokenizerSpec(str(tmp_path / "bad.model")))


@pytest.mark.parametrize("lowercase", [True, False])
def test_wordpiece_equals_transformers(tmp_path: Path, lowercase: bool) -> None:
    from transformers import BertTokenizerFast

    pieces = ["the", "The", "fox", "##es", "jump", "##ed", ",", ".", "na", "##ive", "##ï", "##ve", "1", "##2"]
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *pieces]
    (tmp_path / "vocab.txt").write_text("\n".join(vocab) + "\n")
    tokenizer = load_tokenizer(TokenizerSpec("wordpiece", str(tmp_path / "vocab.txt"), lowercase=lowercase))
    reference = BertTokenizerFast(vocab=str(tmp_path / "vocab.txt"), do_lower_case=lowercase)
    texts = ["The foxes jumped, naïve. 12", "", "the quick"]
    tokens, counts = tokenizer.encode(texts)
    expected = [reference.encode(text, add_special_tokens=False) for text in texts]
    assert counts.tolist() == [len(ids) for ids in expected]
    assert tokens.tolist() == [token for ids in expected for token in ids]
    assert tokenizer.end_id == vocab.index("[SEP]")
    (tmp_path / "vocab.txt").write_text("the\nfox\n")
    with pytest.raises(UserError, match=r"not a (BERT|WordPiece) vocabulary"):
        load_tokenizer(TokenizerSpec("wordpiece", str(tmp_path / "vocab.txt")))


def test_large_vocabulary_uses_int32(tmp_path: Path) -> None:
    tokenizer = Tokenizer(
        models.WordLevel({f"w{number}": number for number in range(65_500)} | {"</s>": 65_500}, unk_token="w0")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write_json_lines(tmp_path / "a.jsonl", ["w1 w65499"])
    run([tmp_path / "a.jsonl"], tmp_path / "out", TokenizeOptions(TokenizerSpec(str(tmp_path)), append_eod=True))
    data = MegatronTokens(tmp_path / "out_text_document")
    assert data.dtype == np.int32
    assert data.tokens.tolist() == [1, 65_499, 65_500]


def test_unreadable_lines_are_skipped_or_fatal(
    gpt2_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    valid = [json.dumps({"text": f"document {number}"}).encode() for number in range(7)]
    invalid = [b"{", b'{"text": "\\ud800"}', b"[1]", b'{"text": 5}', b'{"other": "x"}', b'{"text": "\xff"}', b"null"]
    lines = [line for pair in zip(valid, invalid, strict=True) for line in pair]
    options = TokenizeOptions(gpt2_spec(gpt2_files))
    for name, data in (("a.jsonl", b"\n".join(lines)), ("b.jsonl.gz", gzip.compress(b"\n".join(lines) + b"\n"))):
        path = tmp_path / name
        path.write_bytes(data)
        monkeypatch.setattr(documents, "SLICE_BYTES", 40)
        unreadable = run([path], tmp_path / "out", options)
        assert [record.location for record in unreadable] == [f"line {number}" for number in range(2, 15, 2)]
        assert len(MegatronTokens(tmp_path / "out_text_document")) == 7
        with pytest.raises(UserError, match=f"{name}: line 2: not JSON"):
            tokenize_files([path], tmp_path / "strict", options, 1, SkipReporter(strict=True), lambda *_: None)
        assert not list(tmp_path.glob("*strict*"))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", b'[{"text": "x"}]', "one JSON array"),
        ("a.jsonl", codecs.BOM_UTF8 + b'[{"text": "x"}]', "one JSON array"),
        ("a.jsonl", codecs.BOM_UTF8, "no document with text"),
        ("a.csv", b"text", "unsupported kind of file"),
        ("a.jsonl.gz", b"not gzip", "cannot be decompressed"),
        ("a.jsonl.bz2", b"not bzip2", "cannot be decompressed"),
        ("a.jsonl.bz2", bz2.compress(b'{"text": "x"}\n' * 5000)[:-20], "cannot be decompressed"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 5000)[:-20], "cannot be decompressed"),
        ("a.parquet", b"not parquet", "not a Parquet file"),
        ("a.jsonl", b'{"text": ""}\n', "no document with text"),
        ("a.jsonl", b"", "no document with text"),
    ],
)
def test_unreadable_files_are_one_line_errors(
    gpt2_files: Path, tmp_path: Path, name: str, data: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=message) as caught:
        run(documents.resolve_inputs([str(tmp_path / name)]), tmp_path / "out", TokenizeOptions(gpt2_spec(gpt2_files)))
    assert "\n" not in str(caught.value)
    assert not [path for path in tmp_path.iterdir() if path.name != name]


@given(
    st.one_of(
        st.binary(max_size=200),
        st.lists(
            st.sampled_from([b'{"text": "a"}', b"{}", b"\n", b'"', b"\xff", b"[", b"\\u", b"\x00"]), max_size=9
        ).map(b"".join),
    ),
    st.sampled_from(["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.txt"]),
)
@examples(250)
def test_random_bytes_are_read_or_refused(
    gpt2_files: Path, tmp_path_factory: pytest.TempPathFactory, data: bytes, name: str
) -> None:
    path = tmp_path_factory.mktemp("fuzz", numbered=True) / name
    path.write_bytes(data)
    with suppress(UserError):
        run([path], path.parent / "out", TokenizeOptions(gpt2_spec(gpt2_files)))
        assert len(MegatronTokens(path.parent / "out_text_document"))
    assert not list(path.parent.glob(".*"))


def command(gpt2_files: Path, directory: Path, *flags: str) -> list[str]:
    files = ["--vocab-file", str(gpt2_files / "vocab.json"), "--merge-file", str(gpt2_files / "merges.txt")]
    inputs = ["--input", str(directory / "*.jsonl"), "--output-prefix", str(directory / "out"), "--workers", "2"]
    return ["data", "tokenize", *files, *inputs, *flags]


def test_command_and_its_errors(cli: ForkServer, gpt2_files: Path, tmp_path: Path) -> None:
    write_json_lines(tmp_path / "a.jsonl", make_stories(30))
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write("broken\n")
    megatron_flags = ["--tokenizer-type", "GPT2BPETokenizer", "--dataset-impl", "mmap", "--log-interval", "100"]
    arguments = command(gpt2_files, tmp_path, "--append-eod", *megatron_flags)
    done = subprocess.run([sys.executable, "-m", "trainyard", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "30 documents" in done.stdout
    assert "1 line skipped" in done.stdout
    assert "a.jsonl: line 31: not JSON" in done.stderr
    repeated = cli.run(arguments)
    assert repeated.returncode == 2
    assert "--overwrite" in repeated.stderr
    assert repeated.stderr.count("\n") == 1


def test_killed_command_leaves_no_files_and_no_workers(cli: ForkServer, gpt2_files: Path, tmp_path: Path) -> None:
    write_json_lines(tmp_path / "a.jsonl", make_stories(400) * 60)
    arguments = command(gpt2_files, tmp_path)
    for delay in (0.0, 0.2):
        process = cli.start(arguments)
        end = time.monotonic() + 90
        while not list(tmp_path.glob(".out*.bin.part")) and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(delay)
        process.kill()
        process.wait()
        assert not list(tmp_path.glob("out*"))
        end = time.monotonic() + 60
        while _alive(process.pid) and time.monotonic() < end:
            time.sleep(0.05)
        assert not _alive(process.pid)
    done = cli.run(arguments)
    assert done.returncode == 0, done.stderr
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["a.jsonl", "out_text_document.bin", "out_text_document.idx"]


def _alive(group: int) -> bool:
    """True if any process of the session is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
