"""Greedy search for the fastest settings: which choice to try next, and how long a trial may take.

This module starts no process: the search is a generator that yields choices and is sent trials.
"""

import time
from collections.abc import Callable, Generator
from statistics import median
from typing import get_args

from trainyard.config.schema import CompileSection
from trainyard.preflight.tune.search_space import (
    COMPILE_KEYS,
    KEY_ATTENTION,
    KEY_COMPILE,
    KEY_COMPILE_MODE,
    KEY_CUDA_GRAPHS,
    KEY_MICRO_BATCH,
    SearchSpace,
)
from trainyard.preflight.tune.trial import Choice, Trial

MIN_SPEEDUP = 1.01
"""Speedup that a change must reach to be taken; smaller differences are noise."""
MAX_DRIFT = 1.05
"""Ratio of two measurements of the same choice above which the machine was not idle."""
TIMEOUT_FACTOR = 3
"""A trial times out after this multiple of the median duration of trials with the same compile settings."""

Proposals = Generator[Choice, Trial, None]


class TuneSearch:
    """Changes one key after another and keeps each change that is faster."""

    def __init__(self, space: SearchSpace) -> None:
        self.space = space
        self.trials: list[Trial] = []
        self.best_choice = space.initial_choice
        self.best_speed = 0.0
        """Tokens per second of `best_choice`; 0 until a trial succeeds."""

    @property
    def file_speeds(self) -> list[float]:
        """Tokens per second of the file's own choice, each time it was measured."""
        trials = [trial for trial in self.trials if trial.choice == self.space.initial_choice]
        return [trial.tokens_per_second for trial in trials if trial.tokens_per_second]

    def proposals(self) -> Proposals:
        """Yield the choices to try; the caller sends back each trial."""
        yield from self._search()
        if self.file_speeds and self.best_choice != self.space.initial_choice:
            yield from self._measure_file_again()

    def _measure_file_again(self) -> Proposals:
        """Measure the file's choice a second time: on a machine that has become faster meanwhile, a later trial looks
        better than it is. The change stays only if it is faster than both measurements."""
        trial = yield self.space.initial_choice
        self.trials.append(trial)
        if self.best_speed <= max(self.file_speeds) * MIN_SPEEDUP:
            self.best_choice, self.best_speed = self.space.initial_choice, max(self.file_speeds)

    def _search(self) -> Proposals:
        yield from self._fit_memory()
        if not self.best_speed and self.trials[0].ran_out_of_memory:
            return
        yield from self._try({KEY_COMPILE: not self.best_choice[KEY_COMPILE]})
        if not self.best_speed:
            return
        yield from self._tune_micro_batch()
        yield from self._tune_recompute()
        for name in self.space.other_attention_kernels():
            yield from self._try({KEY_ATTENTION: name})
        if self.best_choice[KEY_COMPILE]:
            for mode in get_args(CompileSection.model_fields["mode"].annotation):
                yield from self._try({KEY_COMPILE_MODE: mode})
        if self.space.supports_cuda_graphs():
            yield from self._try({KEY_CUDA_GRAPHS: not self.best_choice[KEY_CUDA_GRAPHS]})

    def _try(self, change: Choice) -> Generator[Choice, Trial, Trial | None]:
        """Try the best choice with `change` applied, unless it was tried before. Returns None if it is invalid."""
        choice = self.best_choice | change
        for trial in self.trials:
            if trial.choice == choice:
                return trial
        # The file's own choice always runs: its error message tells what is wrong with the file.
        if choice != self.space.initial_choice and not self.space.is_valid(choice):
            return None
        trial = yield choice
        self.trials.append(trial)
        if trial.tokens_per_second > self.best_speed * MIN_SPEEDUP:
            self.best_choice, self.best_speed = choice, trial.tokens_per_second
        return trial

    def _fit_memory(self) -> Proposals:
        """Try the file's choice; while that runs out of memory, smaller micro batches and then more recompute."""
        space, micro_batch = self.space, self.best_choice[KEY_MICRO_BATCH]
        sizes = space.smaller_micro_batches(micro_batch)
        smallest = sizes[-1] if sizes and KEY_MICRO_BATCH not in space.fixed_keys else micro_batch
        trial = yield from self._try({})
        changes = [{KEY_MICRO_BATCH: size} for size in sizes]
        changes += [{KEY_MICRO_BATCH: smallest} | level for level in space.more_recompute(self.best_choice)]
        for change in changes:
            if trial and not trial.ran_out_of_memory:
                return
            trial = (yield from self._try(change)) or trial

    def _tune_micro_batch(self) -> Proposals:
        """Grow the micro batch while that is faster; if growing did not help, shrink it while that is faster."""
        speed_before = self.best_speed
        for candidates in (self.space.larger_micro_batches, self.space.smaller_micro_batches):
            for size in candidates(self.best_choice[KEY_MICRO_BATCH]):
                yield from self._try({KEY_MICRO_BATCH: size})
                if self.best_choice[KEY_MICRO_BATCH] != size:
                    break
            if self.best_speed > speed_before:
                return

    def _tune_recompute(self) -> Proposals:
        """Try less recompute at this micro batch or half of it, then more recompute if it admits a larger one."""
        space, micro_batch = self.space, self.best_choice[KEY_MICRO_BATCH]
        sizes = [micro_batch, *space.smaller_micro_batches(micro_batch)[:1]]
        levels = space.less_recompute(self.best_choice)
        for change in [level | {KEY_MICRO_BATCH: size} for level in levels for size in sizes]:
            trial = yield from self._try(change)
            if trial and not trial.ran_out_of_memory:
                break
        while larger := space.larger_micro_batches(self.best_choice[KEY_MICRO_BATCH]):
            choice_before, change = self.best_choice, {KEY_MICRO_BATCH: larger[0]}
            trial = yield from self._try(change)
            for level in space.more_recompute(self.best_choice):
                if trial and trial.ran_out_of_memory:
                    trial = (yield from self._try(change | level)) or trial
            if self.best_choice == choice_before:
                return


def run_search(
    search: TuneSearch,
    run_trial: Callable[[Choice, float], Trial],
    budget: float,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Run trials for at most `budget` seconds. Returns True if the search completed within the budget."""
    deadline = clock() + budget
    proposals = search.proposals()
    choice = next(proposals)
    while (timeout := trial_timeout(search.trials, choice, deadline - clock())) is not None:
        try:
            choice = proposals.send(run_trial(choice, timeout))
        except StopIteration:
            return True
    return False


def trial_timeout(trials: list[Trial], choice: Choice, remaining: float) -> float | None:
    """Seconds that a trial may take, or None if one as slow as the slowest so far would exceed the budget.

    Compilation may take ten times as long as the steps, so a trial is compared with those of the same compile settings.
    """
    if trials and max(trial.seconds for trial in trials) > remaining:
        return None
    similar = [
        trial.seconds
        for trial in trials
        if trial.tokens_per_second and all(trial.choice[key] == choice[key] for key in COMPILE_KEYS)
    ]
    return min(remaining, TIMEOUT_FACTOR * median(similar)) if similar else remaining
