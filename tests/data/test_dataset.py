"""Text through each tokenizer, masked sentence pairs, and clear lines for files that are not there."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from tests.support import configs
from trainyard.config.schema import Config
from trainyard.core.errors import UserError
from trainyard.data.loading.build import build_datasets, read_text, tokenizer_spec
from trainyard.data.loading.demo_corpus import make_stories, make_story
from trainyard.data.loading.synthetic import MASK, SyntheticSentencePairs
from trainyard.data.text.tokenizer import load_tokenizer

TEXT = "The engine left the yard. Then it came back, and the bell rang: naïve café, 東京.\n"


def quiet(line: str) -> None:
    return


def tokens_of(config: Config) -> np.ndarray:
    return read_text(config, config.data.paths, quiet).all_tokens


def text_config(**data: object):
    return configs.tiny_config({**configs.LLAMA, "vocab": 1000}, data={"source": "text", **data})


@pytest.fixture
def text(tmp_path: Path) -> Path:
    for name in ("b.txt", "a.txt"):
        (tmp_path / name).write_text(f"{name} {TEXT}" * 20)
    return tmp_path


def bpe(path: Path) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    )
    tokenizer.save(str(path))
    return tokenizer


def test_bytes_with_an_end_after_each_document(text: Path) -> None:
    tokens = tokens_of(text_config(paths=[str(text / "*.txt")]))
    first = f"a.txt {TEXT}" * 20
    assert bytes(tokens[: len(first.encode())].astype(np.uint8)).decode() == first
    assert list(np.flatnonzero(tokens == 256)) == [len(first.encode()), len(tokens) - 1]


def test_tokenizer_json_and_gpt2_files_agree(text: Path) -> None:
    tokenizer = bpe(text / "tokenizer.json")
    saved = json.loads((text / "tokenizer.json").read_text())["model"]
    (text / "vocab.json").write_text(json.dumps(saved["vocab"]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in saved["merges"]]
    (text / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    paths = [str(text / "a.txt")]
    one = tokens_of(text_config(paths=paths, tokenizer=str(text / "tokenizer.json")))
    files = {"vocab_file": str(text / "vocab.json"), "merges_file": str(text / "merges.txt")}
    config = text_config(paths=paths, tokenizer="gpt2", **files)
    assert np.array_equal(one, tokens_of(config))
    assert one[-1] == tokenizer.token_to_id("<|endoftext|>")
    assert load_tokenizer(tokenizer_spec(config)).decode(one[:-1].tolist()) == f"a.txt {TEXT}" * 20


@pytest.mark.parametrize(
    ("data", "words"),
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
def test_what_is_wrong_with_the_data_is_said(tmp_path: Path, data: dict, words: str) -> None:
    (tmp_path / "TINY").write_text("short")
    (tmp_path / "BINARY").write_bytes(b"\xff\xfe\x00\x01" * 100)
    bpe(tmp_path / "BPE")
    here = {"TINY", "BINARY", "BPE"}

    def place(value: object) -> object:
        if isinstance(value, list):
            return [place(each) for each in value]
        return str(tmp_path / str(value)) if value in here else value

    with pytest.raises(UserError, match=words) as caught:
        build_datasets(text_config(**{key: place(value) for key, value in data.items()}))
    assert "\n" not in str(caught.value)


def test_a_tokenizer_larger_than_the_model_is_refused() -> None:
    with pytest.raises(UserError, match=r"model\.vocab=100.*257"):
        build_datasets(configs.tiny_config({**configs.LLAMA, "vocab": 100}, data={"source": "text"}))


def test_validation_takes_the_end() -> None:
    train, held, _ = build_datasets(text_config(validation_fraction=0.1))
    assert held is not None
    assert len(held) == round(0.1 * (len(train) + len(held)))
    last = train.samples(np.asarray([len(train) - 1]))["labels"][0, -1]
    assert held.samples(np.asarray([0]))["tokens"][0, 0] == last


def test_the_built_in_text_is_the_same_everywhere() -> None:
    assert make_story(3) == make_story(3)
    assert len(set(make_stories(50))) == 50
    assert " together " in "".join(make_stories(50))


def test_masked_pairs_are_what_bert_expects() -> None:
    config = configs.tiny_config("bert", data={"seq_len": 32, "max_predictions": 5})
    batch = SyntheticSentencePairs(config).samples(np.arange(200, dtype=np.int64))
    tokens, mask, places, labels = (batch[name] for name in ("tokens", "attention_mask", "masked_positions", "labels"))
    assert tokens.shape == mask.shape == batch["segment_ids"].shape == (200, 32)
    assert places.shape == labels.shape == (200, 5)
    counted = labels != -100
    assert (counted.sum(1) >= 1).all()
    assert (labels[counted] >= 4).all()
    assert (tokens[mask == 0] == 0).all()
    chosen = np.take_along_axis(tokens, places.astype(np.int64), 1)
    assert 0.7 < (chosen[counted] == MASK).mean() < 0.9
    assert 0.05 < (chosen[counted] == labels[counted]).mean() < 0.2
    for row in range(200):  # each place at most once, inside the text
        used = places[row][counted[row]]
        assert len(set(used)) == len(used)
        assert (mask[row][used] == 1).all()
    assert 0.35 < batch["next_sentence_labels"].mean() < 0.65
    assert (batch["segment_ids"][mask == 0] == 0).all()


@pytest.mark.parametrize("source", ["text", "synthetic"])
def test_separate_documents_reach_the_batch(source: str) -> None:
    config = configs.tiny_config(
        data={"source": source, "document_mask": True, "seq_len": 64}, model={**configs.LLAMA, "vocab": 260}
    )
    samples = build_datasets(config)[0].samples(np.arange(20))
    assert 0 < samples["document_ids"].max() < 20
    assert samples["position_ids"].max() < 64
