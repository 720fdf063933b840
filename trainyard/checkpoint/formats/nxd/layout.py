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

from trainyard.checkpoint.formats.nxd.names import NORMS, STYLES, Qkv, Style
from trainyard.checkpoint.formats.tensor_map import Piece, Stored
from trainyard.config.base import nearest_divisor
from trainyard.config.model_schema import LlamaModel
from trainyard.core.errors import UserError

KvOrder = Literal["trn1", "trn2"]
Rank = tuple[int, int]
"""Pipeline rank, tensor-parallel rank."""


@dataclass(frozen=True)
class NxdLayout:
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    """Virtual stages of each pipeline rank; stage s is on rank s % pp."""
    cuts: tuple[int, ...] = ()
    """Last layer of each stage but the last; empty: even, with what is left over on the last stages."""
    kv_multiplier: int = 1
    """How often key and value heads are repeated (kv_replicator)."""
    qkv: Qkv = "separate"
    gate_up: bool = True
    """Gate and up projections are one matrix."""
    kv_order: KvOrder = "trn1"
    style: Style = "hf"
    by_head: bool = True
    """Megatron style: rows of matrices that share a tensor lie head by head, as NxDT's model takes them; False: one
    matrix after the other, as the reference's converter writes them (its model reads something else from that)."""
    vocab: int | None = None
    """Rows of the embedding and of the head over all ranks, with padding; default: rounded up to a multiple of tp.
    NxD refuses a vocabulary that tp does not divide, so its configuration must give the padded number."""


FLAGS = {
    "tp": "tp_size",
    "pp": "pp_size",
    "vpp": "virtual_pp_size",
    "cuts": "pipeline_cuts",
    "kv_multiplier": "kv_size_multiplier",
    "kv_order": "hw_backend",
    "style": "model_style",
}
"""What users know these fields by."""


def stored(model: LlamaModel, layout: NxdLayout) -> dict[Rank, tuple[Stored, ...]]:
    """What every rank's file holds."""
    return {
        (pp, tp): held
        for pp in range(layout.pp)
        for tp, held in enumerate(zip(*tensors(model, layout, pp), strict=True))
    }


def tensors(model: LlamaModel, layout: NxdLayout, pp_rank: int) -> Iterator[tuple[Stored, ...]]:
    """The tensors on a pipeline rank in the model's order; for each, what the tensor-parallel ranks hold of it.

    A tied head is there too, as a copy of the embedding: NxD's state dict names both, and loading wants both.
    """
    check(model, layout)
    names = STYLES[layout.style]
    last = pp_rank == layout.pp - 1
    if pp_rank == 0:
        yield _vocabulary(names.embedding, "embedding.weight", model, layout)
    for layer in layers_of(model, layout, pp_rank):
        yield from _layer(model, layout, layer)
    if last:
        yield (Stored(names.norm, 0, (Piece("norm.weight", 0, model.hidden),)),) * layout.tp
        yield _vocabulary(names.output, "embedding.weight" if model.tied else "output.weight", model, layout)


def attention_inputs(model: LlamaModel, layout: NxdLayout, layer: int) -> Iterator[tuple[Stored, ...]]:
    """Query, key and value matrices of a layer, for each the ranks' shares."""
    names, by_head = STYLES[layout.style], layout.style == "megatron" and layout.by_head
    for name, letters in names.qkv[layout.qkv]:
        yield tuple(
            Stored(
                f"{names.layer}{layer}.{name}", 0, _heads(model, slots(model, layout, rank), layer, letters, by_head)
            )
            for rank in range(layout.tp)
        )


def slots(model: LlamaModel, layout: NxdLayout, tp_rank: int) -> list[tuple[int, range]]:
    """The key-value heads on a rank, and with each the query heads that look at it."""
    kv, times = model.kv, layout.kv_multiplier
    here, queries = kv * times // layout.tp, model.heads // (kv * times)
    out = []
    for slot in range(tp_rank * here, (tp_rank + 1) * here):
        head, copy = (slot % kv, slot // kv) if layout.kv_order == "trn1" else (slot // times, slot % times)
        first = (head * times + copy) * queries
        out.append((head, range(first, first + queries)))
    return out


def cuts_of(model: LlamaModel, layout: NxdLayout) -> tuple[int, ...]:
    """The last layer of each stage but the last."""
    stages = layout.pp * layout.vpp
    if layout.cuts:
        return layout.cuts
    each, over = divmod(model.layers, stages)
    ends = [(stage + 1) * each + max(0, stage + 1 - (stages - over)) for stage in range(stages)]
    return tuple(end - 1 for end in ends[:-1])


def layers_of(model: LlamaModel, layout: NxdLayout, pp_rank: int) -> list[int]:
    ends = (-1, *cuts_of(model, layout), model.layers - 1)
    return [
        layer
        for stage in range(pp_rank, layout.pp * layout.vpp, layout.pp)
        for layer in range(ends[stage] + 1, ends[stage + 1] + 1)
    ]


def padded_vocab(model: LlamaModel, layout: NxdLayout) -> int:
    return layout.vocab or ceil(model.vocab / layout.tp) * layout.tp


def check(model: LlamaModel, layout: NxdLayout) -> None:
    """Refuse what no NxD model looks like, with the nearest thing that one does."""
    for key in ("tp", "pp", "vpp", "kv_multiplier"):
        if getattr(layout, key) < 1:
            raise UserError(f"{FLAGS[key]}={getattr(layout, key)}: must be 1 or more")
    names = STYLES[layout.style]
    if layout.qkv not in names.qkv:
        raise UserError(f"qkv={layout.qkv}: {layout.style} style has none of that; it has {' and '.join(names.qkv)}")
    if layout.gate_up not in names.gate_up:
        raise UserError(f"gate_up=False: {layout.style} style keeps gate and up in one matrix; use gate_up=True")
    for key, size in (("heads", model.heads), ("ffn", model.ffn)):
        if size % layout.tp:
            raise UserError(f"tp_size={layout.tp}: does not divide {key}={size}; nearest: {_nearest_tp(model, layout)}")
    if layout.kv_multiplier not in (works := multipliers(model, layout)):
        raise UserError(
            f"kv_size_multiplier={layout.kv_multiplier}: cannot put {model.kv} kv heads of {model.heads} heads on "
            f"tp_size={layout.tp} ranks (qkv={layout.qkv}, {layout.style} style, {layout.kv_order}); "
            + (f"works: {_listed(works)}" if works else f"nearest that works: {_way_out(model, layout)}")
        )
    if layout.vocab is not None and (layout.vocab < model.vocab or layout.vocab % layout.tp):
        fits = ceil(model.vocab / layout.tp) * layout.tp
        raise UserError(
            f"vocab={layout.vocab}: must hold {model.vocab} and divide by tp_size={layout.tp}; least: {fits}"
        )
    _check_stages(model, layout)


def multipliers(model: LlamaModel, layout: NxdLayout) -> list[int]:
    """Every kv_multiplier that fits the rest of the layout."""
    repeated = layout.style == "hf" and layout.qkv in ("qkv_linear", "fused")
    queries = model.heads // model.kv
    return [
        times
        for times in range(1, (queries if repeated else 1) + 1)
        # The last: NxD sums gradients over ranks that hold the same heads, on trn2 over neighbours.
        if queries % times == 0
        and model.kv * times % layout.tp == 0
        and layout.tp % times == 0
        and (times == 1 or layout.kv_order == "trn1" or model.kv * times == layout.tp)
    ]


def _check_stages(model: LlamaModel, layout: NxdLayout) -> None:
    stages, cuts = layout.pp * layout.vpp, layout.cuts
    if stages > model.layers:
        what = f"pp_size={layout.pp} times virtual_pp_size={layout.vpp}"
        raise UserError(f"{what}: {stages} stages for {model.layers} layers; at most {model.layers} stages")
    if cuts and (
        len(cuts) != stages - 1 or list(cuts) != sorted(set(cuts)) or cuts[0] < 0 or cuts[-1] > model.layers - 2
    ):
        even = _listed(cuts_of(model, NxdLayout(pp=layout.pp, vpp=layout.vpp))) or "none"
        raise UserError(
            f"pipeline_cuts={_listed(cuts)}: must be {stages - 1} rising layer numbers up to {model.layers - 2}, "
            f"each the last layer of a stage; even would be: {even}"
        )


def _nearest_tp(model: LlamaModel, layout: NxdLayout) -> int:
    fits = (tp for tp in range(1, model.heads + 1) if model.heads % tp == 0 and model.ffn % tp == 0)
    return min(fits, key=lambda tp: (abs(tp - layout.tp), tp))


def _way_out(model: LlamaModel, layout: NxdLayout) -> str:
    """Where no multiplier fits: a kind that repeats heads, or fewer ranks."""
    repeats = NxdLayout(tp=layout.tp, qkv="qkv_linear", kv_order=layout.kv_order)
    if layout.style == "hf" and (works := multipliers(model, repeats)):
        return f"qkv=qkv_linear with kv_size_multiplier={works[0]}"
    return f"tp_size={nearest_divisor(layout.tp, model.kv)}"


def _listed(numbers: list[int] | tuple[int, ...]) -> str:
    return ", ".join(str(number) for number in numbers)


def _layer(model: LlamaModel, layout: NxdLayout, layer: int) -> Iterator[tuple[Stored, ...]]:
    names, tp = STYLES[layout.style], layout.tp
    theirs, ours = f"{names.layer}{layer}.", f"layers.{layer}."
    yield from attention_inputs(model, layout, layer)
    yield tuple(
        Stored(theirs + names.attention_output, 1, _heads(model, slots(model, layout, rank), layer, "o", False))
        for rank in range(tp)
    )
    share = model.ffn // tp
    for name, parts in names.gate_up[layout.gate_up]:
        yield tuple(
            Stored(theirs + name, 0, tuple(_share(f"{ours}mlp.{part}.weight", share, rank) for part in parts))
            for rank in range(tp)
        )
    yield tuple(Stored(theirs + names.down, 1, (_share(f"{ours}mlp.down.weight", share, rank),)) for rank in range(tp))
    for name, part in NORMS.items():
        yield (Stored(theirs + name, 0, (Piece(f"{ours}{part}.weight", 0, model.hidden),)),) * tp


def _share(part: str, size: int, rank: int) -> Piece:
    return Piece(part, rank * size, (rank + 1) * size)


def _heads(
    model: LlamaModel, here: list[tuple[int, range]], layer: int, letters: str, by_head: bool
) -> tuple[Piece, ...]:
    """Rows (columns for `o`) of the matrices in `letters` for the heads on a rank; what touches is one piece."""
    size = model.head_size
    order = [(slot, x) for slot in here for x in letters] if by_head else [(slot, x) for x in letters for slot in here]
    pieces: list[Piece] = []
    for (head, queries), letter in order:
        part = f"layers.{layer}.attention.{'output' if letter == 'o' else letter}.weight"
        first, stop = (queries.start, queries.stop) if letter in "qo" else (head, head + 1)
        start = first * size
        if pieces and pieces[-1].part == part and pieces[-1].stop == start:
            start = pieces.pop().start
        pieces.append(Piece(part, start, stop * size))
    return tuple(pieces)


def _vocabulary(name: str, part: str, model: LlamaModel, layout: NxdLayout) -> tuple[Stored, ...]:
    rows = padded_vocab(model, layout) // layout.tp
    out = []
    for rank in range(layout.tp):
        start, stop = (min(end * rows, model.vocab) for end in (rank, rank + 1))
        piece = Piece(part, start, stop) if start < stop else Piece(part, 0, 0)  # this rank has padding only
        out.append(Stored(name, 0, (piece,), length=rows))
    return tuple(out)
