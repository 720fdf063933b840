"""Multi-token prediction: blocks after the last layer that predict tokens further ahead, as an auxiliary loss.

B batch, T tokens of this rank, D hidden.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainyard.core.batch import Batch
from trainyard.core.constants import IGNORE_INDEX
from trainyard.families.decoder import DecoderConfig
from trainyard.models.llama import Llama
from trainyard.models.module_factory import ModuleFactory
from trainyard.models.output import ModelOutput
from trainyard.parallel.context_parallel import ContextAxis


class MtpBlock(nn.Module):
    """Hidden states of tokens and the embedding of later tokens to hidden states that predict the next one after."""

    def __init__(self, c: DecoderConfig, make: ModuleFactory, name: str, build: Callable[[str], nn.Module]) -> None:
        super().__init__()
        self.embedding_norm, self.hidden_norm, self.output_norm = (
            make.rms_norm(f"{name}.{norm}_norm", c.norm_eps) for norm in ("embedding", "hidden", "output")
        )
        self.projection = make.linear(f"{name}.projection")
        self.block = build(f"{name}.block")

    def forward(self, hidden_BTD: Tensor, embedded_BTD: Tensor, *block_inputs: Any) -> Tensor:
        normed = (self.embedding_norm(embedded_BTD)[1], self.hidden_norm(hidden_BTD)[1])
        x_BTD = self.block(self.projection(torch.cat(normed, -1)), *block_inputs)
        y_BTD: Tensor = self.output_norm(x_BTD)[1]
        return y_BTD


class MtpDecoder(Llama):
    """Llama's decoder with such blocks, which run where a batch has labels."""

    def __init__(self, c: DecoderConfig, make: ModuleFactory) -> None:
        super().__init__(c, make)
        self.mtp_blocks, self.mtp_loss = c.mtp_blocks, getattr(c, "mtp_loss", 0.0)
        for name in c.mtp_blocks:
            self.add_module(name, MtpBlock(c, make, name, partial(self.block_class, c, make)))

    @property
    def blocks(self) -> list[nn.Module]:
        further = (getattr(self, name, None) for name in self.mtp_blocks)  # which only the last stage has
        return [*super().blocks, *(module.block for module in further if module)]

    def head(self, x_BTD: Tensor, batch: Batch) -> ModelOutput:
        output = super().head(x_BTD, batch)
        if not self.mtp_blocks or "labels" not in batch:
            return output
        hidden_BTD, inputs, further = output.local_hidden, self.block_inputs(batch), []
        for distance, name in enumerate(self.mtp_blocks, 1):
            tokens_BT, labels_BT = later_tokens(batch, distance, self.cp, self.token_positions(batch))
            embedded_BTD = self.embed({**batch, "tokens": tokens_BT}, *inputs)
            hidden_BTD = getattr(self, name)(hidden_BTD, embedded_BTD, *inputs)
            further.append((replace(output, local_hidden=hidden_BTD), labels_BT))
        return replace(output, further=tuple(further), further_weight=self.mtp_loss)


def later_tokens(batch: Batch, distance: int, cp: ContextAxis, position_T: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens and labels `distance` places later in each sample; no label over the end of a sample or document.
    Context-parallel ranks gather all of them, because a chunk's last tokens look into the next one."""

    def later(x_BT: Tensor, fill: int) -> Tensor:
        x_BS = F.pad(cp.gather_sequence(x_BT, 1)[:, distance:], (0, distance), value=fill)
        return x_BS if cp.size == 1 else x_BS.index_select(1, position_T)

    labels_BT = later(batch["labels"], IGNORE_INDEX)
    if "document_ids" in batch:
        same_BT = later(batch["document_ids"], -1) == batch["document_ids"]
        labels_BT = torch.where(same_BT, labels_BT, IGNORE_INDEX)
    return later(batch["tokens"], 0), labels_BT
