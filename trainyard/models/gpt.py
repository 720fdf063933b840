"""GPT-2 and GPT-3. B batch, T tokens, D hidden, F ffn."""

from torch import Tensor, nn

from trainyard.core.batch import Batch
from trainyard.core.counter_rng import RowSeeds
from trainyard.families.builtin.bert import BertConfig
from trainyard.families.builtin.gpt import GptConfig
from trainyard.models.base import TransformerStage
from trainyard.models.layers import BiasActivation, PackedSequences
from trainyard.models.module_factory import ModuleFactory
from trainyard.models.output import ModelOutput
from trainyard.parallel.recompute import Recomputable


class GptAttention(Recomputable):  # also BERT's, which is not causal
    recompute_name = "attention"

    def __init__(self, c: GptConfig | BertConfig, make: ModuleFactory, name: str, causal: bool) -> None:
        super().__init__()
        self.tp, self.head_size = make.tp, c.head_size
        self.qkv_linears = make.linears(self, name, ["qkv"] if c.fuse_qkv else ["q", "k", "v"])
        self.core_attention = make.core_attention(c.heads, c.heads, causal, c.attention_dropout, f"{name}.core")
        self.output = make.linear(f"{name}.output")
        self.dropout = make.dropout(c.hidden_dropout, name)

    def forward(self, x_BTD: Tensor, seeds: RowSeeds, documents_BT: Tensor | PackedSequences | None) -> Tensor:
        projections = self.tp.column_parallel(x_BTD, *self.qkv_linears, keep_gathered=self.keep_gathered)
        y_BTD = self.core_attention.forward_qkv(projections, self.head_size, documents_BT, seeds)
        return self.tp.reduce_output(self.output.matmul(y_BTD))


class GptMLP(Recomputable):
    recompute_name = "mlp"

    def __init__(self, c: GptConfig | BertConfig, make: ModuleFactory, name: str) -> None:
        super().__init__()
        self.tp = make.tp
        self.up, self.down = make.linear(f"{name}.up"), make.linear(f"{name}.down")
        self.activation = BiasActivation(c.activation, make.kernels)
        self.dropout = make.dropout(c.hidden_dropout, name)

    def forward(self, x_BTD: Tensor) -> Tensor:
        (y_BTF,) = self.tp.column_parallel(x_BTD, self.up, keep_gathered=self.keep_gathered, add_bias=False)
        return self.tp.reduce_output(self.down.matmul(self.activation(y_BTF, self.up.bias)))


class GptBlock(nn.Module):
    def __init__(self, c: GptConfig, make: ModuleFactory, name: str) -> None:
        super().__init__()
        self.attention_norm = make.layer_norm(f"{name}.attention_norm", c.norm_eps)
        self.attention = GptAttention(c, make, f"{name}.attention", causal=True)
        self.mlp_norm = make.layer_norm(f"{name}.mlp_norm", c.norm_eps)
        self.mlp = GptMLP(c, make, f"{name}.mlp")

    def forward(self, x_BTD: Tensor, seeds: RowSeeds, local_seeds: RowSeeds, documents_BT: Tensor | None) -> Tensor:
        a, m = self.attention, self.mlp
        x_BTD, y_BTD = self.attention_norm(x_BTD)
        x_BTD, y_BTD = self.mlp_norm(x_BTD, a(y_BTD, seeds, documents_BT), a.output.bias, a.dropout, local_seeds)
        return m.dropout.add_to_residual(x_BTD, m(y_BTD), m.down.bias, local_seeds)


class Gpt(TransformerStage):
    def __init__(self, c: GptConfig, make: ModuleFactory) -> None:
        super().__init__(make, c.vocab)
        self.embedding = make.vocab_embedding("embedding")
        self.position, self.position_offset = make.embedding("position"), c.position_offset
        self.dropout = make.dropout(c.embedding_dropout, "embedding")
        self.layers = make.blocks(lambda name: GptBlock(c, make, name))
        self.norm = make.layer_norm("norm", c.norm_eps)
        self.output = make.head(self, c.tie_embeddings)

    def block_inputs(self, batch: Batch) -> tuple[RowSeeds, RowSeeds, Tensor | None]:
        return *self.dropout_seeds(batch), batch.get("document_ids")

    def embed(self, batch: Batch, seeds: RowSeeds, local_seeds: RowSeeds, documents_BT: Tensor | None) -> Tensor:
        position = batch["position_ids"] if "position_ids" in batch else self.token_positions(batch)
        position = self.tp.local_tokens(position, self.tp_rank) + self.position_offset
        return self.dropout(self.embed_tokens(batch) + self.position(position), local_seeds)

    def head(self, x_BTD: Tensor, batch: Batch) -> ModelOutput:
        return self.make_output(self.norm(x_BTD)[1], self.output, tokens_sharded=self.tp.sequence_parallel)
