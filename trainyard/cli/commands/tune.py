"""`trainyard tune`: Measure which settings are fastest on this machine."""

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

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text
from typer import Option

from trainyard import devices
from trainyard.cli.console import interrupt_on_terminate, print_line
from trainyard.cli.options import ConfigSource, Overrides, Smoke
from trainyard.cli.run_config import load_run_config
from trainyard.config.data_schema import DataSection
from trainyard.config.load import dump, parse
from trainyard.core.atomic_files import atomic_write_text
from trainyard.core.errors import RunStopped, UserError
from trainyard.core.quantities import counted
from trainyard.core.user_code import is_user_path
from trainyard.core.world import World
from trainyard.preflight.dryrun.dry_run import synthetic_data
from trainyard.preflight.tune.search import MAX_DRIFT, TuneSearch, run_search
from trainyard.preflight.tune.search_space import KEY_MICRO_BATCH, SearchSpace
from trainyard.preflight.tune.trial import Choice, Trial, run_with_timeout, trial_from_process
from trainyard.remote.location import find_model_location, is_url

COLUMNS = ("trial", "changes", "speed", "ratio", "memory", "first step", "total", "state")
LEFT_ALIGNED = ("changes", "state")
LABELED_COLUMNS = ("trial", "first step", "total")
"""Columns that plain lines prefix with their heading."""


def tune(
    source: ConfigSource,
    overrides: Overrides = None,
    smoke: Smoke = False,
    nproc: Annotated[int, Option(min=1, help="Ranks of each trial, on this machine.")] = 1,
    budget: Annotated[float, Option(min=0.01, metavar="MINUTES", help="Time limit for all trials together.")] = 10.0,
    steps: Annotated[int, Option(min=2, help="Steps per trial; the first two are not timed.")] = 6,
    out: Annotated[
        Path | None, Option(metavar="FILE", help="Output file. Default: NAME.tuned.yaml in the current directory.")
    ] = None,
) -> int:
    """Measure which settings are fastest on this machine and write the file with them. Losses stay the same.

    Each trial is a short run: the unchanged file, then compile.enabled, larger and smaller train.micro_batch,
    recompute, device.attention, compile.mode and compile.cuda_graphs. A faster setting is kept for the following
    trials. At the end the unchanged file is measured again. A key named on the command line stays fixed.

    Examples:

      trainyard tune my.yaml

      trainyard tune my.yaml --nproc 8 --budget 30

      trainyard tune my.yaml compile.enabled=false --out fast.yaml

      trainyard tune llama2-7b --smoke
    """
    override_list = list(overrides or [])
    if World.from_environment().size > 1:
        raise UserError("tune: starts the ranks of its trials; run it once with --nproc, not as a rank")
    config = load_run_config(source, override_list, smoke, nproc)
    fixed_keys = {override.partition("=")[0] for override in override_list}
    keys = config.model_dump(mode="json")
    missing = has_missing_files(config.data)
    base_config = parse({**keys, "data": synthetic_data(keys["data"])}) if missing else config
    space = SearchSpace(base_config, nproc, fixed_keys=fixed_keys)
    target = output_path(source, out)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    if missing:
        print_line(console, "data: some files are missing; trials use data.source=synthetic (the speed is the same)")
    global_batch = config.train.global_batch
    reduced = f" (train.global_batch={global_batch} is unchanged)" if space.trial_batch < global_batch else ""
    print_line(
        console,
        f"trials of {counted(steps, 'step')} of {space.trial_batch} x {config.data.seq_len} tokens{reduced}; "
        f"at most {budget:g} minutes",
    )
    search = TuneSearch(space)
    display = TuneTable(console, search, budget * 60)
    interrupted = complete = False

    def run_trial(choice: Choice, timeout: float) -> Trial:
        display.on_trial_start(choice)
        directory = Path(temporary) / str(len(search.trials) + 1)
        directory.mkdir()
        atomic_write_text(directory / "trial.yaml", dump(space.trial_config(choice, steps, directory)))
        command = [sys.executable, "-m", "trainyard", "train", str(directory / "trial.yaml"), "--nproc", str(nproc)]
        process = run_with_timeout(command, timeout, directory / "errors")
        metrics = directory / "run" / "metrics.jsonl"
        trial = trial_from_process(choice, process, metrics)
        if process.returncode == 2 and not search.trials:
            raise UserError(trial.outcome)  # an error in the file that only a run detects
        display.on_trial_end(trial)
        return trial

    try:
        with (
            interrupt_on_terminate(),
            tempfile.TemporaryDirectory(prefix="trainyard-") as temporary,
            display.live or nullcontext(),
        ):
            complete = run_search(search, run_trial, budget * 60)
    except KeyboardInterrupt:
        interrupted = True
    finished = [trial for trial in search.trials if trial.tokens_per_second]
    if interrupted and len(finished) < 2:
        raise KeyboardInterrupt
    if not finished:
        raise RunStopped(f"tune: no trial finished; the last one: {search.trials[-1].outcome}")
    best = space.overrides(search.best_choice)
    console.print(trials_table(search, by_speed=True))
    header = file_header(search, [source, *override_list], nproc)
    atomic_write_text(target, header + dump(parse(keys, best)))
    if interrupted:
        print_line(console, "interrupted: not everything was tried")
    elif not complete:
        print_line(console, "budget spent: increase --budget MINUTES")
    file_speeds = search.file_speeds or [0.0]
    if max(file_speeds) > MAX_DRIFT * min(file_speeds):
        speeds = " and ".join(f"{speed:,.0f}" for speed in file_speeds)
        print_line(console, f"note: the unchanged file ran at {speeds} tokens/s: leave the machine idle and tune again")
    baseline = max(file_speeds)
    ratio = f", {search.best_speed / baseline:.2f} times the speed of the file" if baseline and best else ""
    print_line(console, f"fastest: {' '.join(best) or 'the unchanged file'}{ratio}")
    micro_batch = search.best_choice[KEY_MICRO_BATCH]
    doubles = global_batch % (2 * micro_batch * space.layout.dp) == 0
    if doubles and not space.larger_micro_batches(micro_batch):
        print_line(
            console,
            f"larger micro batches were not tried; continue with: {shlex.join(['trainyard', 'tune', str(target)])}",
        )
    options = [*(["--smoke"] if smoke else []), *(["--nproc", str(nproc)] if nproc > 1 else [])]
    print_line(console, f"  written      {target}   (run: trainyard train {target})")
    print_line(console, f"  or           {shlex.join(['trainyard', 'train', source, *override_list, *best, *options])}")
    return 130 if interrupted else 0


def has_missing_files(data: DataSection) -> bool:
    """Return True if the section reads files, and not all of them are named and on this machine."""
    suffix = ".idx" if data.source == "tokens" else ""
    files = [f"{path.removesuffix(suffix)}{suffix}" for path in data.paths]
    files += [name for name in (data.vocab_file, data.merges_file) if name]
    if data.tokenizer not in ("bytes", "gpt2"):
        files.append(data.tokenizer)
    available = all(
        is_url(name) or find_model_location(name) or glob.glob(str(Path(name).expanduser())) for name in files
    )
    reads_no_files = data.source == "synthetic" or is_user_path(data.source)
    return not reads_no_files and not (available and (data.paths or data.tokenizer == "bytes"))


def output_path(source: str, out: Path | None) -> Path:
    """Return where to write the result; reports an unusable path before the first trial."""
    name = Path(source).name.removesuffix(".yaml").removesuffix(".yml").removesuffix(".tuned") + ".tuned.yaml"
    path, source_path = (out or Path(name)).expanduser(), Path(source).expanduser()
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise UserError(f"--out {path}: cannot be written; name a file in an existing directory")
    if path.exists() and source_path.exists() and path.samefile(source_path) and path.name != name:
        raise UserError(f"--out {path}: is the file to tune, whose comments would be lost; nearest: {name}")
    return path


class TuneTable:
    """Shows the trials while the search runs."""

    def __init__(self, console: Console, search: TuneSearch, budget_s: float) -> None:
        self.console, self.search = console, search
        self.running_choice: Choice | None = None
        self.trial_started_at = time.monotonic()
        self.deadline = self.trial_started_at + budget_s
        live = Live(get_renderable=self.render, console=console, refresh_per_second=2, transient=True)
        self.live = live if console.is_terminal else None

    def on_trial_start(self, choice: Choice) -> None:
        self.running_choice, self.trial_started_at = choice, time.monotonic()

    def on_trial_end(self, trial: Trial) -> None:
        self.running_choice = None
        if not self.live:
            cells = zip(COLUMNS, trial_cells(self.search, trial), strict=True)
            line = " | ".join(f"{name} {cell}" if name in LABELED_COLUMNS else cell for name, cell in cells if cell)
            self.console.print(line, soft_wrap=True, markup=False)

    def render(self) -> Group:
        now = time.monotonic()
        table = trials_table(self.search)
        if self.running_choice is not None:
            running = Trial(self.running_choice, "running", now - self.trial_started_at)
            table.add_row(*map(Text, trial_cells(self.search, running)), style="dim")
        left = timedelta(seconds=max(round(self.deadline - now), 0))
        return Group(table, Text(f"{left} of the budget left; Ctrl-C ends the search and keeps the best so far"))


def trial_cells(search: TuneSearch, trial: Trial) -> list[str]:
    """Return the cells of a trial, one per column."""
    number = next((index for index, other in enumerate(search.trials) if other is trial), len(search.trials))
    finished = number < len(search.trials)
    trials = search.trials if finished else [*search.trials, trial]
    baseline, speed, state = trials[0].tokens_per_second, trial.tokens_per_second, trial.outcome
    if finished and speed and speed >= search.best_speed:
        state = "best" if trial.choice == search.best_choice else "gains under 1%"
    return [
        str(number + 1),
        " ".join(search.space.overrides(trial.choice)) or ("unchanged again" if number else "unchanged"),
        f"{speed:,.0f} tokens/s" if speed else "",
        f"{speed / baseline:.2f}x" if speed and baseline else "",
        f"{trial.peak_bytes / 2**30:.2f} GiB" if trial.peak_bytes else "",
        f"{trial.first_step_seconds:.1f} s" if speed else "",
        f"{trial.seconds:.0f} s",
        state,
    ]


def trials_table(search: TuneSearch, by_speed: bool = False) -> Table:
    """Return all trials in order, or the fastest first; the best so far in bold."""
    table = Table(box=None, pad_edge=False)
    for heading in COLUMNS:
        left = heading in LEFT_ALIGNED
        table.add_column(heading, justify="left" if left else "right", no_wrap=not left)
    for trial in sorted(search.trials, key=lambda trial: -trial.tokens_per_second) if by_speed else search.trials:
        cells = trial_cells(search, trial)
        table.add_row(*map(Text, cells), style="bold" if cells[-1] == "best" else None)
    return table


def file_header(search: TuneSearch, arguments: list[str], nproc: int) -> str:
    """Return YAML comments that say where the file comes from and what was measured."""
    space, text = search.space, StringIO()
    Console(file=text, width=160).print(trials_table(search, by_speed=True))
    device = devices.select(space.base_config.device.name).describe()
    lines = [
        f"{shlex.join(['trainyard', 'tune', *arguments])}: the complete configuration with the fastest settings tried",
        f"overrides: {' '.join(space.overrides(search.best_choice)) or 'none'}",
        f"{datetime.now():%Y-%m-%d %H:%M}; {device}; {counted(nproc, 'rank')}; torch {version('torch')}; "
        f"steps of {space.trial_batch} x {space.base_config.data.seq_len} tokens",
        *text.getvalue().splitlines(),
    ]
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)
