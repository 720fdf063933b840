"""Which choices make a run fastest: what to try next, how long a trial may take, what a trial's files say.

No process is started here: the search is a generator that gives choices and is sent trials. The samples of a step are
the same in every trial, so that the optimizer's share of it is too and only what was chosen makes a difference.
"""

import json
import time
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, get_args

from trainyard import devices
from trainyard.compile.compile_blocks import make_compile_fn
from trainyard.config.load import parse
from trainyard.config.schema import CompileSection, Config
from trainyard.core.errors import UserError
from trainyard.parallel.layout import Layout

Choice = dict[str, Any]
"""A value for each key that is tried, by dotted key."""

KEY_COMPILE, KEY_COMPILE_MODE, KEY_MICRO_BATCH, KEY_ATTENTION = (
    "compile.enabled",
    "compile.mode",
    "train.micro_batch",
    "device.attention",
)
KEY_RECOMPUTE, KEY_RECOMPUTE_PARTS, KEY_CUDA_GRAPHS = "recompute.kind", "recompute.modules", "compile.cuda_graphs"
TUNED_KEYS = (
    KEY_COMPILE,
    KEY_COMPILE_MODE,
    KEY_MICRO_BATCH,
    KEY_RECOMPUTE,
    KEY_RECOMPUTE_PARTS,
    KEY_ATTENTION,
    KEY_CUDA_GRAPHS,
)
RECOMPUTE_LEVELS: tuple[Choice, ...] = (
    {KEY_RECOMPUTE: "none", KEY_RECOMPUTE_PARTS: []},
    {KEY_RECOMPUTE: "parts", KEY_RECOMPUTE_PARTS: ["activation"]},
    {KEY_RECOMPUTE: "attention", KEY_RECOMPUTE_PARTS: []},
    {KEY_RECOMPUTE: "full", KEY_RECOMPUTE_PARTS: []},
)
"""Recompute, from what keeps most and is fastest to what keeps least."""
MAX_TRIAL_MICRO_BATCHES = 8
"""Micro batches of the file in a step of a trial, at most; so also how far a micro batch can grow in one search."""
WARMUP_STEPS = 2
"""First steps of a trial, not timed: kernels are compiled and chosen, memory is found."""
MIN_SPEEDUP = 1.01
"""How much faster a choice must be to be taken; below that it is noise."""
TIMEOUT_FACTOR = 3
"""A trial is ended after this many times the median of those that were compiled alike."""
DONE, OUT_OF_MEMORY, TOO_SLOW = "done", "out of memory", "too slow"
OUT_OF_MEMORY_PATTERNS = ("outofmemory", "out of memory", "allocate memory", "memoryerror")


@dataclass(frozen=True)
class Trial:
    """A choice and what came of it."""

    choice: Choice
    outcome: str
    """done, out of memory, too slow, or why it failed."""
    seconds: float
    """From start to end of its process."""
    tokens_per_second: float = 0.0
    """Tokens a second, the median of the timed steps; 0 unless done."""
    peak_bytes: int = 0
    """Most bytes held (by rank 0)."""
    first_step_seconds: float = 0.0
    """Seconds of the first step: what compiling costs."""


SearchSteps = Generator[Choice, Trial, Trial | None]


class SearchSpace:
    """What may be chosen for a file on `ranks` ranks. Keys that are `fixed` stay as they are."""

    def __init__(self, config: Config, ranks: int, fixed_keys: Collection[str] = ()) -> None:
        self.base_config, self.ranks, self.fixed_keys = config, ranks, fixed_keys
        self.layout = Layout.from_config(config, ranks)
        data = config.model_dump(mode="json")
        self.initial_choice: Choice = {
            key: data[section][name] for key in TUNED_KEYS for section, name in [key.split(".")]
        }
        own = {
            KEY_RECOMPUTE: self.initial_choice[KEY_RECOMPUTE],
            KEY_RECOMPUTE_PARTS: self.initial_choice[KEY_RECOMPUTE_PARTS],
        }
        # A ring's attention is not recomputed alone; a file's own choice of parts stands before whole blocks.
        levels = [
            level
            for level in RECOMPUTE_LEVELS
            if level[KEY_RECOMPUTE] != "attention" or config.layout.cp == 1 or level == own
        ]
        self.recompute_levels = levels if own in levels else [*levels[:-1], own, levels[-1]]
        self.trial_batch = self._trial_batch()

    def _trial_batch(self) -> int:
        """Samples in a step of a trial. A pipeline's gaps depend on the number of micro batches: there, the file's."""
        train, room = self.base_config.train, MAX_TRIAL_MICRO_BATCHES
        if self.layout.pp > 1:
            return train.global_batch
        while train.global_batch % (train.micro_batch * self.layout.dp * room):
            room //= 2
        return train.micro_batch * self.layout.dp * room

    def overrides(self, choice: Choice) -> list[str]:
        """What differs from the file, as overrides."""
        return [f"{key}={_to_yaml(value)}" for key, value in choice.items() if value != self.initial_choice[key]]

    def config_for(self, choice: Choice, overrides: Collection[str] = ()) -> Config:
        """The file with a choice in it, and with `words`."""
        return parse(self.base_config.model_dump(mode="json"), [*self.overrides(choice), *overrides])

    def trial_config(self, choice: Choice, steps: int, directory: Path) -> Config:
        """A short run of a choice that leaves its metrics in directory/run and nothing else."""
        words = [
            *(f"train.steps={steps}", f"train.global_batch={self.trial_batch}", f"train.max_skipped_steps={steps + 1}"),
            *(f"log.directory={json.dumps(str(directory))}", "log.name=run", "log.every=1", "log.tensorboard=false"),
            *(
                "checkpoint.export_hf=false",
                "checkpoint.init_from=null",
                "checkpoint.every=0",
                "checkpoint.every_minutes=0",
            ),
            *("checkpoint.resume=none", "checkpoint.weights_only=false", "evaluate.every=0"),
        ]
        return self.config_for(choice, words)

    def is_valid(self, choice: Choice) -> bool:
        """Whether a choice keeps what is fixed and can run at all."""
        changed = {key for key, value in choice.items() if value != self.initial_choice[key]}
        if changed.intersection(self.fixed_keys):
            return False
        try:
            config = self.config_for(choice)
            Layout.from_config(config, self.ranks)
            make_compile_fn(config.compile, devices.select(config.device.name))
        except UserError:
            return False
        return True

    def larger_micro_batches(self, micro: int) -> list[int]:
        """Micro batches above this one that a trial's step holds: its doubles."""
        share = self.trial_batch // self.layout.dp
        return [size for size in (micro << n for n in range(1, share.bit_length())) if share % size == 0]

    def smaller_micro_batches(self, micro: int) -> list[int]:
        """Micro batches below: each at most half of the one before."""
        share = self.trial_batch // self.layout.dp
        sizes = [micro]
        while sizes[-1] > 1:
            sizes.append(next(size for size in range(sizes[-1] // 2, 0, -1) if share % size == 0))
        return sizes[1:]

    def less_recompute(self, choice: Choice) -> list[Choice]:
        """Recompute that keeps more than this choice's, from none on."""
        return self.recompute_levels[: self._level(choice)]

    def more_recompute(self, choice: Choice) -> list[Choice]:
        """Recompute that keeps less, by and by."""
        return self.recompute_levels[self._level(choice) + 1 :]

    def _level(self, choice: Choice) -> int:
        return self.recompute_levels.index(
            {KEY_RECOMPUTE: choice[KEY_RECOMPUTE], KEY_RECOMPUTE_PARTS: choice[KEY_RECOMPUTE_PARTS]}
        )

    def other_attention_kernels(self) -> list[str]:
        """Attention kernels other than the file's. A device lists them as they pay: `auto` begins with the first."""
        names, own = devices.select(self.base_config.device.name).attention_kernels, self.initial_choice[KEY_ATTENTION]
        others = names[1:] if own == "auto" else ("auto", *names[1:]) if names else ()
        return [name for name in others if name != own]

    def supports_cuda_graphs(self) -> bool:
        """Whether work can be recorded and replayed here."""
        return self.ranks == 1 and devices.select(self.base_config.device.name).supports_graphs


class TuneSearch:
    """Greedy, one key after another: a change that is faster is kept, and the rest goes on from there."""

    def __init__(self, space: SearchSpace) -> None:
        self.space = space
        self.trials: list[Trial] = []
        self.best_choice = space.initial_choice
        """The best so far."""
        self.best_speed = 0.0

    def proposals(self) -> Generator[Choice, Trial, None]:
        """Gives what to try; is sent the trial."""
        yield from self._fit_memory()
        if not self.best_speed and _ran_out_of_memory(self.trials[0]):
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

    def _try(self, change: Choice) -> SearchSteps:
        """A trial of the best so far with a change: one made before, or a new one; None where it cannot be."""
        choice = self.best_choice | change
        for trial in self.trials:
            if trial.choice == choice:
                return trial
        if choice != self.space.initial_choice and not self.space.is_valid(
            choice
        ):  # what is wrong with the file, its run says
            return None
        trial = yield choice
        self.trials.append(trial)
        if trial.tokens_per_second > self.best_speed * MIN_SPEEDUP:
            self.best_choice, self.best_speed = choice, trial.tokens_per_second
        return trial

    def _fit_memory(self) -> Generator[Choice, Trial, None]:
        """The file as it is; where that needs too much memory, smaller micro batches, then more recompute."""
        space, micro = self.space, self.best_choice[KEY_MICRO_BATCH]
        sizes = space.smaller_micro_batches(micro)
        least = sizes[-1] if sizes and KEY_MICRO_BATCH not in space.fixed_keys else micro
        trial = yield from self._try({})
        for change in [{KEY_MICRO_BATCH: n} for n in sizes] + [
            {KEY_MICRO_BATCH: least} | level for level in space.more_recompute(self.best_choice)
        ]:
            if not _ran_out_of_memory(trial):
                return
            trial = (yield from self._try(change)) or trial

    def _tune_micro_batch(self) -> Generator[Choice, Trial, None]:
        """Up while it gets faster; down if up was not."""
        before = self.best_speed
        for sizes in (self.space.larger_micro_batches, self.space.smaller_micro_batches):
            for size in sizes(self.best_choice[KEY_MICRO_BATCH]):
                yield from self._try({KEY_MICRO_BATCH: size})
                if self.best_choice[KEY_MICRO_BATCH] != size:
                    break
            if self.best_speed > before:
                return

    def _tune_recompute(self) -> Generator[Choice, Trial, None]:
        """Less, at this micro batch or half of it; then more, where that lets a larger micro batch in."""
        space, micro = self.space, self.best_choice[KEY_MICRO_BATCH]
        sizes = [micro, *space.smaller_micro_batches(micro)[:1]]
        for change in [
            level | {KEY_MICRO_BATCH: size} for level in space.less_recompute(self.best_choice) for size in sizes
        ]:
            trial = yield from self._try(change)
            if trial and not _ran_out_of_memory(trial):
                break
        while sizes := space.larger_micro_batches(self.best_choice[KEY_MICRO_BATCH]):
            before, size = self.best_choice, {KEY_MICRO_BATCH: sizes[0]}
            trial = yield from self._try(size)
            for level in space.more_recompute(self.best_choice):
                if _ran_out_of_memory(trial):
                    trial = (yield from self._try(size | level)) or trial
            if self.best_choice == before:
                return


def run_search(
    search: TuneSearch,
    run_trial: Callable[[Choice, float], Trial],
    budget: float,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Run what the search asks for within `budget` seconds. Whether it came to its own end."""
    end = clock() + budget
    moves = search.proposals()
    choice = next(moves)
    while (seconds := trial_timeout(search.trials, choice, end - clock())) is not None:
        try:
            choice = moves.send(run_trial(choice, seconds))
        except StopIteration:
            return True
    return False


def trial_timeout(trials: list[Trial], choice: Choice, remaining: float) -> float | None:
    """Seconds that a trial may take; None where at the pace of the slowest so far it would end too late.

    Compiling may well take ten times as long as the rest, so a trial is compared with those that were compiled alike.
    """
    if trials and max(trial.seconds for trial in trials) > remaining:
        return None
    alike = [
        trial
        for trial in trials
        if trial.tokens_per_second and all(trial.choice[key] == choice[key] for key in TUNED_KEYS[:2])
    ]
    return min([remaining, *([TIMEOUT_FACTOR * median(trial.seconds for trial in alike)] if alike else [])])


def trial_from_process(
    choice: Choice, returncode: int, in_time: bool, seconds: float, stderr: str, metrics: Path
) -> Trial:
    """The trial of a process that ended: from its exit code, what it said on stderr and its metrics.jsonl."""
    if not in_time:
        return Trial(choice, TOO_SLOW, seconds)
    if returncode == 0:
        records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
        timed = records[min(WARMUP_STEPS, len(records) - 1) :]
        return Trial(
            choice,
            DONE,
            seconds,
            tokens_per_second=median(record["tokens_per_second"] for record in timed),
            peak_bytes=max(record["memory_bytes"] for record in records),
            first_step_seconds=records[0]["ms_per_iteration"] / 1000,
        )
    if returncode == -9 or any(word in stderr.lower() for word in OUT_OF_MEMORY_PATTERNS):
        return Trial(choice, OUT_OF_MEMORY, seconds)
    lines = [line for line in stderr.splitlines() if line.strip() and "logs of all ranks" not in line]
    return Trial(choice, lines[-1].strip().removeprefix("trainyard: ") if lines else f"exit code {returncode}", seconds)


def _ran_out_of_memory(trial: Trial | None) -> bool:
    return trial is not None and trial.outcome == OUT_OF_MEMORY


def _to_yaml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(value)}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
