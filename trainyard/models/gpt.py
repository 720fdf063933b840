"""GPT-2 and GPT-3. B batch, T tokens, D hidden, H heads, K head size."""

from torch import Tensor, nn

from trainyard.config.model_schema import BertModel, GptModel
from trainyard.models.base import Stack
from trainyard.models.blueprint import Blueprint, Part, Row
from trainyard.models.hf_names import Hf, Names
from trainyard.models.layers import Activation, Batch, Draw, Maker, Packed
from trainyard.models.output import Output
from trainyard.parallel.tensor_parallel import Axes


class Attention(nn.Module):
    part, keep_gathered = "attention", False  # BERT's too, which is not causal

    def __init__(self, c: GptModel | BertModel, make: Maker, name: str, causal: bool) -> None:
        super().__init__()
        self.tp, self.head_size = make.tp, c.head_size
        if c.fuse_qkv:
            self.qkv = make.linear(f"{name}.qkv")
        else:
            self.q, self.k, self.v = (make.linear(f"{name}.{part}") for part in "qkv")
        self.inputs = [self.qkv] if c.fuse_qkv else [self.q, self.k, self.v]
        self.core_attention = make.core_attention(c.heads, c.heads, causal, c.attention_dropout, f"{name}.core")
        self.output = make.linear(f"{name}.output")
        self.dropout = make.dropout(c.hidden_dropout, name)

    def forward(self, x_BTD: Tensor, draw: Draw, documents_BT: Tensor | Packed | None) -> Tensor:
        flat = self.tp.columns(x_BTD, *self.inputs, keep=self.keep_gathered)
        y_BTD = self.core_attention.of_qkv(flat, self.head_size, documents_BT, draw)
        return self.tp.scatter(self.output.product(y_BTD))


class MLP(nn.Module):
    part, keep_gathered = "mlp", False

    def __init__(self, c: GptModel | BertModel, make: Maker, name: str) -> None:
        super().__init__()
        self.tp = make.tp
        self.up = make.linear(f"{name}.up")
        self.activation = Activation(c.activation, make.kernels)
        self.down = make.linear(f"{name}.down")
        self.dropout = make.dropout(c.hidden_dropout, name)

    def forward(self, x_BTD: Tensor) -> Tensor:
        (y_BTF,) = self.tp.columns(x_BTD, self.up, keep=self.keep_gathered, bias=False)
        return self.tp.scatter(self.down.product(self.activation(y_BTF, self.up.bias)))


class Block(nn.Module):
    def __init__(self, c: GptModel, make: Maker, name: str) -> None:
        super().__init__()
        self.attention_norm = make.layer_norm(f"{name}.attention_norm", c.norm_eps)
        self.attention = Attention(c, make, f"{name}.attention", causal=True)
        self.mlp_norm = make.layer_norm(f"{name}.mlp_norm", c.norm_eps)
        self.mlp = MLP(c, make, f"{name}.mlp")

    def forward(self, x_BTD: Tensor, draw: Draw, own: Draw, documents_BT: Tensor | None) -> Tensor:
        a, m = self.attention, self.mlp
        x_BTD, y_BTD = self.attention_norm(x_BTD)
        x_BTD, y_BTD = self.mlp_norm(x_BTD, a(y_BTD, draw, documents_BT), a.output.bias, a.dropout, own)
        return m.dropout.add(x_BTD, m(y_BTD), m.down.bias, own)


class Gpt(Stack):
    def __init__(self, c: GptModel, make: Maker, axes: Axes) -> None:
        super().__init__(axes, c.vocab)
        self.embedding = make.vocab_embedding("embedding")
        self.position = make.embedding("position")
        self.dropout = make.dropout(c.embedding_dropout, "embedding")
        self.layers = nn.ModuleDict({str(i): Block(c, make, f"layers.{i}") for i in range(c.layers)})
        self.norm = make.layer_norm("norm", c.norm_eps)
        self.output = self.embedding if c.tied else make.head("output")

    def shared(self, batch: Batch) -> tuple[Draw, Draw, Tensor | None]:
        return *self.draws(batch), batch.get("documents")

    def embed(self, batch: Batch, draw: Draw, own: Draw, documents_BT: Tensor | None) -> Tensor:
        position = self.tp.part(batch["positions"] if "positions" in batch else self.places(batch), self.tp_rank)
        return self.dropout(self.embedding(batch["tokens"]) + self.position(position), own)

    def head(self, x_BTD: Tensor, batch: Batch) -> Output:
        return self.result(self.norm(x_BTD)[1], self.output, split=self.tp.sequence)


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
    head = Row("output.weight", (V, D), 0, place="last", std=std, decay=True, sees="tokens", padded=True)
    return Blueprint(
        (
            Row("embedding.weight", (V, D), 0, place="both" if c.tied else "first", std=std, decay=True, padded=True),
            Row("position.weight", (c.max_positions, D), place="first", std=std, decay=True),
            *block_rows(c),
            Row("norm.weight", (D,), place="last", fill=1.0),
            Row("norm.bias", (D,), place="last"),
            *([] if c.tied else [head]),
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
