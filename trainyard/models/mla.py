"""DeepSeek's decoder: Llama's block with multi-head latent attention.

B batch, T tokens, D hidden, H heads of this rank, K width of queries and keys, C latent and key of all heads.
"""

import torch
from torch import Tensor

from trainyard.families.mla import LATENT_NORM_EPS, MlaConfig, latent_sizes
from trainyard.models.layers import PositionTable
from trainyard.models.llama import LlamaBlock
from trainyard.models.mlp import reduce_output
from trainyard.models.module_factory import ModuleFactory
from trainyard.models.mtp import MtpDecoder
from trainyard.parallel.recompute import Recomputable


class MlaAttention(Recomputable):
    """Projections to latents are computed for the tokens of this rank, and the latents gathered, which are narrow."""

    recompute_name = "attention"

    def __init__(self, c: MlaConfig, make: ModuleFactory, name: str) -> None:
        super().__init__()
        self.tp, self.kernels, self.c = make.tp, make.kernels, c
        self.sizes = [*latent_sizes(c).values()]
        self.latent_linears = make.linears(
            self, name, ["qkv_a"] if c.fuse_qkv and c.q_lora_rank else [*latent_sizes(c)]
        )
        (self.queries,) = make.linears(self, name, ["q_b" if c.q_lora_rank else "q"])
        self.q_a_norm = make.rms_norm(f"{name}.q_a_norm", LATENT_NORM_EPS) if c.q_lora_rank else None
        self.kv_a_norm = make.rms_norm(f"{name}.kv_a_norm", LATENT_NORM_EPS)
        self.kv_b, self.output = make.linear(f"{name}.kv_b"), make.linear(f"{name}.output")
        sizes = (c.kv_lora_rank, c.qk_rope_head_dim, c.v_head_dim)
        self.latent_attention = make.latent_attention(c.heads, *sizes, name, c.style.attention_scale)

    def forward(self, x_BTD: Tensor, positions: tuple[PositionTable, ...], documents_BT: Tensor | None) -> Tensor:
        c, (cos, sin, _) = self.c, positions[0]
        assert cos is not None
        assert sin is not None
        latents = torch.cat([linear(x_BTD) for linear in self.latent_linears], -1)
        *q_latent, kv = torch.split(latents, self.sizes, -1)
        x_BTD = self.q_a_norm(q_latent[0])[1] if self.q_a_norm else x_BTD
        (q,) = self.tp.column_parallel(x_BTD, self.queries, keep_gathered=self.keep_gathered)
        latent, key = torch.split(kv, [c.kv_lora_rank, c.qk_rope_head_dim], -1)
        c_BTC = self.tp.gather_sum_grads(torch.cat((self.kv_a_norm(latent)[1], key), -1))
        q_BHTK = q.view(*q.shape[:2], -1, c.head_size).transpose(1, 2)
        q_BHTK = self.kernels.rotate_end(q_BHTK, cos, sin, c.rope_interleaved)
        c_BTC = self.kernels.rotate_end(c_BTC[:, None], cos, sin, c.rope_interleaved)[:, 0]
        y_BHTV = self.latent_attention(q_BHTK, c_BTC, self.kv_b, documents_BT)
        return reduce_output(self.tp, self.output, y_BHTV.transpose(1, 2).flatten(2))


class MlaBlock(LlamaBlock):
    attention_class = MlaAttention


class MlaDecoder(MtpDecoder):
    block_class = MlaBlock
