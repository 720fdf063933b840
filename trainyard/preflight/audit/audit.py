"""Audit of a run against Trainium's rules, by dry runs: no Trainium and no weights.

Each pipeline stage is traced in two ways. Full step: its first rank, with enough micro batches to fill the pipeline,
for two steps and an evaluation; this gives the memory. Short step: one micro batch, three steps on the first rank and
one step on a middle and on the last rank; this shows graphs that depend on the step or on the rank.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from trainyard.config.load import parse
from trainyard.config.schema import Config
from trainyard.core.errors import UserError
from trainyard.core.quantities import counted
from trainyard.core.worker_pool import map_ordered
from trainyard.devices.neuron.topology import rank_memory_bytes
from trainyard.devices.neuron.trainium import MetaTrainium
from trainyard.parallel.layout import Layout
from trainyard.preflight.audit.rules import (
    Violation,
    check_aborted,
    check_groups,
    check_memory,
    check_micro_batches,
    check_operators,
    check_ranks,
    check_steps,
    merge_violations,
)
from trainyard.preflight.dryrun.dry_run import dry_run, trace_steps
from trainyard.preflight.dryrun.op_trace import RankTrace

PHASE_NAMES = {"step 1": "first step", "step 2": "later steps", "evaluation": "evaluation"}


class TraceJob(NamedTuple):
    """One dry run of one rank."""

    stage: int
    rank: int
    micro_batches: int
    steps: int
    full_step: bool


class StageAudit(NamedTuple):
    """Results of a pipeline rank."""

    stage: int
    ranks: tuple[int, ...]
    """Ranks that were traced."""
    operators: int
    """Operators of a full step, as far as it was traced."""
    peak_bytes: int
    steady_bytes: int
    graphs: dict[str, str]
    """Digest of the graph of the first step, of later steps and of evaluation."""


@dataclass(frozen=True)
class AuditReport:
    generation: str
    lnc: int
    ranks: int
    layout: str
    traced: str
    """Description of what was traced."""
    memory_limit: int
    """Bytes of a rank."""
    stages: list[StageAudit]
    violations: list[Violation]

    @property
    def graphs(self) -> int:
        """Number of distinct graphs of all stages."""
        return len({digest for stage in self.stages for digest in stage.graphs.values()})


def audit(
    config: Config, generation: str, lnc: int, workers: int, on_progress: Callable[[int, int], None]
) -> AuditReport:
    """Trace all jobs in `workers` processes (one worker: in this process) and check the traces. `on_progress` is called
    with the number of traces done and their total."""
    if config.layout.zero > 1:
        raise UserError(f"layout.zero={config.layout.zero}: torch's fully_shard cannot be audited; nearest: 1")
    ranks = config.layout.ranks or config.layout.tp * config.layout.pp * config.layout.cp
    layout = Layout.from_config(config, ranks)
    device = MetaTrainium(generation, lnc)
    memory_limit = rank_memory_bytes(generation, lnc)
    report = partial(AuditReport, generation, lnc, ranks, layout.describe(), memory_limit=memory_limit)
    try:
        rank_order = device.rank_order(layout.tp, ranks) or list(range(ranks))
    except UserError as error:
        stages = tuple(range(layout.pp))
        violation = Violation("groups", f"layout.tp={layout.tp}", str(error), "another layout.tp", stages)
        return report(traced="nothing", stages=[], violations=[violation])
    jobs = trace_jobs(layout, config.layout.pipeline_schedule, rank_order)
    traces: dict[TraceJob, RankTrace] = {}
    on_progress(0, len(jobs))
    run_job = partial(run_trace_job, config, layout, device)
    for job, trace in zip(jobs, map_ordered(run_job, jobs, workers), strict=True):
        traces[job] = trace
        on_progress(len(traces), len(jobs))
    stage_audits: list[StageAudit] = []
    violations: list[Violation] = []
    for stage in range(layout.pp):
        stage_traces = {job: traces[job] for job in jobs if job.stage == stage}
        stage_audits.append(_stage_audit(stage, stage_traces))
        violations += _check_stage(stage_traces, generation, lnc, memory_limit)
    full, short = (next(job for job in jobs if job.full_step is full_step) for full_step in (True, False))
    traced = (
        f"{counted(layout.pp, 'stage')}, each with {counted(full.steps, 'step')} of "
        f"{counted(full.micro_batches, 'micro batch')} (of {layout.micro_batches}) on one rank, "
        f"{counted(short.steps, 'step')} of {short.micro_batches} on the same rank and 1 step on "
        f"{len(stage_audits[0].ranks) - 1} more"
    )
    return report(traced=traced, stages=stage_audits, violations=merge_violations(violations))


def trace_jobs(layout: Layout, pipeline_schedule: str, rank_order: Sequence[int]) -> list[TraceJob]:
    """The dry runs of all stages, longest first. Ranks of a stage: the first, a middle one, the last."""
    simple = layout.vpp == 1 and pipeline_schedule == "1f1b"
    fill = 2 if layout.pp == 1 else layout.pp if simple else 2 * layout.pp
    full = min(layout.micro_batches, fill)
    short = 1 if simple else full
    jobs = []
    for stage, positions in enumerate(layout.groups("dp", "cp", "tp")):
        middle = min(len(positions) // 2 + layout.tp // 2, len(positions) - 1)
        first, *others = dict.fromkeys(rank_order[positions[index]] for index in (0, middle, -1))
        jobs += [TraceJob(stage, first, full, 2, True), TraceJob(stage, first, short, 3, False)]
        jobs += [TraceJob(stage, rank, short, 1, False) for rank in others]
    return sorted(jobs, key=lambda job: -job.steps * job.micro_batches)


def run_trace_job(config: Config, layout: Layout, device: MetaTrainium, job: TraceJob) -> RankTrace:
    """Run a job in the current process, which becomes its rank for the time."""
    batch = job.micro_batches * layout.dp * config.train.micro_batch
    overrides = [f"train.global_batch={batch}", "compile.enabled=false", "compile.cuda_graphs=false"]
    config = parse(config.model_dump(mode="json"), overrides)
    with dry_run(config, job.rank, layout.world_size, device) as trainer:
        return trace_steps(trainer, job.steps, with_evaluation=job.full_step)


def _stage_audit(stage: int, traces: dict[TraceJob, RankTrace]) -> StageAudit:
    full = next(trace for job, trace in traces.items() if job.full_step)
    graphs = {name: full.digest(phase) for phase, name in PHASE_NAMES.items() if phase in full.phases}
    ranks = tuple(dict.fromkeys(job.rank for job in traces))
    return StageAudit(stage, ranks, len(full.phases.get("step 2", ())), full.peak_bytes, full.steady_bytes, graphs)


def _check_stage(
    traces: dict[TraceJob, RankTrace], generation: str, lnc: int, memory_limit: int
) -> Iterator[Violation]:
    """Check all rules on the traces of one stage."""
    full = next(trace for job, trace in traces.items() if job.full_step)
    first, *others = (trace for job, trace in traces.items() if not job.full_step)
    yield from check_operators(full, generation)
    yield from check_groups(full, generation, lnc)
    yield from check_micro_batches(full)
    yield from check_steps(first)
    for other in others:
        yield from check_ranks(first, other)
    yield from check_memory(full, memory_limit)
    yield from check_aborted(full)
