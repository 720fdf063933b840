"""Llama 2, 3, 3.1 and DeepSeek-Coder. B batch, T tokens, D hidden, H heads, G kv heads, K head size, F ffn."""

import torch
from torch import Tensor, nn

from trainyard.config.model_schema import LlamaModel
from trainyard.models.base import Stack
from trainyard.models.blueprint import Blueprint, Part, Row
from trainyard.models.hf_names import Hf, Names
from trainyard.models.layers import Batch, Maker, SwiGLU, rope_frequencies
from trainyard.models.output import Output
from trainyard.parallel.layout import share
from trainyard.parallel.tensor_parallel import Axes


class Attention(nn.Module):
    part, keep_gathered = "attention", False

    def __init__(self, c: LlamaModel, make: Maker, name: str) -> None:
        super().__init__()
        self.tp, self.kernels = make.tp, make.kernels
        first, end = share(c.kv, self.tp.size, self.tp.rank)
        self.heads = (c.heads // self.tp.size, end - first)
        if c.fuse_qkv:
            self.qkv = make.linear(f"{name}.qkv")
        else:
            self.q, self.k, self.v = (make.linear(f"{name}.{part}") for part in "qkv")
        self.inputs = [self.qkv] if c.fuse_qkv else [self.q, self.k, self.v]
        self.core_attention = make.core_attention(c.heads, c.kv, True, 0.0, name)
        self.output = make.linear(f"{name}.output")

    def forward(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor, documents_BT: Tensor | None) -> Tensor:
        flat = self.tp.columns(x_BTD, *self.inputs, keep=self.keep_gathered)
        qkv = flat[0] if len(flat) == 1 else torch.cat(flat, -1)
        q_BHTK, k_BGTK, v_BGTK = self.kernels.rope(qkv, cos_TK, sin_TK, *self.heads)
        y_BHTK = self.core_attention(q_BHTK, k_BGTK, v_BGTK, documents_BT)
        return self.tp.scatter(self.output(y_BHTK.transpose(1, 2).flatten(2)))


class MLP(nn.Module):
    part, keep_gathered = "mlp", False

    def __init__(self, c: LlamaModel, make: Maker, name: str) -> None:
        super().__init__()
        self.tp = make.tp
        if c.fuse_gate_up:
            self.gate_up = make.linear(f"{name}.gate_up")
        else:
            self.gate, self.up = make.linear(f"{name}.gate"), make.linear(f"{name}.up")
        self.inputs = [self.gate_up] if c.fuse_gate_up else [self.gate, self.up]
        self.activation = SwiGLU(make.kernels)
        self.down = make.linear(f"{name}.down")

    def forward(self, x_BTD: Tensor) -> Tensor:
        flat = self.tp.columns(x_BTD, *self.inputs, keep=self.keep_gathered)
        gate_up = flat[0] if len(flat) == 1 else torch.cat(flat, -1)
        return self.tp.scatter(self.down(self.activation(gate_up)))


class Block(nn.Module):
    def __init__(self, c: LlamaModel, make: Maker, name: str) -> None:
        super().__init__()
        self.attention_norm = make.rms_norm(f"{name}.attention_norm", c.norm_eps)
        self.attention = Attention(c, make, f"{name}.attention")
        self.mlp_norm = make.rms_norm(f"{name}.mlp_norm", c.norm_eps)
        self.mlp = MLP(c, make, f"{name}.mlp")

    def forward(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor, documents_BT: Tensor | None) -> Tensor:
        x_BTD, y_BTD = self.attention_norm(x_BTD)
        x_BTD, y_BTD = self.mlp_norm(x_BTD, self.attention(y_BTD, cos_TK, sin_TK, documents_BT))
        return x_BTD + self.mlp(y_BTD)


class Llama(Stack):
    frequency: Tensor

    def __init__(self, c: LlamaModel, make: Maker, axes: Axes) -> None:
        super().__init__(axes, c.vocab)
        self.embedding = make.vocab_embedding("embedding")
        # Layers are named, not numbered: a pipeline stage deletes the others and keeps global names.
        self.layers = nn.ModuleDict({str(i): Block(c, make, f"layers.{i}") for i in range(c.layers)})
        self.norm = make.rms_norm("norm", c.norm_eps)
        self.output = self.embedding if c.tied else make.head("output")
        self.register_buffer("frequency", rope_frequencies(c), persistent=False)

    def shared(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
        position = batch["positions"][:, None] if "positions" in batch else self.places(batch)
        angle_TK = torch.cat([position.float().unsqueeze(-1) * self.frequency] * 2, -1)
        return angle_TK.cos(), angle_TK.sin(), batch.get("documents")

    def embed(self, batch: Batch, *shared: Tensor | None) -> Tensor:
        return self.embedding(batch["tokens"])

    def head(self, x_BTD: Tensor, batch: Batch) -> Output:
        return self.result(self.norm(x_BTD)[1], self.output, split=self.tp.sequence)


def blueprint(c: LlamaModel) -> Blueprint:
    D, V, q, kv = c.hidden, c.vocab, c.heads * c.head_size, c.kv * c.head_size
    std, out_std = c.init_std, c.init_std / (2 * c.layers) ** 0.5 if c.scaled_init else c.init_std
    layer = "layers.*."
    qkv = tuple(
        Part(f"{layer}attention.{name}.weight", size, units)
        for name, size, units in (("q", q, c.heads), ("k", kv, c.kv), ("v", kv, c.kv))
    )
    gate_up = tuple(Part(f"{layer}mlp.{name}.weight", c.ffn, c.ffn) for name in ("gate", "up"))

    def column(name: str, parts: tuple[Part, ...], fused: bool) -> list[Row]:
        """Rows of matrices split by output: one fused matrix, or one for each part."""
        groups = [(f"{layer}{name}.weight", parts)] if fused else [(part.name, (part,)) for part in parts]
        return [
            Row(own, (sum(part.size for part in group), D), 0, group, std=std, decay=True, sees="tokens")
            for own, group in groups
        ]

    head = Row("output.weight", (V, D), 0, place="last", std=std, decay=True, sees="tokens", padded=True)
    return Blueprint(
        (
            Row("embedding.weight", (V, D), 0, place="both" if c.tied else "first", std=std, decay=True, padded=True),
            Row(f"{layer}attention_norm.weight", (D,), fill=1.0),
            *column("attention.qkv", qkv, c.fuse_qkv),
            Row(f"{layer}attention.output.weight", (D, q), 1, std=out_std, decay=True, sees="tokens"),
            Row(f"{layer}mlp_norm.weight", (D,), fill=1.0),
            *column("mlp.gate_up", gate_up, c.fuse_gate_up),
            Row(f"{layer}mlp.down.weight", (D, c.ffn), 1, std=out_std, decay=True, sees="tokens"),
            Row("norm.weight", (D,), place="last", fill=1.0),
            *([] if c.tied else [head]),
        ),
        c.layers,
        (V, D, "tokens") if c.tied else None,
    )


def names(c: LlamaModel) -> Names:
    ours, hf = "layers.*.", "model.layers.*."
    table = {
        "embedding.weight": Hf("model.embed_tokens.weight"),
        f"{ours}attention_norm.weight": Hf(f"{hf}input_layernorm.weight"),
        **{f"{ours}attention.{x}.weight": Hf(f"{hf}self_attn.{x}_proj.weight") for x in "qkv"},
        f"{ours}attention.output.weight": Hf(f"{hf}self_attn.o_proj.weight"),
        f"{ours}mlp_norm.weight": Hf(f"{hf}post_attention_layernorm.weight"),
        **{f"{ours}mlp.{x}.weight": Hf(f"{hf}mlp.{x}_proj.weight") for x in ("gate", "up", "down")},
        "norm.weight": Hf("model.norm.weight"),
    }
    if c.tied:
        return Names(table, {"lm_head.weight": "model.embed_tokens.weight"})
    return Names({**table, "output.weight": Hf("lm_head.weight")})
