"""Trainium's rules, checked on a rehearsed run: no Trainium needed, and no weights.

Each pipeline stage is followed twice. Whole: its first rank, with as many micro batches as fill the pipeline, for two
steps and an evaluation; that gives the memory. Short: one micro batch, three steps on the first rank and one on a rank
in the middle and on the last; that shows whether graphs depend on the step or on the rank.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from trainyard.audit.rules import (
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
from trainyard.config.load import parse
from trainyard.config.schema import Config
from trainyard.core.errors import UserError
from trainyard.data.prepare.worker_pool import map_ordered
from trainyard.devices.neuron.meta import MetaTrainium
from trainyard.devices.neuron.topology import rank_memory_bytes
from trainyard.dryrun.op_trace import RankTrace
from trainyard.dryrun.trace_rank import trace_rank
from trainyard.parallel.layout import Layout


class TraceJob(NamedTuple):
    stage: int
    rank: int
    micro_batches: int
    steps: int
    full_step: bool


class StageAudit(NamedTuple):
    """What was seen of a pipeline rank."""

    stage: int
    ranks: tuple[int, ...]
    operators: int
    """Of a whole step, as far as it was traced."""
    peak_bytes: int
    steady_bytes: int
    graphs: dict[str, str]
    """Digest by what it is of: first step, later steps, evaluation."""


@dataclass(frozen=True)
class AuditReport:
    generation: str
    lnc: int
    ranks: int
    layout: str
    traced: str
    """What was followed, in words."""
    memory_limit: int
    """Bytes of a rank."""
    stages: list[StageAudit]
    violations: list[Violation]

    @property
    def graphs(self) -> int:
        """Different ones, over all stages."""
        return len({digest for stage in self.stages for digest in stage.graphs.values()})


def audit(
    config: Config, generation: str, lnc: int, workers: int, on_progress: Callable[[int, int], None]
) -> AuditReport:
    """`tell` is called with traces done and traces in all. With one worker everything happens in this process."""
    ranks = config.layout.ranks or config.layout.tp * config.layout.pp * config.layout.cp
    layout = Layout.from_config(config, ranks)
    device = MetaTrainium(generation, lnc)
    try:
        order = device.rank_order(layout.tp, ranks) or list(range(ranks))
    except UserError as error:
        refused = Violation(
            "groups", f"layout.tp={layout.tp}", str(error), "another layout.tp", tuple(range(layout.pp))
        )
        return AuditReport(
            generation, lnc, ranks, layout.describe(), "nothing", rank_memory_bytes(generation, lnc), [], [refused]
        )
    jobs = trace_jobs(config, layout, order)
    traces: dict[TraceJob, RankTrace] = {}
    on_progress(0, len(jobs))
    for job, found in zip(
        jobs, map_ordered(partial(run_trace_job, config, layout, device), jobs, workers), strict=True
    ):
        traces[job] = found
        on_progress(len(traces), len(jobs))
    limit = rank_memory_bytes(generation, lnc)
    stages: list[StageAudit] = []
    violations: list[Violation] = []
    for number in range(layout.pp):
        mine = {job: traces[job] for job in jobs if job.stage == number}
        stages.append(_stage_audit(number, mine))
        violations += _check_stage(mine, generation, lnc, limit)
    whole, short = (next(job for job in jobs if job.full_step is kind) for kind in (True, False))
    traced = (
        f"of each of {layout.pp} stage{'s' * (layout.pp > 1)}: {whole.steps} steps of {whole.micro_batches} "
        f"micro batches (of {layout.micro_batches}) at one rank, {short.steps} steps of {short.micro_batches} at the "
        f"same and 1 at {len(stages[0].ranks) - 1} more"
    )
    return AuditReport(generation, lnc, ranks, layout.describe(), traced, limit, stages, merge_violations(violations))


def trace_jobs(config: Config, layout: Layout, rank_order: Sequence[int]) -> list[TraceJob]:
    """The longest first. Ranks of a stage: the first, one in the middle, the last."""
    simple = layout.vpp == 1 and config.layout.pipeline_schedule == "1f1b"
    full = min(layout.micro_batches, 2 if layout.pp == 1 else layout.pp if simple else 2 * layout.pp)
    few = 1 if simple else full
    out = []
    for stage, places in enumerate(layout.groups("dp", "cp", "tp")):
        middle = min(len(places) // 2 + layout.tp // 2, len(places) - 1)
        first, *others = dict.fromkeys(rank_order[places[at]] for at in (0, middle, -1))
        out += [TraceJob(stage, first, full, 2, True), TraceJob(stage, first, few, 3, False)]
        out += [TraceJob(stage, rank, few, 1, False) for rank in others]
    return sorted(out, key=lambda job: -job.steps * job.micro_batches)


def run_trace_job(config: Config, layout: Layout, device: MetaTrainium, job: TraceJob) -> RankTrace:
    """In any process: it becomes that rank for a while."""
    batch = job.micro_batches * layout.dp * config.train.micro_batch
    words = [f"train.global_batch={batch}", "compile.enabled=false", "compile.cuda_graphs=false"]
    changed = parse(config.model_dump(mode="json"), words)
    return trace_rank(changed, job.rank, layout.world_size, device, job.steps, with_evaluation=job.full_step)


def _stage_audit(stage: int, traces: dict[TraceJob, RankTrace]) -> StageAudit:
    whole = next(found for job, found in traces.items() if job.full_step)
    names = {"step 1": "first step", "step 2": "later steps", "evaluation": "evaluation"}
    graphs = {shown: whole.digest(phase) for phase, shown in names.items() if phase in whole.phases}
    ranks = tuple(dict.fromkeys(job.rank for job in traces))
    operators = len(whole.phases.get("step 2", ()))
    return StageAudit(stage, ranks, operators, whole.peak_bytes, whole.steady_bytes, graphs)


def _check_stage(
    traces: dict[TraceJob, RankTrace], generation: str, lnc: int, memory_limit: int
) -> Iterator[Violation]:
    """All rules on what was seen of one stage."""
    whole = next(found for job, found in traces.items() if job.full_step)
    first, *others = (found for job, found in traces.items() if not job.full_step)
    yield from check_operators(whole, generation)
    yield from check_groups(whole, generation, lnc)
    yield from check_micro_batches(whole)
    yield from check_steps(first)
    for other in others:
        yield from check_ranks(first, other)
    yield from check_memory(whole, memory_limit)
    yield from check_aborted(whole)
