"""Fills masked tokens with a BERT model."""

from dataclasses import dataclass

import torch
from torch import Tensor

from trainyard.checkpoint.weights import local_values
from trainyard.core.errors import UserError
from trainyard.core.quantities import counted
from trainyard.data.text.tokenizer import Tokenizer
from trainyard.devices import Device
from trainyard.formats.registry import open_weights, read_model_files
from trainyard.inference.text.tokenizer_files import find_tokenizer
from trainyard.models import ModelOutput, TransformerStage, build_model, family_of, fill_parameters

MASK, START, END = "[MASK]", "[CLS]", "[SEP]"


@dataclass(frozen=True)
class MaskCandidate:
    """A token that may stand for a mask."""

    token: int
    text: str
    probability: float


class MaskFiller:
    """A BERT model with its tokenizer."""

    def __init__(self, source: str, device: Device, tokenizer: str | None = None) -> None:
        weights = open_weights(source).weights
        self.config, self.device = weights.model, device
        if family_of(self.config).is_causal:
            raise UserError(f"{source}: a {self.config.family} model has no masks; see trainyard generate")
        found = find_tokenizer(tokenizer, read_model_files(weights, source))
        if found is None:
            raise UserError(f"{source}: has no tokenizer; give --tokenizer")
        self.tokenizer: Tokenizer = found
        values, handle = local_values(weights), device.torch_device
        self.model: TransformerStage = build_model(self.config, handle, kernels=device.kernels(False))
        fill_parameters(self.model, lambda name: values(name).to(handle))
        self.model.eval()

    def encode(self, text: str) -> list[int]:
        """[CLS] text [SEP], with one token for each [MASK]."""
        parts = [self.tokenizer.encode([part])[0].tolist() if part else [] for part in text.split(MASK)]
        tokens = [self._special(START), *parts[0]]
        for part in parts[1:]:
            tokens += [self._special(MASK), *part]
        tokens.append(self._special(END))
        if len(parts) == 1:
            raise UserError(f"{text!r}: has no {MASK}")
        if len(tokens) > self.config.max_positions:
            raise UserError(
                f"the text has {counted(len(tokens), 'token')}; the model's limit is {self.config.max_positions}"
            )
        return tokens

    def _special(self, token: str) -> int:
        number = self.tokenizer.token_id(token)
        if number is None:
            raise UserError(f"the tokenizer has no {token}")
        return number

    @torch.no_grad()
    def fill(self, text: str, top: int) -> list[list[MaskCandidate]]:
        """The most likely tokens of each mask."""
        tokens = self.encode(text)
        mask = self._special(MASK)
        positions = [position for position, token in enumerate(tokens) if token == mask]
        row = self._row(tokens)
        batch = {
            "tokens": row,
            "segment_ids": torch.zeros_like(row),
            "attention_mask": torch.ones_like(row),
            "masked_positions": self._row(positions),
            "rng_key": torch.zeros(2, dtype=torch.int32, device=row.device),
            "sample_ids": torch.zeros(1, dtype=torch.int32, device=row.device),
        }
        output = self.model(batch)
        assert isinstance(output, ModelOutput)
        probabilities = output.logits().view(len(positions), -1).float().softmax(-1)
        values, ids = probabilities.topk(min(top, probabilities.shape[1]), -1)
        return [
            [MaskCandidate(token, self.tokenizer.decode([token]), p) for token, p in zip(*row, strict=True)]
            for row in zip(ids.tolist(), values.tolist(), strict=True)
        ]

    def _row(self, numbers: list[int]) -> Tensor:
        return torch.tensor([numbers], dtype=torch.int32, device=self.device.torch_device)
