"""BERT with its masked-token and next-sentence heads. B batch, T tokens, P masked places, D hidden."""

import torch.nn.functional as F
from torch import Tensor, nn

from trainyard.config.model_schema import BertModel
from trainyard.models.base import Stack
from trainyard.models.blueprint import Blueprint, Row
from trainyard.models.gpt import MLP, Attention, block_rows
from trainyard.models.hf_names import Hf, Names
from trainyard.models.layers import Activation, Batch, Draw, LayerNorm, Linear, Maker, Packed
from trainyard.models.output import Output
from trainyard.parallel.tensor_parallel import Axes


class Block(nn.Module):
    """LayerNorm comes after the residual sum: a block goes on with what it gives. That comes in twice (and leaves so),
    for the residual and for the products, as its gradients are summed where it was made."""

    def __init__(self, c: BertModel, make: Maker, name: str) -> None:
        super().__init__()
        self.attention = Attention(c, make, f"{name}.attention", causal=False)
        self.attention_norm = make.layer_norm(f"{name}.attention_norm", c.norm_eps, after=True)
        self.mlp = MLP(c, make, f"{name}.mlp")
        self.mlp_norm = make.layer_norm(f"{name}.mlp_norm", c.norm_eps, after=True)

    def forward(
        self, xx_BTD: tuple[Tensor, Tensor], draw: Draw, own: Draw, documents_BT: Tensor | Packed | None
    ) -> tuple[Tensor, Tensor]:
        a, m = self.attention, self.mlp
        x_BTD, y_BTD = xx_BTD
        x_BTD, y_BTD = self.attention_norm(x_BTD, a(y_BTD, draw, documents_BT), a.output.bias, a.dropout, own)
        return self.mlp_norm(x_BTD, m(y_BTD), m.down.bias, m.dropout, own)


class Heads(nn.Module):
    """From the last hidden states to what the two losses need; the masked-token head at the masked places only."""

    bias: nn.Parameter

    def __init__(self, c: BertModel, make: Maker) -> None:
        super().__init__()
        self.dense: Linear = make.linear("mlm.dense")
        self.activation = Activation(c.activation, make.kernels)
        self.norm: LayerNorm = make.layer_norm("mlm.norm", c.norm_eps)
        self.bias = make.parameter("mlm.bias")

    def forward(self, x_BTD: Tensor, place_BP: Tensor) -> Tensor:
        index_BPD = place_BP.unsqueeze(-1).expand(-1, -1, x_BTD.shape[-1])
        return self.norm(self.activation(self.dense.product(x_BTD.gather(1, index_BPD)), self.dense.bias))[1]


class Bert(Stack):
    def __init__(self, c: BertModel, make: Maker, axes: Axes) -> None:
        super().__init__(axes, c.vocab)
        self.embedding = make.vocab_embedding("embedding")
        self.position = make.embedding("position")
        self.segment = make.embedding("segment")
        self.embedding_norm = make.layer_norm("embedding_norm", c.norm_eps)
        self.dropout = make.dropout(c.hidden_dropout, "embedding")
        self.layers = nn.ModuleDict({str(i): Block(c, make, f"layers.{i}") for i in range(c.layers)})
        self.mlm = Heads(c, make)
        self.pooler = make.linear("pooler")
        self.nsp = make.linear("nsp")

    def shared(self, batch: Batch) -> tuple[Draw, Draw, Tensor | Packed | None]:
        """`mask` is 0 at padding, which is a document of its own. A packed batch has none."""
        packed = Packed(batch["starts"], self.longest) if "starts" in batch else None
        return *self.draws(batch), packed or batch.get("mask")

    def embed(self, batch: Batch, draw: Draw, own: Draw, documents_BT: Tensor | Packed | None) -> Tensor:
        position, segment = (self.tp.part(x, self.tp_rank) for x in (self.places(batch), batch["segments"]))
        x_BTD = self.embedding(batch["tokens"]) + self.position(position) + self.segment(segment)
        return self.dropout(self.embedding_norm(x_BTD)[1], own)

    def enter(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        return x_BTD, x_BTD

    def leave(self, x: tuple[Tensor, Tensor]) -> Tensor:
        return x[1]

    def head(self, x_BTD: Tensor, batch: Batch) -> Output:
        """`places` [B, P] are the masked positions. All ranks repeat the heads but for the product with the words."""
        x_BTD = self.tp.whole(x_BTD)
        first_BD = x_BTD[0].index_select(0, batch["starts"][:-1]) if "starts" in batch else x_BTD[:, 0]
        first_BD = F.tanh(self.pooler(first_BD))
        return self.result(self.mlm(x_BTD, batch["places"]), self.embedding, self.mlm.bias, self.nsp(first_BD))


def blueprint(c: BertModel) -> Blueprint:
    D, V, std = c.hidden, c.vocab, c.init_std
    return Blueprint(
        (
            Row("embedding.weight", (V, D), 0, place="both", std=std, decay=True, padded=True),
            Row("position.weight", (c.max_positions, D), place="first", std=std, decay=True),
            Row("segment.weight", (c.segments, D), place="first", std=std, decay=True),
            Row("embedding_norm.weight", (D,), place="first", fill=1.0),
            Row("embedding_norm.bias", (D,), place="first"),
            *block_rows(c),
            Row("mlm.dense.weight", (D, D), place="last", repeated=True, std=std, decay=True, sees="masked"),
            Row("mlm.dense.bias", (D,), place="last", repeated=True),
            Row("mlm.norm.weight", (D,), place="last", repeated=True, fill=1.0),
            Row("mlm.norm.bias", (D,), place="last", repeated=True),
            Row("mlm.bias", (V,), 0, place="last", padded=True),
            Row("pooler.weight", (D, D), place="last", repeated=True, std=std, decay=True, sees="first"),
            Row("pooler.bias", (D,), place="last", repeated=True),
            Row("nsp.weight", (2, D), place="last", repeated=True, std=std, decay=True, sees="first"),
            Row("nsp.bias", (2,), place="last", repeated=True),
        ),
        c.layers,
        (V, D, "masked"),
    )


def names(c: BertModel) -> Names:
    ours, hf = "layers.*.", "bert.encoder.layer.*."
    table = {
        "embedding.weight": Hf("bert.embeddings.word_embeddings.weight"),
        "position.weight": Hf("bert.embeddings.position_embeddings.weight"),
        "segment.weight": Hf("bert.embeddings.token_type_embeddings.weight"),
        "mlm.bias": Hf("cls.predictions.bias"),
    }
    for kind in ("weight", "bias"):
        table |= {
            f"embedding_norm.{kind}": Hf(f"bert.embeddings.LayerNorm.{kind}"),
            f"{ours}attention.q.{kind}": Hf(f"{hf}attention.self.query.{kind}"),
            f"{ours}attention.k.{kind}": Hf(f"{hf}attention.self.key.{kind}"),
            f"{ours}attention.v.{kind}": Hf(f"{hf}attention.self.value.{kind}"),
            f"{ours}attention.output.{kind}": Hf(f"{hf}attention.output.dense.{kind}"),
            f"{ours}attention_norm.{kind}": Hf(f"{hf}attention.output.LayerNorm.{kind}"),
            f"{ours}mlp.up.{kind}": Hf(f"{hf}intermediate.dense.{kind}"),
            f"{ours}mlp.down.{kind}": Hf(f"{hf}output.dense.{kind}"),
            f"{ours}mlp_norm.{kind}": Hf(f"{hf}output.LayerNorm.{kind}"),
            f"pooler.{kind}": Hf(f"bert.pooler.dense.{kind}"),
            f"mlm.dense.{kind}": Hf(f"cls.predictions.transform.dense.{kind}"),
            f"mlm.norm.{kind}": Hf(f"cls.predictions.transform.LayerNorm.{kind}"),
            f"nsp.{kind}": Hf(f"cls.seq_relationship.{kind}"),
        }
    ties = {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }
    return Names(table, ties)
