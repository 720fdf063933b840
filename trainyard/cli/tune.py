"""`trainyard tune`: measure what makes a file fastest here, and write it down."""

import glob
import os
import shlex
import sys
import tempfile
import time
from contextlib import nullcontext
from datetime import datetime, timedelta
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from trainyard import devices
from trainyard.cli.signals import interrupt_on_terminate
from trainyard.cli.train import configure
from trainyard.config.load import dump, parse
from trainyard.config.schema import Config
from trainyard.core.atomic_files import write_whole
from trainyard.core.errors import RunStopped, UserError
from trainyard.tune.search import MICRO, Choice, Search, Space, Trial, explore, judge
from trainyard.tune.trial_process import run

HEADINGS = ("trial", "what differs from the file", "speed", "ratio", "memory", "first step", "in all", "state")
LEFT = ("what differs from the file", "state")
NAMED = ("trial", "first step", "in all")
"""Numbers that say what they are in a plain line too."""


def tune(
    source: Annotated[str, typer.Argument(metavar="FILE|RECIPE", help="A YAML file or a recipe's name.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="Tune the small trial of the file instead.")] = False,
    nproc: Annotated[int, typer.Option("--nproc", min=1, help="Ranks of each trial, on this machine.")] = 1,
    budget: Annotated[float, typer.Option("--budget", min=0.01, metavar="MINUTES", help="For all trials.")] = 10.0,
    steps: Annotated[int, typer.Option("--steps", min=2, help="Steps of a trial; the first two are not timed.")] = 6,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Where to write; default: NAME.tuned.yaml here.")
    ] = None,
) -> int:
    """Measure which choices make a file fastest on this machine, and write the file with them. Losses stay the same.

    Tried, each as a short run of its own: the file as it is; compile.enabled; larger and smaller train.micro_batch;
    recompute; device.attention; compile.mode; compile.replay. What is faster is kept and the rest goes on from there.
    A key that you name on the command line stays as you say.

    Examples:

      trainyard tune my.yaml

      trainyard tune my.yaml --nproc 8 --budget 30

      trainyard tune my.yaml compile.enabled=false --out fast.yaml

      trainyard tune llama2-7b --smoke
    """
    words = list(overrides or [])
    if "RANK" in os.environ:
        raise UserError("tune: starts the ranks of its trials itself; run it once, with --nproc, not as a rank")
    config = configure(source, words, smoke, nproc)
    space = Space(with_data(config), nproc, fixed={word.partition("=")[0] for word in words})
    out = target(source, out)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)

    def say(line: str) -> None:
        console.print(line, soft_wrap=True, markup=False)

    if space.file != config:
        say("data: not all its files are here; trials use data.source=synthetic (as fast as any text)")
    part = f", a part of train.global_batch={config.train.global_batch} (which stays)"
    reduced = space.batch < config.train.global_batch
    say(
        f"trials of {steps} steps of {space.batch} x {config.data.sequence} tokens{part if reduced else ''}; "
        f"at most {budget:g} minutes"
    )
    search = Search(space)
    screen = Screen(console, search, budget * 60)
    interrupted = complete = False

    def runner(choice: Choice, limit: float) -> Trial:
        screen.begin(choice)
        place = Path(directory) / str(len(search.trials) + 1)
        place.mkdir()
        write_whole(place / "trial.yaml", dump(space.trial(choice, steps, place)))
        command = [sys.executable, "-m", "trainyard", "train", str(place / "trial.yaml"), "--nproc", str(nproc)]
        end = run(command, limit, place / "errors")
        metrics = place / "run" / "metrics.jsonl"
        trial = judge(choice, end.code, end.in_time, end.seconds, end.errors, metrics)
        if end.code == 2 and not search.trials:
            raise UserError(trial.state)  # a mistake in the file that only a run finds
        screen.end(trial)
        return trial

    try:
        with (
            interrupt_on_terminate(),
            tempfile.TemporaryDirectory(prefix="trainyard-") as directory,
            screen.live or nullcontext(),
        ):
            complete = explore(search, runner, budget * 60)
    except KeyboardInterrupt:
        interrupted = True
    done = [trial for trial in search.trials if trial.speed]
    if interrupted and len(done) < 2:
        raise KeyboardInterrupt
    if not done:
        raise RunStopped(f"tune: no trial ran to its end; the last one: {search.trials[-1].state}")
    best = space.words(search.choice)
    console.print(table(search, by_speed=True))
    about = header(search, [source, *words], nproc)
    write_whole(out, about + dump(parse(config.model_dump(mode="json"), best)))
    if not complete:
        say("interrupted: not all was tried" if interrupted else "budget spent: --budget MINUTES gives more")
    own = search.trials[0]
    ratio = f", {search.speed / own.speed:.2f} times the file's own speed" if own.speed and best else ""
    say(f"fastest: {' '.join(best) or 'the file as it is'}{ratio}")
    micro = search.choice[MICRO]
    if config.train.global_batch % (2 * micro * space.layout.dp) == 0 and not space.larger(micro):
        say(f"no larger micro batch was tried; to go on from there: {shlex.join(['trainyard', 'tune', str(out)])}")
    options = [*(["--smoke"] if smoke else []), *(["--nproc", str(nproc)] if nproc > 1 else [])]
    say(f"  written      {out}   (trainyard train takes it)")
    say(f"  or           {shlex.join(['trainyard', 'train', source, *words, *best, *options])}")
    return 130 if interrupted else 0


class Screen:
    """The search as a person sees it: a growing table in a terminal, one plain line per trial elsewhere."""

    def __init__(self, console: Console, search: Search, budget: float) -> None:
        self.console, self.search = console, search
        self.running: Choice | None = None
        self.since = time.monotonic()
        self.end_of_budget = self.since + budget
        live = Live(get_renderable=self.render, console=console, refresh_per_second=2, transient=True)
        self.live = live if console.is_terminal else None

    def begin(self, choice: Choice) -> None:
        self.running, self.since = choice, time.monotonic()

    def end(self, trial: Trial) -> None:
        self.running = None
        if not self.live:
            words = zip(HEADINGS, cells(self.search, trial), strict=True)
            line = " | ".join(f"{name} {word}" if name in NAMED else word for name, word in words if word)
            self.console.print(line, soft_wrap=True, markup=False)

    def render(self) -> Group:
        now = time.monotonic()
        out = table(self.search)
        if self.running is not None:
            running = Trial(self.running, "running", now - self.since)
            out.add_row(*map(Text, cells(self.search, running)), style="dim")
        left = timedelta(seconds=max(round(self.end_of_budget - now), 0))
        return Group(out, Text(f"{left} of the budget left; Ctrl-C ends the search and keeps the best so far"))


def cells(search: Search, trial: Trial) -> list[str]:
    """A trial in words, one for each heading."""
    ended = trial in search.trials
    trials = search.trials if ended else [*search.trials, trial]
    own, state = trials[0].speed, trial.state
    if ended and trial.speed and trial.speed >= search.speed:
        state = "best" if trial.choice == search.choice else "gains under 1%"
    return [
        str(trials.index(trial) + 1),
        " ".join(search.space.words(trial.choice)) or "the file as it is",
        f"{trial.speed:,.0f} tokens/s" if trial.speed else "",
        f"{trial.speed / own:.2f}x" if trial.speed and own else "",
        f"{trial.memory / 2**30:.2f} GiB" if trial.memory else "",
        f"{trial.first:.1f} s" if trial.speed else "",
        f"{trial.seconds:.0f} s",
        state,
    ]


def table(search: Search, by_speed: bool = False) -> Table:
    """All trials as they came, or the fastest first; the best so far in bold."""
    out = Table(box=None, pad_edge=False)
    for heading in HEADINGS:
        out.add_column(heading, justify="left" if heading in LEFT else "right", no_wrap=heading not in LEFT)
    for trial in sorted(search.trials, key=lambda trial: -trial.speed) if by_speed else search.trials:
        words = cells(search, trial)
        out.add_row(*map(Text, words), style="bold" if words[-1] == "best" else None)
    return out


def header(search: Search, words: list[str], nproc: int) -> str:
    """Where the file comes from and what was measured, as comments."""
    space, text = search.space, StringIO()
    Console(file=text, width=160).print(table(search, by_speed=True))
    device = devices.select(space.file.device.name).describe()
    lines = [
        f"{shlex.join(['trainyard', 'tune', *words])}: the whole configuration, with the fastest of what was tried",
        f"overrides: {' '.join(space.words(search.choice)) or 'none'}",
        f"{datetime.now():%Y-%m-%d %H:%M}; {device}; {nproc} rank{'s' * (nproc > 1)}; torch {version('torch')}; "
        f"steps of {space.batch} x {space.file.data.sequence} tokens",
        *text.getvalue().splitlines(),
    ]
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


def with_data(config: Config) -> Config:
    """The same with generated tokens where a file that it reads is missing."""
    data = config.data
    suffix = ".idx" if data.source == "tokens" else ""
    named = [f"{path.removesuffix(suffix)}{suffix}" for path in data.paths]
    named += [name for name in (data.vocab_file, data.merges_file) if name]
    if data.tokenizer not in ("bytes", "gpt2"):
        named.append(data.tokenizer)
    here = all(glob.glob(str(Path(name).expanduser())) for name in named) and (data.paths or data.tokenizer == "bytes")
    if data.source == "synthetic" or here:
        return config
    plain: dict[str, object] = {
        "source": "synthetic",
        "paths": [],
        "weights": [],
        "order": "shuffled",
        "split": None,
        "mask_ends": False,
    }
    settings = config.model_dump(mode="json")
    return parse({**settings, "data": {**settings["data"], **plain}})


def target(source: str, out: Path | None) -> Path:
    """Where the result goes; a mistake is found before the first trial."""
    name = Path(source).name.removesuffix(".yaml").removesuffix(".yml").removesuffix(".tuned") + ".tuned.yaml"
    path, own = (out or Path(name)).expanduser(), Path(source).expanduser()
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise UserError(f"--out {path}: cannot be written; name a file in a directory that is there")
    if path.exists() and own.exists() and path.samefile(own) and path.name != name:
        raise UserError(f"--out {path}: is the file to tune, whose comments would be lost; nearest: {name}")
    return path
