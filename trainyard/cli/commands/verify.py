"""`trainyard verify`: Check that a layout trains the same model as one rank."""

import os
import tempfile
from dataclasses import asdict
from itertools import chain
from math import prod
from pathlib import Path
from typing import Annotated, Literal

import torch
from rich.console import Console
from rich.table import Table
from typer import Context, Option

from trainyard import devices, models
from trainyard.cli.options import ConfigSource, Overrides, Smoke
from trainyard.cli.ranks import launch_ranks
from trainyard.cli.run_config import load_run_config, load_source
from trainyard.config.load import parse
from trainyard.config.smoke import fit_to_ranks
from trainyard.core.errors import UserError
from trainyard.core.quantities import counted
from trainyard.core.world import World
from trainyard.parallel.layout import Layout
from trainyard.parallel.mesh import shutdown_distributed
from trainyard.preflight.verify import (
    VerifyFinding,
    VerifyRecord,
    compare_records,
    record_training,
    single_rank_config,
)

# Overrides that keep the tolerance tight, by the key prefix with which the user can replace them. fp32: layouts differ
# by 1e-7 instead of bf16's 1e-2. eps: AdamW divides a gradient by its own magnitude, so a gradient that is only
# rounding noise would give a full-size update.
STRICT_OVERRIDES = {
    "precision.": ["precision.kind=fp32", "precision.grad_dtype=null", "precision.reduce_dtype=null"],
    "optimizer.eps": ["optimizer.eps=1e-3"],
}
BASE_OVERRIDES = [
    *("compile.enabled=false", "checkpoint.export_hf=false", "checkpoint.every=0", "checkpoint.every_minutes=0"),
    *("checkpoint.resume=none", "checkpoint.weights_only=false", "train.callbacks=[]"),
]


def verify(
    context: Context,
    source: ConfigSource,
    overrides: Overrides = None,
    smoke: Smoke = False,
    nproc: Annotated[
        int | None, Option(min=2, help="Ranks. Default: enough for each axis of the layout, up to 8.")
    ] = None,
    steps: Annotated[int, Option(min=1, help="Optimizer steps to compare.")] = 3,
    result: Annotated[Path | None, Option(hidden=True)] = None,
) -> int:
    """Train a few steps on several ranks and on one rank, in fp32, and compare everything.

    Compares initial weights, batches, losses, all gradients and all new weights. Shrinks the layout to the available
    ranks and keeps every axis that fits. Exit code 0: pass, 1: fail.

    Examples:

      trainyard verify llama3-70b --smoke

      trainyard verify my.yaml layout.tp=4 --nproc 8
    """
    override_list = list(overrides or [])
    named = {override.partition("=")[0] for override in override_list}
    world = World.from_environment() if result else World()
    if result and world.size == 1:
        raise UserError(f"--result {result}: only for the ranks that verify starts; nearest: verify --nproc 2")
    ranks = world.size if result else nproc or default_rank_count(source, override_list, named)
    warn = (lambda line: None) if result else None  # the ranks repeat no notes
    if smoke:
        config = load_run_config(source, override_list, smoke, ranks, warn)
    else:
        config = fit_to_ranks(load_source(source, override_list, warn), ranks, named)
    strict = [
        strict_overrides
        for prefix, strict_overrides in STRICT_OVERRIDES.items()
        if not any(override.startswith(prefix) for override in override_list)
    ]
    config = parse(config.model_dump(mode="json"), [*chain(*strict), *BASE_OVERRIDES])
    if result:  # this process is one of the ranks
        record = record_training(config, steps)
        if world.rank == 0:
            torch.save(asdict(record), result)
        shutdown_distributed()
        return 0
    console = Console(highlight=False)
    layout = Layout.from_config(config, ranks)
    _check_host_memory(config.model, steps, smoke)
    console.print(f"{counted(steps, 'step')} on {counted(ranks, 'rank')} ({layout.describe()}) ...", soft_wrap=True)
    with tempfile.TemporaryDirectory(prefix="trainyard-") as directory:
        path = Path(directory) / "record"
        if code := launch_ranks(context, ranks, config.device.name, changes={"result": path}):
            return code
        record = VerifyRecord(**torch.load(path, weights_only=True))
    console.print(f"{counted(steps, 'step')} on one rank ...")
    findings = compare_records(record, record_training(single_rank_config(config), steps), config.precision.kind)
    console.print(findings_table(findings))
    passed = all(finding.ok for finding in findings)
    console.print("[bold green]pass[/]: the same training" if passed else "[bold red]fail[/]: not the same training")
    return 0 if passed else 1


def findings_table(findings: list[VerifyFinding]) -> Table:
    table = Table()
    for heading in ("compared", "largest difference", "allowed", "where", ""):
        justify: Literal["left", "right"] = "right" if heading in ("largest difference", "allowed") else "left"
        table.add_column(heading, justify=justify, overflow="fold")  # names are never cut off
    for finding in findings:
        difference = "none" if finding.max_difference == 0 else f"{finding.max_difference:.1e}"
        allowed = "none" if finding.tolerance == 0 else f"{finding.tolerance:.0e}"
        verdict = "[green]pass[/]" if finding.ok else "[bold red]fail[/]"
        location = finding.location if finding.max_difference else ""
        table.add_row(finding.quantity, difference, allowed, location, verdict)
    return table


def default_rank_count(source: str, overrides: list[str], named: set[str]) -> int:
    """Return two ranks per axis that the layout uses (all ranks of an axis named on the command line), limited by this
    machine."""
    relevant = [override for override in overrides if override.startswith(("layout.", "device."))]
    config = load_source(source, relevant, warn=lambda line: None)
    layout = config.layout
    sizes = {axis: getattr(layout, axis) for axis in ("tp", "pp", "cp")}
    kept = prod(size if f"layout.{axis}" in named else min(size, 2) for axis, size in sizes.items())
    uses_dp = (layout.ranks or 1) > prod(sizes.values()) or layout.zero > 0 or layout.ep > 1
    dp = layout.ep if "layout.ep" in named else 1 + uses_dp
    return max(2, min(kept * dp, devices.select(config.device.name).max_local_ranks()))


def _check_host_memory(model: models.ModelConfig, steps: int, smoke: bool) -> None:
    """Raise UserError unless one rank can hold the complete model, its training state and both records."""
    weights = models.blueprint_of(model).parameter_count()
    needed = weights * 4 * (4 + 2 * (2 + steps))
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > available:
        raise UserError(
            f"{weights:,} weights: one rank needs about {needed / 2**30:.0f} GiB of memory for the comparison, this "
            f"machine has {available / 2**30:.0f}; use {'' if smoke else '--smoke, or '}fewer model.layers"
        )
