"""The forward pass of a pipeline stage as a row of operations: what `models/llama.py`, `gpt.py` and `bert.py` do, read
off them line by line."""

from collections.abc import Callable

from trainyard.config.model_schema import BertModel, GptModel, LlamaModel
from trainyard.config.schema import Config
from trainyard.kernels.fp8_linear import MULTIPLE
from trainyard.parallel.layout import Stage
from trainyard.plan.memory.liveness import Op, Tape
from trainyard.plan.memory.local_sizes import Run
from trainyard.plan.memory.op_memory import Writer
from trainyard.train.cross_entropy import LEAST

LOSS = -2
"""The block number of the loss."""


def llama_block(w: Writer, c: LlamaModel, x: str) -> str:
    r = w.run
    q, kv = r.heads * r.head_size, r.kv * r.head_size
    x, y = w.rms_norm(x)
    with w.part("attention"):
        flat = w.columns(y, q + 2 * kv) if c.fuse_qkv else w.columns(y, q, kv, kv)
        qkv = flat[0] if c.fuse_qkv else w.joined(flat)
        out = w.attention(*w.rope(qkv))
        y = w.scattered(w.linear(out, r.tokens, q, r.hidden))
    x, y = w.rms_norm(x, y)
    with w.part("mlp"):
        flat = w.columns(y, 2 * r.ffn) if c.fuse_gate_up else w.columns(y, r.ffn, r.ffn)
        gate_up = flat[0] if c.fuse_gate_up else w.joined(flat)
        y = w.scattered(w.linear(w.swiglu(gate_up), r.tokens, r.ffn, r.hidden))
    return w.plus(x, y)


def _attention(w: Writer, c: GptModel | BertModel, y: str) -> str:
    r = w.run
    q = r.heads * r.head_size
    with w.part("attention"):
        flat = w.columns(y, 3 * q) if c.fuse_qkv else w.columns(y, q, q, q)
        out = w.attention_of_qkv(flat, c.attention_dropout, r.packed)
        return w.scattered(w.linear(out, r.tokens, q, r.hidden))


def _mlp(w: Writer, y: str) -> str:
    r = w.run
    with w.part("mlp"):
        (up,) = w.columns(y, r.ffn)
        return w.scattered(w.linear(w.gelu(up, r.tokens, r.ffn), r.tokens, r.ffn, r.hidden))


def gpt_block(w: Writer, c: GptModel, x: str) -> str:
    x, y = w.layer_norm(x)
    x, y = w.layer_norm(x, _attention(w, c, y), c.hidden_dropout)
    return w.add_dropped(x, _mlp(w, y), c.hidden_dropout)


def bert_block(w: Writer, c: BertModel, x: str) -> str:
    x, y = w.layer_norm(x, _attention(w, c, x), c.hidden_dropout, after=True)
    _, y = w.layer_norm(x, _mlp(w, y), c.hidden_dropout, after=True)
    return y


BLOCKS: dict[str, Callable[..., str]] = {"llama": llama_block, "gpt": gpt_block, "bert": bert_block}


def embed(w: Writer, config: Config, words: int) -> tuple[str, str]:
    """`words`: rows of the embedding on this rank. Its gradient is as large as it is. Gives the embedding too: where
    it is the head as well, its gradient from there waits for the one from here."""
    r, c = w.run, config.model
    weight = words * c.hidden * r.element
    x, tied = w.add((), {"x": w.whole}, back=weight, views={"weight": ("", weight)})
    if r.tp > 1:  # words of other ranks are zeros, and then summed
        (x,) = w.add((x,), {"here": w.whole, "which": r.tokens}, ("which",))[:1]
        x = w.scattered(x)
    if isinstance(c, LlamaModel):
        return x, tied
    tables = c.max_positions * c.hidden * r.element
    (x,) = w.add((x,), {"sum": w.between}, (), w.between, tables, share=("d sum",))
    if isinstance(c, GptModel):
        return (w.dropped(x, c.embedding_dropout, biased=False) if c.embedding_dropout else x), tied
    _, x = w.layer_norm(x)
    return (w.dropped(x, c.hidden_dropout, biased=False) if c.hidden_dropout else x), tied


def head(w: Writer, config: Config, x: str, tied: str | None, words: int, chunk_bytes: int) -> None:
    """The last norm (or BERT's heads) and the loss."""
    r, c = w.run, config.model
    tokens = r.tokens
    if isinstance(c, LlamaModel):
        _, x = w.rms_norm(x)
        x = w.gathered(x)
    elif isinstance(c, GptModel):
        _, x = w.layer_norm(x)
        x = w.gathered(x)
    else:
        tokens = r.samples * config.data.predictions
        masked = tokens * c.hidden * r.element
        if r.sequence:
            x = w.add((x,), {"whole": w.whole})[0]
        x = w.add((x,), {"masked": masked, "index": 8 * tokens}, ("index",))[0]
        x = w.linear(x, tokens, c.hidden, c.hidden)
        x = w.gelu(x, tokens, c.hidden)
        (x,) = w.add((x,), {"norm": masked}, (x,))
        if r.tp > 1:
            (x,) = w.add((x,), {}, back=masked, views={"on": (x, masked)})
    loss(w, x, tied, tokens, words, chunk_bytes)


def loss(w: Writer, x: str, tied: str | None, tokens: int, words: int, chunk_bytes: int) -> None:
    """As train/cross_entropy.py: gradients are made in the forward pass, from a chunk of logits at a time."""
    r, hidden = w.run, w.run.hidden
    most = max(LEAST, chunk_bytes // (4 * words))
    size = -(-tokens // -(-tokens // most))
    gap = -words % MULTIPLE
    logits = size * (words + gap) * r.element
    weight = (words + gap) * hidden
    plain = not r.fused or r.tp > 1
    softmax = size * words * 4 if plain and not r.wide else 0  # one fp32 copy
    product = weight * r.element if not (r.adds or r.wide) else 0  # where a product cannot add to an fp32 sum
    w.block = LOSS
    copy = 0 if r.wide else words * hidden * r.element
    w.add(
        (x, tied) if tied else (x,),
        {"d_hidden": tokens * hidden * r.element, "d_weight": weight * 4},
        ("d_hidden", "d_weight"),
        logits + max(softmax, product) + (weight * r.element if gap else 0),
        0 if tied else copy,
        share=("d_hidden", "d_weight" if r.wide else None) if tied else ("d_hidden",),
    )


def tape(config: Config, run: Run, stage: Stage, words: int, chunk_bytes: int, fp8: range) -> Tape:
    """A micro batch through a stage and back. `fp8`: blocks that multiply in it."""
    recompute = config.recompute
    parts: frozenset[str] = frozenset(
        {"core_attention"} if recompute.kind == "attention" else recompute.parts if recompute.kind == "parts" else ()
    )
    w = Writer(run)
    w.keep_gathered = frozenset({"attention", "mlp"} if recompute.kind == "full" else parts)
    shared = 8 * run.length * run.head_size if config.model.family == "llama" else 16 * run.tokens
    w.add((), {"shared": shared}, ("shared",))
    tied = None
    if stage.first:
        x, own = embed(w, config, words)
        tied = own if stage.last and getattr(config.model, "tied", True) else None
    else:  # lies where it was received
        (x,) = w.add((), {}, views={"received": ("", w.between)})
    for number in stage.layers:
        w.block, w.fp8 = number, run.fp8 if number in fp8 else ""
        x = BLOCKS[config.model.family](w, config.model, x)
    w.block, w.fp8 = config.model.layers, ""
    if stage.last:
        head(w, config, x, tied, words, chunk_bytes)
    else:  # kept until its gradient has come, which has a place already
        w.add((x,), {}, (x,), share=("",))

    def again(op: Op) -> object:
        if not 0 <= op.block < config.model.layers:
            return None
        if recompute.kind == "full":
            return op.block
        return next(((op.block, *op.parts[: at + 1]) for at, part in enumerate(op.parts) if part in parts), None)

    return Tape(w.ops, again)
