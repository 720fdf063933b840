"""A run on its own completions writes the same ones, and trains the same weights from them, at every layout that it
has, and resumes between two updates on the same completions."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed.test_layouts import SP
from tests.support import configs
from tests.support.pool import Pool, RankFailed
from trainyard.checkpoint.checkpoint import Checkpoint
from trainyard.cli.train_console import log_line
from trainyard.core.errors import UserError
from trainyard.metrics.run_status import reward_of
from trainyard.metrics.spans import read_spans, span_path
from trainyard.preflight.verify import compare_records, record_training
from trainyard.remote.storage import LocalStorage
from trainyard.run.callbacks import Callback, TrainerView
from trainyard.run.rollouts.rewards import RewardFunctions, exact, matching
from trainyard.run.rollouts.rollout import RolloutBatch
from trainyard.run.rollouts.rollout_loader import RolloutLoader
from trainyard.run.trainer import Trainer

STEPS = 4
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "dp2": (2, {}),
    "dp2-zero1": (2, {"zero": 1}),
    "tp2": (2, {"tp": 2}),
    "tp2-sp-dp2-zero1": (4, {"tp": 2, "zero": 1, **SP}),
}
KINDS: dict[str, dict[str, Any]] = {
    "grpo": {"policy": {"kl": 0.2, "average": "completions"}, "rollout": {"rounds": 2}},
    "rloo": {"policy": {"kl": 0.2}, "rollout": {"temperature": 0.7, "epochs": 2, "updates": 1}},
    "grpo-lora": {"lora": {"rank": 3}, "policy": {"kl": 0.2, "clip_high": 0.3}},
}
"""Sections by a name that begins with the objective's."""
FAST = {("grpo", "dp2-zero1"), ("grpo-lora", "tp2")}
CASES = [
    pytest.param(kind, layout, marks=[] if (kind, layout) in FAST else [pytest.mark.nightly])
    for kind in KINDS
    for layout in [*LAYOUTS][1:]
]


def spread(
    prompts: list[str], completions: list[str], completion_ids: list[list[int]], bonus: list[int], **_: Any
) -> Any:
    """Differs between completions, prompts and records."""
    return [len(set(ids)) / 4 + sum(ids) % 5 + extra for ids, extra in zip(completion_ids, bonus, strict=True)]


def odd(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """Does not apply to every completion."""
    return [None if sum(ids) % 3 == 0 else float(ids[0] % 2) for ids in completion_ids]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    records = ({"prompt": "abcdefgh"[: 1 + number % 7], "bonus": number % 2} for number in range(11))
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def run(pool: Pool, prompts: str, directory: Path, kind: str, layout: str, **more: Any) -> tuple[Path, list[Any]]:
    """The run directory, and the records of its steps."""
    sections: dict[str, Any] = {
        "data": {"source": "prompts", "paths": prompts, "seq_len": 16, "validation_fraction": 0.2},
        "train": {"steps": STEPS, "global_batch": 8, "micro_batch": 2, "objective": kind.partition("-")[0]},
        "rollout": {
            "rewards": [f"{__name__}:spread", f"{__name__}:odd"],
            "weights": [1.0, 0.5],
            "completions": 4,
            "max_new_tokens": 6,
            "updates": 2,
        },
        "evaluate": {"every": STEPS},
        "optimizer": {"lr": 1e-3, "eps": 1e-3},
        "log": {"directory": str(directory)},
        "layout": LAYOUTS[layout][1],
        "checkpoint": {"every": 1, "keep": 0},
    }
    for each in (KINDS[kind], more.pop("keys", {}), more):
        sections = {key: {**sections.get(key, {}), **each.get(key, {})} for key in {*sections, *each}}
    config = configs.tiny_config({**configs.LLAMA, "vocab": 257, "layers": 2}, **sections)
    result = pool.run("tests.distributed.rank_jobs:run", (config,), LAYOUTS[layout][0])[0]
    lines = (Path(result["directory"]) / "metrics.jsonl").read_text().splitlines()
    return Path(result["directory"]), [json.loads(line) for line in lines]


def saved(directory: Path, step: int) -> RolloutBatch:
    """The rollouts in the checkpoint of a step, which the next step trains on, too."""
    with Checkpoint(LocalStorage(directory / "checkpoints" / f"step_{step:08d}")) as checkpoint:
        extras = checkpoint.rank_extras(0)
        assert extras
        found = RolloutBatch.from_tensors(extras[0])
    assert found
    return found


def written(trainer: Trainer) -> RolloutBatch:
    """The last rollouts of a run."""
    assert isinstance(trainer.batch_source, RolloutLoader)
    assert trainer.batch_source.written
    return trainer.batch_source.written


@pytest.fixture(scope="module")
def single(pool: Pool, prompts: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[Any]]]:
    """The run of one rank, by kind."""
    return {kind: run(pool, prompts, tmp_path_factory.mktemp(kind), kind, "single") for kind in KINDS}


def numbers(records: list[Any]) -> list[dict[str, float]]:
    """What records say about losses and rewards."""
    names = ("loss", "grad_norm", "param_norm", "rewards", "completions", "kl", "clipped", "log_probs", "evaluate")
    found = [{key: record[key] for key in record if key.split("/")[0] in names} for record in records]
    return [record for record in found if record]


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_layout_equals_one_rank(
    pool: Pool, prompts: str, single: dict[str, tuple[Path, list[Any]]], tmp_path: Path, kind: str, layout: str
) -> None:
    directory, records = run(pool, prompts, tmp_path, kind, layout)
    reference, expected = single[kind]
    for found, one in zip(numbers(records), numbers(expected), strict=True):
        found.pop("log_probs/difference", None), one.pop("log_probs/difference", None)
        assert found == pytest.approx(one, rel=1e-5, abs=2e-6)
    for step in (1, 3):
        ours, theirs = saved(directory, step), saved(reference, step)
        assert np.array_equal(ours.tokens, theirs.tokens)
        assert ours.log_probs == pytest.approx(theirs.log_probs, abs=2e-6)
        assert ours.reference_log_probs == pytest.approx(theirs.reference_log_probs, abs=2e-6)


def test_the_sampler_and_the_trainer_agree(single: dict[str, tuple[Path, list[Any]]]) -> None:
    for kind, (_, records) in single.items():
        steps = [record for record in records if "loss" in record]
        assert steps[0]["log_probs/difference"] < 1e-6, kind  # the first update on a batch of rollouts
        assert steps[1]["log_probs/difference"] > 1e-5, kind  # weights have changed since
        assert steps[2]["log_probs/difference"] < 1e-6, kind  # those of the second batch, not of the one before
        assert steps[0]["rewards/total"] != steps[2]["rewards/total"]
        assert reward_of(steps[0]) == ("mean", steps[0]["rewards/total"])
        shown = f" | log prob difference {steps[1]['log_probs/difference']:.1e} | "
        assert shown in log_line(steps[1], STEPS)


def test_batch_invariant_kernels_make_them_equal_bit_for_bit(pool: Pool, prompts: str, tmp_path: Path) -> None:
    _, records = run(pool, prompts, tmp_path, "grpo", "single", device={"batch_invariant": True})
    differences = [record["log_probs/difference"] for record in records if "loss" in record]
    assert differences[0] == differences[2] == 0.0 < differences[1]


@pytest.mark.parametrize("layout", ["single", pytest.param("tp2", marks=pytest.mark.nightly)])
def test_resumes_between_two_updates(pool: Pool, prompts: str, tmp_path: Path, layout: str) -> None:
    """Step 3 is the first update on rollouts that step 4 uses, too. The run stopped there by chance, went on for much
    longer, and the checkpoint of step 3 was copied."""
    rarely = {"checkpoint": {"every": 1000, "keep": 0, "resume": "auto"}}
    directory, _ = run(pool, prompts, tmp_path, "grpo", "single", train={"steps": 3}, **rarely)
    again, expected = run(pool, prompts, tmp_path, "grpo", "single", train={"steps": 9}, **rarely)
    assert again == directory
    copy = tmp_path / "copy" / "step_00000003"
    shutil.copytree(directory / "checkpoints" / "step_00000003", copy)
    shutil.rmtree(directory)
    source = {"init_from": None, "resume": str(copy)}
    _, records = run(pool, prompts, tmp_path / "resumed", "grpo", layout, checkpoint=source, train={"steps": 9})
    assert records[0]["step"] == 4
    expected = [record for record in expected if record["step"] > 3]
    for found, one in zip(numbers(records), numbers(expected), strict=True):
        found.pop("log_probs/difference", None), one.pop("log_probs/difference", None)
        if layout == "single":
            assert found == one
        else:
            assert found == pytest.approx(one, rel=1e-5, abs=2e-6)


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"updates": 4}, "lacks the 32 rollouts of steps 1 to 4, of which step 3 is done; nearest: .* multiple of 4,"),
        ({"epochs": 2}, "lacks the 16 rollouts of steps 1 to 4, of which step 3 is done; nearest: .* multiple of 4,"),
    ],
)
def test_other_updates_are_one_line(
    pool: Pool, prompts: str, single: dict[str, tuple[Path, list[Any]]], tmp_path: Path, rollout: Any, message: str
) -> None:
    source = {"init_from": None, "resume": str(single["grpo"][0] / "checkpoints" / "step_00000003")}
    with pytest.raises(RankFailed, match=message):
        run(pool, prompts, tmp_path, "grpo", "single", checkpoint=source, rollout=rollout)


def test_resumes_from_the_memory_of_the_host(prompts: str, tmp_path: Path) -> None:
    """After an error in step 4, which trains on rollouts of step 3."""

    class Failure(Callback):
        def on_gradients_ready(self, trainer: TrainerView) -> None:
            while trainer.completed_steps == 3:
                if [*memory.rglob("step_00000003/manifest.json")]:
                    raise ArithmeticError

    memory = tmp_path / "memory"
    memory.mkdir()
    keys: dict[str, Any] = {
        "data": {"source": "prompts", "paths": prompts, "seq_len": 16},
        "train": {"steps": 5, "global_batch": 8, "micro_batch": 2, "objective": "grpo"},
        "rollout": {"rewards": [f"{__name__}:spread"], "completions": 4, "max_new_tokens": 6, "updates": 2},
        "log": {"directory": str(tmp_path)},
        "checkpoint": {"every": 1000, "memory_every": 1, "memory_directory": str(memory), "resume": "auto"},
    }
    config = configs.tiny_config({**configs.LLAMA, "vocab": 257, "layers": 2}, **keys)
    failed = Trainer(config, callbacks=[Failure()])
    with pytest.raises(ArithmeticError):
        failed.run()
    resumed = Trainer(config, run_directory=failed.directory)
    assert resumed.completed_steps == 3
    resumed.train_step = None  # type: ignore[assignment]
    with pytest.raises(TypeError):
        resumed.run()
    for name, array in vars(written(failed)).items():
        assert np.array_equal(array, vars(written(resumed))[name], equal_nan=array.dtype == np.float32), name


def test_rollouts_are_written_for_people(single: dict[str, tuple[Path, list[Any]]]) -> None:
    directory, _ = single["grpo"]
    records = [json.loads(line) for line in (directory / "rollouts.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1] * 4 + [3] * 4
    assert {record["prompt"] for record in records[:4]} == {records[0]["prompt"]}
    assert sum(record["advantage"] for record in records[:4]) == pytest.approx(0, abs=1e-4)
    assert records[0]["rewards"].keys() == {"spread", "odd"}


def test_times_of_rollouts_and_rewards_are_recorded(single: dict[str, tuple[Path, list[Any]]]) -> None:
    """Steps 1 and 3 write completions while they wait for data, and the evaluation after step 4."""
    spans = read_spans(span_path(single["grpo-lora"][0], 0), 0)
    assert spans
    assert spans.named("rollout")["step"].tolist() == [1, 1, 3, 3, 4]  # each first, the completions, then the reference
    assert spans.named("reward")["step"].tolist() == [1, 3, 4]
    for name in ("rollout", "reward"):
        for step, outer in ((1, "data wait"), (3, "data wait"), (4, "evaluate")):
            (around,) = (each for each in spans.named(outer) if each["step"] == step)
            for each in spans.named(name)[spans.named(name)["step"] == step]:
                assert each["duration"] > 0
                assert around["start"] <= each["start"]
                assert each["start"] + each["duration"] <= around["start"] + around["duration"]


def test_advantages_follow_the_rewards_of_their_own_prompt(single: dict[str, tuple[Path, list[Any]]]) -> None:
    """Recomputed in numpy from what the run saved."""
    rollouts = saved(single["grpo"][0], 3)
    groups, totals = rollouts.prompts.reshape(-1, 4), rollouts.stats[:, 0].reshape(-1, 4)
    assert (groups == groups[:, :1]).all()
    expected = (totals - totals.mean(1, keepdims=True)) / (totals.std(1, ddof=1, keepdims=True) + 1e-4)
    assert rollouts.advantages.reshape(-1, 4) == pytest.approx(expected, abs=1e-5)
    for row in range(len(rollouts.tokens)):
        ids = rollouts.tokens[row][rollouts.sampled[row]].tolist()
        (value,) = spread([], [], [ids], [int(rollouts.prompts[row]) % 2])
        assert rollouts.stats[row, 1] == pytest.approx(value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"layout": {"pp": 2}}, r"layout.pp=2: train.objective=grpo generates with the weights of the trainer"),
        ({"layout": {"zero": 3}}, r"layout.zero=3: .*nearest: 1"),
        ({"rollout": {"rewards": []}}, "rollout.rewards: missing"),
        ({"rollout": {"rewards": ["a:b", "a:b"], "weights": []}}, "rollout.rewards=a:b: given twice"),
        ({"rollout": {"completions": 3}}, "not a multiple of rollout.completions=3; nearest: 6 or 9"),
        ({"rollout": {"weights": [1.0]}}, "give one per reward"),
        ({"policy": {"variant": "x"}}, "policy.variant"),
        ({"preference": {"beta": 1.0}}, "train.objective=grpo has its options in policy"),
        ({"data": {"packing": True}}, "data.packing=True: train.objective=grpo makes its samples itself"),
    ],
)
def test_mistakes_are_one_line(pool: Pool, prompts: str, tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises((UserError, ValueError), match=message):
        run(pool, prompts, tmp_path, "grpo", "single", keys=keys)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda **_: 1.0, "a reward is a list of numbers"),
        (lambda **_: [1.0], r"returned 1 number for 8 completions"),
        (lambda prompts, **_: [float("nan") for _ in prompts], "a reward is finite, or None"),
        (lambda prompts, **_: ["good" for _ in prompts], "returned a str"),
        (lambda prompts, **_: {}["x"], r"test_rollouts:wrong: KeyError: 'x' \(.*test_rollouts.py, line \d+\)$"),
        (lambda answer, **_: answer, r"wrong: TypeError: .* missing 1 required .* 'answer'"),
    ],
)
def test_wrong_rewards_are_one_line(prompts: str, tmp_path: Path, function: Any, message: str) -> None:
    globals()["wrong"] = function
    keys: dict[str, Any] = {
        "data": {"source": "prompts", "paths": prompts, "seq_len": 16},
        "train": {"steps": 1, "global_batch": 8, "micro_batch": 2, "objective": "grpo"},
        "rollout": {"rewards": [f"{__name__}:wrong"], "completions": 4, "max_new_tokens": 6},
        "log": {"directory": str(tmp_path)},
    }
    with pytest.raises(UserError, match=message):
        Trainer(configs.tiny_config({**configs.LLAMA, "vocab": 257, "layers": 2}, **keys)).run()


def test_rewards_of_answers() -> None:
    """Of text and of messages, with answers that are text, numbers, or missing."""
    completions: list[Any] = [
        "12",
        " 12\n",
        [{"role": "tool", "content": "9"}, {"role": "assistant", "content": "12"}],
        "13",
    ]
    assert exact(completions, ["12", 12, "12", None]) == [1.0, 1.0, 1.0, None]
    assert matching(["12", "1x", completions[2], "13"], ["12", 12, "12", None]) == [1.0, 0.5, 1.0, None]
    functions = RewardFunctions([f"{exact.__module__}:exact"], [])
    assert functions(["p"], ["a"], [[1]], [{"prompt": "p", "answer": "a"}]) == [[1.0]]


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([{"prompt": 3}], "line 1: prompt is an int; expected text or messages"),
        ([{"prompt": ""}], "line 1: prompt is empty"),
        ([{"text": "a"}], "line 1: no prompt: .*found text"),
        ([{"prompt": "a" * 20}], "20 tokens, and data.seq_len=16 less rollout.max_new_tokens leaves 10"),
        ([{"prompt": "a"}, {"prompt": [{"role": "user", "content": "a"}]}], "line 2: some prompts are text"),
        (
            [{"messages": [{"role": "assistant", "content": "a"}]}],
            "line 1: the last message of the prompt is an answer",
        ),
        ([], "no prompt$"),
    ],
)
def test_wrong_prompts_are_one_line(tmp_path: Path, records: list[Any], message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    keys: dict[str, Any] = {
        "data": {"source": "prompts", "paths": str(file), "seq_len": 16},
        "train": {"steps": 1, "global_batch": 8, "micro_batch": 2, "objective": "grpo"},
        "rollout": {"rewards": [f"{__name__}:spread"], "completions": 4, "max_new_tokens": 6},
        "log": {"directory": str(tmp_path)},
    }
    with pytest.raises(UserError, match=message):
        Trainer(configs.tiny_config({**configs.LLAMA, "vocab": 257, "layers": 2}, **keys))


def test_verify_compares_steps_that_train(prompts: str) -> None:
    """Prompts have no labels, and a loss of 0 would be the same at every layout."""
    keys: dict[str, Any] = {
        "data": {"source": "prompts", "paths": prompts, "seq_len": 16},
        "train": {"steps": 1, "global_batch": 8, "micro_batch": 2, "objective": "grpo"},
        "rollout": {"rewards": [f"{__name__}:spread"], "completions": 4, "max_new_tokens": 6},
    }
    record = record_training(configs.tiny_config({**configs.LLAMA, "vocab": 257, "layers": 2}, **keys), 1)
    assert record.grad_norms[0] > 0.1
    assert all(finding.ok for finding in compare_records(record, record, "fp32"))
    nothing, something = (replace(record, losses=[0.0], grad_norms=[norm]) for norm in (0.0, 1e-3))
    assert all(finding.ok for finding in compare_records(nothing, nothing, "fp32"))
    assert not all(finding.ok for finding in compare_records(something, nothing, "fp32"))
