"""The train step: micro batches forward and backward, then one update. Fixed shapes, no question to the device."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainyard.devices import Device
from trainyard.models import Batch
from trainyard.random import key32
from trainyard.train.losses import Loss
from trainyard.train.optimizers import Optimizer


@dataclass
class StepResult:
    """What a step leaves behind, still on the device: reading it waits for the step."""

    number: int
    """Of the update; 1 is the first."""
    lr: float
    loss: Tensor
    terms: dict[str, Tensor]
    grad_norm: Tensor
    skipped: Callable[[], Tensor]
    """Steps skipped in all, and in a row. Its copy to the host was queued with the step: it can be read while the next
    step runs."""


class Step:
    def __init__(
        self, model: nn.Module, loss: Loss, optimizer: Optimizer, device: Device, micro_batch: int, seed: int
    ) -> None:
        self.model = model
        self.loss = loss
        self.optimizer = optimizer
        self.device = device
        self.micro_batch = micro_batch
        self.seed = seed

    def __call__(self, batch: Batch, number: int, lr: float) -> StepResult:
        batch = send(batch, self.device)
        key = self.device.to_device(torch.tensor(key32(self.seed, "step", number), dtype=torch.int32))
        self.optimizer.clear()
        sums: dict[str, Tensor] = {}
        counts: dict[str, Tensor] = {}
        # Counts known from the labels divide the loss before backward; those of a user's own loss divide the gradient.
        ahead = self.loss.counts(batch)
        with self.device.attention():
            for micro in micro_batches(batch, self.micro_batch):
                terms = self.loss.terms(self.model({**micro, "key": key}), micro)
                part = sum(
                    (total / at_least_one(ahead[name]) if ahead else total) for name, (total, _) in terms.items()
                )
                assert isinstance(part, Tensor)
                part.backward()  # type: ignore[no-untyped-call]
                for name, (total, count) in terms.items():
                    sums[name] = sums.get(name, 0) + total.detach()
                    counts[name] = counts.get(name, 0) + count.detach()
        means = {name: sums[name] / at_least_one(counts[name]) for name in sums}
        loss = torch.stack(list(means.values())).sum()
        scale = torch.ones_like(loss) if ahead else 1 / at_least_one(counts["loss"])
        rate = self.device.to_device(torch.tensor(lr, dtype=torch.float32))
        norm = self.optimizer.step(rate, scale, loss, number)
        return StepResult(number, lr, loss, means, norm, self.device.fetch(self.optimizer.skipped))


def micro_batches(batch: Batch, size: int) -> Iterator[Batch]:
    total = len(batch["sample"])
    for first in range(0, total, size):
        yield {name: tensor[first : first + size] for name, tensor in batch.items()}


def send(batch: Batch, device: Device) -> Batch:
    return {name: device.to_device(tensor) for name, tensor in batch.items()}


def at_least_one(count: Tensor) -> Tensor:
    """A batch in which nothing counts has loss 0, not 0 / 0."""
    return count.clamp(min=1)
