"""BERT with its masked-token and next-sentence heads. B batch, T tokens, P masked places, D hidden."""

import torch.nn.functional as F
from torch import Tensor, nn

from trainyard.config.model_schema import BertConfig
from trainyard.models.base import TransformerStage
from trainyard.models.blueprint import Blueprint, ParamSpec
from trainyard.models.gpt import GptAttention, GptMLP, block_specs
from trainyard.models.hf_names import HfNameMap, HfTensor
from trainyard.models.layers import Batch, BiasGelu, Draw, LayerNorm, Linear, ModuleFactory, PackedSequences
from trainyard.models.output import ModelOutput
from trainyard.parallel.tensor_parallel import Axes


class BertBlock(nn.Module):
    """LayerNorm comes after the residual sum: a block goes on with what it gives. That comes in twice (and leaves so),
    for the residual and for the products, as its gradients are summed where it was made."""

    def __init__(self, c: BertConfig, make: ModuleFactory, name: str) -> None:
        super().__init__()
        self.attention = GptAttention(c, make, f"{name}.attention", causal=False)
        self.attention_norm = make.layer_norm(f"{name}.attention_norm", c.norm_eps, post_norm=True)
        self.mlp = GptMLP(c, make, f"{name}.mlp")
        self.mlp_norm = make.layer_norm(f"{name}.mlp_norm", c.norm_eps, post_norm=True)

    def forward(
        self, xx_BTD: tuple[Tensor, Tensor], draw: Draw, own: Draw, documents_BT: Tensor | PackedSequences | None
    ) -> tuple[Tensor, Tensor]:
        a, m = self.attention, self.mlp
        x_BTD, y_BTD = xx_BTD
        x_BTD, y_BTD = self.attention_norm(x_BTD, a(y_BTD, draw, documents_BT), a.output.bias, a.dropout, own)
        return self.mlp_norm(x_BTD, m(y_BTD), m.down.bias, m.dropout, own)


class BertHeads(nn.Module):
    """From the last hidden states to what the two losses need; the masked-token head at the masked places only."""

    bias: nn.Parameter

    def __init__(self, c: BertConfig, make: ModuleFactory) -> None:
        super().__init__()
        self.dense: Linear = make.linear("mlm.dense")
        self.activation = BiasGelu(c.activation, make.kernels)
        self.norm: LayerNorm = make.layer_norm("mlm.norm", c.norm_eps)
        self.bias = make.parameter("mlm.bias")

    def forward(self, x_BTD: Tensor, place_BP: Tensor) -> Tensor:
        index_BPD = place_BP.unsqueeze(-1).expand(-1, -1, x_BTD.shape[-1])
        return self.norm(self.activation(self.dense.matmul(x_BTD.gather(1, index_BPD)), self.dense.bias))[1]


class Bert(TransformerStage):
    def __init__(self, c: BertConfig, make: ModuleFactory, axes: Axes) -> None:
        super().__init__(axes, c.vocab)
        self.embedding = make.vocab_embedding("embedding")
        self.position = make.embedding("position")
        self.segment = make.embedding("segment")
        self.embedding_norm = make.layer_norm("embedding_norm", c.norm_eps)
        self.dropout = make.dropout(c.hidden_dropout, "embedding")
        self.layers = nn.ModuleDict({str(i): BertBlock(c, make, f"layers.{i}") for i in range(c.layers)})
        self.mlm = BertHeads(c, make)
        self.pooler = make.linear("pooler")
        self.nsp = make.linear("nsp")

    def block_inputs(self, batch: Batch) -> tuple[Draw, Draw, Tensor | PackedSequences | None]:
        """`mask` is 0 at padding, which is a document of its own. A packed batch has none."""
        packed = PackedSequences(batch["cu_seqlens"], self.max_seq_len) if "cu_seqlens" in batch else None
        return *self.draws(batch), packed or batch.get("attention_mask")

    def embed(self, batch: Batch, draw: Draw, own: Draw, documents_BT: Tensor | PackedSequences | None) -> Tensor:
        position, segment = (
            self.tp.local_tokens(x, self.tp_rank) for x in (self.token_positions(batch), batch["segment_ids"])
        )
        x_BTD = self.embedding(batch["tokens"]) + self.position(position) + self.segment(segment)
        return self.dropout(self.embedding_norm(x_BTD)[1], own)

    def pack_input(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        return x_BTD, x_BTD

    def unpack_output(self, x: tuple[Tensor, Tensor]) -> Tensor:
        return x[1]

    def head(self, x_BTD: Tensor, batch: Batch) -> ModelOutput:
        """`places` [B, P] are the masked positions. All ranks repeat the heads but for the product with the words."""
        x_BTD = self.tp.gather_tokens(x_BTD)
        first_BD = x_BTD[0].index_select(0, batch["cu_seqlens"][:-1]) if "cu_seqlens" in batch else x_BTD[:, 0]
        first_BD = F.tanh(self.pooler(first_BD))
        return self.make_output(self.mlm(x_BTD, batch["masked_positions"]), self.embedding, self.mlm.bias, self.nsp(first_BD))


def blueprint(c: BertConfig) -> Blueprint:
    D, V, std = c.hidden, c.vocab, c.init_std
    return Blueprint(
        (
            ParamSpec(
                "embedding.weight", (V, D), 0, pipeline_stage="both", init_std=std, weight_decay=True, padded=True
            ),
            ParamSpec("position.weight", (c.max_positions, D), pipeline_stage="first", init_std=std, weight_decay=True),
            ParamSpec("segment.weight", (c.segments, D), pipeline_stage="first", init_std=std, weight_decay=True),
            ParamSpec("embedding_norm.weight", (D,), pipeline_stage="first", init_value=1.0),
            ParamSpec("embedding_norm.bias", (D,), pipeline_stage="first"),
            *block_specs(c),
            ParamSpec(
                "mlm.dense.weight",
                (D, D),
                pipeline_stage="last",
                replicated_compute=True,
                init_std=std,
                weight_decay=True,
                flops_tokens="masked",
            ),
            ParamSpec("mlm.dense.bias", (D,), pipeline_stage="last", replicated_compute=True),
            ParamSpec("mlm.norm.weight", (D,), pipeline_stage="last", replicated_compute=True, init_value=1.0),
            ParamSpec("mlm.norm.bias", (D,), pipeline_stage="last", replicated_compute=True),
            ParamSpec("mlm.bias", (V,), 0, pipeline_stage="last", padded=True),
            ParamSpec(
                "pooler.weight",
                (D, D),
                pipeline_stage="last",
                replicated_compute=True,
                init_std=std,
                weight_decay=True,
                flops_tokens="first",
            ),
            ParamSpec("pooler.bias", (D,), pipeline_stage="last", replicated_compute=True),
            ParamSpec(
                "nsp.weight",
                (2, D),
                pipeline_stage="last",
                replicated_compute=True,
                init_std=std,
                weight_decay=True,
                flops_tokens="first",
            ),
            ParamSpec("nsp.bias", (2,), pipeline_stage="last", replicated_compute=True),
        ),
        c.layers,
        (V, D, "masked"),
    )


def hf_names(c: BertConfig) -> HfNameMap:
    ours, hf = "layers.*.", "bert.encoder.layer.*."
    table = {
        "embedding.weight": HfTensor("bert.embeddings.word_embeddings.weight"),
        "position.weight": HfTensor("bert.embeddings.position_embeddings.weight"),
        "segment.weight": HfTensor("bert.embeddings.token_type_embeddings.weight"),
        "mlm.bias": HfTensor("cls.predictions.bias"),
    }
    for kind in ("weight", "bias"):
        table |= {
            f"embedding_norm.{kind}": HfTensor(f"bert.embeddings.LayerNorm.{kind}"),
            f"{ours}attention.q.{kind}": HfTensor(f"{hf}attention.self.query.{kind}"),
            f"{ours}attention.k.{kind}": HfTensor(f"{hf}attention.self.key.{kind}"),
            f"{ours}attention.v.{kind}": HfTensor(f"{hf}attention.self.value.{kind}"),
            f"{ours}attention.output.{kind}": HfTensor(f"{hf}attention.output.dense.{kind}"),
            f"{ours}attention_norm.{kind}": HfTensor(f"{hf}attention.output.LayerNorm.{kind}"),
            f"{ours}mlp.up.{kind}": HfTensor(f"{hf}intermediate.dense.{kind}"),
            f"{ours}mlp.down.{kind}": HfTensor(f"{hf}output.dense.{kind}"),
            f"{ours}mlp_norm.{kind}": HfTensor(f"{hf}output.LayerNorm.{kind}"),
            f"pooler.{kind}": HfTensor(f"bert.pooler.dense.{kind}"),
            f"mlm.dense.{kind}": HfTensor(f"cls.predictions.transform.dense.{kind}"),
            f"mlm.norm.{kind}": HfTensor(f"cls.predictions.transform.LayerNorm.{kind}"),
            f"nsp.{kind}": HfTensor(f"cls.seq_relationship.{kind}"),
        }
    ties = {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }
    return HfNameMap(table, ties)
