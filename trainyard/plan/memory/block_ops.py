"""The forward pass of a pipeline stage as a list of operations, following `models/llama.py`, `gpt.py` and `bert.py`."""

from collections.abc import Callable

from trainyard.config.schema import Config
from trainyard.families.builtin.bert import BertConfig
from trainyard.families.builtin.gpt import GptConfig
from trainyard.families.builtin.llama import LlamaConfig
from trainyard.kernels.fp8_linear import SIZE_MULTIPLE
from trainyard.parallel.layout import StageSpec
from trainyard.plan.memory.liveness import LivenessTimeline
from trainyard.plan.memory.local_sizes import RankSizes
from trainyard.plan.memory.op_memory import OpMemoryBuilder
from trainyard.train.decisions import fp8_layer_range, loss_chunk_tokens

EMBEDDING_LAYER, LOSS_LAYER, HEAD_LAYER = -1, -2, -3
"""Layer numbers outside of the blocks."""


def llama_block_ops(ops: OpMemoryBuilder, model: LlamaConfig, x: str) -> str:
    sizes = ops.sizes
    q, kv = sizes.heads * sizes.head_size, sizes.kv_heads * sizes.head_size
    x, y = ops.rms_norm(x)
    with ops.scope("attention"):
        projections = ops.column_parallel(y, q + 2 * kv) if model.fuse_qkv else ops.column_parallel(y, q, kv, kv)
        qkv = projections[0] if model.fuse_qkv else ops.concat(projections)
        out = ops.attention(*ops.rope(qkv))
        y = ops.reduce_output(ops.linear(out, sizes.tokens, q, sizes.hidden))
    x, y = ops.rms_norm(x, y)
    with ops.scope("mlp"):
        widths = (2 * sizes.ffn,) if model.fuse_gate_up else (sizes.ffn, sizes.ffn)
        projections = ops.column_parallel(y, *widths)
        gate_up = projections[0] if model.fuse_gate_up else ops.concat(projections)
        y = ops.reduce_output(ops.linear(ops.swiglu(gate_up), sizes.tokens, sizes.ffn, sizes.hidden))
    return ops.residual_add(x, y)


def _attention_ops(ops: OpMemoryBuilder, model: GptConfig | BertConfig, y: str) -> str:
    sizes = ops.sizes
    q = sizes.heads * sizes.head_size
    with ops.scope("attention"):
        projections = ops.column_parallel(y, 3 * q) if model.fuse_qkv else ops.column_parallel(y, q, q, q)
        out = ops.qkv_attention(projections, model.attention_dropout, sizes.packed_batch)
        return ops.reduce_output(ops.linear(out, sizes.tokens, q, sizes.hidden))


def _mlp_ops(ops: OpMemoryBuilder, y: str) -> str:
    sizes = ops.sizes
    with ops.scope("mlp"):
        (up,) = ops.column_parallel(y, sizes.ffn)
        activated = ops.gelu(up, sizes.tokens, sizes.ffn)
        return ops.reduce_output(ops.linear(activated, sizes.tokens, sizes.ffn, sizes.hidden))


def gpt_block_ops(ops: OpMemoryBuilder, model: GptConfig, x: str) -> str:
    x, y = ops.layer_norm(x)
    x, y = ops.layer_norm(x, _attention_ops(ops, model, y), model.hidden_dropout)
    return ops.add_dropout(x, _mlp_ops(ops, y), model.hidden_dropout)


def bert_block_ops(ops: OpMemoryBuilder, model: BertConfig, x: str) -> str:
    x, y = ops.layer_norm(x, _attention_ops(ops, model, x), model.hidden_dropout, post_norm=True)
    _, y = ops.layer_norm(x, _mlp_ops(ops, y), model.hidden_dropout, post_norm=True)
    return y


BLOCK_OPS: dict[str, Callable[..., str]] = {"llama": llama_block_ops, "gpt": gpt_block_ops, "bert": bert_block_ops}


def embedding_ops(ops: OpMemoryBuilder, config: Config) -> tuple[str, str]:
    """The embedded tokens, and the embedding matrix. The matrix is returned because, tied to the
    output head, its gradient from the head stays alive until the embedding's backward pass."""
    sizes, model = ops.sizes, config.model
    weight = sizes.vocab * model.hidden * sizes.element_size
    x, tied = ops.record((), {"x": sizes.hidden_bytes}, backward_workspace=weight, views={"weight": ("", weight)})
    if sizes.tp > 1:  # tokens whose rows other ranks hold are masked, then all ranks are summed
        (x,) = ops.record((x,), {"masked": sizes.hidden_bytes, "mask": sizes.tokens}, ("mask",))[:1]
        x = ops.reduce_output(x)
    if isinstance(model, LlamaConfig):
        return x, tied
    positions = model.max_positions * model.hidden * sizes.element_size
    hidden = sizes.local_hidden_bytes
    (x,) = ops.record((x,), {"sum": hidden}, (), hidden, positions, grad_aliases=("d sum",))
    if isinstance(model, GptConfig):
        return (ops.dropout(x, with_bias=False) if model.embedding_dropout else x), tied
    _, x = ops.layer_norm(x)
    assert isinstance(model, BertConfig)
    return (ops.dropout(x, with_bias=False) if model.hidden_dropout else x), tied


def output_head_ops(ops: OpMemoryBuilder, config: Config, x: str, tied: str | None) -> None:
    """The final norm (for BERT the head's transform) and the loss."""
    sizes, model = ops.sizes, config.model
    tokens = sizes.tokens
    if not isinstance(model, BertConfig):
        _, x = ops.rms_norm(x) if isinstance(model, LlamaConfig) else ops.layer_norm(x)
        x = ops.gather_tokens(x)
    else:
        tokens = sizes.samples * config.data.max_predictions
        masked = tokens * model.hidden * sizes.element_size
        if sizes.sequence_parallel:
            x = ops.record((x,), {"gathered": sizes.hidden_bytes})[0]
        x = ops.record((x,), {"masked": masked, "index": 8 * tokens}, ("index",))[0]
        x = ops.linear(x, tokens, model.hidden, model.hidden)
        x = ops.gelu(x, tokens, model.hidden)
        (x,) = ops.record((x,), {"norm": masked}, (x,))
        if sizes.tp > 1:
            (x,) = ops.record((x,), {}, backward_workspace=masked, views={"same": (x, masked)})
    loss_ops(ops, x, tied, tokens)


def loss_ops(ops: OpMemoryBuilder, x: str, tied: str | None, tokens: int) -> None:
    """The chunked cross entropy of `train/cross_entropy.py`, which computes gradients in the forward pass."""
    sizes, hidden, vocab = ops.sizes, ops.sizes.hidden, ops.sizes.vocab
    chunk = loss_chunk_tokens(tokens, vocab, sizes.device.logits_bytes)
    padding = -vocab % SIZE_MULTIPLE
    weight = (vocab + padding) * hidden
    logits = chunk * (vocab + padding) * sizes.element_size
    by_torch = not sizes.fused_kernels or sizes.tp > 1
    fp32_logits = chunk * vocab * 4 if by_torch and not sizes.is_fp32 else 0
    # Where a matrix product cannot add to an fp32 buffer, its result exists too.
    product = 0 if sizes.device.accumulating_gemm or sizes.is_fp32 else weight * sizes.element_size
    padded_weight = weight * sizes.element_size if padding else 0
    weight_grad_copy = 0 if sizes.is_fp32 or tied else vocab * hidden * sizes.element_size
    ops.layer = LOSS_LAYER
    ops.record(
        (x, tied) if tied else (x,),
        {"d_hidden": tokens * hidden * sizes.element_size, "d_weight": weight * 4},
        ("d_hidden", "d_weight"),
        logits + max(fp32_logits, product) + padded_weight,
        weight_grad_copy,
        grad_aliases=("d_hidden", "d_weight" if sizes.is_fp32 else None) if tied else ("d_hidden",),
    )


def stage_timeline(config: Config, sizes: RankSizes, stage: StageSpec) -> LivenessTimeline:
    """A micro batch through the forward and backward pass of a stage."""
    model, fp8_layers = config.model, fp8_layer_range(config)
    ops = OpMemoryBuilder(sizes, config.recompute)
    ops.layer = EMBEDDING_LAYER
    # Tensors that all blocks read: the cosines and sines of Llama, masks and positions of the others.
    shared = 8 * sizes.seq_len * sizes.head_size if model.family == "llama" else 16 * sizes.tokens
    ops.record((), {"shared": shared}, ("shared",))
    tied = None
    if stage.is_first:
        x, embedding = embedding_ops(ops, config)
        tied = embedding if stage.is_last and getattr(model, "tie_embeddings", True) else None
    else:  # the input stays in the receive buffer
        (x,) = ops.record((), {}, views={"received": ("", sizes.local_hidden_bytes)})
    for layer in stage.layers:
        ops.layer, ops.fp8 = layer, config.precision.fp8_backward if layer in fp8_layers else ""
        x = BLOCK_OPS[model.family](ops, model, x)
    ops.layer, ops.fp8 = HEAD_LAYER, ""
    if stage.is_last:
        output_head_ops(ops, config, x, tied)
    else:  # saved until its gradient arrives, which has a receive buffer
        ops.record((x,), {}, (x,), grad_aliases=("",))
    return LivenessTimeline(ops.recorded)
