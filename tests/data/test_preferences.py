"""The data source preference: formats of records, what of a pair is compared, and errors that name a record."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import configs
from trainyard.config.data_schema import DataSection
from trainyard.core.constants import IGNORE_INDEX
from trainyard.core.errors import UserError
from trainyard.data.formats.preferences import LabeledAnswer, Preference, read_preference
from trainyard.data.loading.answers import Answers, AnswerSamples
from trainyard.data.loading.build import build_datasets
from trainyard.data.loading.conversation_samples import open_conversations
from trainyard.data.loading.packing import PairSamples

USER = {"role": "user", "content": "Hi"}
GOOD, BAD = {"role": "assistant", "content": "Hello."}, {"role": "assistant", "content": "No."}
RECORDS: dict[str, dict[str, Any]] = {
    "messages": {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
    "one message": {"prompt": [USER], "chosen": GOOD, "rejected": BAD},
    "whole conversations": {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    "whole conversations and a prompt": {"prompt": "Hi", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
    "a prompt as text": {"prompt": "Hi", "chosen": [GOOD], "rejected": [BAD]},
    "answers as text": {"prompt": [USER], "chosen": "Hello.", "rejected": "No."},
    "ShareGPT": {
        "conversations": [{"from": "human", "value": "Hi"}],
        "chosen": {"from": "gpt", "value": "Hello."},
        "rejected": {"from": "gpt", "value": "No."},
    },
}


def samples(tmp_path: Path, records: list[dict[str, Any]], packing: bool = False, **data: Any) -> PairSamples:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    section = DataSection(source="preference", paths=(str(path),), **{"seq_len": 256, **data})
    return PairSamples(open_conversations(section, section.paths, None), section.seq_len, 0, packing)


def answers(batch: dict[str, np.ndarray[Any, Any]], row: int = 0) -> list[bytes]:
    """The labels of each document of a sample."""
    labels, documents = batch["labels"][row], batch["document_ids"][row]
    found = [labels[(documents == each) & (labels != IGNORE_INDEX)] for each in range(documents.max() + 1)]
    return [bytes(each[each < 256].astype(np.uint8)) + b"|" * int((each == 256).sum()) for each in found]


@pytest.mark.parametrize("name", RECORDS)
def test_every_format_is_the_same_pair(name: str, tmp_path: Path) -> None:
    pair = read_preference(RECORDS[name])
    assert isinstance(pair, Preference)
    chosen, rejected, _ = pair
    assert [chosen.messages, rejected.messages] == [[USER, GOOD], [USER, BAD]]
    assert [chosen.trained, rejected.trained] == [(False, None), (False, None)]
    batch = samples(tmp_path, [RECORDS[name]]).samples(np.array([0]))
    assert answers(batch) == [b"Hello.|", b"No.|", b""]
    assert batch["position_ids"][0, (batch["document_ids"][0] == 1).argmax()] == 0


def test_answers_before_the_last_turn_belong_to_the_prompt(tmp_path: Path) -> None:
    talk = [USER, GOOD, {"role": "user", "content": "And?"}]
    batch = samples(tmp_path, [{"chosen": [*talk, BAD], "rejected": [*talk, GOOD]}]).samples(np.array([0]))
    assert answers(batch)[:2] == [b"No.|", b"Hello.|"]


def test_text_is_a_prompt_and_two_ends(tmp_path: Path) -> None:
    texts = [{"prompt": "2+2=", "chosen": "4", "rejected": "5"}, {"chosen": "yes", "rejected": "no"}]
    batch = samples(tmp_path, texts).samples(np.array([0, 1]))
    assert [answers(batch, 0)[:2], answers(batch, 1)[:2]] == [[b"4|", b"5|"], [b"es|", b"o|"]]


def test_keys_name_a_pair_wherever_it_is(tmp_path: Path) -> None:
    texts = [{"prompt": f"{n}=", "chosen": str(n), "rejected": str(n + 1)} for n in range(12)]
    plain, packed = samples(tmp_path, texts), samples(tmp_path, texts[::-1], packing=True)
    keys = {tuple(words) for words in plain.samples(np.arange(12))["pair_keys"].tolist()}
    found = packed.samples(np.arange(len(packed)))["pair_keys"].reshape(-1, 2)
    assert len(packed) < 12
    assert len(keys) == 12
    assert {tuple(words) for words in found[found.any(1)].tolist()} == keys
    swapped = samples(tmp_path, [each | {"chosen": each["rejected"], "rejected": each["chosen"]} for each in texts])
    assert not {tuple(words) for words in swapped.samples(np.arange(12))["pair_keys"].tolist()} & keys


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": [USER], "completion": [GOOD], "label": True},
        {"prompt": [USER], "completion": GOOD, "label": 1},
        {"prompt": "Hi", "completion": [GOOD], "label": True},
        {"prompt": [USER], "completion": "Hello.", "label": True},
    ],
)
def test_an_answer_with_a_label(record: dict[str, Any]) -> None:
    found = read_preference(record)
    assert isinstance(found, LabeledAnswer)
    assert (found.answer.messages, found.answer.trained, found.is_good) == ([USER, GOOD], (False, None), True)


def labeled(tmp_path: Path, records: list[dict[str, Any]], packing: bool = False, seq_len: int = 256) -> AnswerSamples:
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    section = DataSection(source="preference", paths=(str(path),), seq_len=seq_len)
    found = Answers(open_conversations(section, section.paths, None, apart=True), seq_len)
    return AnswerSamples(found, seq_len, 0, packing, True)


def text_of(batch: dict[str, np.ndarray[Any, Any]], row: int, prefix: str = "") -> list[str]:
    """Each document of a sample, with | before what is trained and . for the token that ends it."""
    tokens, labels, documents = (batch[f"{prefix}{name}"][row] for name in ("tokens", "labels", "document_ids"))
    found = []
    for each in dict.fromkeys(documents.tolist()):
        inside = documents == each
        start = int(np.flatnonzero(labels[inside] != IGNORE_INDEX)[0]) + 1 if (labels[inside] >= 0).any() else 0
        letters = ["." if token == 256 else chr(token) for token in tokens[inside].tolist() if token]
        found.append("".join([*letters[:start], "|", *letters[start:]]) if start else "")
    return [each for each in found if each]


def test_a_mismatch_is_the_answer_of_the_record_before(tmp_path: Path) -> None:
    """In a pair the chosen with the chosen; the first record has that of the last one. None depends on the batch."""
    records: list[dict[str, Any]] = [
        {"prompt": "a=", "completion": "1", "label": False},
        {"prompt": "b=", "chosen": "22", "rejected": "33"},
        {"prompt": "c=", "chosen": "4", "rejected": "5"},
        {"prompt": "d=", "completion": "666", "label": True},
    ]
    found = labeled(tmp_path, records)
    batch = found.samples(np.arange(6))
    assert [text_of(batch, row) for row in range(6)] == [
        [each] for each in ("a=|1.", "b=|22.", "b=|33.", "c=|4.", "c=|5.", "d=|666.")
    ]
    mismatches = ["a=|666.", "b=|1.", "b=|1.", "c=|22.", "c=|33.", "d=|4."]
    assert [text_of(batch, row, "kl_") for row in range(6)] == [[each] for each in mismatches]
    assert batch["answer_labels"][:, 0].tolist() == [0, 1, 0, 1, 0, 1]
    packed = labeled(tmp_path, records, packing=True, seq_len=14)
    rows = packed.samples(np.arange(len(packed)))
    assert sorted(each for row in range(len(packed)) for each in text_of(rows, row, "kl_")) == sorted(mismatches)
    assert {tuple(key) for key in batch["pair_keys"].tolist()} == {
        tuple(key) for key in rows["pair_keys"].reshape(-1, 2).tolist() if any(key)
    }


def test_a_mismatch_that_does_not_fit_is_cut(tmp_path: Path) -> None:
    records = [
        {"prompt": "p" * 7, "completion": "1", "label": True},
        {"prompt": "q", "completion": "9" * 7, "label": 0},
    ]
    batch = labeled(tmp_path, records, seq_len=10).samples(np.arange(2))
    assert [text_of(batch, row, "kl_")[0] for row in range(2)] == ["ppppppp|999", "q|1."]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, "line 2: no pair of answers: expected chosen and rejected"),
        ({"prompt": "a", "completion": "b", "label": "good"}, "line 2: label is a str; expected true or false"),
        ({"prompt": "a", "completion": "b"}, "line 2: completion without label: expected label, true or false"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": "1"}, "line 2: margin is a str; expected a number"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "line 2: chosen and rejected are the same"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "line 2: no prompt"),
        (
            {"prompt": [USER], "chosen": [USER], "rejected": [BAD]},
            "line 2: an answer is not the .*: found user",
        ),
        ({"prompt": [USER], "chosen": [], "rejected": [BAD]}, "line 2: an answer .*: found no message"),
        ({"prompt": 3, "chosen": [GOOD], "rejected": [BAD]}, "line 2: an answer or prompt is an int"),
        ({"prompt": "a" * 300, "chosen": "b", "rejected": "c"}, r"line 2: 60\d tokens.* 1 pair of 2 is .*=drop$"),
    ],
)
def test_a_record_that_is_no_pair_is_named(tmp_path: Path, record: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        samples(tmp_path, [RECORDS["messages"], record])


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"train": {}}, "train.objective: missing; data.source=preference has pairs; nearest: dpo"),
        ({"data": {"source": "text"}}, "data.source=text: train.objective=dpo needs pairs; nearest: preference"),
        (
            {"preference": {"margin": 1}},
            "preference.margin=1.0: train.objective has only beta, variant",
        ),
        (
            {"train": {"objective": "simpo"}, "preference": {"variant": "ipo"}},
            "preference.variant=ipo: ",
        ),
        ({"train": {"objective": "cpo"}, "preference": {"variant": "robust"}}, "has only sigmoid, hinge, ipo"),
        ({"preference": {"variant": "exo_pair"}}, "needs preference.label_smoothing; nearest: 0.001"),
        ({"train": {"objective": "dop"}}, "nearest: dpo"),
        ({"train": {"objective": "dpo", "loss": "causal_lm"}}, "train.objective=dpo is the loss; nearest: null"),
        ({"data": {"chat": {"too_long": "truncate"}}}, "compares whole answers; nearest: drop"),
        (
            {"data": {"chat": {"train_on": ["user"]}}},
            r"compares answers; nearest: \[assistant\]",
        ),
    ],
)
def test_mistakes_are_one_line(sections: dict[str, Any], message: str) -> None:
    data = {"source": "preference", "paths": "a.jsonl", **sections.get("data", {})}
    train = sections.get("train", {"objective": "dpo"})
    with pytest.raises((UserError, ValueError), match=message):
        configs.tiny_config(data=data, train=train, preference=sections.get("preference", {}))


def test_files_without_a_pair_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data.paths: no record"):
        samples(tmp_path, [])
    long = {"prompt": "a" * 300, "chosen": "b", "rejected": "c"}
    with pytest.raises(UserError, match=r"data.seq_len=256: no pair is as short; nearest: 60\d"):
        samples(tmp_path, [long], chat={"too_long": "drop"})
    config = configs.tiny_config(
        data={"source": "preference", "paths": str(tmp_path / "pairs.jsonl"), "seq_len": 128},
        train={"objective": "dpo"},
    )
    answer = {"prompt": "a", "completion": "b", "label": True}
    for records, message in (
        ([RECORDS["messages"], answer], "line 2: one answer; train.objective=dpo compares two; nearest: kto"),
        ([{**long, "prompt": "a" * 80, "chosen": ""}], r"line 1: an answer has 8\d tokens .*max_positions=64"),
    ):
        (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        with pytest.raises(UserError, match=message):
            build_datasets(config.model_copy(update={"data": config.data.model_copy(update={"seq_len": 512})}))
