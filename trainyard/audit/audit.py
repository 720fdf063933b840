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
    check_groups,
    check_halt,
    check_memory,
    check_micro_batches,
    check_operators,
    check_ranks,
    check_steps,
    merged,
)
from trainyard.config.load import parse
from trainyard.config.schema import Config
from trainyard.core.errors import UserError
from trainyard.data.prepare.worker_pool import ordered
from trainyard.devices.neuron.meta import OnPaper
from trainyard.devices.neuron.topology import rank_memory
from trainyard.dryrun.op_trace import Trace
from trainyard.dryrun.trace_rank import follow
from trainyard.parallel.layout import Layout


class Job(NamedTuple):
    stage: int
    rank: int
    micro_batches: int
    steps: int
    whole: bool


class Stage(NamedTuple):
    """What was seen of a pipeline rank."""

    number: int
    ranks: tuple[int, ...]
    operators: int
    """Of a whole step, as far as it was traced."""
    peak: int
    kept: int
    graphs: dict[str, str]
    """Digest by what it is of: first step, later steps, evaluation."""


@dataclass(frozen=True)
class Report:
    generation: str
    lnc: int
    ranks: int
    layout: str
    traced: str
    """What was followed, in words."""
    limit: int
    """Bytes of a rank."""
    stages: list[Stage]
    violations: list[Violation]

    @property
    def graphs(self) -> int:
        """Different ones, over all stages."""
        return len({digest for stage in self.stages for digest in stage.graphs.values()})


def audit(config: Config, generation: str, lnc: int, workers: int, tell: Callable[[int, int], None]) -> Report:
    """`tell` is called with traces done and traces in all. With one worker everything happens in this process."""
    ranks = config.layout.ranks or config.layout.tp * config.layout.pp * config.layout.cp
    layout = Layout.of(config, ranks)
    device = OnPaper(generation, lnc)
    try:
        order = device.order(layout.tp, ranks) or list(range(ranks))
    except UserError as error:
        refused = Violation(
            "groups", f"layout.tp={layout.tp}", str(error), "another layout.tp", tuple(range(layout.pp))
        )
        return Report(generation, lnc, ranks, layout.describe(), "nothing", rank_memory(generation, lnc), [], [refused])
    jobs = plan_jobs(config, layout, order)
    traces: dict[Job, Trace] = {}
    tell(0, len(jobs))
    for job, found in zip(jobs, ordered(partial(run_job, config, layout, device), jobs, workers), strict=True):
        traces[job] = found
        tell(len(traces), len(jobs))
    limit = rank_memory(generation, lnc)
    stages: list[Stage] = []
    violations: list[Violation] = []
    for number in range(layout.pp):
        mine = {job: traces[job] for job in jobs if job.stage == number}
        stages.append(_stage(number, mine))
        violations += _check(mine, generation, lnc, limit)
    whole, short = (next(job for job in jobs if job.whole is kind) for kind in (True, False))
    traced = (
        f"of each of {layout.pp} stage{'s' * (layout.pp > 1)}: {whole.steps} steps of {whole.micro_batches} "
        f"micro batches (of {layout.micro_batches}) at one rank, {short.steps} steps of {short.micro_batches} at the "
        f"same and 1 at {len(stages[0].ranks) - 1} more"
    )
    return Report(generation, lnc, ranks, layout.describe(), traced, limit, stages, merged(violations))


def plan_jobs(config: Config, layout: Layout, order: Sequence[int]) -> list[Job]:
    """The longest first. Ranks of a stage: the first, one in the middle, the last."""
    simple = layout.vpp == 1 and config.layout.schedule == "1f1b"
    full = min(layout.micro_batches, 2 if layout.pp == 1 else layout.pp if simple else 2 * layout.pp)
    few = 1 if simple else full
    out = []
    for stage, places in enumerate(layout.groups("dp", "cp", "tp")):
        middle = min(len(places) // 2 + layout.tp // 2, len(places) - 1)
        first, *others = dict.fromkeys(order[places[at]] for at in (0, middle, -1))
        out += [Job(stage, first, full, 2, True), Job(stage, first, few, 3, False)]
        out += [Job(stage, rank, few, 1, False) for rank in others]
    return sorted(out, key=lambda job: -job.steps * job.micro_batches)


def run_job(config: Config, layout: Layout, device: OnPaper, job: Job) -> Trace:
    """In any process: it becomes that rank for a while."""
    batch = job.micro_batches * layout.dp * config.train.micro_batch
    words = [f"train.global_batch={batch}", "compile.enabled=false", "compile.replay=false"]
    changed = parse(config.model_dump(mode="json"), words)
    return follow(changed, job.rank, layout.world, device, job.steps, evaluates=job.whole)


def _stage(number: int, traces: dict[Job, Trace]) -> Stage:
    whole = next(found for job, found in traces.items() if job.whole)
    names = {"step 1": "first step", "step 2": "later steps", "evaluation": "evaluation"}
    graphs = {shown: whole.digest(phase) for phase, shown in names.items() if phase in whole.phases}
    ranks = tuple(dict.fromkeys(job.rank for job in traces))
    operators = len(whole.phases.get("step 2", ()))
    return Stage(number, ranks, operators, whole.peak, whole.kept, graphs)


def _check(traces: dict[Job, Trace], generation: str, lnc: int, limit: int) -> Iterator[Violation]:
    """All rules on what was seen of one stage."""
    whole = next(found for job, found in traces.items() if job.whole)
    first, *others = (found for job, found in traces.items() if not job.whole)
    yield from check_operators(whole, generation)
    yield from check_groups(whole, generation, lnc)
    yield from check_micro_batches(whole)
    yield from check_steps(first)
    for other in others:
        yield from check_ranks(first, other)
    yield from check_memory(whole, limit)
    yield from check_halt(whole)
