"""`trainyard data train-tokenizer`: files that tokenizers, transformers and Megatron's tools read."""

import json
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoTokenizer

from trainyard.cli import main
from trainyard.data.text.tokenizer import TokenizerSpec, load_tokenizer

TEXTS = [f"The {name} returns the size of the {name}.\n" for name in ("file", "socket", "Straße", "list")] * 5


def train(*arguments: object) -> int:
    argv = ["trainyard", "data", "train-tokenizer", *map(str, arguments)]
    with patch.object(sys, "argv", argv), pytest.raises(SystemExit) as ended:
        main.main()
    return int(ended.value.code or 0)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def test_bpe_equals_the_tokenizers_library(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "bpe"
    assert train("--input", corpus, "--output", out, "--vocab-size", 300) == 0
    reference = ByteLevelBPETokenizer()
    reference.train_from_iterator(TEXTS, vocab_size=299, min_frequency=0, show_progress=False)
    vocab = json.loads((out / "vocab.json").read_text())
    assert vocab == reference.get_vocab() | {"<|endoftext|>": len(reference.get_vocab())}
    ours = load_tokenizer(TokenizerSpec(str(out)))
    megatron = load_tokenizer(TokenizerSpec("gpt2", str(out / "vocab.json"), str(out / "merges.txt")))
    theirs = AutoTokenizer.from_pretrained(out)
    for text in TEXTS:
        ids = ours.encode([text])[0].tolist()
        assert ids == reference.encode(text).ids == theirs(text)["input_ids"] == megatron.encode([text])[0].tolist()
        assert ours.decode(ids) == text
    assert ours.end_id == megatron.end_id == theirs.eos_token_id == len(vocab) - 1


def test_wordpiece_is_read_by_transformers(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "wordpiece"
    assert train("--input", corpus, "--output", out, "--kind", "wordpiece", "--vocab-size", 120) == 0
    theirs = AutoTokenizer.from_pretrained(out)
    ours = load_tokenizer(TokenizerSpec("wordpiece", str(out / "vocab.txt")))
    ids = theirs(TEXTS[0], TEXTS[1])["input_ids"]
    tokens = theirs.convert_ids_to_tokens(ids)
    assert tokens[0] == "[CLS]"
    assert tokens.count("[SEP]") == 2
    assert "[UNK]" not in tokens
    plain = theirs(TEXTS[2], add_special_tokens=False)["input_ids"]
    assert ours.encode([TEXTS[2]])[0].tolist() == plain
    assert theirs.decode(plain).startswith("the straße returns")


def test_same_text_gives_same_files(corpus: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert train("--input", corpus, "-o", tmp_path / name, "--vocab-size", 280) == 0
    for name in ("tokenizer.json", "vocab.json", "merges.txt"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_same_text_gives_same_wordpieces(tmp_path: Path) -> None:
    """Also where many pairs of letters are equally frequent."""
    names = sorted(path.stem for path in Path(json.__file__).parents[1].glob("*.py"))
    (tmp_path / "text.txt").write_text(" ".join(names))
    for name in ("a", "b", "c"):
        options = ("--kind", "wordpiece", "--vocab-size", 150)
        assert train("--input", tmp_path / "text.txt", "-o", tmp_path / name, *options) == 0
    vocabularies = {(tmp_path / name / "vocab.txt").read_text() for name in ("a", "b", "c")}
    assert len(vocabularies) == 1
    special = AutoTokenizer.from_pretrained(tmp_path / "a").all_special_tokens
    assert set(special) == {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--vocab-size", "100"), "--vocab-size 100: bpe needs at least 257"),
        (("--vocab-size", "1000000000"), "--vocab-size 1000000000: must be at most 16777216"),  # aborted the process
        (("--kind", "unigram"), "--kind unigram: unknown; nearest: bpe or wordpiece"),
        (("--json-key", "content", "--strict"), "no text under 'content'"),
    ],
)
def test_wrong_input_is_one_line(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
) -> None:
    assert train("--input", corpus, "--output", tmp_path / "out", *options) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert errors.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
@pytest.mark.parametrize("text", ["", " \n\n"])
def test_file_without_text_gives_no_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, text: str
) -> None:
    (tmp_path / "empty.txt").write_text(text)
    assert train("--input", tmp_path / "empty.txt", "--output", tmp_path / "out", "--kind", kind) == 2
    assert capsys.readouterr().err == f"trainyard: {tmp_path / 'empty.txt'}: no text to train on\n"
    assert not (tmp_path / "out").exists()


def test_existing_output_stays(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    assert train("--input", corpus, "--output", tmp_path / "out") == 2
    assert "already exists" in capsys.readouterr().err


def test_printed_key_names_the_directory(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also if the directory is called like a tokenizer that needs a vocabulary file."""
    monkeypatch.chdir(tmp_path)
    assert train("--input", corpus, "--output", "wordpiece", "--kind", "wordpiece", "--vocab-size", 120) == 0
    key = capsys.readouterr().out.rpartition("data.tokenizer=")[2].strip(")\n")
    assert load_tokenizer(TokenizerSpec(key)).vocab_size <= 120
