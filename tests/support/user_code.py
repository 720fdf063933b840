"""Code as a user of Trainyard writes it: update rules, a dataset, a schedule, a loss and a metric."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from trainyard import Config, UpdateRule
from trainyard.models import Batch, ModelOutput

State = Mapping[str, Tensor]
Result = tuple[Tensor, dict[str, Tensor]]


class Momentum(UpdateRule):
    """torch.optim.SGD with momentum and (coupled) weight decay."""

    state_names = ("momentum_buffer",)

    def __init__(self, momentum: float = 0.9) -> None:
        self.momentum = momentum

    def update(
        self, weight: Tensor, gradient: Tensor, state: State, lr: Tensor, weight_decay: float, updates: Tensor
    ) -> Result:
        buffer = self.momentum * state["momentum_buffer"] + gradient + weight_decay * weight
        return weight - lr * buffer, {"momentum_buffer": buffer}


class PlainSgd(UpdateRule):
    """A rule without state."""

    def update(
        self, weight: Tensor, gradient: Tensor, state: State, lr: Tensor, weight_decay: float, updates: Tensor
    ) -> Result:
        return weight - lr * gradient, {}


class AdamW(UpdateRule):
    """The built-in rule, written again."""

    state_names = ("exp_avg", "exp_avg_sq")

    def update(
        self, weight: Tensor, gradient: Tensor, state: State, lr: Tensor, weight_decay: float, updates: Tensor
    ) -> Result:
        avg = state["exp_avg"] + (gradient - state["exp_avg"]) * (1 - 0.9)
        square = state["exp_avg_sq"] + (gradient * gradient - state["exp_avg_sq"]) * (1 - 0.95)
        direction = (avg / (1 - 0.9**updates)) / ((square / (1 - 0.95**updates)).sqrt() + 1e-8)
        return weight - lr * (direction + weight_decay * weight), {"exp_avg": avg, "exp_avg_sq": square}


class Powers:
    """Sample i is 7^i, 7^(i+1), ... modulo the vocabulary plus one."""

    def __init__(self, vocab: int, seq_len: int, length: int) -> None:
        self.vocab, self.seq_len, self.length = vocab, seq_len, length

    def __len__(self) -> int:
        return self.length

    def samples(self, indices: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        tokens = np.array([[pow(7, int(i) + k, self.vocab - 1) for k in range(self.seq_len + 1)] for i in indices])
        return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


def make_dataset(config: Config) -> Powers:
    return Powers(config.model.vocab, config.data.seq_len, 40)


def make_both(config: Config) -> tuple[Powers, Powers]:
    return make_dataset(config), Powers(config.model.vocab, config.data.seq_len, 5)


def triangle(step: int, config: Config) -> float:
    half = config.train.steps / 2
    return 1 - abs(step - half) / (half + 1)


def soft_cap(logits: Tensor, cap: float = 0.1) -> Tensor:
    return cap * torch.tanh(logits / cap)


def capped_loss(output: ModelOutput, batch: Batch) -> tuple[Tensor, Tensor]:
    """Cross entropy of soft-capped logits."""
    labels = batch["labels"].long()
    logits = soft_cap(output.logits().float())
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum"), (labels != -100).sum()


def accuracy(output: ModelOutput, batch: Batch) -> tuple[Tensor, Tensor]:
    labels = batch["labels"].long()
    return (output.logits().argmax(-1) == labels).sum(), (labels != -100).sum()
