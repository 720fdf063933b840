"""The decoder of Llama and of the families that share its block.

B batch, T tokens, D hidden, H heads, G kv heads, K head size, F ffn.
"""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from trainyard.core.batch import Batch
from trainyard.core.splits import head_range
from trainyard.families.blueprint import layer_index
from trainyard.families.decoder import DecoderConfig
from trainyard.families.moe import MoeConfig
from trainyard.models.base import TransformerStage
from trainyard.models.layers import SwiGLU, rope_frequencies
from trainyard.models.module_factory import ModuleFactory
from trainyard.models.moe import MoeMLP
from trainyard.models.output import ModelOutput
from trainyard.parallel.recompute import Recomputable


class LlamaAttention(Recomputable):
    recompute_name = "attention"

    def __init__(self, c: DecoderConfig, make: ModuleFactory, name: str) -> None:
        super().__init__()
        self.tp, self.kernels = make.tp, make.kernels
        first, end = head_range(c.num_kv_heads, self.tp.size, self.tp.rank)
        self.local_heads = (c.heads // self.tp.size, end - first)
        self.qkv_linears = make.linears(self, name, ["qkv"] if c.fuse_qkv else ["q", "k", "v"])
        self.q_norm, self.k_norm = (make.optional_rms_norm(f"{name}.{x}_norm", c.norm_eps) for x in "qk")
        layer = layer_index(name)
        assert layer is not None
        window = c.attention_window(layer)
        self.core_attention = make.core_attention(c.heads, c.num_kv_heads, True, 0.0, name, window)
        self.output = make.linear(f"{name}.output")

    def forward(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor, documents_BT: Tensor | None) -> Tensor:
        projections = self.tp.column_parallel(x_BTD, *self.qkv_linears, keep_gathered=self.keep_gathered)
        qkv = projections[0] if len(projections) == 1 else torch.cat(projections, -1)
        if self.q_norm and self.k_norm:
            q_BHTK, k_BGTK, v_BGTK = self.kernels.norm_rope(
                qkv, self.q_norm.weight, self.k_norm.weight, self.q_norm.eps, cos_TK, sin_TK, *self.local_heads
            )
        else:
            q_BHTK, k_BGTK, v_BGTK = self.kernels.rope(qkv, cos_TK, sin_TK, *self.local_heads)
        y_BHTK = self.core_attention(q_BHTK, k_BGTK, v_BGTK, documents_BT)
        return self.tp.reduce_output(self.output(y_BHTK.transpose(1, 2).flatten(2)))


class LlamaMLP(Recomputable):
    recompute_name = "mlp"

    def __init__(self, c: DecoderConfig, make: ModuleFactory, name: str) -> None:
        super().__init__()
        self.tp = make.tp
        self.gate_up_linears = make.linears(self, name, ["gate_up"] if c.fuse_gate_up else ["gate", "up"])
        self.activation = SwiGLU(make.kernels)
        self.down = make.linear(f"{name}.down")

    def forward(self, x_BTD: Tensor) -> Tensor:
        projections = self.tp.column_parallel(x_BTD, *self.gate_up_linears, keep_gathered=self.keep_gathered)
        gate_up = projections[0] if len(projections) == 1 else torch.cat(projections, -1)
        return self.tp.reduce_output(self.down(self.activation(gate_up)))


class LlamaBlock(nn.Module):
    attention_class: ClassVar[Callable[..., nn.Module]] = LlamaAttention

    def __init__(self, c: DecoderConfig, make: ModuleFactory, name: str) -> None:
        super().__init__()
        self.attention_norm = make.rms_norm(f"{name}.attention_norm", c.norm_eps)
        self.attention = self.attention_class(c, make, f"{name}.attention")
        self.mlp_norm = make.rms_norm(f"{name}.mlp_norm", c.norm_eps)
        self.mlp: nn.Module
        if isinstance(c, MoeConfig) and f"{name}.mlp.router.weight" in make.blueprint:
            self.mlp = MoeMLP(c, make, f"{name}.mlp")
        else:
            self.mlp = LlamaMLP(c, make, f"{name}.mlp")

    def forward(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor, documents_BT: Tensor | None) -> Tensor:
        x_BTD, y_BTD = self.attention_norm(x_BTD)
        x_BTD, y_BTD = self.mlp_norm(x_BTD, self.attention(y_BTD, cos_TK, sin_TK, documents_BT))
        return x_BTD + self.mlp(y_BTD)


class Llama(TransformerStage):
    frequency: Tensor
    block_class: ClassVar[type[LlamaBlock]] = LlamaBlock

    def __init__(self, c: DecoderConfig, make: ModuleFactory) -> None:
        super().__init__(make, c.vocab)
        self.kernels = make.kernels
        self.embedding = make.vocab_embedding("embedding")
        self.layers = make.blocks(lambda name: self.block_class(c, make, name))
        self.norm = make.rms_norm("norm", c.norm_eps)
        self.output = make.head(self, c.tie_embeddings)
        self.register_buffer("frequency", torch.cat([rope_frequencies(c)] * 2), persistent=False)

    def block_inputs(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
        position = batch["position_ids"][:, None] if "position_ids" in batch else self.token_positions(batch)
        return *self.kernels.rope_angles(position, self.frequency), batch.get("document_ids")

    def embed(self, batch: Batch, *block_inputs: Tensor | None) -> Tensor:
        return self.embed_tokens(batch)

    def head(self, x_BTD: Tensor, batch: Batch) -> ModelOutput:
        return self.make_output(self.norm(x_BTD)[1], self.output, tokens_sharded=self.tp.sequence_parallel)
