"""Problems of a run that are known before it starts, each in one line with the nearest fix: those that `trainyard plan`
finds, and the memory check of `trainyard train` before any weight is allocated."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from trainyard.config.schema import Config
from trainyard.core.constants import GIB
from trainyard.core.errors import UserError
from trainyard.core.quantities import counted, size_text
from trainyard.data.loading.build import build_datasets
from trainyard.devices.base import Device
from trainyard.families import blueprint_of
from trainyard.formats.registry import check_export
from trainyard.parallel.layout import Layout
from trainyard.preflight.plan.group_rules import PlanProblem, group_problems
from trainyard.preflight.plan.planned_run import PlannedRun
from trainyard.preflight.plan.report import MEMORY_FILL_LIMIT, ConfigChange, Plan, max_rank_memory, single_key_variants
from trainyard.remote.storage import open_storage

REFUSE_FACTOR = 1.3
"""A run that needs this many times the available memory is refused. Estimates are within 5 %: see
docs/lab/memory-evidence.md."""


def find_problems(plan: Plan, fixes: list[ConfigChange]) -> list[PlanProblem]:
    """`fixes` are changes that fit in memory."""
    problems, device = group_problems(plan.layout, plan.hardware), plan.hardware.entry.kind
    if plan.replaces_ring:
        message = f"layout.cp_method=ring: {device.label} gathers keys and values instead, and so does this plan"
        problems.append(PlanProblem(f"{message}; nearest: layout.cp_method=all_gather", False))
    if not (device.has_grouped_gemm or plan.config.model.has_static_shapes):
        message = f"model.capacity_factor=null: the graphs of {device.label} have static shapes; nearest: 2.0"
        problems.append(PlanProblem(message, True))
    if plan.config.checkpoint.export_hf:
        try:
            check_export(plan.config.model)
        except UserError as error:
            problems.append(PlanProblem(f"checkpoint.export_hf=true: {error}; nearest: false", True))
    problems += [*_memory_problems(plan, fixes), *_disk_problems(plan), *_host_memory_problems(plan)]
    return [*problems, *_data_problems(plan)]


def _memory_problems(plan: Plan, fixes: list[ConfigChange]) -> Iterator[PlanProblem]:
    if plan.fits:
        return
    needed, pp = max((memory.total, pp) for pp, memory in enumerate(plan.memory_by_pp))
    rank = f"a rank at pipeline position {pp}" if plan.layout.pp > 1 else "a rank"
    fix = f"nearest: {fixes[0].overrides} ({fixes[0].memory / GIB:.1f} GiB)" if fixes else "try --search"
    message = f"memory: {rank} needs {needed / GIB:.1f} GiB and has {plan.hardware.memory / GIB:.1f}; {fix}"
    yield PlanProblem(message, True)


def checkpoint_bytes(plan: Plan) -> int:
    """Size of one checkpoint, over all ranks: master weights and two moments of what is trained."""
    model, per_weight = plan.config.model, 8 + (2 if plan.config.precision.kind == "bf16_sr" else 4)
    return blueprint_of(model).trained_count * per_weight


def _disk_problems(plan: Plan) -> Iterator[PlanProblem]:
    """Space for all kept checkpoints and the next one. Checked only for a named directory or on this machine's CPU:
    otherwise the run uses another disk."""
    config, section = plan.config, plan.config.checkpoint
    local = section.directory or plan.hardware.entry.kind.is_host
    if not section.saving_enabled or not local or "://" in (section.directory or ""):
        return
    directory = Path(section.directory or Path(config.log.directory) / config.log.name).expanduser()
    size, free = checkpoint_bytes(plan), open_storage(directory.absolute()).free_bytes()
    count = section.keep + 1
    if not section.keep:
        count = -(-config.train.steps // section.every) if section.every else 1
    if free is not None and size * count > free:
        nearest = f"checkpoint.keep={free // size - 1}" if free >= 2 * size else "another checkpoint.directory"
        space = f"{counted(count, 'checkpoint')} of {size_text(size)}, {directory} has {size_text(free)} free"
        yield PlanProblem(f"disk: {space}; nearest: {nearest}", size > free)


def _host_memory_problems(plan: Plan) -> Iterator[PlanProblem]:
    """While a checkpoint is written, the ranks of a host hold copies of their shards in host memory."""
    section, host_memory = plan.config.checkpoint, plan.hardware.entry.host_memory
    if not section.saving_enabled or section.blocking or not host_memory or plan.hardware.entry.kind.is_host:
        return
    shard = checkpoint_bytes(plan) / plan.layout.world_size
    ranks = plan.hardware.ranks_per_node
    copies = shard * min(ranks, section.writers_per_host or ranks)
    if copies > host_memory / 2:
        writers = max(int(host_memory / 2 / shard), 1)
        size = f"copies of a checkpoint take {copies / GIB:.0f} GiB of a host's {host_memory / GIB:.0f}"
        message = f"host memory: {size}; nearest: checkpoint.writers_per_host={writers}"
        yield PlanProblem(message, copies > host_memory)


def _data_problems(plan: Plan) -> Iterator[PlanProblem]:
    """Repetitions of the training data, if the files are on this machine."""
    config = plan.config
    if buckets := config.data.buckets:
        message = f"data.buckets: predicted for steps of {buckets[-1]} tokens per sample; shorter ones take less"
        yield PlanProblem(f"{message}; {counted(len(buckets), 'graph')}", False)
    if not config.data.has_flag("is_countable"):
        return
    try:
        samples = len(build_datasets(config).train)
    except UserError as error:
        missing = "no such" in str(error)
        paths = ", ".join(config.data.paths)
        yield PlanProblem(
            f"data.paths={paths}: not on this machine, length unknown" if missing else str(error), not missing
        )
        return
    needed = config.train.steps * config.train.global_batch
    if config.data.order == "shuffled" and not config.data.weights and needed > samples:
        epochs = f"{counted(needed, 'sample', ',')} needed, data.paths has {samples:,}: {needed / samples:.1f} epochs"
        steps = max(samples // config.train.global_batch, 1)
        yield PlanProblem(f"data: {epochs}; one epoch is train.steps={steps}", False)


def check_fits(
    config: Config, layout: Layout, device: Device, warn: Callable[[str], None], local_size: int = 1
) -> None:
    """Refuse a run that cannot fit and warn about one that may not. Runs with a custom loss, whose memory is unknown,
    are not checked."""
    available = device.memory_per_rank(local_size)
    if available is None or config.train.loss:
        return
    run = PlannedRun(config, layout, device.kind)
    needed = max_rank_memory(run)
    if needed <= MEMORY_FILL_LIMIT * available:
        return
    message = f"memory: a rank needs about {needed / GIB:.1f} GiB and has {available / GIB:.1f}"
    fix = smallest_fix(single_key_variants(config, layout.world_size, run.device), available)
    # Packed batches: the data decide how much is padding, which needs no memory.
    depends_on_data = run.packed_batch and config.data.source != "synthetic"
    if needed > REFUSE_FACTOR * available and not depends_on_data:
        raise UserError(f"{message}; {fix}")
    warn(f"note: {message}, so the run may fail; {fix}")


def smallest_fix(variants: Iterable[tuple[str, PlannedRun]], available: int) -> str:
    """The single change that fits and saves the least memory, as advice for the user."""
    sizes = [(max_rank_memory(run), overrides) for overrides, run in variants]
    fitting = [entry for entry in sizes if entry[0] <= MEMORY_FILL_LIMIT * available]
    if not fitting:
        return "no single change makes it fit; run trainyard plan FILE --search"
    size, overrides = max(fitting)
    return f"nearest: {overrides} ({size / GIB:.1f} GiB)"
