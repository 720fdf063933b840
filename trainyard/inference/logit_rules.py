"""What changes the logits of a slot before its next token is chosen: penalties of earlier tokens, and grammars.

All state is on the device at fixed addresses, and steps update it there, so that a captured step can contain it and no
step waits for the host. It is allocated when the first request needs it; rows without penalties and grammars keep their
logits bit for bit.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainyard.devices import Device
from trainyard.inference.requests import SamplingOptions

WORD_BITS = 32
"""Tokens per element of a bit mask."""


class TokenPenalties:
    """Penalties as in vLLM; repetition as in transformers."""

    def __init__(self, slots: int, vocab: int, device: torch.device) -> None:
        self.counts = torch.zeros(slots, vocab, dtype=torch.int32, device=device)
        """How often each token is among the new tokens of a slot."""
        self.in_prompt = torch.zeros(slots, vocab, dtype=torch.bool, device=device)
        self.presence, self.frequency = (torch.zeros(slots, device=device) for _ in range(2))
        self.repetition = torch.ones(slots, device=device)

    def start(self, slot: int, options: SamplingOptions, prompt: Sequence[int]) -> None:
        self.presence[slot], self.frequency[slot] = options.presence_penalty, options.frequency_penalty
        self.repetition[slot] = options.repetition_penalty
        self.counts[slot], self.in_prompt[slot] = 0, False
        if options.is_penalized:
            self.in_prompt[slot, torch.tensor(prompt, device=self.counts.device)] = True

    def apply(self, logits: Tensor, index: Any) -> Tensor:
        """fp32 logits [N, V] of the slots in `index`."""
        counts, repetition = self.counts[index], self.repetition[index][:, None]
        is_new = counts > 0
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(self.in_prompt[index] | is_new, repeated, logits)
        return logits - counts * self.frequency[index][:, None] - is_new * self.presence[index][:, None]


class TokenMasks:
    """The tokens that each slot may choose next, as bits: token t is bit t % 32 of word t // 32."""

    def __init__(self, slots: int, vocab: int, device: Device) -> None:
        words = -(-vocab // WORD_BITS)
        self.on_host = device.alloc_host_buffer(torch.Size((slots, words)), torch.int32)
        self.allowed = torch.full((slots, words), -1, dtype=torch.int32, device=device.torch_device)
        token = torch.arange(vocab, device=device.torch_device)
        self.word, self.bit = token // WORD_BITS, (token % WORD_BITS).int()

    def allow_all(self, slot: int) -> None:
        self.allowed[slot] = -1

    def set(self, slot: int, words: Tensor) -> None:
        """`words` may have more of them than the vocabulary needs."""
        self.on_host[slot] = words[: self.on_host.shape[1]]
        self.allowed[slot].copy_(self.on_host[slot], non_blocking=True)

    def apply(self, logits: Tensor, index: Any) -> Tensor:
        bits = self.allowed[index][:, self.word] >> self.bit
        return torch.where((bits & 1).bool(), logits, -torch.inf)
