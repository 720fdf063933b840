"""GPT-2 and GPT-3. B batch, T tokens, D hidden, H heads, K head size."""

import torch
from torch import Tensor, nn

from trainyard.config.model import BertModel, GptModel
from trainyard.models.blueprint import Blueprint, Part, Row
from trainyard.models.layers import Activation, Batch, CoreAttention, Draw, Dropout, Maker, make_draw
from trainyard.models.names import Hf, Names
from trainyard.models.output import Output
from trainyard.parallel.axes import Axes


class Attention(nn.Module):
    part = "attention"  # BERT's too, which is not causal

    def __init__(self, c: GptModel | BertModel, make: Maker, axes: Axes, name: str, causal: bool) -> None:
        super().__init__()
        self.tp = axes.tp
        self.head_size = c.head_size
        self.fused = c.fuse_qkv
        if c.fuse_qkv:
            self.qkv = make.linear(f"{name}.qkv")
        else:
            self.q, self.k, self.v = (make.linear(f"{name}.{part}") for part in "qkv")
        first_head = axes.tp.rank * c.heads // axes.tp.size
        self.core_attention = CoreAttention(causal, c.attention_dropout, f"{name}.core", first_head)
        self.output = make.linear(f"{name}.output")
        self.dropout = Dropout(c.hidden_dropout, name)

    def forward(self, x_BTD: Tensor, draw: Draw, keep: Tensor | None = None) -> Tensor:
        x_BTD = self.tp.gather(x_BTD)
        flat = self.qkv(x_BTD).chunk(3, -1) if self.fused else (self.q(x_BTD), self.k(x_BTD), self.v(x_BTD))
        q_BHTK, k_BHTK, v_BHTK = (y.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for y in flat)
        y_BTD = self.core_attention(q_BHTK, k_BHTK, v_BHTK, keep, draw).transpose(1, 2).flatten(2)
        return self.dropout(self.output.add_bias(self.tp.scatter(self.output.product(y_BTD))), draw)


class MLP(nn.Module):
    part = "mlp"

    def __init__(self, c: GptModel | BertModel, make: Maker, axes: Axes, name: str) -> None:
        super().__init__()
        self.tp = axes.tp
        self.up = make.linear(f"{name}.up")
        self.activation = Activation(c.activation)
        self.down = make.linear(f"{name}.down")
        self.dropout = Dropout(c.hidden_dropout, name)

    def forward(self, x_BTD: Tensor, draw: Draw) -> Tensor:
        y_BTF = self.activation(self.up(self.tp.gather(x_BTD)))
        return self.dropout(self.down.add_bias(self.tp.scatter(self.down.product(y_BTF))), draw)


class Block(nn.Module):
    def __init__(self, c: GptModel, make: Maker, axes: Axes, name: str) -> None:
        super().__init__()
        self.attention_norm = make.layer_norm(f"{name}.attention_norm", c.norm_eps)
        self.attention = Attention(c, make, axes, f"{name}.attention", causal=True)
        self.mlp_norm = make.layer_norm(f"{name}.mlp_norm", c.norm_eps)
        self.mlp = MLP(c, make, axes, f"{name}.mlp")

    def forward(self, x_BTD: Tensor, draw: Draw) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), draw)
        return x_BTD + self.mlp(self.mlp_norm(x_BTD), draw)


class Gpt(nn.Module):
    def __init__(self, c: GptModel, make: Maker, axes: Axes) -> None:
        super().__init__()
        self.embedding = make.embedding("embedding")
        self.position = make.embedding("position")
        self.dropout = Dropout(c.embedding_dropout, "embedding")
        self.layers = nn.ModuleDict({str(i): Block(c, make, axes, f"layers.{i}") for i in range(c.layers)})
        self.norm = make.layer_norm("norm", c.norm_eps)
        self.output = self.embedding if c.tied else make.linear("output")

    def forward(self, batch: Batch) -> Output:
        tokens_BT = batch["tokens"]
        position_T = torch.arange(tokens_BT.shape[1], dtype=torch.int32, device=tokens_BT.device)
        draw = make_draw(batch, position_T)
        x_BTD = self.dropout(self.embedding(tokens_BT) + self.position(position_T), draw)
        for block in self.layers.values():
            x_BTD = block(x_BTD, draw)
        return Output(self.norm(x_BTD), self.output.weight)


def block_rows(c: GptModel | BertModel) -> tuple[Row, ...]:
    """The rows of one block, the same for GPT and BERT."""
    D, layer = c.hidden, "layers.*."
    std, out_std = c.init_std, c.init_std / (2 * c.layers) ** 0.5 if c.scaled_init else c.init_std

    def qkv(kind: str, shape: tuple[int, ...], std: float | None) -> list[Row]:
        parts = tuple(Part(f"{layer}attention.{name}.{kind}", D, c.heads) for name in "qkv")
        groups = [(f"{layer}attention.qkv.{kind}", parts)] if c.fuse_qkv else [(part.name, (part,)) for part in parts]
        return [
            Row(own, (len(group) * D, *shape), 0, group, std=std, decay=bool(std), sees="tokens" if std else "nothing")
            for own, group in groups
        ]

    def norm(name: str) -> tuple[Row, Row]:
        return Row(f"{layer}{name}.weight", (D,), fill=1.0), Row(f"{layer}{name}.bias", (D,))

    return (
        *norm("attention_norm"),
        *qkv("weight", (D,), std),
        *qkv("bias", (), None),
        Row(f"{layer}attention.output.weight", (D, D), 1, std=out_std, decay=True, sees="tokens"),
        Row(f"{layer}attention.output.bias", (D,)),
        *norm("mlp_norm"),
        Row(f"{layer}mlp.up.weight", (c.inner, D), 0, std=std, decay=True, sees="tokens"),
        Row(f"{layer}mlp.up.bias", (c.inner,), 0),
        Row(f"{layer}mlp.down.weight", (D, c.inner), 1, std=out_std, decay=True, sees="tokens"),
        Row(f"{layer}mlp.down.bias", (D,)),
    )


def blueprint(c: GptModel) -> Blueprint:
    D, V, std = c.hidden, c.vocab, c.init_std
    return Blueprint(
        (
            Row("embedding.weight", (V, D), 0, place="both" if c.tied else "first", std=std, decay=True),
            Row("position.weight", (c.max_positions, D), place="first", std=std, decay=True),
            *block_rows(c),
            Row("norm.weight", (D,), place="last", fill=1.0),
            Row("norm.bias", (D,), place="last"),
            *([] if c.tied else [Row("output.weight", (V, D), 0, place="last", std=std, decay=True, sees="tokens")]),
        ),
        c.layers,
        (V, D, "tokens") if c.tied else None,
    )


def names(c: GptModel) -> Names:
    ours, hf = "layers.*.", "transformer.h.*."
    table = {"embedding.weight": Hf("transformer.wte.weight"), "position.weight": Hf("transformer.wpe.weight")}
    for kind in ("weight", "bias"):
        transposed = kind == "weight"
        table |= {
            f"{ours}attention_norm.{kind}": Hf(f"{hf}ln_1.{kind}"),
            **{f"{ours}attention.{x}.{kind}": Hf(f"{hf}attn.c_attn.{kind}", transposed) for x in "qkv"},
            f"{ours}attention.output.{kind}": Hf(f"{hf}attn.c_proj.{kind}", transposed),
            f"{ours}mlp_norm.{kind}": Hf(f"{hf}ln_2.{kind}"),
            f"{ours}mlp.up.{kind}": Hf(f"{hf}mlp.c_fc.{kind}", transposed),
            f"{ours}mlp.down.{kind}": Hf(f"{hf}mlp.c_proj.{kind}", transposed),
            f"norm.{kind}": Hf(f"transformer.ln_f.{kind}"),
        }
    if c.tied:
        return Names(table, {"lm_head.weight": "transformer.wte.weight"})
    return Names({**table, "output.weight": Hf("lm_head.weight")})
