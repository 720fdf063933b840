"""The decoder of Llama and of the families that share its block.

B batch, T tokens, D hidden, H heads, G kv heads, K head size, F ffn.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trainyard.core.batch import Batch
from trainyard.core.splits import head_range
from trainyard.families.blueprint import layer_index
from trainyard.families.decoder import DecoderConfig
from trainyard.models.base import TransformerStage
from trainyard.models.layers import PositionTable, PositionTables, ResidualSum, RMSNorm
from trainyard.models.mlp import make_mlp, reduce_output
from trainyard.models.module_factory import ModuleFactory
from trainyard.models.output import ModelOutput
from trainyard.parallel.recompute import Recomputable


class LlamaAttention(Recomputable):
    recompute_name = "attention"

    def __init__(self, c: DecoderConfig, make: ModuleFactory, name: str) -> None:
        super().__init__()
        self.tp, self.kernels, style = make.tp, make.kernels, c.style
        layer = layer_index(name)
        assert layer is not None
        rope = c.rope_of(layer)
        first, end = head_range(c.num_kv_heads, self.tp.size, self.tp.rank)
        self.local_heads = (c.heads // self.tp.size, end - first)
        self.qkv_linears = make.linears(self, name, ["qkv"] if c.fuse_qkv else ["q", "k", "v"])
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        self.norms_all_heads = style.qk_norm == "all"
        if self.norms_all_heads:
            self.q_norm, self.k_norm = (make.norm_of_all_heads(f"{name}.{x}_norm", c.norm_eps) for x in "qk")
        elif style.qk_norm == "unit" and rope and rope.size:
            self.q_norm = self.k_norm = RMSNorm(torch.ones(c.head_size), c.norm_eps, make.kernels)
        elif style.qk_norm == "heads":
            self.q_norm, self.k_norm = (
                make.rms_norm(f"{name}.{x}_norm", c.norm_eps, style.norm == "rms_plus_one") for x in "qk"
            )
        self.rope_index, self.rope_interleaved = c.ropes.index(rope), rope is not None and rope.interleaved
        window = c.attention_window(layer)
        self.sinks = make.optional_parameter(f"{name}.sinks")
        scores: dict[str, Any] = {"scale": style.attention_scale, "soft_cap": style.attention_soft_cap}
        self.core_attention = make.core_attention(
            c.heads, c.num_kv_heads, True, 0.0, name, window, sinks=self.sinks, **scores
        )
        self.output = make.linear(f"{name}.output")

    def forward(self, x_BTD: Tensor, positions: tuple[PositionTable, ...], documents_BT: Tensor | None) -> Tensor:
        return reduce_output(self.tp, self.output, self.attend(self.project(x_BTD), positions, documents_BT))

    def project(self, x_BTD: Tensor) -> Tensor:
        """q, k and v of this rank's heads, side by side."""
        projections = self.tp.column_parallel(x_BTD, *self.qkv_linears, keep_gathered=self.keep_gathered)
        return projections[0] if len(projections) == 1 else torch.cat(projections, -1)

    def attend(self, qkv: Tensor, positions: tuple[PositionTable, ...], documents_BT: Tensor | None) -> Tensor:
        """The output of all heads, [B, T, H K]."""
        if self.norms_all_heads:
            qkv = self._norm_all_heads(qkv)
        cos_TK, sin_TK, query_scale = positions[self.rope_index]
        if isinstance(self.q_norm, RMSNorm) and isinstance(self.k_norm, RMSNorm):
            norms = self.q_norm.factor, self.k_norm.factor, self.q_norm.eps
            q_BHTK, k_BGTK, v_BGTK = self.kernels.norm_rope(
                qkv, *norms, cos_TK, sin_TK, *self.local_heads, self.rope_interleaved
            )
        else:
            q_BHTK, k_BGTK, v_BGTK = self.kernels.rope(qkv, cos_TK, sin_TK, *self.local_heads, self.rope_interleaved)
        if query_scale is not None:
            q_BHTK = (q_BHTK * query_scale).to(q_BHTK.dtype)
        y_BHTK = self.core_attention(q_BHTK, k_BGTK, v_BGTK, documents_BT)
        return y_BHTK.transpose(1, 2).flatten(2)

    def _norm_all_heads(self, qkv: Tensor) -> Tensor:
        assert self.q_norm is not None
        assert self.k_norm is not None
        heads, kv_heads = self.local_heads
        head_size = qkv.shape[-1] // (heads + 2 * kv_heads)
        q, k, v = torch.split(qkv, [heads * head_size, kv_heads * head_size, kv_heads * head_size], -1)
        return torch.cat((self.q_norm(q), self.k_norm(k), v), -1)


class LlamaBlock(nn.Module):
    attention_class: ClassVar[Callable[..., nn.Module]] = LlamaAttention

    def __init__(self, c: DecoderConfig, make: ModuleFactory, name: str) -> None:
        super().__init__()
        self.residual_scale, self.parallel = c.style.residual_scale, c.style.parallel
        self.attention_norm = make.decoder_norm(f"{name}.attention_norm", c) or ResidualSum()
        self.attention = self.attention_class(c, make, f"{name}.attention")
        self.attention_output_norm = make.decoder_norm(f"{name}.attention_output_norm", c)
        self.mlp_norm = make.decoder_norm(f"{name}.mlp_norm", c) or ResidualSum()
        self.mlp = make_mlp(c, make, f"{name}.mlp")
        self.mlp_output_norm = make.decoder_norm(f"{name}.mlp_output_norm", c)

    def forward(self, x_BTD: Tensor, positions: tuple[PositionTable, ...], documents_BT: Tensor | None) -> Tensor:
        x_BTD, y_BTD = self.attention_norm(x_BTD)
        z_BTD = self._output(self.attention(y_BTD, positions, documents_BT), self.attention_output_norm)
        if self.parallel:
            mlp_input = y_BTD if isinstance(self.mlp_norm, ResidualSum) else self.mlp_norm(x_BTD)[1]
            return x_BTD + z_BTD + self._output(self.mlp(mlp_input), self.mlp_output_norm)
        x_BTD, y_BTD = self.mlp_norm(x_BTD, z_BTD)
        return x_BTD + self._output(self.mlp(y_BTD), self.mlp_output_norm)

    def _output(self, y_BTD: Tensor, norm: nn.Module | None) -> Tensor:
        """The output of attention or MLP as it is added to the residual."""
        if norm is not None:
            y_BTD = norm(y_BTD)[1]
        return y_BTD if self.residual_scale == 1 else y_BTD * self.residual_scale


class Llama(TransformerStage):
    block_class: ClassVar[type[LlamaBlock]] = LlamaBlock

    def __init__(self, c: DecoderConfig, make: ModuleFactory) -> None:
        super().__init__(make, c.vocab)
        self.style = c.style
        self.positions = PositionTables(c.ropes, make.kernels)
        self.static_length = self.positions.static_length
        self.embedding = make.vocab_embedding("embedding")
        self.layers = make.blocks(lambda name: self.block_class(c, make, name))
        self.norm = make.decoder_norm("norm", c)
        self.output = make.head(self, c.tie_embeddings)

    def block_inputs(self, batch: Batch) -> tuple[tuple[PositionTable, ...], Tensor | None]:
        position = batch["position_ids"][:, None] if "position_ids" in batch else self.token_positions(batch)
        length: int | Tensor = batch["tokens"].shape[1] * self.cp.size
        if "sequence_lengths" in batch:
            length = batch["sequence_lengths"][:, None, None]
        return self.positions(position, length), batch.get("document_ids")

    def embed(self, batch: Batch, *block_inputs: Any) -> Tensor:
        x_BTD = self.embed_tokens(batch)
        scale = self.style.embedding_scale
        return x_BTD if scale == 1 else x_BTD * torch.tensor(scale, dtype=x_BTD.dtype)

    def head(self, x_BTD: Tensor, batch: Batch) -> ModelOutput:
        assert self.norm is not None
        x_BTD = self.norm(x_BTD)[1]
        if self.style.logit_scale != 1:
            x_BTD = x_BTD * self.style.logit_scale
        cap, sharded = self.style.logit_soft_cap, self.tp.sequence_parallel
        return self.make_output(x_BTD, self.output, self.output.bias, tokens_sharded=sharded, soft_cap=cap)
