"""Datasets from a configuration: text with each tokenizer, synthetic samples, and one-line errors."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from tests.support import configs
from trainyard.config.schema import Config
from trainyard.core.errors import UserError
from trainyard.data.loading.build import build_datasets
from trainyard.data.loading.demo_corpus import make_stories, make_story
from trainyard.data.loading.synthetic import MASK, SyntheticSentencePairs
from trainyard.data.loading.text_stream import read_text, tokenizer_spec
from trainyard.data.text.tokenizer import load_tokenizer

TEXT = "The engine left the yard. Then it came back, and the bell rang: naïve café, 東京.\n"


def read_tokens(config: Config) -> np.ndarray:
    return read_text(config.data, config.model, config.data.paths).all_tokens


def text_config(**data: object):
    return configs.tiny_config({**configs.LLAMA, "vocab": 1000}, data={"source": "text", **data})


@pytest.fixture
def text(tmp_path: Path) -> Path:
    for name in ("b.txt", "a.txt"):
        (tmp_path / name).write_text(f"{name} {TEXT}" * 20)
    return tmp_path


def train_bpe(path: Path) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    )
    tokenizer.save(str(path))
    return tokenizer


def test_byte_tokens_have_an_end_token_after_each_document(text: Path) -> None:
    tokens = read_tokens(text_config(paths=[str(text / "*.txt")]))
    first = f"a.txt {TEXT}" * 20
    assert bytes(tokens[: len(first.encode())].astype(np.uint8)).decode() == first
    assert list(np.flatnonzero(tokens == 256)) == [len(first.encode()), len(tokens) - 1]


def test_tokenizer_json_and_gpt2_files_give_the_same_tokens(text: Path) -> None:
    tokenizer = train_bpe(text / "tokenizer.json")
    saved = json.loads((text / "tokenizer.json").read_text())["model"]
    (text / "vocab.json").write_text(json.dumps(saved["vocab"]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in saved["merges"]]
    (text / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    paths = [str(text / "a.txt")]
    tokens = read_tokens(text_config(paths=paths, tokenizer=str(text / "tokenizer.json")))
    files = {"vocab_file": str(text / "vocab.json"), "merges_file": str(text / "merges.txt")}
    config = text_config(paths=paths, tokenizer="gpt2", **files)
    assert np.array_equal(tokens, read_tokens(config))
    assert tokens[-1] == tokenizer.token_to_id("<|endoftext|>")
    assert load_tokenizer(tokenizer_spec(config.data, ())).decode(tokens[:-1].tolist()) == f"a.txt {TEXT}" * 20


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"paths": ["nowhere/*.txt"]}, "data.paths=nowhere"),
        ({"tokenizer": "nowhere.json"}, "data.tokenizer=nowhere.json"),
        ({"tokenizer": "gpt2", "vocab_file": "v", "merges_file": "m"}, "data.vocab_file=v"),
        ({"seq_len": 64, "paths": ["TINY"]}, "data.seq_len=64"),
        ({"paths": ["BINARY"]}, "not UTF-8"),
        ({"tokenizer": "BINARY"}, "not a tokenizer.json"),
        ({"tokenizer": "BPE"}, "data.paths: missing"),
        ({"tokenizer": "BPE", "end_of_text": "<nope>"}, "<nope>"),
    ],
)
def test_invalid_settings_are_one_line_errors(tmp_path: Path, data: dict, message: str) -> None:
    (tmp_path / "TINY").write_text("short")
    (tmp_path / "BINARY").write_bytes(b"\xff\xfe\x00\x01" * 100)
    train_bpe(tmp_path / "BPE")
    files = {"TINY", "BINARY", "BPE"}

    def full_path(value: object) -> object:
        if isinstance(value, list):
            return [full_path(item) for item in value]
        return str(tmp_path / str(value)) if value in files else value

    with pytest.raises(UserError, match=message) as caught:
        build_datasets(text_config(**{key: full_path(value) for key, value in data.items()}))
    assert "\n" not in str(caught.value)


def test_tokenizer_larger_than_the_vocabulary_is_refused() -> None:
    with pytest.raises(UserError, match=r"model\.vocab=100.*257"):
        build_datasets(configs.tiny_config({**configs.LLAMA, "vocab": 100}, data={"source": "text"}))


def test_validation_samples_come_from_the_end() -> None:
    train, validation, _ = build_datasets(text_config(validation_fraction=0.1))
    assert validation is not None
    assert len(validation) == round(0.1 * (len(train) + len(validation)))
    last = train.samples(np.asarray([len(train) - 1]))["labels"][0, -1]
    assert validation.samples(np.asarray([0]))["tokens"][0, 0] == last


def test_demo_corpus_is_reproducible() -> None:
    assert make_story(3) == make_story(3)
    assert len(set(make_stories(50))) == 50
    assert " together " in "".join(make_stories(50))


def test_synthetic_pairs_have_the_format_of_bert() -> None:
    config = configs.tiny_config("bert", data={"seq_len": 32, "max_predictions": 5})
    pairs = SyntheticSentencePairs(config.data, config.model.vocab, config.train.seed)
    batch = pairs.samples(np.arange(200, dtype=np.int64))
    tokens, mask, positions, labels = (
        batch[name] for name in ("tokens", "attention_mask", "masked_positions", "labels")
    )
    assert tokens.shape == mask.shape == batch["segment_ids"].shape == (200, 32)
    assert positions.shape == labels.shape == (200, 5)
    counted = labels != -100
    assert (counted.sum(1) >= 1).all()
    assert (labels[counted] >= 4).all()
    assert (tokens[mask == 0] == 0).all()
    chosen = np.take_along_axis(tokens, positions.astype(np.int64), 1)
    assert 0.7 < (chosen[counted] == MASK).mean() < 0.9
    assert 0.05 < (chosen[counted] == labels[counted]).mean() < 0.2
    for row in range(200):  # each position at most once, inside the text
        used = positions[row][counted[row]]
        assert len(set(used)) == len(used)
        assert (mask[row][used] == 1).all()
    assert 0.35 < batch["next_sentence_labels"].mean() < 0.65
    assert (batch["segment_ids"][mask == 0] == 0).all()


@pytest.mark.parametrize("source", ["text", "synthetic"])
def test_document_mask_reaches_the_samples(source: str) -> None:
    config = configs.tiny_config(
        data={"source": source, "document_mask": True, "seq_len": 64}, model={**configs.LLAMA, "vocab": 260}
    )
    samples = build_datasets(config)[0].samples(np.arange(20))
    assert 0 < samples["document_ids"].max() < 20
    assert samples["position_ids"].max() < 64
