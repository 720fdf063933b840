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
from trainyard.compile.compile_blocks import compiler
from trainyard.config.load import parse
from trainyard.config.schema import CompileSection, Config
from trainyard.core.errors import UserError
from trainyard.parallel.layout import Layout

Choice = dict[str, Any]
"""A value for each key that is tried, by dotted key."""

ENABLED, MODE, MICRO, ATTENTION = "compile.enabled", "compile.mode", "train.micro_batch", "device.attention"
KIND, PARTS, REPLAY = "recompute.kind", "recompute.parts", "compile.replay"
KEYS = (ENABLED, MODE, MICRO, KIND, PARTS, ATTENTION, REPLAY)
LEVELS: tuple[Choice, ...] = (
    {KIND: "none", PARTS: []},
    {KIND: "parts", PARTS: ["activation"]},
    {KIND: "attention", PARTS: []},
    {KIND: "full", PARTS: []},
)
"""Recompute, from what keeps most and is fastest to what keeps least."""
ROOM = 8
"""Micro batches of the file in a step of a trial, at most; so also how far a micro batch can grow in one search."""
WARM = 2
"""First steps of a trial, not timed: kernels are compiled and chosen, memory is found."""
GAIN = 1.01
"""How much faster a choice must be to be taken; below that it is noise."""
PATIENCE = 3
"""A trial is ended after this many times the median of those that were compiled alike."""
DONE, OUT, SLOW = "done", "out of memory", "too slow"
OUT_WORDS = ("outofmemory", "out of memory", "allocate memory", "memoryerror")


@dataclass(frozen=True)
class Trial:
    """A choice and what came of it."""

    choice: Choice
    state: str
    """done, out of memory, too slow, or why it failed."""
    seconds: float
    """From start to end of its process."""
    speed: float = 0.0
    """Tokens a second, the median of the timed steps; 0 unless done."""
    memory: int = 0
    """Most bytes held (by rank 0)."""
    first: float = 0.0
    """Seconds of the first step: what compiling costs."""


Moves = Generator[Choice, Trial, Trial | None]


class Space:
    """What may be chosen for a file on `ranks` ranks. Keys that are `fixed` stay as they are."""

    def __init__(self, config: Config, ranks: int, fixed: Collection[str] = ()) -> None:
        self.file, self.ranks, self.fixed = config, ranks, fixed
        self.layout = Layout.of(config, ranks)
        data = config.model_dump(mode="json")
        self.start: Choice = {key: data[section][name] for key in KEYS for section, name in [key.split(".")]}
        own = {KIND: self.start[KIND], PARTS: self.start[PARTS]}
        # A ring's attention is not recomputed alone; a file's own choice of parts stands before whole blocks.
        levels = [level for level in LEVELS if level[KIND] != "attention" or config.layout.cp == 1 or level == own]
        self.levels = levels if own in levels else [*levels[:-1], own, levels[-1]]
        self.batch = self._batch()

    def _batch(self) -> int:
        """Samples in a step of a trial. A pipeline's gaps depend on the number of micro batches: there, the file's."""
        train, room = self.file.train, ROOM
        if self.layout.pp > 1:
            return train.global_batch
        while train.global_batch % (train.micro_batch * self.layout.dp * room):
            room //= 2
        return train.micro_batch * self.layout.dp * room

    def words(self, choice: Choice) -> list[str]:
        """What differs from the file, as overrides."""
        return [f"{key}={_yaml(value)}" for key, value in choice.items() if value != self.start[key]]

    def config(self, choice: Choice, words: Collection[str] = ()) -> Config:
        """The file with a choice in it, and with `words`."""
        return parse(self.file.model_dump(mode="json"), [*self.words(choice), *words])

    def trial(self, choice: Choice, steps: int, directory: Path) -> Config:
        """A short run of a choice that leaves its metrics in directory/run and nothing else."""
        words = [
            *(f"train.steps={steps}", f"train.global_batch={self.batch}", f"train.max_skipped={steps + 1}"),
            *(f"log.directory={json.dumps(str(directory))}", "log.name=run", "log.every=1", "log.tensorboard=false"),
            *("checkpoint.final=false", "checkpoint.start=null", "checkpoint.every=0", "checkpoint.minutes=0"),
            *("checkpoint.resume=none", "checkpoint.weights_only=false", "evaluate.every=0"),
        ]
        return self.config(choice, words)

    def allows(self, choice: Choice) -> bool:
        """Whether a choice keeps what is fixed and can run at all."""
        changed = {key for key, value in choice.items() if value != self.start[key]}
        if changed.intersection(self.fixed):
            return False
        try:
            config = self.config(choice)
            Layout.of(config, self.ranks)
            compiler(config.compile, devices.select(config.device.name))
        except UserError:
            return False
        return True

    def larger(self, micro: int) -> list[int]:
        """Micro batches above this one that a trial's step holds: its doubles."""
        share = self.batch // self.layout.dp
        return [size for size in (micro << n for n in range(1, share.bit_length())) if share % size == 0]

    def smaller(self, micro: int) -> list[int]:
        """Micro batches below: each at most half of the one before."""
        share = self.batch // self.layout.dp
        sizes = [micro]
        while sizes[-1] > 1:
            sizes.append(next(size for size in range(sizes[-1] // 2, 0, -1) if share % size == 0))
        return sizes[1:]

    def lighter(self, choice: Choice) -> list[Choice]:
        """Recompute that keeps more than this choice's, from none on."""
        return self.levels[: self._level(choice)]

    def heavier(self, choice: Choice) -> list[Choice]:
        """Recompute that keeps less, by and by."""
        return self.levels[self._level(choice) + 1 :]

    def _level(self, choice: Choice) -> int:
        return self.levels.index({KIND: choice[KIND], PARTS: choice[PARTS]})

    def attentions(self) -> list[str]:
        """Attention kernels other than the file's. A device lists them as they pay: `auto` begins with the first."""
        names, own = devices.select(self.file.device.name).attentions, self.start[ATTENTION]
        others = names[1:] if own == "auto" else ("auto", *names[1:]) if names else ()
        return [name for name in others if name != own]

    def replays(self) -> bool:
        """Whether work can be recorded and replayed here."""
        return self.ranks == 1 and devices.select(self.file.device.name).records


class Search:
    """Greedy, one key after another: a change that is faster is kept, and the rest goes on from there."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.trials: list[Trial] = []
        self.choice = space.start
        """The best so far."""
        self.speed = 0.0

    def moves(self) -> Generator[Choice, Trial, None]:
        """Gives what to try; is sent the trial."""
        yield from self._fit()
        if not self.speed and _out(self.trials[0]):
            return
        yield from self._try({ENABLED: not self.choice[ENABLED]})
        if not self.speed:
            return
        yield from self._micro()
        yield from self._recompute()
        for name in self.space.attentions():
            yield from self._try({ATTENTION: name})
        if self.choice[ENABLED]:
            for mode in get_args(CompileSection.model_fields["mode"].annotation):
                yield from self._try({MODE: mode})
        if self.space.replays():
            yield from self._try({REPLAY: not self.choice[REPLAY]})

    def _try(self, change: Choice) -> Moves:
        """A trial of the best so far with a change: one made before, or a new one; None where it cannot be."""
        choice = self.choice | change
        for trial in self.trials:
            if trial.choice == choice:
                return trial
        if choice != self.space.start and not self.space.allows(choice):  # what is wrong with the file, its run says
            return None
        trial = yield choice
        self.trials.append(trial)
        if trial.speed > self.speed * GAIN:
            self.choice, self.speed = choice, trial.speed
        return trial

    def _fit(self) -> Generator[Choice, Trial, None]:
        """The file as it is; where that needs too much memory, smaller micro batches, then more recompute."""
        space, micro = self.space, self.choice[MICRO]
        sizes = space.smaller(micro)
        least = sizes[-1] if sizes and MICRO not in space.fixed else micro
        trial = yield from self._try({})
        for change in [{MICRO: n} for n in sizes] + [{MICRO: least} | level for level in space.heavier(self.choice)]:
            if not _out(trial):
                return
            trial = (yield from self._try(change)) or trial

    def _micro(self) -> Generator[Choice, Trial, None]:
        """Up while it gets faster; down if up was not."""
        before = self.speed
        for sizes in (self.space.larger, self.space.smaller):
            for size in sizes(self.choice[MICRO]):
                yield from self._try({MICRO: size})
                if self.choice[MICRO] != size:
                    break
            if self.speed > before:
                return

    def _recompute(self) -> Generator[Choice, Trial, None]:
        """Less, at this micro batch or half of it; then more, where that lets a larger micro batch in."""
        space, micro = self.space, self.choice[MICRO]
        sizes = [micro, *space.smaller(micro)[:1]]
        for change in [level | {MICRO: size} for level in space.lighter(self.choice) for size in sizes]:
            trial = yield from self._try(change)
            if trial and not _out(trial):
                break
        while sizes := space.larger(self.choice[MICRO]):
            before, size = self.choice, {MICRO: sizes[0]}
            trial = yield from self._try(size)
            for level in space.heavier(self.choice):
                if _out(trial):
                    trial = (yield from self._try(size | level)) or trial
            if self.choice == before:
                return


def explore(
    search: Search,
    runner: Callable[[Choice, float], Trial],
    budget: float,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Run what the search asks for within `budget` seconds. Whether it came to its own end."""
    end = clock() + budget
    moves = search.moves()
    choice = next(moves)
    while (seconds := limit(search.trials, choice, end - clock())) is not None:
        try:
            choice = moves.send(runner(choice, seconds))
        except StopIteration:
            return True
    return False


def limit(trials: list[Trial], choice: Choice, left: float) -> float | None:
    """Seconds that a trial may take; None where at the pace of the slowest so far it would end too late.

    Compiling may well take ten times as long as the rest, so a trial is compared with those that were compiled alike.
    """
    if trials and max(trial.seconds for trial in trials) > left:
        return None
    alike = [trial for trial in trials if trial.speed and all(trial.choice[key] == choice[key] for key in KEYS[:2])]
    return min([left, *([PATIENCE * median(trial.seconds for trial in alike)] if alike else [])])


def judge(choice: Choice, code: int, in_time: bool, seconds: float, errors: str, metrics: Path) -> Trial:
    """The trial of a process that ended: from its exit code, what it said on stderr and its metrics.jsonl."""
    if not in_time:
        return Trial(choice, SLOW, seconds)
    if code == 0:
        records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
        timed = records[min(WARM, len(records) - 1) :]
        return Trial(
            choice,
            DONE,
            seconds,
            speed=median(record["tokens_per_second"] for record in timed),
            memory=max(record["memory_bytes"] for record in records),
            first=records[0]["ms_per_iteration"] / 1000,
        )
    if code == -9 or any(word in errors.lower() for word in OUT_WORDS):
        return Trial(choice, OUT, seconds)
    lines = [line for line in errors.splitlines() if line.strip() and "logs of all ranks" not in line]
    return Trial(choice, lines[-1].strip().removeprefix("trainyard: ") if lines else f"exit code {code}", seconds)


def _out(trial: Trial | None) -> bool:
    return trial is not None and trial.state == OUT


def _yaml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(value)}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
