"""Trainium's rules, each a function from traces to violations."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch

from trainyard.audit.unsupported_ops import (
    INDEX_ARGUMENTS,
    INDEX_FIX,
    UNSUPPORTED_DTYPES,
    UNSUPPORTED_FP8_DTYPES,
    UNSUPPORTED_OPS,
    op_base_name,
)
from trainyard.devices.neuron.topology import group_problem
from trainyard.dryrun.op_trace import RankTrace, TracedOp

GIB = 1 << 30
HOST_READ_FILES = ("trainyard/train/evaluate.py", "trainyard/train/trainer.py")
"""These ask the device for numbers between graphs, as they must."""
PIPELINE_FILE = "trainyard/parallel/pipeline.py"
"""In the first step torch's schedules ask the neighbours about shapes."""
COLLECTIVE_OPS = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "_allgather_base": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
}


class Violation(NamedTuple):
    rule: str
    location: str
    """FILE:LINE."""
    description: str
    fix: str
    stages: tuple[int, ...]
    """Pipeline ranks at which it was seen."""


def check_operators(trace: RankTrace, generation: str) -> Iterator[Violation]:
    """Each operator by itself: is it supported, with these dtypes, and does anybody look at values?"""
    dtypes = UNSUPPORTED_DTYPES | UNSUPPORTED_FP8_DTYPES.get(generation, {})
    later = {number for phase, numbers in trace.phases.items() if phase != "step 1" for number in numbers}
    for number, each in enumerate(trace.operations):

        def broken(rule: str, why: str, fix: str, each: TracedOp = each) -> Violation:
            backward = "in the backward pass of this line, " if each.source.in_backward else ""
            return Violation(rule, str(each.source), f"{backward}{each.text}: {why}", fix, (trace.stage,))

        name = op_base_name(each.name)
        if refused := UNSUPPORTED_OPS.get(name):
            yield broken("operators", *refused)
        given = {value.dtype for argument in each.arguments for value in argument.tensors if not value.on_host}
        for dtype in {value.dtype for value in each.results if not value.on_host} - given:  # where it comes from
            if refused := dtypes.get(dtype):
                yield broken("dtypes", *refused)
        for place in INDEX_ARGUMENTS.get(name, ()):
            indices = each.arguments[place].tensors if place < len(each.arguments) else ()
            if any(value.dtype == torch.int64 and not value.on_host for value in indices):
                yield broken("int64", "looked up by 64-bit integers", INDEX_FIX)
        if each.dynamic_shape:
            yield broken(
                "shapes", "the shape of what comes out depends on values", "torch.where, or a product by a mask"
            )
        if each.reads_to_host and not _host_read_allowed(each, number in later):
            yield broken("host", "the host waits for a value", "keep it a tensor: torch.where instead of if")


def _host_read_allowed(each: TracedOp, later: bool) -> bool:
    file = each.source.location.rpartition(":")[0]
    return file in HOST_READ_FILES or (file == PIPELINE_FILE and not later)


def check_groups(trace: RankTrace, generation: str, lnc: int) -> Iterator[Violation]:
    """Every group of ranks that some message goes through."""
    seen = set()
    for each in trace.operations:
        kind = COLLECTIVE_OPS.get(op_base_name(each.name))
        if kind is None or each.group is None or (kind, each.group) in seen:
            continue
        seen.add((kind, each.group))
        ranks = trace.groups[each.group]
        if problem := group_problem(generation, lnc, kind, ranks):
            shown = ", ".join(map(str, ranks[:4])) + (", ..." if len(ranks) > 4 else "")
            what = f"{kind} of {each.group} ({len(ranks)} ranks: {shown}): {problem}"
            yield Violation("groups", str(each.source), what, "another layout (tp, pp, cp, ranks)", (trace.stage,))


def check_micro_batches(trace: RankTrace) -> Iterator[Violation]:
    """All micro batches of the first step ask for the same, whatever is in them."""
    segments = [segment for segment in trace.segments if segment.phase == "step 1"]
    for _, some in groupby(sorted(segments, key=lambda segment: segment.model), key=lambda segment: segment.model):
        first, *others = some
        wanted = trace.texts(first.phase, first.start, first.end)
        numbers = trace.phases[first.phase]
        for number, other in enumerate(others, 2):
            texts = trace.texts(other.phase, other.start, other.end)
            if texts != wanted:
                at = first_difference(wanted, texts)
                each = trace.operations[numbers[min(other.start + at, len(numbers) - 1)]]
                what = f"micro batch {number}: {_text_at(texts, at)}; micro batch 1: {_text_at(wanted, at)}"
                yield Violation(
                    "shapes", str(each.source), what, "the same shapes for every micro batch", (trace.stage,)
                )
                break


def check_steps(trace: RankTrace) -> Iterator[Violation]:
    """The third step is the second again. The first may have more to do."""
    if "step 3" in trace.phases and not trace.abort_reason:
        fix = "the same shapes and Python numbers in every step; what changes comes as a tensor"
        yield from _compare_traces("recompiles", trace, "step 3", "step 3", trace, "step 2", "step 2", fix)


def check_ranks(first: RankTrace, other: RankTrace) -> Iterator[Violation]:
    """A rank of a stage does what the others do."""
    if "step 1" in first.phases and "step 1" in other.phases and not (first.abort_reason or other.abort_reason):
        fix = "let the rank come in as a tensor; sizes that all ranks share out evenly"
        names = f"rank {other.rank}", f"rank {first.rank}"
        yield from _compare_traces("ranks", other, "step 1", names[0], first, "step 1", names[1], fix)


def _compare_traces(
    rule: str, a: RankTrace, phase: str, name: str, b: RankTrace, other_phase: str, other: str, fix: str
) -> Iterator[Violation]:
    mine, theirs = a.details(phase), b.details(other_phase)
    if mine == theirs:
        return
    at = first_difference(mine, theirs)
    longer, numbers = (a, a.phases[phase]) if at < len(mine) else (b, b.phases[other_phase])
    each = longer.operations[numbers[at]]
    what = f"{name}: {_text_at(a.texts(phase), at)}; {other}: {_text_at(b.texts(other_phase), at)}"
    yield Violation(rule, str(each.source), what, fix, (a.stage,))


def check_memory(trace: RankTrace, memory_limit: int) -> Iterator[Violation]:
    if trace.peak_bytes > memory_limit:
        alive, kept = trace.peak_bytes / GIB, trace.steady_bytes / GIB
        what = f"{alive:.1f} GiB alive here ({kept:.1f} between steps), a rank has {memory_limit / GIB:.0f}"
        fix = "a larger layout.tp or layout.pp, layout.zero=1, recompute.kind=full, a smaller train.micro_batch"
        yield Violation("memory", trace.peak_location, what, fix, (trace.stage,))


def check_aborted(trace: RankTrace) -> Iterator[Violation]:
    if trace.abort_reason and trace.operations:
        fix = "mend what else is said about this line, then audit again: what comes after it was not seen"
        where = str(trace.operations[-1].source)
        yield Violation("traced", where, f"the trace ends here: {trace.abort_reason}", fix, (trace.stage,))


def first_difference(a: Sequence[str], b: Sequence[str]) -> int:
    """The first place where two sequences differ."""
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _text_at(texts: Sequence[str], at: int) -> str:
    return texts[at] if at < len(texts) else "nothing"


def merge_violations(violations: Sequence[Violation]) -> list[Violation]:
    """The same line against the same rule once, with the stages at which it was seen."""
    out: dict[tuple[str, str], Violation] = {}
    for each in violations:
        known = out.get(each[:2], each)
        out[each[:2]] = known._replace(stages=tuple(sorted({*known.stages, *each.stages})))
    return list(out.values())
