"""`trainyard verify`: does a layout train the same model as one rank?"""

import os
import tempfile
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from trainyard import devices, models
from trainyard.config.load import load, parse
from trainyard.config.schema import Config
from trainyard.config.smoke import fit_to_ranks
from trainyard.config.smoke import smoke_config as shrink
from trainyard.core.errors import UserError
from trainyard.launch.launcher import launch
from trainyard.parallel.layout import Layout
from trainyard.parallel.mesh import shutdown_distributed
from trainyard.verify.compare_layouts import (
    VerifyFinding,
    VerifyRecord,
    compare_records,
    record_training,
    single_rank_config,
)

# What keeps a comparison sharp. fp32: layouts differ by 1e-7, not by bf16's 1e-2. eps: AdamW divides a gradient by its
# own size, and where it is rounding alone the update would be too.
STRICT_OVERRIDES = {
    "precision.": ["precision.kind=fp32", "precision.grad_dtype=null", "precision.reduce_dtype=null"],
    "optimizer.eps": ["optimizer.eps=1e-3"],
}
BASE_OVERRIDES = [
    *("compile.enabled=false", "checkpoint.export_hf=false", "checkpoint.every=0", "checkpoint.every_minutes=0"),
    *("checkpoint.resume=none", "checkpoint.weights_only=false"),
]


def verify(
    source: Annotated[str, typer.Argument(metavar="FILE|RECIPE", help="A YAML file or a recipe's name.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="A tiny model with the same structure and layout.")] = False,
    nproc: Annotated[
        int | None, typer.Option("--nproc", min=2, help="Ranks; default: enough for each axis of the layout, up to 8.")
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Optimizer steps to compare.")] = 3,
    result: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> int:
    """Train a few steps on several ranks and on one, in fp32, and compare: initial weights, batches, losses, every
    gradient, every new weight. The layout is shrunk to the ranks at hand; every axis that it has stays, if they allow.

    Examples:

      trainyard verify llama3-70b --smoke

      trainyard verify my.yaml layout.tp=4 --nproc 8
    """
    words = list(overrides or [])
    config = load(source, words)
    ranks = int(os.environ["WORLD_SIZE"]) if result else nproc or default_rank_count(config)
    config = shrink(config, ranks) if smoke else fit_to_ranks(config, ranks)
    # What the user names stands: a precision, or eps.
    sharp = [
        sharp for section, sharp in STRICT_OVERRIDES.items() if not any(word.startswith(section) for word in words)
    ]
    config = parse(config.model_dump(mode="json"), [*chain(*sharp), *BASE_OVERRIDES])
    if result:  # one of the ranks
        found = record_training(config, steps)
        if os.environ["RANK"] == "0":
            torch.save(asdict(found), result)
        shutdown_distributed()
        return 0
    console = Console(highlight=False)
    layout = Layout.from_config(config, ranks)
    _check_host_memory(config, steps)
    console.print(f"{steps} steps on {ranks} ranks ({layout.describe()}) ...", soft_wrap=True)
    with tempfile.TemporaryDirectory(prefix="trainyard-") as directory:
        path = Path(directory) / "record"
        options = [*(["--smoke"] if smoke else []), "--steps", str(steps), "--result", str(path)]
        if code := launch(["verify", source, *words, *options], ranks):
            return code
        found = VerifyRecord(**torch.load(path, weights_only=True))
    console.print(f"{steps} steps on one rank ...")
    findings = compare_records(found, record_training(single_rank_config(config), steps), config.precision.kind)
    console.print(findings_table(findings))
    passed = all(finding.ok for finding in findings)
    console.print("[bold green]pass[/]: the same training" if passed else "[bold red]fail[/]: not the same training")
    return 0 if passed else 1


def findings_table(findings: list[VerifyFinding]) -> Table:
    out = Table()
    for name in ("compared", "largest difference", "allowed", "where", ""):
        out.add_column(name, justify="right" if name in ("largest difference", "allowed") else "left")
    for each in findings:
        worst = "none" if each.max_difference == 0 else f"{each.max_difference:.1e}"
        allowed = "none" if each.tolerance == 0 else f"{each.tolerance:.0e}"
        verdict = "[green]pass[/]" if each.ok else "[bold red]fail[/]"
        out.add_row(each.quantity, worst, allowed, each.location if each.max_difference else "", verdict)
    return out


def default_rank_count(config: Config) -> int:
    """Two ranks for each axis that the layout uses, as far as this machine goes."""
    layout = config.layout
    used = sum(size > 1 for size in (layout.tp, layout.pp, layout.cp))
    spread = (layout.ranks or 1) > layout.tp * layout.pp * layout.cp or layout.zero > 0
    return max(2, min(2 ** (used + spread), devices.select(config.device.name).max_local_ranks()))


def _check_host_memory(config: Config, steps: int) -> None:
    """One rank must hold the whole model, its training state and both records."""
    weights = models.family_of(config.model).blueprint(config.model).parameter_count()
    needed = weights * 4 * (4 + 2 * (2 + steps))
    here = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > here:
        raise UserError(
            f"{weights:,} weights: one rank would need about {needed / 2**30:.0f} GiB of memory to compare with, this "
            f"machine has {here / 2**30:.0f}; use --smoke, or fewer model.layers"
        )
