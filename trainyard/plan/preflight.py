"""What would make a run fail or disappoint and can be known before it starts: one line each, with the nearest fix."""

from dataclasses import dataclass
from pathlib import Path

from trainyard.checkpoint.io.storage import open_place
from trainyard.config.schema import Config
from trainyard.core.errors import UserError
from trainyard.data.loading.build import open_sources
from trainyard.models import family
from trainyard.plan.group_rules import group_problems
from trainyard.plan.report import Change, Plan

GIB = 2**30
READ = ("tokens", "arrow", "hdf5")
"""Sources whose samples can be counted without reading them all."""


@dataclass(frozen=True)
class Problem:
    line: str
    fatal: bool
    """The run would not start, or not end."""


def problems(plan: Plan, fixes: list[Change]) -> list[Problem]:
    """`fixes` are changes that fit in memory."""
    config = plan.config
    shapes = [Problem(each.line, each.refused) for each in group_problems(plan.layout, plan.on)]
    if plan.given.layout.context != config.layout.context:
        line = "layout.context=ring: Trainium gathers keys and values instead, and so does this plan"
        shapes.append(Problem(f"{line}; nearest: layout.context=all_gather", False))
    return [*shapes, *_memory(plan, fixes), *_disk(plan), *_host(plan), *_data(config)]


def _memory(plan: Plan, fixes: list[Change]) -> list[Problem]:
    if plan.fits:
        return []
    needed, place = max((each.total, pp) for pp, each in enumerate(plan.memories))
    where = f" of pipeline rank {place}" if plan.layout.pp > 1 else ""
    best = f"nearest: {fixes[0].words} ({fixes[0].memory / GIB:.1f} GiB)" if fixes else "--search finds what fits"
    line = f"memory: a rank{where} needs {needed / GIB:.1f} GiB, it has {plan.on.memory / GIB:.1f}; {best}"
    return [Problem(line, True)]


def checkpoint_bytes(config: Config) -> int:
    """Of one checkpoint, all ranks together: weights at their best precision, and two moments."""
    each = 8 + (2 if config.precision.kind == "bf16_sr" else 4)
    return family(config.model).blueprint(config.model).parameters() * each


def _disk(plan: Plan) -> list[Problem]:
    """Room for all that is kept, one more being written. Only of a directory that is named, or on this machine's CPU:
    elsewhere the disk is not the run's."""
    config = plan.config
    saves = config.checkpoint
    if not saves.saves or not (saves.directory or plan.on.entry.kind == "cpu") or "://" in (saves.directory or ""):
        return []
    directory = Path(saves.directory or Path(config.log.directory) / config.log.name).expanduser()
    size, free = checkpoint_bytes(config), open_place(directory.absolute()).free()
    count = saves.keep + 1
    if not saves.keep:
        count = -(-config.train.steps // saves.every) if saves.every else 1
    if free is None or size * count <= free:
        return []
    near = f"checkpoint.keep={free // size - 1}" if free >= 2 * size else "another checkpoint.directory"
    needed, have = f"{count} checkpoints of {size / GIB:.1f} GiB", f"{free / GIB:.1f} GiB free"
    return [Problem(f"disk: {needed}, {directory} has {have}; nearest: {near}", size > free)]


def _host(plan: Plan) -> list[Problem]:
    """While a checkpoint is written, every rank of a host holds a copy of its part of the state."""
    config, host = plan.config, plan.on.entry.host
    if not config.checkpoint.saves or config.checkpoint.blocking or not host:
        return []
    each = checkpoint_bytes(config) / plan.layout.world
    ranks = min(plan.on.node, config.checkpoint.window or plan.on.node)
    if plan.on.entry.kind == "cpu" or each * ranks <= host / 2:
        return []
    near = max(int(host / 2 / each), 1)
    line = (
        f"host memory: a checkpoint's copies take {each * ranks / GIB:.0f} GiB of a host's {host / GIB:.0f}; "
        f"nearest: checkpoint.window={near}"
    )
    return [Problem(line, each * ranks > host)]


def _data(config: Config) -> list[Problem]:
    """How often the run goes through its samples, where they are here."""
    if config.data.source not in READ:
        return []
    try:
        train = open_sources(config).train
    except UserError as error:
        if "no such" in str(error):
            return [
                Problem(f"data.paths={', '.join(config.data.paths)}: not here, so their length is not known", False)
            ]
        return [Problem(str(error), True)]
    wanted, have = config.train.steps * config.train.global_batch, len(train)
    if config.data.order == "megatron" or config.data.weights or wanted <= have:
        return []
    steps = have // config.train.global_batch
    line = (
        f"data: {wanted:,} samples wanted, data.paths has {have:,}: {wanted / have:.1f} times round; "
        f"once is train.steps={max(steps, 1)}"
    )
    return [Problem(line, False)]
