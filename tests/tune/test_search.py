"""The search for the fastest choices, on made-up machines whose speed and memory are functions of the choice."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.support.configs import config
from trainyard import devices
from trainyard.core.errors import UserError
from trainyard.tune.search import (
    ATTENTION,
    ENABLED,
    KIND,
    LEVELS,
    MICRO,
    MODE,
    OUT,
    PARTS,
    SLOW,
    Choice,
    Search,
    Space,
    Trial,
    explore,
    judge,
    limit,
)

KEEP = {"none": 8, "parts": 6, "attention": 5, "full": 1}
"""Memory that a sample takes, by recompute."""
PACE = {"none": 1.0, "parts": 0.97, "attention": 0.9, "full": 0.85}


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
        if choice[MICRO] * KEEP[choice[KIND]] > self.memory:
            return 0.0
        micro = choice[MICRO]
        fast = self.compiled * (self.autotuned if choice[MODE] != "default" else 1) if choice[ENABLED] else 1.0
        return (
            1000
            * fast
            * PACE[choice[KIND]]
            * min(micro, self.wide)
            / (min(micro, self.wide) + 1)
            * 0.9 ** max(micro // self.wide - 1, 0)
        )

    def __call__(self, choice: Choice, seconds: float) -> Trial:
        self.limits.append(seconds)
        takes = 60.0 if choice[ENABLED] else 10.0
        self.now += min(takes, seconds)
        if takes > seconds:
            return Trial(choice, SLOW, seconds)
        speed = self.speed(choice)
        return Trial(choice, "done" if speed else OUT, takes, speed)


def space(ranks: int = 1, fixed: set[str] = frozenset(), **sections: dict[str, Any]) -> Space:  # type: ignore[assignment]
    sections["train"] = {"global_batch": 64, "micro_batch": 1, **sections.get("train", {})}
    return Space(config("llama", **sections), ranks, fixed)


def searched(machine: Machine, where: Space, budget: float = 1e9) -> Search:
    search = Search(where)
    explore(search, machine, budget, machine.clock)
    return search


def fastest(machine: Machine, where: Space) -> tuple[float, int]:
    """By trying everything: the best speed, and how many choices that are."""
    sizes = [*where.smaller(where.start[MICRO]), where.start[MICRO], *where.larger(where.start[MICRO])]
    modes = ("default", "max-autotune-no-cudagraphs")
    grid = [
        where.start | {ENABLED: enabled, MODE: mode, MICRO: size} | level
        for enabled, mode, size, level in product((False, True), modes, sizes, LEVELS)
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
        (Machine(memory=32), {"train": {"micro_batch": 2}, "recompute": {"kind": "parts", "parts": ["mlp"]}}),
        (Machine(memory=20, wide=64), {"recompute": {"kind": "full"}, "train": {"micro_batch": 4}}),
        (Machine(memory=6), {"train": {"micro_batch": 4}}),
        (Machine(memory=1, wide=1), {"train": {"micro_batch": 4}}),
    ],
)
def test_the_fastest_is_found_in_few_trials(machine: Machine, sections: dict[str, dict[str, Any]]) -> None:
    where = space(**sections)
    search = searched(machine, where)
    best, choices = fastest(machine, where)
    assert search.speed >= 0.98 * best
    assert search.speed == machine.speed(search.choice)
    assert len(search.trials) <= 12 < choices
    assert search.trials[0].choice == where.start


def test_every_choice_is_a_configuration_and_none_is_tried_twice(tmp_path: Path) -> None:
    where = space(ranks=2, train={"global_batch": 96, "micro_batch": 6}, recompute={"kind": "full"})
    search = searched(Machine(memory=20), where)
    for trial in search.trials:
        short = where.trial(trial.choice, 6, tmp_path)
        assert short.train.global_batch == where.batch == 96
        assert short.train.global_batch % (short.train.micro_batch * 2) == 0
        assert (short.train.steps, short.log.every, short.checkpoint.final) == (6, 1, False)
        whole = where.config(trial.choice)
        assert whole.train.global_batch == 96
        assert (
            whole.model_copy(update={"train": where.file.train, "compile": where.file.compile}).model_copy(
                update={"recompute": where.file.recompute}
            )
            == where.file
        )
    assert len({json.dumps(trial.choice) for trial in search.trials}) == len(search.trials) > 4


def test_out_of_memory_halves_the_files_micro_batch() -> None:
    search = searched(Machine(memory=17), space(train={"micro_batch": 8}), budget=25)
    assert [trial.choice[MICRO] for trial in search.trials] == [8, 4]
    assert [trial.state for trial in search.trials] == [OUT, OUT]
    search = searched(Machine(memory=17), space(train={"micro_batch": 8}), budget=85)
    assert [trial.choice[MICRO] for trial in search.trials] == [8, 4, 2, 2]
    assert [trial.state for trial in search.trials] == [OUT, OUT, "done", SLOW]  # the last was compiling
    assert search.choice == search.space.start | {MICRO: 2}


def test_nothing_fits() -> None:
    search = searched(Machine(memory=0), space(train={"micro_batch": 2}))
    assert not search.speed
    assert search.trials[-1].choice | {MICRO: 1, **LEVELS[-1]} == search.trials[-1].choice
    assert len(search.trials) == 5


def test_more_recompute_only_for_a_micro_batch_that_needs_it() -> None:
    search = searched(Machine(memory=1e9), space())
    assert {trial.choice[KIND] for trial in search.trials} == {"none"}
    search = searched(Machine(memory=8, wide=64), space())
    assert search.choice[KIND] == "full"
    assert all(trial.choice[MICRO] > 1 for trial in search.trials if trial.choice[KIND] != "none")


def test_what_the_user_names_stays() -> None:
    where = space(fixed={ENABLED, MICRO, KIND, "optimizer.lr"})
    assert [trial.choice for trial in searched(Machine(memory=1e9), where).trials] == [where.start]
    search = searched(Machine(memory=4), space(fixed={MICRO}))
    assert {trial.choice[MICRO] for trial in search.trials} == {1}
    assert search.choice[KIND] == "full"


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
    assert searched(Machine(memory=1e9), space(), 5).trials[0].state == SLOW


def test_a_trial_is_compared_with_those_compiled_alike() -> None:
    eager = {ENABLED: False, MODE: "default"}
    compiled = {ENABLED: True, MODE: "default"}
    trials = [Trial(eager, "done", seconds, 1.0) for seconds in (9.0, 10.0, 30.0)] + [Trial(eager, OUT, 2.0)]
    assert limit([], eager, 100) == 100
    assert limit(trials, eager, 100) == 30
    assert limit(trials, compiled, 100) == 100
    assert limit(trials, eager, 30.5) == 30
    assert limit(trials, eager, 29) is None


def test_a_step_has_the_same_samples_in_all_trials() -> None:
    assert space().batch == 8
    assert space(train={"global_batch": 1024, "micro_batch": 4}).batch == 32
    assert space(ranks=2, train={"global_batch": 24, "micro_batch": 1}).batch == 8  # 16 does not divide 24
    assert space(train={"global_batch": 6, "micro_batch": 6}).smaller(6) == [3, 1]
    assert space(train={"micro_batch": 2}).larger(2) == [4, 8, 16]
    piped = space(ranks=2, layout={"pp": 2})
    assert piped.batch == 64
    with pytest.raises(UserError, match="does not divide"):
        space(ranks=3, layout={"tp": 3})


def test_a_schedule_without_compile_is_not_compiled() -> None:
    where = space(ranks=2, layout={"pp": 2, "schedule": "zero_bubble"})
    search = searched(Machine(memory=1e9), where)
    assert len(search.trials) > 2
    assert not any(trial.choice[ENABLED] for trial in search.trials)


def test_without_a_compiler_only_the_file_as_it_is_may_ask_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert not any(trial.choice[ENABLED] for trial in searched(Machine(memory=1e9), space()).trials)
    search = searched(Machine(memory=1e9), space(compile={"enabled": True}))
    assert [trial.choice[ENABLED] for trial in search.trials][:2] == [True, False]


def test_a_change_within_the_noise_is_not_taken() -> None:
    search = searched(Machine(memory=1e9, compiled=1.005), space(fixed={MICRO}))
    assert search.choice == search.space.start
    assert len(search.trials) == 2


def test_attention_kernels_are_those_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    where = space()
    assert where.attentions() == []
    monkeypatch.setattr("trainyard.devices.Cpu.attentions", ("one", "two", "three"))
    for own, others in (("auto", ["two", "three"]), ("three", ["auto", "two"]), ("one", ["auto", "two", "three"])):
        where.start[ATTENTION] = own
        assert where.attentions() == others


def test_the_fastest_attention_kernel_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """By names that the schema knows, on a device that has them."""
    names = devices.ATTENTIONS[1:]
    monkeypatch.setattr("trainyard.devices.Cpu.attentions", names)
    machine = Machine(memory=1e9)
    search = Search(space(fixed={ENABLED, MICRO}))
    speed = {"auto": 1.0, names[1]: 1.1, names[2]: 1.3}

    def runner(choice: Choice, seconds: float) -> Trial:
        return replace(machine(choice, seconds), speed=speed.get(choice[ATTENTION], 0.5))

    explore(search, runner, 1e9, machine.clock)
    assert search.choice == search.space.start | {ATTENTION: names[2]}
    assert search.space.words(search.choice) == [f"device.attention={names[2]}"]


def test_words_are_overrides() -> None:
    where = space()
    choice = where.start | {ENABLED: True, MICRO: 4, KIND: "parts", PARTS: ["activation"]}
    words = where.words(choice)
    assert words == [
        "compile.enabled=true",
        "train.micro_batch=4",
        "recompute.kind=parts",
        "recompute.parts=[activation]",
    ]
    assert where.config(choice).recompute.parts == ("activation",)
    assert where.words(where.start) == []


def test_a_done_trial_is_read_from_its_metrics(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    rows = [(90_000.0, 1.0, 5), (40.0, 80.0, 7), (10.0, 100.0, 7), (10.0, 300.0, 7), (10.0, 110.0, 6)]
    names = ("ms_per_iteration", "tokens_per_second", "memory_bytes")
    metrics.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    trial = judge({}, 0, True, 12.0, "", metrics)
    assert trial == Trial({}, "done", 12.0, speed=110.0, memory=7, first=90.0)


@pytest.mark.parametrize(
    ("code", "in_time", "errors", "state"),
    [
        (1, True, "Traceback\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n", OUT),
        (1, True, "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes\n", OUT),
        (-9, True, "", OUT),
        (1, True, "trainyard: rank 1 was killed by signal 9 (SIGKILL); often the machine ran out of memory\n", OUT),
        (-9, False, "", SLOW),
        (0, False, "", SLOW),
        (1, True, "Traceback\nRuntimeError: no\ntrainyard: logs of all ranks: somewhere\n\n", "RuntimeError: no"),
        (2, True, "trainyard: train.loss=a:b: cannot import a\n", "train.loss=a:b: cannot import a"),
        (-11, True, "", "exit code -11"),
    ],
)
def test_how_a_trial_failed(code: int, in_time: bool, errors: str, state: str, tmp_path: Path) -> None:
    trial = judge({}, code, in_time, 3.0, errors, tmp_path / "none")
    assert (trial.state, trial.speed, trial.seconds) == (state, 0.0, 3.0)
