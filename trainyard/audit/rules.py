"""Trainium's rules, each a function from traces to violations."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch

from trainyard.audit.unsupported_ops import FP8, INDEX_FIX, INDICES, OPERATORS, VALUES, base
from trainyard.devices.neuron.topology import group_problem
from trainyard.dryrun.op_trace import Operation, Trace

GIB = 1 << 30
READS_RESULTS = ("trainyard/train/evaluate.py", "trainyard/train/trainer.py")
"""These ask the device for numbers between graphs, as they must."""
PIPELINE = "trainyard/parallel/pipeline.py"
"""In the first step torch's schedules ask the neighbours about shapes."""
MESSAGES = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "_allgather_base": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
}


class Violation(NamedTuple):
    rule: str
    where: str
    """FILE:LINE."""
    what: str
    fix: str
    stages: tuple[int, ...]
    """Pipeline ranks at which it was seen."""


def check_operators(found: Trace, generation: str) -> Iterator[Violation]:
    """Each operator by itself: is it supported, with these dtypes, and does anybody look at values?"""
    dtypes = VALUES | FP8.get(generation, {})
    later = {number for phase, numbers in found.phases.items() if phase != "step 1" for number in numbers}
    for number, each in enumerate(found.operations):

        def broken(rule: str, why: str, fix: str, each: Operation = each) -> Violation:
            backward = "in the backward pass of this line, " if each.place.backward else ""
            return Violation(rule, str(each.place), f"{backward}{each.text}: {why}", fix, (found.stage,))

        name = base(each.name)
        if refused := OPERATORS.get(name):
            yield broken("operators", *refused)
        given = {value.dtype for argument in each.arguments for value in argument.values if not value.host}
        for dtype in {value.dtype for value in each.results if not value.host} - given:  # where it comes from
            if refused := dtypes.get(dtype):
                yield broken("dtypes", *refused)
        for place in INDICES.get(name, ()):
            indices = each.arguments[place].values if place < len(each.arguments) else ()
            if any(value.dtype == torch.int64 and not value.host for value in indices):
                yield broken("int64", "looked up by 64-bit integers", INDEX_FIX)
        if each.varies:
            yield broken(
                "shapes", "the shape of what comes out depends on values", "torch.where, or a product by a mask"
            )
        if each.answers and not _allowed(each, number in later):
            yield broken("host", "the host waits for a value", "keep it a tensor: torch.where instead of if")


def _allowed(each: Operation, later: bool) -> bool:
    file = each.place.at.rpartition(":")[0]
    return file in READS_RESULTS or (file == PIPELINE and not later)


def check_groups(found: Trace, generation: str, lnc: int) -> Iterator[Violation]:
    """Every group of ranks that some message goes through."""
    seen = set()
    for each in found.operations:
        kind = MESSAGES.get(base(each.name))
        if kind is None or each.group is None or (kind, each.group) in seen:
            continue
        seen.add((kind, each.group))
        ranks = found.groups[each.group]
        if problem := group_problem(generation, lnc, kind, ranks):
            shown = ", ".join(map(str, ranks[:4])) + (", ..." if len(ranks) > 4 else "")
            what = f"{kind} of {each.group} ({len(ranks)} ranks: {shown}): {problem}"
            yield Violation("groups", str(each.place), what, "another layout (tp, pp, cp, ranks)", (found.stage,))


def check_micro_batches(found: Trace) -> Iterator[Violation]:
    """All micro batches of the first step ask for the same, whatever is in them."""
    segments = [segment for segment in found.segments if segment.phase == "step 1"]
    for _, some in groupby(sorted(segments, key=lambda segment: segment.model), key=lambda segment: segment.model):
        first, *others = some
        wanted = found.texts(first.phase, first.first, first.end)
        numbers = found.phases[first.phase]
        for number, other in enumerate(others, 2):
            texts = found.texts(other.phase, other.first, other.end)
            if texts != wanted:
                at = differs(wanted, texts)
                each = found.operations[numbers[min(other.first + at, len(numbers) - 1)]]
                what = f"micro batch {number}: {_at(texts, at)}; micro batch 1: {_at(wanted, at)}"
                yield Violation(
                    "shapes", str(each.place), what, "the same shapes for every micro batch", (found.stage,)
                )
                break


def check_steps(found: Trace) -> Iterator[Violation]:
    """The third step is the second again. The first may have more to do."""
    if "step 3" in found.phases and not found.halted:
        fix = "the same shapes and Python numbers in every step; what changes comes as a tensor"
        yield from _compared("recompiles", found, "step 3", "step 3", found, "step 2", "step 2", fix)


def check_ranks(first: Trace, other: Trace) -> Iterator[Violation]:
    """A rank of a stage does what the others do."""
    if "step 1" in first.phases and "step 1" in other.phases and not (first.halted or other.halted):
        fix = "let the rank come in as a tensor; sizes that all ranks share out evenly"
        names = f"rank {other.rank}", f"rank {first.rank}"
        yield from _compared("ranks", other, "step 1", names[0], first, "step 1", names[1], fix)


def _compared(
    rule: str, a: Trace, phase: str, name: str, b: Trace, other_phase: str, other: str, fix: str
) -> Iterator[Violation]:
    mine, theirs = a.details(phase), b.details(other_phase)
    if mine == theirs:
        return
    at = differs(mine, theirs)
    longer, numbers = (a, a.phases[phase]) if at < len(mine) else (b, b.phases[other_phase])
    each = longer.operations[numbers[at]]
    what = f"{name}: {_at(a.texts(phase), at)}; {other}: {_at(b.texts(other_phase), at)}"
    yield Violation(rule, str(each.place), what, fix, (a.stage,))


def check_memory(found: Trace, limit: int) -> Iterator[Violation]:
    if found.peak > limit:
        alive, kept = found.peak / GIB, found.kept / GIB
        what = f"{alive:.1f} GiB alive here ({kept:.1f} between steps), a rank has {limit / GIB:.0f}"
        fix = "a larger layout.tp or layout.pp, layout.zero=1, recompute.kind=full, a smaller train.micro_batch"
        yield Violation("memory", found.peak_at, what, fix, (found.stage,))


def check_halt(found: Trace) -> Iterator[Violation]:
    if found.halted and found.operations:
        fix = "mend what else is said about this line, then audit again: what comes after it was not seen"
        where = str(found.operations[-1].place)
        yield Violation("traced", where, f"the trace ends here: {found.halted}", fix, (found.stage,))


def differs(a: Sequence[str], b: Sequence[str]) -> int:
    """The first place where two sequences differ."""
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _at(texts: Sequence[str], at: int) -> str:
    return texts[at] if at < len(texts) else "nothing"


def merged(violations: Sequence[Violation]) -> list[Violation]:
    """The same line against the same rule once, with the stages at which it was seen."""
    out: dict[tuple[str, str], Violation] = {}
    for each in violations:
        known = out.get(each[:2], each)
        out[each[:2]] = known._replace(stages=tuple(sorted({*known.stages, *each.stages})))
    return list(out.values())
