"""BERT with its masked-token and next-sentence heads. B batch, T tokens, P masked positions, D hidden."""

import torch.nn.functional as F
from torch import Tensor, nn

from trainyard.core.batch import Batch
from trainyard.core.counter_rng import RowSeeds
from trainyard.families.builtin.bert import BertConfig
from trainyard.models.base import TransformerStage
from trainyard.models.gpt import GptAttention, GptMLP
from trainyard.models.layers import BiasActivation, PackedSequences
from trainyard.models.module_factory import ModuleFactory
from trainyard.models.output import ModelOutput

Documents = Tensor | PackedSequences | None


class BertBlock(nn.Module):
    """A post-norm block: LayerNorm follows each residual sum. Blocks exchange the normed tensor twice, as (residual,
    normed), because the norm's backward kernel adds the gradients of both uses."""

    def __init__(self, c: BertConfig, make: ModuleFactory, name: str) -> None:
        super().__init__()
        self.attention = GptAttention(c, make, f"{name}.attention", causal=False)
        self.attention_norm = make.layer_norm(f"{name}.attention_norm", c.norm_eps, post_norm=True)
        self.mlp = GptMLP(c, make, f"{name}.mlp")
        self.mlp_norm = make.layer_norm(f"{name}.mlp_norm", c.norm_eps, post_norm=True)

    def forward(
        self, xy_BTD: tuple[Tensor, Tensor], seeds: RowSeeds, local_seeds: RowSeeds, documents_BT: Documents
    ) -> tuple[Tensor, Tensor]:
        a, m = self.attention, self.mlp
        x_BTD, y_BTD = xy_BTD
        x_BTD, y_BTD = self.attention_norm(x_BTD, a(y_BTD, seeds, documents_BT), a.output.bias, a.dropout, local_seeds)
        return self.mlp_norm(x_BTD, m(y_BTD), m.down.bias, m.dropout, local_seeds)


class BertMlmHead(nn.Module):
    """The masked-token head up to its output projection, at the masked positions only."""

    def __init__(self, c: BertConfig, make: ModuleFactory) -> None:
        super().__init__()
        self.dense = make.linear("mlm.dense")
        self.activation = BiasActivation(c.activation, make.kernels)
        self.norm = make.layer_norm("mlm.norm", c.norm_eps)
        self.bias = make.parameter("mlm.bias")

    def forward(self, x_BTD: Tensor, position_BP: Tensor) -> Tensor:
        index_BPD = position_BP.unsqueeze(-1).expand(-1, -1, x_BTD.shape[-1])
        return self.norm(self.activation(self.dense.matmul(x_BTD.gather(1, index_BPD)), self.dense.bias))[1]


class Bert(TransformerStage):
    def __init__(self, c: BertConfig, make: ModuleFactory) -> None:
        super().__init__(make, c.vocab)
        self.embedding = make.vocab_embedding("embedding")
        self.position = make.embedding("position")
        self.segment = make.embedding("segment")
        self.embedding_norm = make.layer_norm("embedding_norm", c.norm_eps)
        self.dropout = make.dropout(c.hidden_dropout, "embedding")
        self.layers = make.blocks(lambda name: BertBlock(c, make, name))
        self.mlm = BertMlmHead(c, make)
        self.pooler, self.nsp = make.linear("pooler"), make.linear("nsp")

    def block_inputs(self, batch: Batch) -> tuple[RowSeeds, RowSeeds, Documents]:
        """`attention_mask` is 0 at padding, which acts as a document of its own. A packed batch has no padding."""
        packed = PackedSequences(batch["cu_seqlens"], self.max_seq_len) if "cu_seqlens" in batch else None
        return *self.dropout_seeds(batch), packed or batch.get("attention_mask")

    def embed(self, batch: Batch, seeds: RowSeeds, local_seeds: RowSeeds, documents_BT: Documents) -> Tensor:
        ids = self.token_positions(batch), batch["segment_ids"]
        position, segment = (self.tp.local_tokens(x, self.tp_rank) for x in ids)
        x_BTD = self.embed_tokens(batch) + self.position(position) + self.segment(segment)
        return self.dropout(self.embedding_norm(x_BTD)[1], local_seeds)

    def pack_input(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        return x_BTD, x_BTD

    def unpack_output(self, x: tuple[Tensor, Tensor]) -> Tensor:
        return x[1]

    def head(self, x_BTD: Tensor, batch: Batch) -> ModelOutput:
        """All tensor-parallel ranks repeat the heads, except for the matmul with the vocabulary."""
        x_BTD = self.tp.gather_tokens(x_BTD, self.tp_rank)
        first_BD = x_BTD[0].index_select(0, batch["cu_seqlens"][:-1]) if "cu_seqlens" in batch else x_BTD[:, 0]
        next_sentence = self.nsp(F.tanh(self.pooler(first_BD)))
        hidden_BPD = self.mlm(x_BTD, batch["masked_positions"])
        return self.make_output(hidden_BPD, self.embedding, self.mlm.bias, next_sentence)
