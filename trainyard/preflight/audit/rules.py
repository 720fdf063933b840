"""Trainium's rules: functions from traces to violations, and the only table of operators and dtypes that it does not
support.

From reports of users of torch-neuronx 2.11 and 2.12: no sort, no complex numbers, no FFT; 64-bit floats are silently
cast to 32 bits; look-ups by int64 run at a few hundredths of the speed of int32.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch

from trainyard.core.constants import GIB
from trainyard.core.quantities import counted
from trainyard.devices.neuron.topology import group_problem
from trainyard.preflight.dryrun.op_trace import PRINT_OP, RankTrace, TracedOp

HOST_READ_FILES = ("trainyard/train/evaluate.py", "trainyard/run/trainer.py")
"""Files that must read values from the device, between graphs."""
PIPELINE_FILE = "trainyard/parallel/pipeline.py"
"""In the first step torch's pipeline schedules exchange shapes with the neighbors."""
RANDOM_FIX = "trainyard.core.counter_rng: numbers that are a function of seed, step and position"
COLLECTIVE_OPS = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "_allgather_base": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
}


class UnsupportedOp(NamedTuple):
    reason: str
    fix: str


_SORTING = UnsupportedOp(
    "sorting is not supported", "compare instead (amax, argmax, a mask by threshold), or sort on the host"
)
_FOURIER = UnsupportedOp(
    "Fourier transforms are not supported", "multiply by a constant matrix, or transform on the host"
)
UNSUPPORTED_OPS = {
    **dict.fromkeys(("sort", "argsort", "msort", "topk", "kthvalue", "median", "nanmedian", "mode"), _SORTING),
    **dict.fromkeys(("_fft_r2c", "_fft_c2r", "_fft_c2c"), _FOURIER),
}
"""By `op_base_name`."""

_COMPLEX = UnsupportedOp("complex numbers are not supported", "two tensors for real and imaginary part")
UNSUPPORTED_DTYPES = {
    torch.float64: UnsupportedOp("64-bit floats are cast to 32 bits", "float32"),
    torch.complex32: _COMPLEX,
    torch.complex64: _COMPLEX,
    torch.complex128: _COMPLEX,
}
"""By dtype of an operator's result."""
UNSUPPORTED_FP8_DTYPES = {
    "trn2": {torch.float8_e4m3fn: UnsupportedOp("trn2 defines this 8-bit format differently", "float8_e5m2, or bf16")}
}
"""By generation, then by dtype."""

_INDEX_SECOND = (
    *("embedding", "embedding_dense_backward", "nll_loss_forward", "take", "put"),
    *("index", "_unsafe_index", "index_put", "_index_put_impl", "_unsafe_index_put"),
)
_INDEX_THIRD = (
    *("index_select", "index_add", "index_copy", "index_fill", "index_reduce"),
    *("gather", "scatter", "scatter_add", "scatter_reduce", "nll_loss_backward"),
)
INDEX_ARGUMENTS = {**dict.fromkeys(_INDEX_SECOND, 1), **dict.fromkeys(_INDEX_THIRD, 2)}
"""Position of the argument that is an index."""
_INDEX_FIX = "int32 (torch accepts it here: drop .long(); for the index of a maximum, compare with the maximum instead)"
_CROSS_ENTROPY_FIX = (
    "-logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None]) with int32 labels: torch's cross_entropy takes "
    "no int32; then mask ignored labels"
)


def op_base_name(name: str) -> str:
    """index_add for aten.index_add_.default and aten.index_add."""
    return name.split(".")[1].removesuffix("_")


def index_fix(name: str) -> str:
    """How to look up by int32, by `op_base_name`."""
    return _CROSS_ENTROPY_FIX if name.startswith("nll_loss") else _INDEX_FIX


class Violation(NamedTuple):
    rule: str
    location: str
    """FILE:LINE."""
    description: str
    fix: str
    stages: tuple[int, ...]
    """Pipeline ranks with this violation."""


def check_operators(trace: RankTrace, generation: str) -> Iterator[Violation]:
    """Check each operator: it must be supported with its dtypes and index types, have a fixed shape, and not make the
    host wait for a value."""
    dtypes = UNSUPPORTED_DTYPES | UNSUPPORTED_FP8_DTYPES.get(generation, {})
    later = {index for phase, indices in trace.phases.items() if phase != "step 1" for index in indices}
    for index, op in enumerate(trace.operations):

        def violation(rule: str, reason: str, fix: str, op: TracedOp = op) -> Violation:
            backward = "in the backward pass of this line, " if op.source.in_backward else ""
            return Violation(rule, str(op.source), f"{backward}{op.text}: {reason}", fix, (trace.stage,))

        name = op_base_name(op.name)
        if unsupported := UNSUPPORTED_OPS.get(name):
            yield violation("operators", *unsupported)
        inputs = {tensor.dtype for argument in op.arguments for tensor in argument.tensors if not tensor.on_host}
        # Only the operator that introduces a dtype is reported.
        for dtype in {tensor.dtype for tensor in op.results if not tensor.on_host} - inputs:
            if unsupported := dtypes.get(dtype):
                yield violation("dtypes", *unsupported)
        position = INDEX_ARGUMENTS.get(name, len(op.arguments))
        indices = op.arguments[position].tensors if position < len(op.arguments) else ()
        if any(tensor.dtype == torch.int64 and not tensor.on_host for tensor in indices):
            yield violation("int64", "look-up by 64-bit integers", index_fix(name))
        if op.dynamic_shape:
            fix = "torch.where, or multiplication by a mask"
            yield violation("shapes", "the shape of the result depends on values", fix)
        if op.reads_to_host and not _host_read_allowed(op, index in later):
            printed = op.name == PRINT_OP
            fix = (
                "print its shape, or return it as a metric"
                if printed
                else "keep it a tensor: torch.where instead of if"
            )
            yield violation("host", "the host waits for a value", fix)
        if op.draws_random_numbers:
            reason = "torch's own random numbers: another layout or a resumed run draws others"
            yield violation("random", reason, RANDOM_FIX)


def _host_read_allowed(op: TracedOp, later: bool) -> bool:
    file = op.source.location.rpartition(":")[0]
    return file in HOST_READ_FILES or (file == PIPELINE_FILE and not later)


def check_groups(trace: RankTrace, generation: str, lnc: int) -> Iterator[Violation]:
    """Check each process group together with each collective that uses it."""
    checked = set()
    for op in trace.operations:
        collective = COLLECTIVE_OPS.get(op_base_name(op.name))
        if collective is None or op.group is None or (collective, op.group) in checked:
            continue
        checked.add((collective, op.group))
        ranks = trace.groups[op.group]
        if problem := group_problem(generation, lnc, collective, ranks):
            first_ranks = ", ".join(map(str, ranks[:4])) + (", ..." if len(ranks) > 4 else "")
            description = f"{collective} of {op.group} ({counted(len(ranks), 'rank')}: {first_ranks}): {problem}"
            fix = "another layout (tp, pp, cp, ranks)"
            yield Violation("groups", str(op.source), description, fix, (trace.stage,))


def check_micro_batches(trace: RankTrace) -> Iterator[Violation]:
    """All micro batches of the first step must run the same operators, whatever their content."""
    segments = [segment for segment in trace.segments if segment.phase == "step 1"]
    for _, group in groupby(sorted(segments, key=lambda segment: segment.model), key=lambda segment: segment.model):
        first, *others = group
        expected = trace.texts(first.phase, first.start, first.end)
        indices = trace.phases[first.phase]
        for number, other in enumerate(others, 2):
            texts = trace.texts(other.phase, other.start, other.end)
            if texts != expected:
                position = first_difference(expected, texts)
                op = trace.operations[indices[min(other.start + position, len(indices) - 1)]]
                description = (
                    f"micro batch {number}: {_text_at(texts, position)}; micro batch 1: {_text_at(expected, position)}"
                )
                fix = "the same shapes for every micro batch"
                yield Violation("shapes", str(op.source), description, fix, (trace.stage,))
                break


def check_steps(trace: RankTrace) -> Iterator[Violation]:
    """The third step must equal the second. The first may do more."""
    if "step 3" in trace.phases and not trace.abort_reason:
        fix = "the same shapes and Python numbers in every step; pass what changes as a tensor"
        yield from _compare_traces("recompiles", trace, "step 3", "step 3", trace, "step 2", "step 2", fix)


def check_ranks(first: RankTrace, other: RankTrace) -> Iterator[Violation]:
    """All ranks of a stage must run the same graph."""
    if "step 1" in first.phases and "step 1" in other.phases and not (first.abort_reason or other.abort_reason):
        fix = "pass the rank as a tensor; use sizes that all ranks share equally"
        names = f"rank {other.rank}", f"rank {first.rank}"
        yield from _compare_traces("ranks", other, "step 1", names[0], first, "step 1", names[1], fix)


def _compare_traces(
    rule: str, a: RankTrace, a_phase: str, a_name: str, b: RankTrace, b_phase: str, b_name: str, fix: str
) -> Iterator[Violation]:
    """The first difference between phases of two traces."""
    a_details, b_details = a.details(a_phase), b.details(b_phase)
    if a_details == b_details:
        return
    position = first_difference(a_details, b_details)
    longer, phase = (a, a_phase) if position < len(a_details) else (b, b_phase)
    op = longer.operations[longer.phases[phase][position]]
    a_text, b_text = _text_at(a.texts(a_phase), position), _text_at(b.texts(b_phase), position)
    yield Violation(rule, str(op.source), f"{a_name}: {a_text}; {b_name}: {b_text}", fix, (a.stage,))


def check_memory(trace: RankTrace, memory_limit: int) -> Iterator[Violation]:
    if trace.peak_bytes > memory_limit:
        peak, steady = trace.peak_bytes / GIB, trace.steady_bytes / GIB
        description = f"{peak:.1f} GiB live here ({steady:.1f} between steps), a rank has {memory_limit / GIB:.0f}"
        fix = "a larger layout.tp or layout.pp, layout.zero=1, recompute.kind=full, a smaller train.micro_batch"
        yield Violation("memory", trace.peak_location, description, fix, (trace.stage,))


def check_aborted(trace: RankTrace) -> Iterator[Violation]:
    if trace.abort_reason and trace.operations:
        fix = "fix the other violations of this line, then audit again: what follows it was not traced"
        location = str(trace.operations[-1].source)
        yield Violation("traced", location, f"the trace ends here: {trace.abort_reason}", fix, (trace.stage,))


def first_difference(a: Sequence[str], b: Sequence[str]) -> int:
    """Index of the first difference between two sequences."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((index for index, (left, right) in pairs if left != right), min(len(a), len(b)))


def _text_at(texts: Sequence[str], index: int) -> str:
    return texts[index] if index < len(texts) else "nothing"


def merge_violations(violations: Sequence[Violation]) -> list[Violation]:
    """Merge violations of one rule at one line, with the stages of all."""
    merged: dict[tuple[str, str], Violation] = {}
    for violation in violations:
        key = violation.rule, violation.location
        known = merged.get(key, violation)
        merged[key] = known._replace(stages=tuple(sorted({*known.stages, *violation.stages})))
    return list(merged.values())
