"""What each file of an NxD (neuronx-distributed) checkpoint holds of a Llama model, as data.

A rank's file names its tensors as the model on that rank does and says nothing about how they were cut, so all of it is
in `NxdLayout`. The one subtle part are key and value heads. With fewer of them than ranks each is repeated, and there
are two orders of the copies: `trn1` repeats all heads as a block (rank r has head r % heads) and moves the query heads
and the columns of the output projection along; `trn2` puts the copies of a head on neighbours and leaves the query
heads where they are. Both are one rule here (`slots`), so that queries cannot part from their keys.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import Literal

from trainyard.checkpoint.formats.nxd.names import NAME_TABLES, NORM_NAMES, NameStyle, QkvKind
from trainyard.checkpoint.formats.tensor_map import StoredTensor, TensorRange
from trainyard.config.base import nearest_divisor
from trainyard.config.model_schema import LlamaConfig
from trainyard.core.errors import UserError

KvOrder = Literal["trn1", "trn2"]
PpTpRank = tuple[int, int]
"""Pipeline rank, tensor-parallel rank."""


@dataclass(frozen=True)
class NxdLayout:
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    """Virtual stages of each pipeline rank; stage s is on rank s % pp."""
    pipeline_cuts: tuple[int, ...] = ()
    """Last layer of each stage but the last; empty: even, with what is left over on the last stages."""
    kv_multiplier: int = 1
    """How often key and value heads are repeated (kv_replicator)."""
    qkv: QkvKind = "separate"
    gate_up: bool = True
    """Gate and up projections are one matrix."""
    kv_order: KvOrder = "trn1"
    style: NameStyle = "hf"
    by_head: bool = True
    """Megatron style: rows of matrices that share a tensor lie head by head, as NxDT's model takes them; False: one
    matrix after the other, as the reference's converter writes them (its model reads something else from that)."""
    vocab: int | None = None
    """Rows of the embedding and of the head over all ranks, with padding; default: rounded up to a multiple of tp.
    NxD refuses a vocabulary that tp does not divide, so its configuration must give the padded number."""


FLAG_NAMES = {
    "tp": "tp_size",
    "pp": "pp_size",
    "vpp": "virtual_pp_size",
    "kv_multiplier": "kv_size_multiplier",
    "kv_order": "hw_backend",
    "style": "model_style",
}
"""What users know these fields by."""


def rank_tensors(model: LlamaConfig, layout: NxdLayout) -> dict[PpTpRank, tuple[StoredTensor, ...]]:
    """What every rank's file holds."""
    return {
        (pp, tp): held
        for pp in range(layout.pp)
        for tp, held in enumerate(zip(*stage_tensors(model, layout, pp), strict=True))
    }


def stage_tensors(model: LlamaConfig, layout: NxdLayout, pp_rank: int) -> Iterator[tuple[StoredTensor, ...]]:
    """The tensors on a pipeline rank in the model's order; for each, what the tensor-parallel ranks hold of it.

    A tied head is there too, as a copy of the embedding: NxD's state dict names both, and loading wants both.
    """
    check_layout(model, layout)
    names = NAME_TABLES[layout.style]
    last = pp_rank == layout.pp - 1
    if pp_rank == 0:
        yield _vocab_tensors(names.embedding, "embedding.weight", model, layout)
    for layer in pp_rank_layers(model, layout, pp_rank):
        yield from _layer_tensors(model, layout, layer)
    if last:
        yield (StoredTensor(names.norm, 0, (TensorRange("norm.weight", 0, model.hidden),)),) * layout.tp
        yield _vocab_tensors(
            names.output, "embedding.weight" if model.tie_embeddings else "output.weight", model, layout
        )


def qkv_tensors(model: LlamaConfig, layout: NxdLayout, layer: int) -> Iterator[tuple[StoredTensor, ...]]:
    """Query, key and value matrices of a layer, for each the ranks' shares."""
    names, by_head = NAME_TABLES[layout.style], layout.style == "megatron" and layout.by_head
    for name, letters in names.qkv[layout.qkv]:
        yield tuple(
            StoredTensor(
                f"{names.layer_prefix}{layer}.{name}",
                0,
                _head_ranges(model, kv_slots(model, layout, rank), layer, letters, by_head),
            )
            for rank in range(layout.tp)
        )


def kv_slots(model: LlamaConfig, layout: NxdLayout, tp_rank: int) -> list[tuple[int, range]]:
    """The key-value heads on a rank, and with each the query heads that look at it."""
    kv, times = model.num_kv_heads, layout.kv_multiplier
    here, queries = kv * times // layout.tp, model.heads // (kv * times)
    out = []
    for slot in range(tp_rank * here, (tp_rank + 1) * here):
        head, copy = (slot % kv, slot // kv) if layout.kv_order == "trn1" else (slot // times, slot % times)
        first = (head * times + copy) * queries
        out.append((head, range(first, first + queries)))
    return out


def stage_cuts(model: LlamaConfig, layout: NxdLayout) -> tuple[int, ...]:
    """The last layer of each stage but the last."""
    stages = layout.pp * layout.vpp
    if layout.pipeline_cuts:
        return layout.pipeline_cuts
    each, over = divmod(model.layers, stages)
    ends = [(stage + 1) * each + max(0, stage + 1 - (stages - over)) for stage in range(stages)]
    return tuple(end - 1 for end in ends[:-1])


def pp_rank_layers(model: LlamaConfig, layout: NxdLayout, pp_rank: int) -> list[int]:
    ends = (-1, *stage_cuts(model, layout), model.layers - 1)
    return [
        layer
        for stage in range(pp_rank, layout.pp * layout.vpp, layout.pp)
        for layer in range(ends[stage] + 1, ends[stage + 1] + 1)
    ]


def padded_vocab(model: LlamaConfig, layout: NxdLayout) -> int:
    return layout.vocab or ceil(model.vocab / layout.tp) * layout.tp


def check_layout(model: LlamaConfig, layout: NxdLayout) -> None:
    """Refuse what no NxD model looks like, with the nearest thing that one does."""
    for key in ("tp", "pp", "vpp", "kv_multiplier"):
        if getattr(layout, key) < 1:
            raise UserError(f"{FLAG_NAMES[key]}={getattr(layout, key)}: must be 1 or more")
    names = NAME_TABLES[layout.style]
    if layout.qkv not in names.qkv:
        raise UserError(f"qkv={layout.qkv}: {layout.style} style has none of that; it has {' and '.join(names.qkv)}")
    if layout.gate_up not in names.gate_up:
        raise UserError(f"gate_up=False: {layout.style} style keeps gate and up in one matrix; use gate_up=True")
    for key, size in (("heads", model.heads), ("ffn", model.ffn)):
        if size % layout.tp:
            raise UserError(f"tp_size={layout.tp}: does not divide {key}={size}; nearest: {_nearest_tp(model, layout)}")
    if layout.kv_multiplier not in (works := valid_kv_multipliers(model, layout)):
        raise UserError(
            f"kv_size_multiplier={layout.kv_multiplier}: cannot put {model.num_kv_heads} kv heads of {model.heads} heads on "
            f"tp_size={layout.tp} ranks (qkv={layout.qkv}, {layout.style} style, {layout.kv_order}); "
            + (f"works: {_join_numbers(works)}" if works else f"nearest that works: {_suggest_fix(model, layout)}")
        )
    if layout.vocab is not None and (layout.vocab < model.vocab or layout.vocab % layout.tp):
        fits = ceil(model.vocab / layout.tp) * layout.tp
        raise UserError(
            f"vocab={layout.vocab}: must hold {model.vocab} and divide by tp_size={layout.tp}; least: {fits}"
        )
    _check_stages(model, layout)


def valid_kv_multipliers(model: LlamaConfig, layout: NxdLayout) -> list[int]:
    """Every kv_multiplier that fits the rest of the layout."""
    repeated = layout.style == "hf" and layout.qkv in ("qkv_linear", "fused")
    queries = model.heads // model.num_kv_heads
    return [
        times
        for times in range(1, (queries if repeated else 1) + 1)
        # The last: NxD sums gradients over ranks that hold the same heads, on trn2 over neighbours.
        if queries % times == 0
        and model.num_kv_heads * times % layout.tp == 0
        and layout.tp % times == 0
        and (times == 1 or layout.kv_order == "trn1" or model.num_kv_heads * times == layout.tp)
    ]


def _check_stages(model: LlamaConfig, layout: NxdLayout) -> None:
    stages, cuts = layout.pp * layout.vpp, layout.pipeline_cuts
    if stages > model.layers:
        what = f"pp_size={layout.pp} times virtual_pp_size={layout.vpp}"
        raise UserError(f"{what}: {stages} stages for {model.layers} layers; at most {model.layers} stages")
    if cuts and (
        len(cuts) != stages - 1 or list(cuts) != sorted(set(cuts)) or cuts[0] < 0 or cuts[-1] > model.layers - 2
    ):
        even = _join_numbers(stage_cuts(model, NxdLayout(pp=layout.pp, vpp=layout.vpp))) or "none"
        raise UserError(
            f"pipeline_cuts={_join_numbers(cuts)}: must be {stages - 1} rising layer numbers up to {model.layers - 2}, "
            f"each the last layer of a stage; even would be: {even}"
        )


def _nearest_tp(model: LlamaConfig, layout: NxdLayout) -> int:
    fits = (tp for tp in range(1, model.heads + 1) if model.heads % tp == 0 and model.ffn % tp == 0)
    return min(fits, key=lambda tp: (abs(tp - layout.tp), tp))


def _suggest_fix(model: LlamaConfig, layout: NxdLayout) -> str:
    """Where no multiplier fits: a kind that repeats heads, or fewer ranks."""
    repeats = NxdLayout(tp=layout.tp, qkv="qkv_linear", kv_order=layout.kv_order)
    if layout.style == "hf" and (works := valid_kv_multipliers(model, repeats)):
        return f"qkv=qkv_linear with kv_size_multiplier={works[0]}"
    return f"tp_size={nearest_divisor(layout.tp, model.num_kv_heads)}"


def _join_numbers(numbers: list[int] | tuple[int, ...]) -> str:
    return ", ".join(str(number) for number in numbers)


def _layer_tensors(model: LlamaConfig, layout: NxdLayout, layer: int) -> Iterator[tuple[StoredTensor, ...]]:
    names, tp = NAME_TABLES[layout.style], layout.tp
    theirs, ours = f"{names.layer_prefix}{layer}.", f"layers.{layer}."
    yield from qkv_tensors(model, layout, layer)
    yield tuple(
        StoredTensor(
            theirs + names.attention_output, 1, _head_ranges(model, kv_slots(model, layout, rank), layer, "o", False)
        )
        for rank in range(tp)
    )
    share = model.ffn // tp
    for name, parts in names.gate_up[layout.gate_up]:
        yield tuple(
            StoredTensor(
                theirs + name, 0, tuple(_even_range(f"{ours}mlp.{part}.weight", share, rank) for part in parts)
            )
            for rank in range(tp)
        )
    yield tuple(
        StoredTensor(theirs + names.down, 1, (_even_range(f"{ours}mlp.down.weight", share, rank),))
        for rank in range(tp)
    )
    for name, part in NORM_NAMES.items():
        yield (StoredTensor(theirs + name, 0, (TensorRange(f"{ours}{part}.weight", 0, model.hidden),)),) * tp


def _even_range(name: str, size: int, rank: int) -> TensorRange:
    return TensorRange(name, rank * size, (rank + 1) * size)


def _head_ranges(
    model: LlamaConfig, here: list[tuple[int, range]], layer: int, letters: str, by_head: bool
) -> tuple[TensorRange, ...]:
    """Rows (columns for `o`) of the matrices in `letters` for the heads on a rank; what touches is one piece."""
    size = model.head_size
    order = [(slot, x) for slot in here for x in letters] if by_head else [(slot, x) for x in letters for slot in here]
    pieces: list[TensorRange] = []
    for (head, queries), letter in order:
        part = f"layers.{layer}.attention.{'output' if letter == 'o' else letter}.weight"
        first, stop = (queries.start, queries.stop) if letter in "qo" else (head, head + 1)
        start = first * size
        if pieces and pieces[-1].name == part and pieces[-1].stop == start:
            start = pieces.pop().start
        pieces.append(TensorRange(part, start, stop * size))
    return tuple(pieces)


def _vocab_tensors(name: str, unfused_name: str, model: LlamaConfig, layout: NxdLayout) -> tuple[StoredTensor, ...]:
    rows = padded_vocab(model, layout) // layout.tp
    out = []
    for rank in range(layout.tp):
        start, stop = (min(end * rows, model.vocab) for end in (rank, rank + 1))
        piece = (
            TensorRange(unfused_name, start, stop) if start < stop else TensorRange(unfused_name, 0, 0)
        )  # this rank has padding only
        out.append(StoredTensor(name, 0, (piece,), padded_size=rows))
    return tuple(out)
