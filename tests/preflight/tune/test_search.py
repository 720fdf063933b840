"""The tuning search on simulated machines whose speed and memory are functions of the choice."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.support.configs import tiny_config
from trainyard.core.errors import UserError
from trainyard.devices import DEVICES
from trainyard.devices.cpu import CpuDevice
from trainyard.preflight.tune.search import TuneSearch, run_search, trial_timeout
from trainyard.preflight.tune.search_space import (
    KEY_ATTENTION,
    KEY_COMPILE,
    KEY_COMPILE_MODE,
    KEY_MICRO_BATCH,
    KEY_RECOMPUTE,
    KEY_RECOMPUTE_MODULES,
    RECOMPUTE_LEVELS,
    SearchSpace,
)
from trainyard.preflight.tune.trial import OUT_OF_MEMORY, TOO_SLOW, Choice, ProcessResult, Trial, trial_from_process

MEMORY_PER_SAMPLE = {"none": 8, "selective": 6, "attention": 5, "full": 1}
"""By recompute kind."""
RELATIVE_SPEED = {"none": 1.0, "selective": 0.97, "attention": 0.9, "full": 0.85}


class Machine:
    """A simulated device with `memory` for samples. Larger micro batches are faster up to `saturation`; compiled code
    is `compiled` times as fast but its trial takes 60 s instead of 10 s."""

    def __init__(self, memory: float, saturation: int = 8, compiled: float = 1.3, autotuned: float = 1.0) -> None:
        self.memory, self.saturation, self.compiled, self.autotuned = memory, saturation, compiled, autotuned
        self.now = 0.0
        self.limits: list[float] = []

    def clock(self) -> float:
        return self.now

    def speed(self, choice: Choice) -> float:
        """Tokens per second, or 0 if the choice does not fit into memory."""
        if choice[KEY_MICRO_BATCH] * MEMORY_PER_SAMPLE[choice[KEY_RECOMPUTE]] > self.memory:
            return 0.0
        micro = choice[KEY_MICRO_BATCH]
        compile_factor = (
            self.compiled * (self.autotuned if choice[KEY_COMPILE_MODE] != "default" else 1)
            if choice[KEY_COMPILE]
            else 1.0
        )
        return (
            1000
            * compile_factor
            * RELATIVE_SPEED[choice[KEY_RECOMPUTE]]
            * min(micro, self.saturation)
            / (min(micro, self.saturation) + 1)
            * 0.9 ** max(micro // self.saturation - 1, 0)
        )

    def __call__(self, choice: Choice, seconds: float) -> Trial:
        self.limits.append(seconds)
        duration = 60.0 if choice[KEY_COMPILE] else 10.0
        self.now += min(duration, seconds)
        if duration > seconds:
            return Trial(choice, TOO_SLOW, seconds)
        speed = self.speed(choice)
        return Trial(choice, "done" if speed else OUT_OF_MEMORY, duration, speed)


def make_space(ranks: int = 1, fixed: set[str] = frozenset(), **sections: dict[str, Any]) -> SearchSpace:  # type: ignore[assignment]
    sections["train"] = {"global_batch": 64, "micro_batch": 1, **sections.get("train", {})}
    return SearchSpace(tiny_config("llama", **sections), ranks, fixed)


def search_on(machine: Machine, space: SearchSpace, budget: float = 1e9) -> TuneSearch:
    search = TuneSearch(space)
    run_search(search, machine, budget, machine.clock)
    return search


def exhaustive_best(machine: Machine, space: SearchSpace) -> tuple[float, int]:
    """The best speed over all choices, and the number of choices."""
    sizes = [
        *space.smaller_micro_batches(space.initial_choice[KEY_MICRO_BATCH]),
        space.initial_choice[KEY_MICRO_BATCH],
        *space.larger_micro_batches(space.initial_choice[KEY_MICRO_BATCH]),
    ]
    modes = ("default", "max-autotune-no-cudagraphs")
    grid = [
        space.initial_choice | {KEY_COMPILE: enabled, KEY_COMPILE_MODE: mode, KEY_MICRO_BATCH: size} | level
        for enabled, mode, size, level in product((False, True), modes, sizes, RECOMPUTE_LEVELS)
    ]
    return max(machine.speed(choice) for choice in grid), len(grid)


@pytest.mark.parametrize(
    ("machine", "sections"),
    [
        (Machine(memory=1e9), {}),
        (Machine(memory=1e9, saturation=2), {"train": {"micro_batch": 8}}),
        (Machine(memory=1e9, compiled=0.8), {"compile": {"enabled": True}}),
        (Machine(memory=1e9, autotuned=1.1), {"compile": {"enabled": True}}),
        (Machine(memory=32), {"recompute": {"kind": "full"}}),
        (Machine(memory=32), {"train": {"micro_batch": 2}, "recompute": {"kind": "selective", "modules": ["mlp"]}}),
        (Machine(memory=20, saturation=64), {"recompute": {"kind": "full"}, "train": {"micro_batch": 4}}),
        (Machine(memory=6), {"train": {"micro_batch": 4}}),
        (Machine(memory=1, saturation=1), {"train": {"micro_batch": 4}}),
    ],
)
def test_search_finds_the_fastest_choice_in_few_trials(machine: Machine, sections: dict[str, dict[str, Any]]) -> None:
    space = make_space(**sections)
    search = search_on(machine, space)
    best, choices = exhaustive_best(machine, space)
    assert search.best_speed >= 0.98 * best
    assert search.best_speed == machine.speed(search.best_choice)
    assert len(search.trials) <= 13 < choices
    assert search.trials[0].choice == space.initial_choice


def test_every_choice_is_a_valid_config_and_is_tried_once(tmp_path: Path) -> None:
    space = make_space(ranks=2, train={"global_batch": 96, "micro_batch": 6}, recompute={"kind": "full"})
    search = search_on(Machine(memory=20), space)
    for trial in search.trials:
        trial_config = space.trial_config(trial.choice, 6, tmp_path)
        assert trial_config.train.global_batch == space.trial_batch == 96
        assert trial_config.train.global_batch % (trial_config.train.micro_batch * 2) == 0
        assert (trial_config.train.steps, trial_config.log.every, trial_config.checkpoint.export_hf) == (6, 1, False)
        full_config = space.config_for(trial.choice)
        assert full_config.train.global_batch == 96
        assert (
            full_config.model_copy(
                update={"train": space.base_config.train, "compile": space.base_config.compile}
            ).model_copy(update={"recompute": space.base_config.recompute})
            == space.base_config
        )
    tried = [json.dumps(trial.choice) for trial in search.trials[:-1]]  # the last one is the file's choice again
    assert len(set(tried)) == len(tried) > 4


def test_baseline_is_measured_again_at_the_end() -> None:
    """Guards against a machine whose load changes: what was measured later would look faster, or slower."""
    search = search_on(Machine(memory=1e9), make_space())
    assert [trial.choice == search.space.initial_choice for trial in search.trials].count(True) == 2
    assert search.trials[-1].choice == search.space.initial_choice
    assert search.file_speeds == [search.trials[0].tokens_per_second] * 2
    assert search.best_speed > 1.5 * search.file_speeds[0]


def test_change_that_only_the_load_of_the_machine_made_faster_is_dropped() -> None:
    class Recovering(Machine):
        """Twice as fast after the first trial, whatever the choice; no setting makes a difference."""

        def speed(self, choice: Choice) -> float:
            return 1000.0 if len(self.limits) == 1 else 2000.0

    search = search_on(Recovering(memory=1e9), make_space())
    assert search.file_speeds == [1000.0, 2000.0]
    assert search.best_choice == search.space.initial_choice
    assert search.best_speed == 2000.0


def test_out_of_memory_halves_the_micro_batch() -> None:
    search = search_on(Machine(memory=17), make_space(train={"micro_batch": 8}), budget=25)
    assert [trial.choice[KEY_MICRO_BATCH] for trial in search.trials] == [8, 4]
    assert [trial.outcome for trial in search.trials] == [OUT_OF_MEMORY, OUT_OF_MEMORY]
    search = search_on(Machine(memory=17), make_space(train={"micro_batch": 8}), budget=85)
    assert [trial.choice[KEY_MICRO_BATCH] for trial in search.trials] == [8, 4, 2, 2]
    assert [trial.outcome for trial in search.trials] == [
        OUT_OF_MEMORY,
        OUT_OF_MEMORY,
        "done",
        TOO_SLOW,
    ]  # the last trial was compiling
    assert search.best_choice == search.space.initial_choice | {KEY_MICRO_BATCH: 2}


def test_search_ends_when_nothing_fits_into_memory() -> None:
    search = search_on(Machine(memory=0), make_space(train={"micro_batch": 2}))
    assert not search.best_speed
    assert search.trials[-1].choice | {KEY_MICRO_BATCH: 1, **RECOMPUTE_LEVELS[-1]} == search.trials[-1].choice
    assert len(search.trials) == 5


def test_more_recompute_is_tried_only_if_a_micro_batch_needs_it() -> None:
    search = search_on(Machine(memory=1e9), make_space())
    assert {trial.choice[KEY_RECOMPUTE] for trial in search.trials} == {"none"}
    search = search_on(Machine(memory=8, saturation=64), make_space())
    assert search.best_choice[KEY_RECOMPUTE] == "full"
    assert all(trial.choice[KEY_MICRO_BATCH] > 1 for trial in search.trials if trial.choice[KEY_RECOMPUTE] != "none")


def test_fixed_keys_keep_their_values() -> None:
    space = make_space(fixed={KEY_COMPILE, KEY_MICRO_BATCH, KEY_RECOMPUTE, "optimizer.lr"})
    assert [trial.choice for trial in search_on(Machine(memory=1e9), space).trials] == [space.initial_choice]
    search = search_on(Machine(memory=4), make_space(fixed={KEY_MICRO_BATCH}))
    assert {trial.choice[KEY_MICRO_BATCH] for trial in search.trials} == {1}
    assert search.best_choice[KEY_RECOMPUTE] == "full"


def test_search_stays_within_its_budget() -> None:
    for budget in (5, 15, 70, 75, 130, 140, 500):
        machine = Machine(memory=1e9)
        search = search_on(machine, make_space(), budget)
        assert machine.now <= budget
        assert len(search.trials) >= 1
        for number, trial in enumerate(search.trials[1:], 1):  # each fits at the pace of the slowest before it
            spent = sum(earlier.seconds for earlier in search.trials[:number])
            assert spent + max(earlier.seconds for earlier in search.trials[:number]) <= budget
            assert trial.seconds <= budget - spent
    assert search_on(Machine(memory=1e9), make_space(), 5).trials[0].outcome == TOO_SLOW


def test_timeout_uses_trials_with_the_same_compile_settings() -> None:
    eager = {KEY_COMPILE: False, KEY_COMPILE_MODE: "default"}
    compiled = {KEY_COMPILE: True, KEY_COMPILE_MODE: "default"}
    trials = [Trial(eager, "done", seconds, 1.0) for seconds in (9.0, 10.0, 30.0)] + [Trial(eager, OUT_OF_MEMORY, 2.0)]
    assert trial_timeout([], eager, 100) == 100
    assert trial_timeout(trials, eager, 100) == 30
    assert trial_timeout(trials, compiled, 100) == 100
    assert trial_timeout(trials, eager, 30.5) == 30
    assert trial_timeout(trials, eager, 29) is None


def test_every_trial_step_has_the_same_samples() -> None:
    assert make_space().trial_batch == 8
    assert make_space(train={"global_batch": 1024, "micro_batch": 4}).trial_batch == 32
    assert make_space(ranks=2, train={"global_batch": 24, "micro_batch": 1}).trial_batch == 8  # 16 does not divide 24
    assert make_space(train={"global_batch": 6, "micro_batch": 6}).smaller_micro_batches(6) == [3, 1]
    assert make_space(train={"micro_batch": 2}).larger_micro_batches(2) == [4, 8, 16]
    pipelined = make_space(ranks=2, layout={"pp": 2})
    assert pipelined.trial_batch == 64
    with pytest.raises(UserError, match="does not divide"):
        make_space(ranks=3, layout={"tp": 3})


def test_schedules_that_cannot_compile_are_never_compiled() -> None:
    space = make_space(ranks=2, layout={"pp": 2, "pipeline_schedule": "zero_bubble"})
    search = search_on(Machine(memory=1e9), space)
    assert len(search.trials) > 2
    assert not any(trial.choice[KEY_COMPILE] for trial in search.trials)


def test_without_a_cpp_compiler_only_the_files_own_choice_may_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert not any(trial.choice[KEY_COMPILE] for trial in search_on(Machine(memory=1e9), make_space()).trials)
    search = search_on(Machine(memory=1e9), make_space(compile={"enabled": True}))
    assert [trial.choice[KEY_COMPILE] for trial in search.trials][:2] == [True, False]


def test_speedups_within_noise_are_ignored() -> None:
    search = search_on(Machine(memory=1e9, compiled=1.005), make_space(fixed={KEY_MICRO_BATCH}))
    assert search.best_choice == search.space.initial_choice
    assert len(search.trials) == 2


def test_other_attention_kernels_come_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    space = make_space()
    assert space.other_attention_kernels() == []
    monkeypatch.setattr(CpuDevice, "kind", replace(CpuDevice.kind, attention_kernels=("one", "two", "three")))
    for own, others in (("auto", ["two", "three"]), ("three", ["auto", "two"]), ("one", ["auto", "two", "three"])):
        space.initial_choice[KEY_ATTENTION] = own
        assert space.other_attention_kernels() == others


def test_fastest_attention_kernel_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """With names that the schema accepts, on a device that lists them."""
    names = DEVICES.find("cuda").attention_kernels
    monkeypatch.setattr(CpuDevice, "kind", replace(CpuDevice.kind, attention_kernels=names))
    machine = Machine(memory=1e9)
    search = TuneSearch(make_space(fixed={KEY_COMPILE, KEY_MICRO_BATCH}))
    speed = {"auto": 1.0, names[1]: 1.1, names[2]: 1.3}

    def run_trial(choice: Choice, seconds: float) -> Trial:
        return replace(machine(choice, seconds), tokens_per_second=speed.get(choice[KEY_ATTENTION], 0.5))

    run_search(search, run_trial, 1e9, machine.clock)
    assert search.best_choice == search.space.initial_choice | {KEY_ATTENTION: names[2]}
    assert search.space.overrides(search.best_choice) == [f"device.attention={names[2]}"]


def test_overrides_list_what_differs_from_the_file() -> None:
    space = make_space()
    choice = space.initial_choice | {
        KEY_COMPILE: True,
        KEY_MICRO_BATCH: 4,
        KEY_RECOMPUTE: "selective",
        KEY_RECOMPUTE_MODULES: ["activation"],
    }
    overrides = space.overrides(choice)
    assert overrides == [
        "compile.enabled=true",
        "train.micro_batch=4",
        "recompute.kind=selective",
        "recompute.modules=[activation]",
    ]
    assert space.config_for(choice).recompute.modules == ("activation",)
    assert space.overrides(space.initial_choice) == []


def test_finished_trial_is_read_from_its_metrics(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    rows = [(90_000.0, 1.0, 5), (40.0, 80.0, 7), (10.0, 100.0, 7), (10.0, 300.0, 7), (10.0, 110.0, 6)]
    names = ("ms_per_iteration", "tokens_per_second", "memory_bytes")
    metrics.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    trial = trial_from_process({}, ProcessResult(0, 12.0, True, ""), metrics)
    assert trial == Trial({}, "done", 12.0, tokens_per_second=110.0, peak_bytes=7, first_step_seconds=90.0)


@pytest.mark.parametrize(
    ("returncode", "in_time", "stderr", "outcome"),
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
def test_outcome_of_a_failed_trial(returncode: int, in_time: bool, stderr: str, outcome: str, tmp_path: Path) -> None:
    trial = trial_from_process({}, ProcessResult(returncode, 3.0, in_time, stderr), tmp_path / "none")
    assert (trial.outcome, trial.tokens_per_second, trial.seconds) == (outcome, 0.0, 3.0)
