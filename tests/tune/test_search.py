"""The search for the fastest choices, on made-up machines whose speed and memory are functions of the choice."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.support.configs import tiny_config
from trainyard import devices
from trainyard.core.errors import UserError
from trainyard.tune.search import (
    KEY_ATTENTION,
    KEY_COMPILE,
    KEY_COMPILE_MODE,
    KEY_MICRO_BATCH,
    KEY_RECOMPUTE,
    KEY_RECOMPUTE_PARTS,
    OUT_OF_MEMORY,
    RECOMPUTE_LEVELS,
    TOO_SLOW,
    Choice,
    SearchSpace,
    Trial,
    TuneSearch,
    run_search,
    trial_from_process,
    trial_timeout,
)

KEEP = {"none": 8, "selective": 6, "attention": 5, "full": 1}
"""Memory that a sample takes, by recompute."""
PACE = {"none": 1.0, "selective": 0.97, "attention": 0.9, "full": 0.85}


class Machine:
    """A device with room for `memory`, where larger micro batches are faster up to `wide`, and compiling is `compiled`
    times as fast but takes 60 s."""

    def __init__(self, memory: float, wide: int = 8, compiled: float = 1.3, autotuned: float = 1.0) -> None:
        self.memory, self.wide, self.compiled, self.autotuned = memory, wide, compiled, autotuned
        self.now = 0.0
        self.limits: list[float] = []

    def clock(self) -> float:
        return self.now

    def speed(self, choice: Choice) -> float:
        """0 where it does not fit."""
        if choice[KEY_MICRO_BATCH] * KEEP[choice[KEY_RECOMPUTE]] > self.memory:
            return 0.0
        micro = choice[KEY_MICRO_BATCH]
        fast = (
            self.compiled * (self.autotuned if choice[KEY_COMPILE_MODE] != "default" else 1)
            if choice[KEY_COMPILE]
            else 1.0
        )
        return (
            1000
            * fast
            * PACE[choice[KEY_RECOMPUTE]]
            * min(micro, self.wide)
            / (min(micro, self.wide) + 1)
            * 0.9 ** max(micro // self.wide - 1, 0)
        )

    def __call__(self, choice: Choice, seconds: float) -> Trial:
        self.limits.append(seconds)
        takes = 60.0 if choice[KEY_COMPILE] else 10.0
        self.now += min(takes, seconds)
        if takes > seconds:
            return Trial(choice, TOO_SLOW, seconds)
        speed = self.speed(choice)
        return Trial(choice, "done" if speed else OUT_OF_MEMORY, takes, speed)


def space(ranks: int = 1, fixed: set[str] = frozenset(), **sections: dict[str, Any]) -> SearchSpace:  # type: ignore[assignment]
    sections["train"] = {"global_batch": 64, "micro_batch": 1, **sections.get("train", {})}
    return SearchSpace(tiny_config("llama", **sections), ranks, fixed)


def searched(machine: Machine, where: SearchSpace, budget: float = 1e9) -> TuneSearch:
    search = TuneSearch(where)
    run_search(search, machine, budget, machine.clock)
    return search


def fastest(machine: Machine, where: SearchSpace) -> tuple[float, int]:
    """By trying everything: the best speed, and how many choices that are."""
    sizes = [
        *where.smaller_micro_batches(where.initial_choice[KEY_MICRO_BATCH]),
        where.initial_choice[KEY_MICRO_BATCH],
        *where.larger_micro_batches(where.initial_choice[KEY_MICRO_BATCH]),
    ]
    modes = ("default", "max-autotune-no-cudagraphs")
    grid = [
        where.initial_choice | {KEY_COMPILE: enabled, KEY_COMPILE_MODE: mode, KEY_MICRO_BATCH: size} | level
        for enabled, mode, size, level in product((False, True), modes, sizes, RECOMPUTE_LEVELS)
    ]
    return max(machine.speed(choice) for choice in grid), len(grid)


@pytest.mark.parametrize(
    ("machine", "sections"),
    [
        (Machine(memory=1e9), {}),
        (Machine(memory=1e9, wide=2), {"train": {"micro_batch": 8}}),
        (Machine(memory=1e9, compiled=0.8), {"compile": {"enabled": True}}),
        (Machine(memory=1e9, autotuned=1.1), {"compile": {"enabled": True}}),
        (Machine(memory=32), {"recompute": {"kind": "full"}}),
        (Machine(memory=32), {"train": {"micro_batch": 2}, "recompute": {"kind": "selective", "modules": ["mlp"]}}),
        (Machine(memory=20, wide=64), {"recompute": {"kind": "full"}, "train": {"micro_batch": 4}}),
        (Machine(memory=6), {"train": {"micro_batch": 4}}),
        (Machine(memory=1, wide=1), {"train": {"micro_batch": 4}}),
    ],
)
def test_the_fastest_is_found_in_few_trials(machine: Machine, sections: dict[str, dict[str, Any]]) -> None:
    where = space(**sections)
    search = searched(machine, where)
    best, choices = fastest(machine, where)
    assert search.best_speed >= 0.98 * best
    assert search.best_speed == machine.speed(search.best_choice)
    assert len(search.trials) <= 12 < choices
    assert search.trials[0].choice == where.initial_choice


def test_every_choice_is_a_configuration_and_none_is_tried_twice(tmp_path: Path) -> None:
    where = space(ranks=2, train={"global_batch": 96, "micro_batch": 6}, recompute={"kind": "full"})
    search = searched(Machine(memory=20), where)
    for trial in search.trials:
        short = where.trial_config(trial.choice, 6, tmp_path)
        assert short.train.global_batch == where.trial_batch == 96
        assert short.train.global_batch % (short.train.micro_batch * 2) == 0
        assert (short.train.steps, short.log.every, short.checkpoint.export_hf) == (6, 1, False)
        whole = where.config_for(trial.choice)
        assert whole.train.global_batch == 96
        assert (
            whole.model_copy(
                update={"train": where.base_config.train, "compile": where.base_config.compile}
            ).model_copy(update={"recompute": where.base_config.recompute})
            == where.base_config
        )
    assert len({json.dumps(trial.choice) for trial in search.trials}) == len(search.trials) > 4


def test_out_of_memory_halves_the_files_micro_batch() -> None:
    search = searched(Machine(memory=17), space(train={"micro_batch": 8}), budget=25)
    assert [trial.choice[KEY_MICRO_BATCH] for trial in search.trials] == [8, 4]
    assert [trial.outcome for trial in search.trials] == [OUT_OF_MEMORY, OUT_OF_MEMORY]
    search = searched(Machine(memory=17), space(train={"micro_batch": 8}), budget=85)
    assert [trial.choice[KEY_MICRO_BATCH] for trial in search.trials] == [8, 4, 2, 2]
    assert [trial.outcome for trial in search.trials] == [
        OUT_OF_MEMORY,
        OUT_OF_MEMORY,
        "done",
        TOO_SLOW,
    ]  # the last was compiling
    assert search.best_choice == search.space.initial_choice | {KEY_MICRO_BATCH: 2}


def test_nothing_fits() -> None:
    search = searched(Machine(memory=0), space(train={"micro_batch": 2}))
    assert not search.best_speed
    assert search.trials[-1].choice | {KEY_MICRO_BATCH: 1, **RECOMPUTE_LEVELS[-1]} == search.trials[-1].choice
    assert len(search.trials) == 5


def test_more_recompute_only_for_a_micro_batch_that_needs_it() -> None:
    search = searched(Machine(memory=1e9), space())
    assert {trial.choice[KEY_RECOMPUTE] for trial in search.trials} == {"none"}
    search = searched(Machine(memory=8, wide=64), space())
    assert search.best_choice[KEY_RECOMPUTE] == "full"
    assert all(trial.choice[KEY_MICRO_BATCH] > 1 for trial in search.trials if trial.choice[KEY_RECOMPUTE] != "none")


def test_what_the_user_names_stays() -> None:
    where = space(fixed={KEY_COMPILE, KEY_MICRO_BATCH, KEY_RECOMPUTE, "optimizer.lr"})
    assert [trial.choice for trial in searched(Machine(memory=1e9), where).trials] == [where.initial_choice]
    search = searched(Machine(memory=4), space(fixed={KEY_MICRO_BATCH}))
    assert {trial.choice[KEY_MICRO_BATCH] for trial in search.trials} == {1}
    assert search.best_choice[KEY_RECOMPUTE] == "full"


def test_the_budget_is_kept() -> None:
    for budget in (5, 15, 70, 75, 130, 140, 500):
        machine = Machine(memory=1e9)
        search = searched(machine, space(), budget)
        assert machine.now <= budget
        assert len(search.trials) >= 1
        for number, trial in enumerate(search.trials[1:], 1):  # it fitted at the pace of the slowest before it
            spent = sum(each.seconds for each in search.trials[:number])
            assert spent + max(each.seconds for each in search.trials[:number]) <= budget
            assert trial.seconds <= budget - spent
    assert searched(Machine(memory=1e9), space(), 5).trials[0].outcome == TOO_SLOW


def test_a_trial_is_compared_with_those_compiled_alike() -> None:
    eager = {KEY_COMPILE: False, KEY_COMPILE_MODE: "default"}
    compiled = {KEY_COMPILE: True, KEY_COMPILE_MODE: "default"}
    trials = [Trial(eager, "done", seconds, 1.0) for seconds in (9.0, 10.0, 30.0)] + [Trial(eager, OUT_OF_MEMORY, 2.0)]
    assert trial_timeout([], eager, 100) == 100
    assert trial_timeout(trials, eager, 100) == 30
    assert trial_timeout(trials, compiled, 100) == 100
    assert trial_timeout(trials, eager, 30.5) == 30
    assert trial_timeout(trials, eager, 29) is None


def test_a_step_has_the_same_samples_in_all_trials() -> None:
    assert space().trial_batch == 8
    assert space(train={"global_batch": 1024, "micro_batch": 4}).trial_batch == 32
    assert space(ranks=2, train={"global_batch": 24, "micro_batch": 1}).trial_batch == 8  # 16 does not divide 24
    assert space(train={"global_batch": 6, "micro_batch": 6}).smaller_micro_batches(6) == [3, 1]
    assert space(train={"micro_batch": 2}).larger_micro_batches(2) == [4, 8, 16]
    piped = space(ranks=2, layout={"pp": 2})
    assert piped.trial_batch == 64
    with pytest.raises(UserError, match="does not divide"):
        space(ranks=3, layout={"tp": 3})


def test_a_schedule_without_compile_is_not_compiled() -> None:
    where = space(ranks=2, layout={"pp": 2, "pipeline_schedule": "zero_bubble"})
    search = searched(Machine(memory=1e9), where)
    assert len(search.trials) > 2
    assert not any(trial.choice[KEY_COMPILE] for trial in search.trials)


def test_without_a_compiler_only_the_file_as_it_is_may_ask_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert not any(trial.choice[KEY_COMPILE] for trial in searched(Machine(memory=1e9), space()).trials)
    search = searched(Machine(memory=1e9), space(compile={"enabled": True}))
    assert [trial.choice[KEY_COMPILE] for trial in search.trials][:2] == [True, False]


def test_a_change_within_the_noise_is_not_taken() -> None:
    search = searched(Machine(memory=1e9, compiled=1.005), space(fixed={KEY_MICRO_BATCH}))
    assert search.best_choice == search.space.initial_choice
    assert len(search.trials) == 2


def test_attention_kernels_are_those_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    where = space()
    assert where.other_attention_kernels() == []
    monkeypatch.setattr("trainyard.devices.CpuDevice.attention_kernels", ("one", "two", "three"))
    for own, others in (("auto", ["two", "three"]), ("three", ["auto", "two"]), ("one", ["auto", "two", "three"])):
        where.initial_choice[KEY_ATTENTION] = own
        assert where.other_attention_kernels() == others


def test_the_fastest_attention_kernel_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """By names that the schema knows, on a device that has them."""
    names = devices.ATTENTION_KERNELS[1:]
    monkeypatch.setattr("trainyard.devices.CpuDevice.attention_kernels", names)
    machine = Machine(memory=1e9)
    search = TuneSearch(space(fixed={KEY_COMPILE, KEY_MICRO_BATCH}))
    speed = {"auto": 1.0, names[1]: 1.1, names[2]: 1.3}

    def runner(choice: Choice, seconds: float) -> Trial:
        return replace(machine(choice, seconds), speed=speed.get(choice[KEY_ATTENTION], 0.5))

    run_search(search, runner, 1e9, machine.clock)
    assert search.best_choice == search.space.initial_choice | {KEY_ATTENTION: names[2]}
    assert search.space.overrides(search.best_choice) == [f"device.attention={names[2]}"]


def test_words_are_overrides() -> None:
    where = space()
    choice = where.initial_choice | {
        KEY_COMPILE: True,
        KEY_MICRO_BATCH: 4,
        KEY_RECOMPUTE: "parts",
        KEY_RECOMPUTE_PARTS: ["activation"],
    }
    words = where.overrides(choice)
    assert words == [
        "compile.enabled=true",
        "train.micro_batch=4",
        "recompute.kind=selective",
        "recompute.modules=[activation]",
    ]
    assert where.config_for(choice).recompute.modules == ("activation",)
    assert where.overrides(where.initial_choice) == []


def test_a_done_trial_is_read_from_its_metrics(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    rows = [(90_000.0, 1.0, 5), (40.0, 80.0, 7), (10.0, 100.0, 7), (10.0, 300.0, 7), (10.0, 110.0, 6)]
    names = ("ms_per_iteration", "tokens_per_second", "memory_bytes")
    metrics.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    trial = trial_from_process({}, 0, True, 12.0, "", metrics)
    assert trial == Trial({}, "done", 12.0, tokens_per_second=110.0, peak_bytes=7, first_step_seconds=90.0)


@pytest.mark.parametrize(
    ("code", "in_time", "errors", "state"),
    [
        (1, True, "Traceback\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n", OUT_OF_MEMORY),
        (
            1,
            True,
            "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes\n",
            OUT_OF_MEMORY,
        ),
        (-9, True, "", OUT_OF_MEMORY),
        (
            1,
            True,
            "trainyard: rank 1 was killed by signal 9 (SIGKILL); often the machine ran out of memory\n",
            OUT_OF_MEMORY,
        ),
        (-9, False, "", TOO_SLOW),
        (0, False, "", TOO_SLOW),
        (1, True, "Traceback\nRuntimeError: no\ntrainyard: logs of all ranks: somewhere\n\n", "RuntimeError: no"),
        (2, True, "trainyard: train.loss=a:b: cannot import a\n", "train.loss=a:b: cannot import a"),
        (-11, True, "", "exit code -11"),
    ],
)
def test_how_a_trial_failed(code: int, in_time: bool, errors: str, state: str, tmp_path: Path) -> None:
    trial = trial_from_process({}, code, in_time, 3.0, errors, tmp_path / "none")
    assert (trial.outcome, trial.tokens_per_second, trial.seconds) == (state, 0.0, 3.0)
