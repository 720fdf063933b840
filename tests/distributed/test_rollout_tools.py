"""Conversations with a tool: the model's turns and the tool's answers have the tokens that transformers gives them.

The model is random but for one direction, which lets it write a few letters and end its turns often.
"""

import json
import os
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from tests.support import configs
from tests.support.pool import Pool
from trainyard import Trainer
from trainyard.config.schema import Config
from trainyard.core.constants import IGNORE_INDEX
from trainyard.core.errors import UserError
from trainyard.run.rollouts.rollout import RolloutBatch
from trainyard.run.rollouts.rollout_loader import RolloutLoader

END = "<|im_end|>"
SEQ_LEN = 96
CHATS: list[Any] = [
    [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1"}],
    [{"role": "user", "content": "2+3"}],
    [{"role": "user", "content": "4"}, {"role": "assistant", "content": "5"}, {"role": "user", "content": "6"}],
    [{"role": "user", "content": "7+8"}],
]
seen: list[dict[str, Any]] = []


def calculator(text: str) -> str | None:
    """Answers texts of which the number of letters is not a multiple of 5."""
    return f"{text}={len(text)}" if len(text) % 5 else None


def length(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
    keys = ("prompt", "completion", "ids")
    seen.extend(dict(zip(keys, each, strict=True)) for each in zip(prompts, completions, completion_ids, strict=True))
    return [float(len(ids) % 7) for ids in completion_ids]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    with pytest.MonkeyPatch.context() as patch:
        bench = Path(__file__).parents[2] / "bench"
        patch.syspath_prepend(str(bench))
        runpy.run_path(str(bench / "trl_parity.py"))["write_model"](directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    weights = load_file(directory / "model.safetensors")
    weights["model.embed_tokens.weight"][:, 0] = 3.0
    weights["model.norm.weight"][0] = 1.0
    head = weights["lm_head.weight"][:, 0]
    head[:] = -20.0
    head[tokenizer.convert_tokens_to_ids([*"abc+"])] = 0.0
    head[tokenizer.convert_tokens_to_ids(END)] = 0.1
    save_file({name: value.contiguous() for name, value in weights.items()}, directory / "model.safetensors")
    return directory


@pytest.fixture(autouse=True)
def forget() -> None:
    seen.clear()


def configure(tmp_path: Path, model: Path, **sections: Any) -> Config:
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps({"prompt": chat}) + "\n" for chat in CHATS))
    default: dict[str, Any] = {
        "data": {"source": "prompts", "paths": str(file), "tokenizer": str(model), "seq_len": SEQ_LEN},
        "train": {"objective": "grpo", "steps": 1, "global_batch": 8, "micro_batch": 8},
        "rollout": {
            "rewards": [f"{__name__}:length"],
            "tool": f"{__name__}:calculator",
            "completions": 4,
            "max_new_tokens": 12,
            "updates": 2,
        },
        "checkpoint": {"init_from": str(model), "export_hf": False},
        "log": {"directory": str(tmp_path / "runs")},
    }
    merged = {key: default.get(key, {}) | sections.get(key, {}) for key in default | sections}
    return configs.tiny_config({"from_hf": str(model)}, **merged)  # type: ignore[arg-type]


def train(tmp_path: Path, model: Path, **sections: Any) -> RolloutBatch:
    """The rollouts of a step."""
    trainer = Trainer(configure(tmp_path, model, **sections))
    trainer.run()
    assert isinstance(trainer.batch_source, RolloutLoader)
    assert trainer.batch_source.written
    return trainer.batch_source.written


def test_tokens_are_those_of_transformers_for_the_same_messages(tmp_path: Path, model: Path) -> None:
    rollouts, tokenizer = train(tmp_path, model), AutoTokenizer.from_pretrained(model)
    kinds = set()
    assert len(seen) == 16
    for row, each in enumerate(seen):
        prompt = tokenizer.apply_chat_template(each["prompt"], add_generation_prompt=True, tokenize=False)
        start = len(tokenizer(prompt)["input_ids"])
        stop = start + len(each["ids"])
        tokens, sampled = rollouts.tokens[row], rollouts.sampled[row]
        assert tokens[start:stop].tolist() == each["ids"]
        assert not sampled[:start].any()
        assert not sampled[stop:].any()
        text = tokenizer.apply_chat_template([*each["prompt"], *each["completion"]], tokenize=False)
        ended = tokens[stop - 1] == tokenizer.convert_tokens_to_ids(END)
        assert ended or not rollouts.stats[row, -1]
        assert text.endswith(END)
        assert tokenizer.decode(tokens[:stop]) == (text if ended else text.removesuffix(END))
        expected = tokenizer(text)["input_ids"]
        assert tokens[:stop].tolist() == (expected if ended else expected[:-1])
        # What the model drew is the text of its turns with their ends, and nothing else.
        answers = [message for message in each["completion"] if message["role"] == "assistant"]
        drawn = "".join(message["content"] + END for message in answers)
        assert tokenizer.decode(tokens[sampled]) == (drawn if ended else drawn.removesuffix(END))
        assert (rollouts.log_probs[row][~sampled] == 0).all()
        for before, after in zip(each["completion"], each["completion"][1:], strict=False):
            if after["role"] == "tool":
                assert after["content"] == calculator(before["content"])
        kinds.add((len(answers), bool(ended)))
    assert {turns for turns, _ in kinds} >= {1, 2, 3}
    assert {ended for _, ended in kinds} == {True, False}


def test_only_what_the_model_drew_is_trained(tmp_path: Path, model: Path) -> None:
    """Each label is the token after it, with the log-probability that it was drawn with and the right advantage."""
    rollouts = train(tmp_path, model)
    rows = np.array([5, 2, 11])
    batch = rollouts.batch(rows, np.arange(3), SEQ_LEN)
    width = rollouts.tokens.shape[1]
    sampled = rollouts.sampled[rows, 1:]
    inside = sampled[:, :-1] & ~sampled[:, 1:]
    assert inside.sum() > len(rows)  # more than one turn
    labels, log_probs = batch["labels"].numpy(), batch["old_log_probs"].numpy()
    assert ((labels[:, : width - 1] != IGNORE_INDEX) == sampled).all()
    assert (labels[:, width - 1 :] == IGNORE_INDEX).all()
    assert (labels[:, : width - 1][sampled] == rollouts.tokens[rows, 1:][sampled]).all()
    assert (log_probs[:, : width - 1][sampled] < 0).all()
    assert (log_probs[:, : width - 1][~sampled] == 0).all()
    assert batch["advantages"].tolist() == rollouts.advantages[rows].tolist()


def test_the_trainer_gives_turns_after_a_tool_what_the_sampler_gave(tmp_path: Path, model: Path) -> None:
    """The turns after the answer of a tool, too: its tokens are in the cache of the sampler as in the sample."""
    directory = tmp_path / "runs"
    train(tmp_path, model)
    (record, *_) = map(json.loads, (next(directory.glob("*")) / "metrics.jsonl").read_text().splitlines())
    assert record["log_probs/difference"] < 1e-5


def test_turns_are_counted_and_end_at_seq_len(tmp_path: Path, model: Path) -> None:
    train(tmp_path, model, rollout={"max_turns": 2, "max_new_tokens": 40})
    turns = [sum(message["role"] == "assistant" for message in each["completion"]) for each in seen]
    assert max(turns) == 2
    seen.clear()
    rollouts = train(tmp_path, model, rollout={"max_turns": 50}, data={"seq_len": 64})
    lengths = (rollouts.tokens != 0).sum(1)
    assert 56 <= lengths.max() <= 64
    cut = lengths > 50
    assert cut.any()
    assert np.isin(rollouts.stats[:, -1], (0, 1)).all()
    for each in seen:
        assert each["completion"][-1]["role"] == "assistant"  # no answer that the model had no room to read
    assert torch.isfinite(torch.from_numpy(rollouts.advantages)).all()


def broken(text: str) -> str:
    raise LookupError(f"no answer\nto {len(text)}")


def number(text: str) -> Any:
    return len(text)


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        ("broken", r"rollout.tool: LookupError: no answer to \d+ \(.*test_rollout_tools.py, line \d+\)$"),
        ("number", "rollout.tool: returned an int; expected text or None"),
    ],
)
def test_a_wrong_tool_is_one_line(tmp_path: Path, model: Path, tool: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        train(tmp_path, model, rollout={"tool": f"{__name__}:{tool}"})


def process(text: str) -> str | None:
    """Answers something else in each process, and more of it."""
    return str(os.getpid()) * (1 + os.getpid() % 3) if os.getpid() % 2 or len(text) % 3 else None


@pytest.mark.nightly
def test_ranks_of_a_tensor_parallel_group_read_the_same_answers(pool: Pool, tmp_path: Path, model: Path) -> None:
    config = configure(tmp_path, model, rollout={"tool": f"{__name__}:process"}, layout={"tp": 2})
    directory = Path(pool.run("tests.distributed.rank_jobs:run", (config,), 2)[0]["directory"])
    (record, *_) = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    assert record["log_probs/difference"] < 1e-5
    written = [json.loads(line)["completion"] for line in (directory / "rollouts.jsonl").read_text().splitlines()]
    assert any("tool" in completion for completion in written)
