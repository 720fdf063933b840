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
from trainyard.cli.train import load_run_config
from trainyard.config.load import dump, parse
from trainyard.config.schema import Config
from trainyard.core.atomic_files import atomic_write_text
from trainyard.core.errors import RunStopped, UserError
from trainyard.tune.search import (
    KEY_MICRO_BATCH,
    Choice,
    SearchSpace,
    Trial,
    TuneSearch,
    run_search,
    trial_from_process,
)
from trainyard.tune.trial_process import run_with_timeout

COLUMNS = ("trial", "what differs from the file", "speed", "ratio", "memory", "first step", "in all", "state")
LEFT_ALIGNED = ("what differs from the file", "state")
LABELED_COLUMNS = ("trial", "first step", "in all")
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
    recompute; device.attention; compile.mode; compile.cuda_graphs. What is faster is kept and the rest goes on from there.
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
    config = load_run_config(source, words, smoke, nproc)
    space = SearchSpace(with_available_data(config), nproc, fixed_keys={word.partition("=")[0] for word in words})
    out = output_path(source, out)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)

    def say(line: str) -> None:
        console.print(line, soft_wrap=True, markup=False)

    if space.base_config != config:
        say("data: not all its files are here; trials use data.source=synthetic (as fast as any text)")
    part = f", a part of train.global_batch={config.train.global_batch} (which stays)"
    reduced = space.trial_batch < config.train.global_batch
    say(
        f"trials of {steps} steps of {space.trial_batch} x {config.data.seq_len} tokens{part if reduced else ''}; "
        f"at most {budget:g} minutes"
    )
    search = TuneSearch(space)
    screen = TuneTable(console, search, budget * 60)
    interrupted = complete = False

    def runner(choice: Choice, limit: float) -> Trial:
        screen.on_trial_start(choice)
        place = Path(directory) / str(len(search.trials) + 1)
        place.mkdir()
        atomic_write_text(place / "trial.yaml", dump(space.trial_config(choice, steps, place)))
        command = [sys.executable, "-m", "trainyard", "train", str(place / "trial.yaml"), "--nproc", str(nproc)]
        end = run_with_timeout(command, limit, place / "errors")
        metrics = place / "run" / "metrics.jsonl"
        trial = trial_from_process(choice, end.returncode, end.finished_in_time, end.seconds, end.stderr, metrics)
        if end.returncode == 2 and not search.trials:
            raise UserError(trial.outcome)  # a mistake in the file that only a run finds
        screen.on_trial_end(trial)
        return trial

    try:
        with (
            interrupt_on_terminate(),
            tempfile.TemporaryDirectory(prefix="trainyard-") as directory,
            screen.live or nullcontext(),
        ):
            complete = run_search(search, runner, budget * 60)
    except KeyboardInterrupt:
        interrupted = True
    done = [trial for trial in search.trials if trial.tokens_per_second]
    if interrupted and len(done) < 2:
        raise KeyboardInterrupt
    if not done:
        raise RunStopped(f"tune: no trial ran to its end; the last one: {search.trials[-1].outcome}")
    best = space.overrides(search.best_choice)
    console.print(trials_table(search, by_speed=True))
    about = file_header(search, [source, *words], nproc)
    atomic_write_text(out, about + dump(parse(config.model_dump(mode="json"), best)))
    if not complete:
        say("interrupted: not all was tried" if interrupted else "budget spent: --budget MINUTES gives more")
    own = search.trials[0]
    ratio = (
        f", {search.best_speed / own.tokens_per_second:.2f} times the file's own speed"
        if own.tokens_per_second and best
        else ""
    )
    say(f"fastest: {' '.join(best) or 'the file as it is'}{ratio}")
    micro = search.best_choice[KEY_MICRO_BATCH]
    if config.train.global_batch % (2 * micro * space.layout.dp) == 0 and not space.larger_micro_batches(micro):
        say(f"no larger micro batch was tried; to go on from there: {shlex.join(['trainyard', 'tune', str(out)])}")
    options = [*(["--smoke"] if smoke else []), *(["--nproc", str(nproc)] if nproc > 1 else [])]
    say(f"  written      {out}   (trainyard train takes it)")
    say(f"  or           {shlex.join(['trainyard', 'train', source, *words, *best, *options])}")
    return 130 if interrupted else 0


class TuneTable:
    """The search as a person sees it: a growing table in a terminal, one plain line per trial elsewhere."""

    def __init__(self, console: Console, search: TuneSearch, budget: float) -> None:
        self.console, self.search = console, search
        self.running_choice: Choice | None = None
        self.trial_started_at = time.monotonic()
        self.deadline = self.trial_started_at + budget
        live = Live(get_renderable=self.render, console=console, refresh_per_second=2, transient=True)
        self.live = live if console.is_terminal else None

    def on_trial_start(self, choice: Choice) -> None:
        self.running_choice, self.trial_started_at = choice, time.monotonic()

    def on_trial_end(self, trial: Trial) -> None:
        self.running_choice = None
        if not self.live:
            words = zip(COLUMNS, trial_cells(self.search, trial), strict=True)
            line = " | ".join(f"{name} {word}" if name in LABELED_COLUMNS else word for name, word in words if word)
            self.console.print(line, soft_wrap=True, markup=False)

    def render(self) -> Group:
        now = time.monotonic()
        out = trials_table(self.search)
        if self.running_choice is not None:
            running = Trial(self.running_choice, "running", now - self.trial_started_at)
            out.add_row(*map(Text, trial_cells(self.search, running)), style="dim")
        left = timedelta(seconds=max(round(self.deadline - now), 0))
        return Group(out, Text(f"{left} of the budget left; Ctrl-C ends the search and keeps the best so far"))


def trial_cells(search: TuneSearch, trial: Trial) -> list[str]:
    """A trial in words, one for each heading."""
    ended = trial in search.trials
    trials = search.trials if ended else [*search.trials, trial]
    own, state = trials[0].tokens_per_second, trial.outcome
    if ended and trial.tokens_per_second and trial.tokens_per_second >= search.best_speed:
        state = "best" if trial.choice == search.best_choice else "gains under 1%"
    return [
        str(trials.index(trial) + 1),
        " ".join(search.space.overrides(trial.choice)) or "the file as it is",
        f"{trial.tokens_per_second:,.0f} tokens/s" if trial.tokens_per_second else "",
        f"{trial.tokens_per_second / own:.2f}x" if trial.tokens_per_second and own else "",
        f"{trial.peak_bytes / 2**30:.2f} GiB" if trial.peak_bytes else "",
        f"{trial.first_step_seconds:.1f} s" if trial.tokens_per_second else "",
        f"{trial.seconds:.0f} s",
        state,
    ]


def trials_table(search: TuneSearch, by_speed: bool = False) -> Table:
    """All trials as they came, or the fastest first; the best so far in bold."""
    out = Table(box=None, pad_edge=False)
    for heading in COLUMNS:
        out.add_column(
            heading, justify="left" if heading in LEFT_ALIGNED else "right", no_wrap=heading not in LEFT_ALIGNED
        )
    for trial in sorted(search.trials, key=lambda trial: -trial.tokens_per_second) if by_speed else search.trials:
        words = trial_cells(search, trial)
        out.add_row(*map(Text, words), style="bold" if words[-1] == "best" else None)
    return out


def file_header(search: TuneSearch, words: list[str], nproc: int) -> str:
    """Where the file comes from and what was measured, as comments."""
    space, text = search.space, StringIO()
    Console(file=text, width=160).print(trials_table(search, by_speed=True))
    device = devices.select(space.base_config.device.name).describe()
    lines = [
        f"{shlex.join(['trainyard', 'tune', *words])}: the whole configuration, with the fastest of what was tried",
        f"overrides: {' '.join(space.overrides(search.best_choice)) or 'none'}",
        f"{datetime.now():%Y-%m-%d %H:%M}; {device}; {nproc} rank{'s' * (nproc > 1)}; torch {version('torch')}; "
        f"steps of {space.trial_batch} x {space.base_config.data.seq_len} tokens",
        *text.getvalue().splitlines(),
    ]
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


def with_available_data(config: Config) -> Config:
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
        "mask_eod_loss": False,
    }
    settings = config.model_dump(mode="json")
    return parse({**settings, "data": {**settings["data"], **plain}})


def output_path(source: str, out: Path | None) -> Path:
    """Where the result goes; a mistake is found before the first trial."""
    name = Path(source).name.removesuffix(".yaml").removesuffix(".yml").removesuffix(".tuned") + ".tuned.yaml"
    path, own = (out or Path(name)).expanduser(), Path(source).expanduser()
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise UserError(f"--out {path}: cannot be written; name a file in a directory that is there")
    if path.exists() and own.exists() and path.samefile(own) and path.name != name:
        raise UserError(f"--out {path}: is the file to tune, whose comments would be lost; nearest: {name}")
    return path
