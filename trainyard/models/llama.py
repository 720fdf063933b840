"""Llama 2, 3, 3.1 and DeepSeek-Coder. B batch, T tokens, D hidden, H heads, G kv heads, K head size, F ffn."""

import torch
from torch import Tensor, nn

from trainyard.config.model import LlamaModel
from trainyard.models.blueprint import Blueprint, Part, Row
from trainyard.models.layers import Batch, CoreAttention, Maker, SwiGLU, rope_frequencies, rotate
from trainyard.models.names import Hf, Names
from trainyard.models.output import Output
from trainyard.parallel.axes import Axes


class Attention(nn.Module):
    part = "attention"

    def __init__(self, c: LlamaModel, make: Maker, axes: Axes, name: str) -> None:
        super().__init__()
        self.tp = axes.tp
        self.head_size = c.head_size
        self.sizes = [c.heads // axes.tp.size * c.head_size] + [max(c.kv // axes.tp.size, 1) * c.head_size] * 2
        if c.fuse_qkv:
            self.qkv = make.linear(f"{name}.qkv")
        else:
            self.q, self.k, self.v = (make.linear(f"{name}.{part}") for part in "qkv")
        self.core_attention = CoreAttention(True, 0.0, name, axes.tp.rank * c.heads // axes.tp.size)
        self.output = make.linear(f"{name}.output")
        self.fused = c.fuse_qkv

    def forward(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        x_BTD = self.tp.gather(x_BTD)
        flat = self.qkv(x_BTD).split(self.sizes, -1) if self.fused else (self.q(x_BTD), self.k(x_BTD), self.v(x_BTD))
        q_BHTK, k_BGTK, v_BGTK = (y.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for y in flat)
        q_BHTK, k_BGTK = rotate(q_BHTK, cos_TK, sin_TK), rotate(k_BGTK, cos_TK, sin_TK)
        y_BHTK = self.core_attention(q_BHTK, k_BGTK, v_BGTK)
        return self.tp.scatter(self.output(y_BHTK.transpose(1, 2).flatten(2)))


class MLP(nn.Module):
    part = "mlp"

    def __init__(self, c: LlamaModel, make: Maker, axes: Axes, name: str) -> None:
        super().__init__()
        self.tp = axes.tp
        if c.fuse_gate_up:
            self.gate_up = make.linear(f"{name}.gate_up")
        else:
            self.gate, self.up = make.linear(f"{name}.gate"), make.linear(f"{name}.up")
        self.activation = SwiGLU()
        self.down = make.linear(f"{name}.down")
        self.fused = c.fuse_gate_up

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = self.tp.gather(x_BTD)
        gate_BTF, up_BTF = self.gate_up(x_BTD).chunk(2, -1) if self.fused else (self.gate(x_BTD), self.up(x_BTD))
        return self.tp.scatter(self.down(self.activation(gate_BTF, up_BTF)))


class Block(nn.Module):
    def __init__(self, c: LlamaModel, make: Maker, axes: Axes, name: str) -> None:
        super().__init__()
        self.attention_norm = make.rms_norm(f"{name}.attention_norm", c.norm_eps)
        self.attention = Attention(c, make, axes, f"{name}.attention")
        self.mlp_norm = make.rms_norm(f"{name}.mlp_norm", c.norm_eps)
        self.mlp = MLP(c, make, axes, f"{name}.mlp")

    def forward(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), cos_TK, sin_TK)
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class Llama(nn.Module):
    frequency: Tensor

    def __init__(self, c: LlamaModel, make: Maker, axes: Axes) -> None:
        super().__init__()
        self.embedding = make.embedding("embedding")
        # Layers are named, not numbered: a pipeline stage deletes the others and keeps global names.
        self.layers = nn.ModuleDict({str(i): Block(c, make, axes, f"layers.{i}") for i in range(c.layers)})
        self.norm = make.rms_norm("norm", c.norm_eps)
        self.output = self.embedding if c.tied else make.linear("output")
        self.register_buffer("frequency", rope_frequencies(c), persistent=False)

    def forward(self, batch: Batch) -> Output:
        tokens_BT = batch["tokens"]
        position_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device).float()
        angle_TK = torch.outer(position_T, self.frequency).repeat(1, 2)
        cos_TK, sin_TK = angle_TK.cos(), angle_TK.sin()
        x_BTD = self.embedding(tokens_BT)
        for block in self.layers.values():
            x_BTD = block(x_BTD, cos_TK, sin_TK)
        return Output(self.norm(x_BTD), self.output.weight)


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

    return Blueprint(
        (
            Row("embedding.weight", (V, D), 0, place="both" if c.tied else "first", std=std, decay=True),
            Row(f"{layer}attention_norm.weight", (D,), fill=1.0),
            *column("attention.qkv", qkv, c.fuse_qkv),
            Row(f"{layer}attention.output.weight", (D, q), 1, std=out_std, decay=True, sees="tokens"),
            Row(f"{layer}mlp_norm.weight", (D,), fill=1.0),
            *column("mlp.gate_up", gate_up, c.fuse_gate_up),
            Row(f"{layer}mlp.down.weight", (D, c.ffn), 1, std=out_std, decay=True, sees="tokens"),
            Row("norm.weight", (D,), place="last", fill=1.0),
            *([] if c.tied else [Row("output.weight", (V, D), 0, place="last", std=std, decay=True, sees="tokens")]),
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
