"""The forward pass of a pipeline stage as a row of operations: what `models/llama.py`, `gpt.py` and `bert.py` do, read
off them line by line."""

from collections.abc import Callable

from trainyard.config.model_schema import BertConfig, GptConfig, LlamaConfig
from trainyard.config.schema import Config
from trainyard.kernels.fp8_linear import SIZE_MULTIPLE
from trainyard.parallel.layout import StageSpec
from trainyard.plan.memory.liveness import LivenessTimeline, OpMemory
from trainyard.plan.memory.local_sizes import RankSizes
from trainyard.plan.memory.op_memory import OpMemoryBuilder
from trainyard.train.cross_entropy import MIN_CHUNK_TOKENS

LOSS_LAYER = -2
"""The block number of the loss."""


def llama_block_ops(ops: OpMemoryBuilder, c: LlamaConfig, x: str) -> str:
    r = ops.sizes
    q, kv = r.heads * r.head_size, r.kv_heads * r.head_size
    x, y = ops.rms_norm(x)
    with ops.scope("attention"):
        flat = ops.column_parallel(y, q + 2 * kv) if c.fuse_qkv else ops.column_parallel(y, q, kv, kv)
        qkv = flat[0] if c.fuse_qkv else ops.concat(flat)
        out = ops.attention(*ops.rope(qkv))
        y = ops.reduce_output(ops.linear(out, r.tokens, q, r.hidden))
    x, y = ops.rms_norm(x, y)
    with ops.scope("mlp"):
        flat = ops.column_parallel(y, 2 * r.ffn) if c.fuse_gate_up else ops.column_parallel(y, r.ffn, r.ffn)
        gate_up = flat[0] if c.fuse_gate_up else ops.concat(flat)
        y = ops.reduce_output(ops.linear(ops.swiglu(gate_up), r.tokens, r.ffn, r.hidden))
    return ops.residual_add(x, y)


def _attention_ops(ops: OpMemoryBuilder, c: GptConfig | BertConfig, y: str) -> str:
    r = ops.sizes
    q = r.heads * r.head_size
    with ops.scope("attention"):
        flat = ops.column_parallel(y, 3 * q) if c.fuse_qkv else ops.column_parallel(y, q, q, q)
        out = ops.qkv_attention(flat, c.attention_dropout, r.packed_batch)
        return ops.reduce_output(ops.linear(out, r.tokens, q, r.hidden))


def _mlp_ops(ops: OpMemoryBuilder, y: str) -> str:
    r = ops.sizes
    with ops.scope("mlp"):
        (up,) = ops.column_parallel(y, r.ffn)
        return ops.reduce_output(ops.linear(ops.gelu(up, r.tokens, r.ffn), r.tokens, r.ffn, r.hidden))


def gpt_block_ops(ops: OpMemoryBuilder, c: GptConfig, x: str) -> str:
    x, y = ops.layer_norm(x)
    x, y = ops.layer_norm(x, _attention_ops(ops, c, y), c.hidden_dropout)
    return ops.add_dropout(x, _mlp_ops(ops, y), c.hidden_dropout)


def bert_block_ops(ops: OpMemoryBuilder, c: BertConfig, x: str) -> str:
    x, y = ops.layer_norm(x, _attention_ops(ops, c, x), c.hidden_dropout, post_norm=True)
    _, y = ops.layer_norm(x, _mlp_ops(ops, y), c.hidden_dropout, post_norm=True)
    return y


BLOCK_OPS: dict[str, Callable[..., str]] = {"llama": llama_block_ops, "gpt": gpt_block_ops, "bert": bert_block_ops}


def embedding_ops(ops: OpMemoryBuilder, config: Config, local_vocab: int) -> tuple[str, str]:
    """`words`: rows of the embedding on this rank. Its gradient is as large as it is. Gives the embedding too: where
    it is the head as well, its gradient from there waits for the one from here."""
    r, c = ops.sizes, config.model
    weight = local_vocab * c.hidden * r.element_size
    x, tied = ops.record((), {"x": ops.hidden_bytes}, backward_workspace=weight, views={"weight": ("", weight)})
    if r.tp > 1:  # words of other ranks are zeros, and then summed
        (x,) = ops.record((x,), {"here": ops.hidden_bytes, "which": r.tokens}, ("which",))[:1]
        x = ops.reduce_output(x)
    if isinstance(c, LlamaConfig):
        return x, tied
    tables = c.max_positions * c.hidden * r.element_size
    (x,) = ops.record(
        (x,), {"sum": ops.local_hidden_bytes}, (), ops.local_hidden_bytes, tables, grad_aliases=("d sum",)
    )
    if isinstance(c, GptConfig):
        return (ops.dropout(x, c.embedding_dropout, with_bias=False) if c.embedding_dropout else x), tied
    _, x = ops.layer_norm(x)
    return (ops.dropout(x, c.hidden_dropout, with_bias=False) if c.hidden_dropout else x), tied


def output_head_ops(
    ops: OpMemoryBuilder, config: Config, x: str, tied: str | None, local_vocab: int, logits_bytes: int
) -> None:
    """The last norm (or BERT's heads) and the loss."""
    r, c = ops.sizes, config.model
    tokens = r.tokens
    if isinstance(c, LlamaConfig):
        _, x = ops.rms_norm(x)
        x = ops.gather_tokens(x)
    elif isinstance(c, GptConfig):
        _, x = ops.layer_norm(x)
        x = ops.gather_tokens(x)
    else:
        tokens = r.samples * config.data.max_predictions
        masked = tokens * c.hidden * r.element_size
        if r.sequence_parallel:
            x = ops.record((x,), {"whole": ops.hidden_bytes})[0]
        x = ops.record((x,), {"masked": masked, "index": 8 * tokens}, ("index",))[0]
        x = ops.linear(x, tokens, c.hidden, c.hidden)
        x = ops.gelu(x, tokens, c.hidden)
        (x,) = ops.record((x,), {"norm": masked}, (x,))
        if r.tp > 1:
            (x,) = ops.record((x,), {}, backward_workspace=masked, views={"on": (x, masked)})
    loss_ops(ops, x, tied, tokens, local_vocab, logits_bytes)


def loss_ops(ops: OpMemoryBuilder, x: str, tied: str | None, tokens: int, local_vocab: int, logits_bytes: int) -> None:
    """As train/cross_entropy.py: gradients are made in the forward pass, from a chunk of logits at a time."""
    r, hidden = ops.sizes, ops.sizes.hidden
    most = max(MIN_CHUNK_TOKENS, logits_bytes // (4 * local_vocab))
    size = -(-tokens // -(-tokens // most))
    gap = -local_vocab % SIZE_MULTIPLE
    logits = size * (local_vocab + gap) * r.element_size
    weight = (local_vocab + gap) * hidden
    plain = not r.fused_kernels or r.tp > 1
    softmax = size * local_vocab * 4 if plain and not r.is_fp32 else 0  # one fp32 copy
    product = (
        weight * r.element_size if not (r.accumulating_gemm or r.is_fp32) else 0
    )  # where a product cannot add to an fp32 sum
    ops.layer = LOSS_LAYER
    copy = 0 if r.is_fp32 else local_vocab * hidden * r.element_size
    ops.record(
        (x, tied) if tied else (x,),
        {"d_hidden": tokens * hidden * r.element_size, "d_weight": weight * 4},
        ("d_hidden", "d_weight"),
        logits + max(softmax, product) + (weight * r.element_size if gap else 0),
        0 if tied else copy,
        grad_aliases=("d_hidden", "d_weight" if r.is_fp32 else None) if tied else ("d_hidden",),
    )


def stage_timeline(
    config: Config, sizes: RankSizes, stage: StageSpec, local_vocab: int, logits_bytes: int, fp8_layers: range
) -> LivenessTimeline:
    """A micro batch through a stage and back. `fp8`: blocks that multiply in it."""
    recompute = config.recompute
    parts: frozenset[str] = frozenset(
        {"core_attention"}
        if recompute.kind == "attention"
        else recompute.modules
        if recompute.kind == "selective"
        else ()
    )
    w = OpMemoryBuilder(sizes)
    w.keep_gathered = frozenset({"attention", "mlp"} if recompute.kind == "full" else parts)
    shared = 8 * sizes.seq_len * sizes.head_size if config.model.family == "llama" else 16 * sizes.tokens
    w.record((), {"shared": shared}, ("shared",))
    tied = None
    if stage.is_first:
        x, own = embedding_ops(w, config, local_vocab)
        tied = own if stage.is_last and getattr(config.model, "tie_embeddings", True) else None
    else:  # lies where it was received
        (x,) = w.record((), {}, views={"received": ("", w.local_hidden_bytes)})
    for number in stage.layers:
        w.layer, w.fp8 = number, sizes.fp8 if number in fp8_layers else ""
        x = BLOCK_OPS[config.model.family](w, config.model, x)
    w.layer, w.fp8 = config.model.layers, ""
    if stage.is_last:
        output_head_ops(w, config, x, tied, local_vocab, logits_bytes)
    else:  # kept until its gradient has come, which has a place already
        w.record((x,), {}, (x,), grad_aliases=("",))

    def again(op: OpMemory) -> object:
        if not 0 <= op.layer < config.model.layers:
            return None
        if recompute.kind == "full":
            return op.layer
        return next(((op.layer, *op.scopes[: at + 1]) for at, part in enumerate(op.scopes) if part in parts), None)

    return LivenessTimeline(w.recorded, again)
