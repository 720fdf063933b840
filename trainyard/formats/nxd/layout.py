"""Describes the tensors in each file of an NxD (neuronx-distributed) checkpoint of a Llama-like model or a mixture of
experts.

A rank's file names its tensors as the model on that rank does and does not say how they were sharded; `NxdLayout` holds
all of that. The subtle part is key and value heads. If there are fewer of them than ranks, each is replicated, in one
of two orders: `trn1` repeats all heads as a block (rank r has head r % heads) and permutes the query heads and the
columns of the output projection accordingly; `trn2` puts the replicas of a head on adjacent ranks and leaves the query
heads in place. One function (`kv_slots`) covers both, so that queries always stay with their keys.

What NxD's own converter writes for trn2 is a third order, which is only read: heads repeated as a block, as for trn1,
but query heads in place. NxD's model then attends to other heads than the model that was converted.

The experts of a layer are stacked in one tensor, each as [in, out]. Expert-parallel ranks have consecutive experts, and
copies of all other tensors.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal, NamedTuple

from trainyard.checkpoint.weights import unfused_tensors
from trainyard.core.errors import UserError
from trainyard.core.quantities import counted
from trainyard.core.section import nearest_divisor
from trainyard.core.tensor_slice import TensorSlice
from trainyard.families import ModelConfig, all_families, family_of
from trainyard.families.decoder import DecoderConfig
from trainyard.families.moe import MoeConfig
from trainyard.formats.nxd.names import (
    EXPERT_NAMES,
    NAME_TABLES,
    NORM_NAMES,
    ROUTER_NAME,
    NameStyle,
    QkvKind,
)
from trainyard.formats.tensor_map import StoredTensor, padded_shard

KvOrder = Literal["trn1", "trn2"]


class NxdRank(NamedTuple):
    """The pipeline, expert-parallel and tensor-parallel rank of a file."""

    pp: int
    ep: int
    tp: int


@dataclass(frozen=True)
class NxdLayout:
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    """Virtual stages per pipeline rank; stage s is on rank s % pp."""
    pipeline_cuts: tuple[int, ...] = ()
    """Last layer of each stage except the last. Empty: even stages; remaining layers go to the last stages."""
    ep: int = 1
    """Expert-parallel ranks."""
    kv_multiplier: int = 1
    """Replicas of each key and value head (NxD's kv_replicator)."""
    qkv: QkvKind = "separate"
    gate_up: bool = True
    """Gate and up projections are fused in one matrix."""
    kv_order: KvOrder | Literal["trn2_converter"] = "trn1"
    """Order of replicated heads. trn2_converter: that of NxD's own converter for trn2, which is only read."""
    style: NameStyle = "hf"
    by_head: bool = True
    """Megatron style: fused matrices are interleaved head by head, as NxDT's model expects. False: one matrix follows
    the other, as NxD's reference converter writes them (NxDT's model misreads those)."""
    vocab: int | None = None
    """Rows of the embedding and of the output projection over all ranks, with padding. None: rounded up to a multiple
    of tp. NxD refuses a vocabulary that tp does not divide, so its configuration has the padded number."""


FLAG_NAMES = {
    "tp": "tp_size",
    "pp": "pp_size",
    "ep": "ep_size",
    "vpp": "virtual_pp_size",
    "kv_multiplier": "kv_size_multiplier",
    "kv_order": "hw_backend",
    "style": "model_style",
}
"""NxD's command-line flags for these fields, for error messages."""


def require_nxd_model(model: ModelConfig, nearest: str | None = None) -> DecoderConfig:
    """The model, if NxD has it."""
    if not isinstance(model, DecoderConfig) or not family_of(model).nxd_styles:
        names = [name for name, family in all_families().items() if family.nxd_styles]
        nearest = nearest or f"model.family={names[0]}"
        raise UserError(
            f"model.family={model.family}: NxD checkpoints hold models of {', '.join(names)} only; nearest: {nearest}"
        )
    return model


def rank_tensors(model: DecoderConfig, layout: NxdLayout) -> dict[NxdRank, tuple[StoredTensor, ...]]:
    """The tensors in every rank's file."""
    return {
        NxdRank(pp, ep, tp): tensors
        for pp in range(layout.pp)
        for ep in range(layout.ep)
        for tp, tensors in enumerate(zip(*stage_tensors(model, layout, pp, ep), strict=True))
    }


def stage_tensors(
    model: DecoderConfig, layout: NxdLayout, pp_rank: int, ep_rank: int
) -> Iterator[tuple[StoredTensor, ...]]:
    """The tensors on a pipeline and expert-parallel rank in the model's order, each as a tuple of its tensor-parallel
    shards.

    A tied output projection is included as a copy of the embedding: NxD's state dict has both, and loading needs both.
    """
    check_layout(model, layout)
    names = NAME_TABLES[layout.style]
    if pp_rank == 0:
        yield _vocab_tensors(names.embedding, "embedding.weight", model, layout)
    for layer in pp_rank_layers(model, layout, pp_rank):
        yield from _layer_tensors(model, layout, layer, ep_rank)
    if pp_rank == layout.pp - 1:
        yield (StoredTensor(names.norm, 0, (unfused_tensors(model)["norm.weight"],)),) * layout.tp
        output = "embedding.weight" if model.tie_embeddings else "output.weight"
        yield _vocab_tensors(names.output, output, model, layout)


def qkv_tensors(model: DecoderConfig, layout: NxdLayout, layer: int) -> Iterator[tuple[StoredTensor, ...]]:
    """The query, key and value matrices of a layer, each as a tuple of its tensor-parallel shards."""
    names, by_head = NAME_TABLES[layout.style], layout.style == "megatron" and layout.by_head
    for suffix, letters in names.qkv[layout.qkv]:
        name = f"{names.layer_prefix}{layer}.{suffix}"
        slots = (kv_slots(model, layout, rank) for rank in range(layout.tp))
        yield tuple(StoredTensor(name, 0, _head_slices(model, on_rank, layer, letters, by_head)) for on_rank in slots)


def kv_slots(model: DecoderConfig, layout: NxdLayout, tp_rank: int) -> list[tuple[int, range]]:
    """The key-value heads on a rank, each with the query heads that attend to it."""
    kv, replicas = model.num_kv_heads, layout.kv_multiplier
    slots_per_rank, queries = kv * replicas // layout.tp, model.heads // (kv * replicas)
    out = []
    for slot in range(tp_rank * slots_per_rank, (tp_rank + 1) * slots_per_rank):
        head = slot // replicas if layout.kv_order == "trn2" else slot % kv
        first = ((head * replicas + slot // kv) if layout.kv_order == "trn1" else slot) * queries
        out.append((head, range(first, first + queries)))
    return out


def is_key_or_value(name: str) -> bool:
    """True for the unfused tensors whose rows NxD replicates."""
    return name.endswith((".attention.k.weight", ".attention.v.weight"))


def is_replicated(layout: NxdLayout, name: str) -> bool:
    """True for the unfused tensors whose copies on several ranks must agree: those of key and value heads and, with
    expert parallelism, of all but the experts."""
    return is_key_or_value(name) or (layout.ep > 1 and ".mlp.experts." not in name)


def stage_cuts(model: DecoderConfig, layout: NxdLayout) -> tuple[int, ...]:
    """The last layer of each stage except the last."""
    stages = layout.pp * layout.vpp
    if layout.pipeline_cuts:
        return layout.pipeline_cuts
    per_stage, remaining = divmod(model.layers, stages)
    ends = [(stage + 1) * per_stage + max(0, stage + 1 - (stages - remaining)) for stage in range(stages)]
    return tuple(end - 1 for end in ends[:-1])


def pp_rank_layers(model: DecoderConfig, layout: NxdLayout, pp_rank: int) -> list[int]:
    ends = (-1, *stage_cuts(model, layout), model.layers - 1)
    return [
        layer
        for stage in range(pp_rank, layout.pp * layout.vpp, layout.pp)
        for layer in range(ends[stage] + 1, ends[stage + 1] + 1)
    ]


def padded_vocab(model: DecoderConfig, layout: NxdLayout) -> int:
    return layout.vocab or ceil(model.vocab / layout.tp) * layout.tp


def check_layout(model: DecoderConfig, layout: NxdLayout) -> None:
    """Refuse layouts that no NxD model has. The error names the nearest valid value."""
    for key in ("tp", "pp", "ep", "vpp", "kv_multiplier"):
        if getattr(layout, key) < 1:
            raise UserError(f"{FLAG_NAMES[key]}={getattr(layout, key)}: must be 1 or more")
    if layout.style not in (styles := family_of(model).nxd_styles):
        raise UserError(f"model_style={layout.style}: not supported for {model.family}; use {' or '.join(styles)}")
    names = NAME_TABLES[layout.style]
    if layout.qkv not in names.qkv:
        raise UserError(f"qkv={layout.qkv}: not available in {layout.style} style; use {' or '.join(names.qkv)}")
    if not layout.gate_up and (isinstance(model, MoeConfig) or False not in names.gate_up):
        which = "NxD's experts fuse" if isinstance(model, MoeConfig) else f"{layout.style} style fuses"
        raise UserError(f"gate_up=False: {which} gate and up in one matrix; use gate_up=True")
    check_ep(model, layout.ep)
    for key, size in (("heads", model.heads), ("ffn", model.ffn)):
        if size % layout.tp:
            raise UserError(f"tp_size={layout.tp}: does not divide {key}={size}; nearest: {_nearest_tp(model, layout)}")
    if layout.kv_multiplier not in (valid := valid_kv_multipliers(model, layout)):
        raise UserError(
            f"kv_size_multiplier={layout.kv_multiplier}: cannot split {model.num_kv_heads} kv heads of {model.heads} "
            f"heads over tp_size={layout.tp} ranks (qkv={layout.qkv}, {layout.style} style, {layout.kv_order}); "
            + (f"valid: {_join_numbers(valid)}" if valid else f"nearest: {_suggest_fix(model, layout)}")
        )
    if layout.vocab is not None and (layout.vocab < model.vocab or layout.vocab % layout.tp):
        raise UserError(
            f"vocab={layout.vocab}: must be at least {model.vocab} and a multiple of tp_size={layout.tp}; "
            f"smallest: {padded_vocab(model, replace(layout, vocab=None))}"
        )
    _check_stages(model, layout)


def check_ep(model: DecoderConfig, ep: int) -> None:
    """Refuse a number of expert-parallel ranks that does not divide the experts."""
    if not isinstance(model, MoeConfig) and ep > 1:
        raise UserError(f"ep_size={ep}: a {model.family} model has no experts; nearest: 1")
    if isinstance(model, MoeConfig) and model.experts % ep:
        nearest = nearest_divisor(ep, model.experts)
        raise UserError(f"ep_size={ep}: does not divide experts={model.experts}; nearest: {nearest}")


def valid_kv_multipliers(model: DecoderConfig, layout: NxdLayout) -> list[int]:
    """Every kv_multiplier that is valid with the rest of the layout."""
    can_replicate = layout.style == "hf" and layout.qkv in ("qkv_linear", "fused")
    queries = model.heads // model.num_kv_heads
    return [
        replicas
        for replicas in range(1, (queries if can_replicate else 1) + 1)
        if queries % replicas == 0
        and model.num_kv_heads * replicas % layout.tp == 0
        and layout.tp % replicas == 0
        # NxD sums gradients over ranks that hold the same heads; on trn2 these are adjacent ranks.
        and (replicas == 1 or layout.kv_order != "trn2" or model.num_kv_heads * replicas == layout.tp)
    ]


def _check_stages(model: DecoderConfig, layout: NxdLayout) -> None:
    stages, cuts = layout.pp * layout.vpp, layout.pipeline_cuts
    if stages > model.layers:
        keys = f"pp_size={layout.pp} times virtual_pp_size={layout.vpp}"
        raise UserError(
            f"{keys}: {counted(stages, 'stage')} for {counted(model.layers, 'layer')}; at most "
            f"{counted(model.layers, 'stage')}"
        )
    if cuts and (
        len(cuts) != stages - 1 or list(cuts) != sorted(set(cuts)) or cuts[0] < 0 or cuts[-1] > model.layers - 2
    ):
        even = _join_numbers(stage_cuts(model, NxdLayout(pp=layout.pp, vpp=layout.vpp))) or "none"
        raise UserError(
            f"pipeline_cuts={_join_numbers(cuts)}: must be {stages - 1} increasing layer numbers up to "
            f"{model.layers - 2}, each the last layer of a stage; for even stages: {even}"
        )


def _nearest_tp(model: DecoderConfig, layout: NxdLayout) -> int:
    fits = (tp for tp in range(1, model.heads + 1) if model.heads % tp == 0 and model.ffn % tp == 0)
    return min(fits, key=lambda tp: (abs(tp - layout.tp), tp))


def _suggest_fix(model: DecoderConfig, layout: NxdLayout) -> str:
    """A valid layout if no multiplier works: a qkv kind that replicates heads, or fewer ranks."""
    replicating = NxdLayout(tp=layout.tp, qkv="qkv_linear", kv_order=layout.kv_order)
    if layout.style == "hf" and (valid := valid_kv_multipliers(model, replicating)):
        return f"qkv=qkv_linear with kv_size_multiplier={valid[0]}"
    return f"tp_size={nearest_divisor(layout.tp, model.num_kv_heads)}"


def _join_numbers(numbers: list[int] | tuple[int, ...]) -> str:
    return ", ".join(str(number) for number in numbers)


def _layer_tensors(
    model: DecoderConfig, layout: NxdLayout, layer: int, ep_rank: int
) -> Iterator[tuple[StoredTensor, ...]]:
    names, ranks, shard_size = NAME_TABLES[layout.style], range(layout.tp), model.ffn // layout.tp
    prefix, tensors = f"{names.layer_prefix}{layer}.", unfused_tensors(model)

    def mlp_tensors(suffix: str, dim: int, matrices: Sequence[str], experts: int | None) -> tuple[StoredTensor, ...]:
        full = [tensors[f"layers.{layer}.mlp.{matrix}.weight"] for matrix in matrices]
        ends = [(rank * shard_size, (rank + 1) * shard_size) for rank in ranks]
        shards = (tuple(each.narrow(dim, *end) for each in full) for end in ends)
        transposed = experts is not None
        return tuple(StoredTensor(prefix + suffix, dim, shard, None, transposed, experts) for shard in shards)

    yield from qkv_tensors(model, layout, layer)
    slots = (kv_slots(model, layout, rank) for rank in ranks)
    yield tuple(
        StoredTensor(prefix + names.attention_output, 1, _head_slices(model, on_rank, layer, "o", False))
        for on_rank in slots
    )
    if isinstance(model, MoeConfig):
        yield (StoredTensor(prefix + ROUTER_NAME, 0, (tensors[f"layers.{layer}.mlp.router.weight"],)),) * layout.tp
        count = model.experts // layout.ep
        experts = range(ep_rank * count, (ep_rank + 1) * count)
        for suffix, matrices in EXPERT_NAMES.items():
            per_expert = [f"experts.{expert}.{matrix}" for expert in experts for matrix in matrices]
            yield mlp_tensors(suffix, int(matrices == ("down",)), per_expert, count)
    else:
        for suffix, matrices in names.gate_up[layout.gate_up]:
            yield mlp_tensors(suffix, 0, matrices, None)
        yield mlp_tensors(names.down, 1, ("down",), None)
    for suffix, norm in NORM_NAMES.items():
        yield (StoredTensor(prefix + suffix, 0, (tensors[f"layers.{layer}.{norm}.weight"],)),) * layout.tp


def _head_slices(
    model: DecoderConfig, slots: list[tuple[int, range]], layer: int, letters: str, by_head: bool
) -> tuple[TensorSlice, ...]:
    """Rows (columns for `o`) of the matrices in `letters` for the heads on a rank. Adjacent heads are one slice."""
    size, tensors = model.head_size, unfused_tensors(model)
    ranges: list[tuple[str, int, int]] = []
    order = (
        [(slot, x) for slot in slots for x in letters] if by_head else [(slot, x) for x in letters for slot in slots]
    )
    for (head, queries), letter in order:
        first, stop = (queries.start, queries.stop) if letter in "qo" else (head, head + 1)
        start = first * size
        if ranges and ranges[-1][0] == letter and ranges[-1][2] == start:
            start = ranges.pop()[1]
        ranges.append((letter, start, stop * size))
    names = {letter: f"layers.{layer}.attention.{'output' if letter == 'o' else letter}.weight" for letter in letters}
    return tuple(tensors[names[letter]].narrow(int(letter == "o"), start, stop) for letter, start, stop in ranges)


def _vocab_tensors(name: str, unfused_name: str, model: DecoderConfig, layout: NxdLayout) -> tuple[StoredTensor, ...]:
    rows, full = padded_vocab(model, layout) // layout.tp, unfused_tensors(model)[unfused_name]
    return tuple(padded_shard(name, full, rows, rank) for rank in range(layout.tp))
