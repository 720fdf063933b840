"""What would make a run fail or disappoint and can be known before it starts: one line each, with the nearest fix."""

from dataclasses import dataclass
from pathlib import Path

from trainyard.checkpoint.io.storage import open_storage
from trainyard.config.schema import Config
from trainyard.core.errors import UserError
from trainyard.data.loading.build import build_datasets
from trainyard.models import family_of
from trainyard.plan.group_rules import group_problems
from trainyard.plan.report import ConfigChange, Plan

GIB = 2**30
COUNTABLE_SOURCES = ("tokens", "arrow", "hdf5")
"""Sources whose samples can be counted without reading them all."""


@dataclass(frozen=True)
class PlanProblem:
    message: str
    fatal: bool
    """The run would not start, or not end."""


def find_problems(plan: Plan, fixes: list[ConfigChange]) -> list[PlanProblem]:
    """`fixes` are changes that fit in memory."""
    config = plan.config
    shapes = [PlanProblem(each.message, each.fatal) for each in group_problems(plan.layout, plan.hardware)]
    if plan.original_config.layout.cp_method != config.layout.cp_method:
        line = "layout.cp_method=ring: Trainium gathers keys and values instead, and so does this plan"
        shapes.append(PlanProblem(f"{line}; nearest: layout.cp_method=all_gather", False))
    return [
        *shapes,
        *_memory_problems(plan, fixes),
        *_disk_problems(plan),
        *_host_memory_problems(plan),
        *_data_problems(config),
    ]


def _memory_problems(plan: Plan, fixes: list[ConfigChange]) -> list[PlanProblem]:
    if plan.fits:
        return []
    needed, place = max((each.total, pp) for pp, each in enumerate(plan.stage_memory))
    where = f" of pipeline rank {place}" if plan.layout.pp > 1 else ""
    best = f"nearest: {fixes[0].overrides} ({fixes[0].memory / GIB:.1f} GiB)" if fixes else "--search finds what fits"
    line = f"memory: a rank{where} needs {needed / GIB:.1f} GiB, it has {plan.hardware.memory / GIB:.1f}; {best}"
    return [PlanProblem(line, True)]


def checkpoint_bytes(config: Config) -> int:
    """Of one checkpoint, all ranks together: weights at their best precision, and two moments."""
    each = 8 + (2 if config.precision.kind == "bf16_sr" else 4)
    return family_of(config.model).blueprint(config.model).parameter_count() * each


def _disk_problems(plan: Plan) -> list[PlanProblem]:
    """Room for all that is kept, one more being written. Only of a directory that is named, or on this machine's CPU:
    elsewhere the disk is not the run's."""
    config = plan.config
    saves = config.checkpoint
    if (
        not saves.saving_enabled
        or not (saves.directory or plan.hardware.entry.kind == "cpu")
        or "://" in (saves.directory or "")
    ):
        return []
    directory = Path(saves.directory or Path(config.log.directory) / config.log.name).expanduser()
    size, free = checkpoint_bytes(config), open_storage(directory.absolute()).free_bytes()
    count = saves.keep + 1
    if not saves.keep:
        count = -(-config.train.steps // saves.every) if saves.every else 1
    if free is None or size * count <= free:
        return []
    near = f"checkpoint.keep={free // size - 1}" if free >= 2 * size else "another checkpoint.directory"
    needed, have = f"{count} checkpoints of {size / GIB:.1f} GiB", f"{free / GIB:.1f} GiB free"
    return [PlanProblem(f"disk: {needed}, {directory} has {have}; nearest: {near}", size > free)]


def _host_memory_problems(plan: Plan) -> list[PlanProblem]:
    """While a checkpoint is written, every rank of a host holds a copy of its part of the state."""
    config, host = plan.config, plan.hardware.entry.host_memory
    if not config.checkpoint.saving_enabled or config.checkpoint.blocking or not host:
        return []
    each = checkpoint_bytes(config) / plan.layout.world_size
    ranks = min(plan.hardware.ranks_per_node, config.checkpoint.writers_per_host or plan.hardware.ranks_per_node)
    if plan.hardware.entry.kind == "cpu" or each * ranks <= host / 2:
        return []
    near = max(int(host / 2 / each), 1)
    line = (
        f"host memory: a checkpoint's copies take {each * ranks / GIB:.0f} GiB of a host's {host / GIB:.0f}; "
        f"nearest: checkpoint.writers_per_host={near}"
    )
    return [PlanProblem(line, each * ranks > host)]


def _data_problems(config: Config) -> list[PlanProblem]:
    """How often the run goes through its samples, where they are here."""
    if config.data.source not in COUNTABLE_SOURCES:
        return []
    try:
        train = build_datasets(config).train
    except UserError as error:
        if "no such" in str(error):
            return [
                PlanProblem(f"data.paths={', '.join(config.data.paths)}: not here, so their length is not known", False)
            ]
        return [PlanProblem(str(error), True)]
    wanted, have = config.train.steps * config.train.global_batch, len(train)
    if config.data.order == "megatron" or config.data.weights or wanted <= have:
        return []
    steps = have // config.train.global_batch
    line = (
        f"data: {wanted:,} samples wanted, data.paths has {have:,}: {wanted / have:.1f} times round; "
        f"once is train.steps={max(steps, 1)}"
    )
    return [PlanProblem(line, False)]
