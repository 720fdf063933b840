"""Qwen3-Next's decoder.

B batch, T tokens, D hidden, H heads, K head size, Q width of all heads.
"""

import torch
from torch import Tensor, nn

from trainyard.families.builtin.qwen3_next import Qwen3NextConfig
from trainyard.models.gated_delta import GatedDeltaNet
from trainyard.models.layers import PositionTable
from trainyard.models.llama import Llama, LlamaAttention, LlamaBlock
from trainyard.models.mlp import reduce_output
from trainyard.models.module_factory import ModuleFactory


class GatedAttention(LlamaAttention):
    """Attention whose output is multiplied by the sigmoid of a gate, which each head has beside its query."""

    def forward(self, x_BTD: Tensor, positions: tuple[PositionTable, ...], documents_BT: Tensor | None) -> Tensor:
        heads, kv_heads = self.local_heads
        x = self.project(x_BTD)
        x_BTHK = x.view(*x.shape[:2], 2 * (heads + kv_heads), -1)
        q_BTHK, gate_BTHK = x_BTHK[:, :, : 2 * heads : 2], x_BTHK[:, :, 1 : 2 * heads : 2]
        qkv = torch.cat((q_BTHK, x_BTHK[:, :, 2 * heads :]), 2).flatten(2)
        y_BTQ = self.attend(qkv, positions, documents_BT) * gate_BTHK.flatten(2).sigmoid()
        return reduce_output(self.tp, self.output, y_BTQ)


def mixer(c: Qwen3NextConfig, make: ModuleFactory, name: str) -> nn.Module:
    """What a block has in the place of attention."""
    return GatedDeltaNet(c, make, name) if f"{name}.qkvz.weight" in make.blueprint else GatedAttention(c, make, name)


class Qwen3NextBlock(LlamaBlock):
    attention_class = staticmethod(mixer)


class Qwen3Next(Llama):
    block_class = Qwen3NextBlock
