"""GPT-2 and GPT-3. B batch, T tokens, D hidden, F ffn."""

from torch import Tensor, nn

from trainyard.config.model_schema import BertConfig, GptConfig
from trainyard.core.batch import Batch
from trainyard.core.counter_rng import RowSeeds
from trainyard.models.base import TransformerStage
from trainyard.models.blueprint import Blueprint, FusedPart, ParamSpec, column_parallel_specs
from trainyard.models.factory import ModuleFactory
from trainyard.models.hf_names import HfNameMap, HfTensor
from trainyard.models.layers import BiasGelu, PackedSequences
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
        self.activation = BiasGelu(c.activation, make.kernels)
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
        self.position = make.embedding("position")
        self.dropout = make.dropout(c.embedding_dropout, "embedding")
        self.layers = nn.ModuleDict({str(i): GptBlock(c, make, f"layers.{i}") for i in range(c.layers)})
        self.norm = make.layer_norm("norm", c.norm_eps)
        self.output = self.embedding if c.tie_embeddings else make.output_projection("output")

    def block_inputs(self, batch: Batch) -> tuple[RowSeeds, RowSeeds, Tensor | None]:
        return *self.dropout_seeds(batch), batch.get("document_ids")

    def embed(self, batch: Batch, seeds: RowSeeds, local_seeds: RowSeeds, documents_BT: Tensor | None) -> Tensor:
        position = batch["position_ids"] if "position_ids" in batch else self.token_positions(batch)
        position = self.tp.local_tokens(position, self.tp_rank)
        return self.dropout(self.embedding(batch["tokens"]) + self.position(position), local_seeds)

    def head(self, x_BTD: Tensor, batch: Batch) -> ModelOutput:
        return self.make_output(self.norm(x_BTD)[1], self.output, tokens_sharded=self.tp.sequence_parallel)


def block_specs(c: GptConfig | BertConfig) -> tuple[ParamSpec, ...]:
    """The parameters of one block, equal for GPT and BERT."""
    D, F, layer = c.hidden, c.ffn_size, "layers.*."
    std, out_std = c.init_std, c.init_std / (2 * c.layers) ** 0.5 if c.scaled_init else c.init_std

    def qkv(kind: str) -> tuple[FusedPart, ...]:
        return tuple(FusedPart(f"{layer}attention.{name}.{kind}", D, c.heads) for name in "qkv")

    def norm(name: str) -> tuple[ParamSpec, ParamSpec]:
        return ParamSpec(f"{layer}{name}.weight", (D,), init_value=1.0), ParamSpec(f"{layer}{name}.bias", (D,))

    return (
        *norm("attention_norm"),
        *column_parallel_specs(f"{layer}attention.qkv.weight", qkv("weight"), (D,), c.fuse_qkv, std),
        *column_parallel_specs(f"{layer}attention.qkv.bias", qkv("bias"), (), c.fuse_qkv),
        ParamSpec(f"{layer}attention.output.weight", (D, D), 1, init_std=out_std, flops_tokens="tokens"),
        ParamSpec(f"{layer}attention.output.bias", (D,)),
        *norm("mlp_norm"),
        ParamSpec(f"{layer}mlp.up.weight", (F, D), 0, init_std=std, flops_tokens="tokens"),
        ParamSpec(f"{layer}mlp.up.bias", (F,), 0),
        ParamSpec(f"{layer}mlp.down.weight", (D, F), 1, init_std=out_std, flops_tokens="tokens"),
        ParamSpec(f"{layer}mlp.down.bias", (D,)),
    )


def blueprint(c: GptConfig) -> Blueprint:
    D, V, std, tied = c.hidden, c.vocab, c.init_std, c.tie_embeddings
    head = ParamSpec("output.weight", (V, D), 0, (), "last", std, flops_tokens="tokens", padded=True)
    return Blueprint(
        (
            ParamSpec("embedding.weight", (V, D), 0, (), "both" if tied else "first", std, padded=True),
            ParamSpec("position.weight", (c.max_positions, D), pipeline_stage="first", init_std=std),
            *block_specs(c),
            ParamSpec("norm.weight", (D,), pipeline_stage="last", init_value=1.0),
            ParamSpec("norm.bias", (D,), pipeline_stage="last"),
            *([] if tied else [head]),
        ),
        c.layers,
        (V, D, "tokens") if tied else None,
    )


def hf_names(c: GptConfig) -> HfNameMap:
    ours, top, hf = "layers.*.", "transformer.", "transformer.h.*."
    table = {"embedding.weight": HfTensor(f"{top}wte.weight"), "position.weight": HfTensor(f"{top}wpe.weight")}
    for kind in ("weight", "bias"):
        transposed = kind == "weight"
        table |= {
            f"{ours}attention_norm.{kind}": HfTensor(f"{hf}ln_1.{kind}"),
            **{f"{ours}attention.{x}.{kind}": HfTensor(f"{hf}attn.c_attn.{kind}", transposed) for x in "qkv"},
            f"{ours}attention.output.{kind}": HfTensor(f"{hf}attn.c_proj.{kind}", transposed),
            f"{ours}mlp_norm.{kind}": HfTensor(f"{hf}ln_2.{kind}"),
            f"{ours}mlp.up.{kind}": HfTensor(f"{hf}mlp.c_fc.{kind}", transposed),
            f"{ours}mlp.down.{kind}": HfTensor(f"{hf}mlp.c_proj.{kind}", transposed),
            f"norm.{kind}": HfTensor(f"{top}ln_f.{kind}"),
        }
    if c.tie_embeddings:
        return HfNameMap(table, {"lm_head.weight": "transformer.wte.weight"})
    return HfNameMap({**table, "output.weight": HfTensor("lm_head.weight")})
