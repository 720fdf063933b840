"""`trainyard data show`: the samples it prints are those that the step trained on, for every kind of data."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.cli.conftest import Call, fail, succeed
from tests.data.loading import test_training as kinds
from tests.support import configs
from trainyard import Trainer
from trainyard.config.load import dump
from trainyard.config.schema import Config
from trainyard.data.loading.build import build_datasets
from trainyard.data.loading.loader import BatchLoader
from trainyard.run.training_texts import INPUTS_FILE, write_training_texts

STEP = 3


def demo_text(directory: Path) -> dict[str, Any]:
    return {"source": "text", "validation_fraction": 0.05}


def synthetic(directory: Path) -> dict[str, Any]:
    return {"source": "synthetic"}


SOURCES = {
    demo_text: r"the built-in text, token \d+ \(document \d+\)",
    synthetic: r"synthetic tokens \d+",
    kinds.tokens: r"a, token \d+ \(document \d\)",
    kinds.megatron: r"a, token \d+ of document \d",
    kinds.blend: r"[ab], token \d+ \(document \d\)",
    kinds.arrow: r"set/data-00000-of-00001.arrow, row \d+",
    kinds.hdf5: r"x_training_00000.hdf5, sample \d+",
}


@pytest.mark.parametrize("make", SOURCES, ids=lambda make: make.__name__)
def test_printed_samples_are_those_of_the_step(make: Any, call: Call, tmp_path: Path) -> None:
    seen: list[torch.Tensor] = []

    def loss(output: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(batch["tokens"].clone())
        logits = output.logits()
        return logits.square().sum(), torch.tensor(logits.numel())

    config = kinds.data_config(make(tmp_path), micro_batch=2)
    config = config.model_copy(update={"log": config.log.model_copy(update={"directory": str(tmp_path / "runs")})})
    directory = Trainer(config, loss=loss).run().directory
    expected = torch.cat(seen[2 * (STEP - 1) : 2 * STEP]).tolist()
    title, *lines = succeed(call("data", "show", directory, "--step", STEP)).splitlines()
    assert title == f"step {STEP} of 6: 4 samples, 4 shown"
    headings = [line for line in lines if not line.startswith(" ")]
    assert len(headings) == 4
    for heading in headings:
        assert re.fullmatch(rf"sample \d+: (?:/.*/)?{SOURCES[make]}", heading), heading
    contents = [line.strip() for line in lines if re.match('  [0-9"]', line)]
    if make is demo_text:
        byte_texts = [bytes(token for token in row if token < 256).decode(errors="replace") for row in expected]
        assert contents == [
            '"' + byte_text.replace("\\", "\\\\").replace("\n", "\\n") + '"' for byte_text in byte_texts
        ]
    else:
        assert contents == [" ".join(map(str, row)) for row in expected]
    if make is kinds.hdf5:
        assert [line.split(":")[0].strip() for line in lines if ": " in line and line[0] == " "] == [
            "masked", "second text",
        ] * 4  # fmt: skip


def test_rank_limit_and_tokenizer(call: Call, tmp_path: Path) -> None:
    """A run of two data-parallel ranks from step 2 on; its tokenizer is a file of its own."""
    words = {f"w{number}": number for number in range(259)} | {"</s>": 259}
    tokenizer = Tokenizer(models.WordLevel(words, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    data = {**kinds.tokens(tmp_path), "tokenizer": str(tmp_path / "tokenizer.json")}
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(dump(kinds.data_config(data, 2)))
    (run / "events.jsonl").write_text(
        '{"step": 0, "event": "start", "ranks": 1}\n{"step": 1, "event": "start", "ranks": 2}\n'
    )
    everything = succeed(call("data", "show", run, "--step", 2)).splitlines()
    assert re.fullmatch(r'  "(w\d+ ?){16}"', everything[2])
    second = succeed(call("data", "show", run, "--step", 2, "--rank", 1)).splitlines()
    assert second == ["step 2 of 6: 2 samples of rank 1, 2 shown", *everything[5:]]
    one = succeed(call("data", "show", run, "--step", 2, "--rank", 1, "--limit", 1)).splitlines()
    assert one == ["step 2 of 6: 2 samples of rank 1, 1 shown", *everything[5:7]]
    fail(call("data", "show", run, "--step", 1, "--rank", 1), "--rank 1: the run has ranks 0 to 0")
    fail(call("data", "show", run, "--step", 2, "--rank", 2), "--rank 2: the run has ranks 0 to 1")
    (tmp_path / "tokenizer.json").unlink()
    code, out, err = call("data", "show", run, "--step", 2)
    assert (code, err.count("\n")) == (0, 1)
    assert err.startswith("note: token ids, since the tokenizer cannot be read: data.tokenizer=")
    assert re.fullmatch(r"  (\d+ ?){16}", out.splitlines()[2])


def test_mistakes_are_one_line(call: Call, tmp_path: Path) -> None:
    run = tmp_path / "run"
    fail(call("data", "show", run, "--step", 1), f"{run}: not a run directory: it has no config.yaml")
    run.mkdir()
    fail(call("data", "show", run, "--step", 1), f"{run}: not a run directory: it has no config.yaml")
    config = yaml.safe_load(dump(configs.tiny_config()))
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert succeed(call("data", "show", run, "--sample", 3)).startswith("sample 3: synthetic tokens 3")
    for step in (0, -3, 5):
        fail(call("data", "show", run, "--step", step), f"--step {step}: the run has steps 1 to 4")
    fail(call("data", "show", run, "--step", "x"), "Invalid value for '--step'")
    config["data"] |= {"source": "tokens", "paths": [str(tmp_path / "gone")]}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    fail(call("data", "show", run, "--step", 1), f"data.paths={tmp_path / 'gone'}: no such token files")
    (run / "config.yaml").write_text("train: [")
    fail(call("data", "show", run, "--step", 1), ".*config.yaml")


def test_what_is_trained_of_conversations_is_in_brackets(call: Call, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "What is 2+2?"}, {"role": "assistant", "content": "Four."}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    found = succeed(call("data", "show", tmp_path / "a.jsonl"))
    assert "<|im_start|>user\\n\nWhat is 2+2?<256>\\n\n<|im_start|>assistant\\n\n[[Four.<256>]]\\n" in found
    assert "60 tokens, 6 trained (10.0%)" in found
    fail(call("data", "show", tmp_path / "a.jsonl", "--sample", 1), "--sample 1: there are samples 0 to 0")
    facts = succeed(call("data", "inspect", tmp_path / "a.jsonl"))
    assert re.search(r"a.jsonl: conversations\n  formats +messages: 1\n  conversations +1\n", facts)


PAIRS = [
    {"prompt": "What is <b>2+2</b>?", "chosen": "Four.", "rejected": "Five, I <i>guess</i>."},
    {
        "prompt": [{"role": "user", "content": "Hi"}],
        "chosen": [{"role": "assistant", "content": "Hello."}],
        "rejected": [{"role": "assistant", "content": "Hey, go."}],
    },
]
TEXT_PAIR = """\
  prompt: 19 tokens
What is <b>2+2</b>?
  chosen: 6 tokens, 6 trained
[[Four.<256>]]
  rejected: 22 tokens, 22 trained
[[Five, I <i>guess</i>.<256>]]
"""
MESSAGES_PAIR = """\
  prompt: 43 tokens
<|im_start|>user\\n
Hi<256>\\n
<|im_start|>assistant\\n

  chosen: 8 tokens, 7 trained
[[Hello.<256>]]\\n

  rejected: 10 tokens, 9 trained
[[Hey, go.<256>]]\\n

"""


def pairs_config(tmp_path: Path, packing: bool) -> Config:
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in PAIRS))
    data = {"source": "preference", "paths": [str(tmp_path / "pairs.jsonl")], "tokenizer": "bytes"}
    data |= {"seq_len": 192, "packing": packing, "validation_fraction": 0}
    train = {"objective": "cpo", "global_batch": 2}
    return configs.tiny_config({**configs.LLAMA, "max_positions": 192}, data=data, train=train)


def test_a_pair_is_its_prompt_and_two_answers(call: Call, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    config = pairs_config(tmp_path, packing=False)
    (tmp_path / "run" / "config.yaml").write_text(dump(config))
    place = f"{tmp_path / 'pairs.jsonl'}: line"
    samples = f"sample 0: {place} 1\n{TEXT_PAIR}sample 1: {place} 2\n{MESSAGES_PAIR}"
    assert succeed(call("data", "show", tmp_path / "pairs.jsonl", "--limit", 2)) == samples
    assert succeed(call("data", "show", tmp_path / "run", "--limit", 2)) == samples
    heading, *lines = succeed(call("data", "show", tmp_path / "run", "--step", 2)).splitlines()
    assert heading == "step 2 of 4: 2 samples, 2 shown"
    assert sorted(lines) == sorted(samples.splitlines())
    (tmp_path / "run" / "config.yaml").write_text(dump(pairs_config(tmp_path, packing=True)))
    packed = succeed(call("data", "show", tmp_path / "run"))
    both = f"  pair 1 of 2\n{MESSAGES_PAIR}  pair 2 of 2\n{TEXT_PAIR}"
    assert packed == f"sample 0: {place} 2, {place} 1\n{both}"


@pytest.mark.parametrize("packing", [False, True])
def test_a_run_writes_its_first_pairs(tmp_path: Path, packing: bool) -> None:
    """The texts of an answer, joined, are the rendered conversation; marked is what has a label."""
    config = pairs_config(tmp_path, packing)
    datasets = build_datasets(config)
    write_training_texts(tmp_path, config, BatchLoader(datasets.train, 2, 0, datasets.needs_shuffle))
    records = [json.loads(line) for line in (tmp_path / INPUTS_FILE).read_text().splitlines()]
    found = set()
    for record in records[:2]:
        assert record["prompt"]["trained"] == 0
        texts = ["".join(text for text, _ in record[name]["parts"]) for name in ("prompt", "chosen", "rejected")]
        found.add((texts[0] + texts[1], texts[0] + texts[2]))
        for name in ("chosen", "rejected"):
            assert all(is_trained == (text != "\n") for text, is_trained in record[name]["parts"])
            assert record[name]["trained"] == sum(len(text) - 4 for text, trained in record[name]["parts"] if trained)
    chat = "<|im_start|>user\nHi<256>\n<|im_start|>assistant\n"
    assert found == {
        ("What is <b>2+2</b>?Four.<256>", "What is <b>2+2</b>?Five, I <i>guess</i>.<256>"),
        (f"{chat}Hello.<256>\n", f"{chat}Hey, go.<256>\n"),
    }
    assert [record["pairs"] for record in records[:2]] == ([2, 2] if packing else [1, 1])
