"""Evaluation: exact over tokens, whatever the batch size; sums and counts are added up and divided once."""

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from math import exp

import torch
from torch import Tensor

from trainyard.devices import Device
from trainyard.models import Batch, Output
from trainyard.parallel.mesh import Mesh
from trainyard.train.losses import Loss
from trainyard.train.step import Forward, Sums
from trainyard.train.user_functions import pair

Metric = Callable[[Output, Batch], tuple[Tensor, Tensor]]
PERPLEXITY = ("lm", "mlm")
"""Terms whose exponential is a perplexity."""


@torch.no_grad()
def evaluate(
    forward: Forward,
    loss: Loss,
    metrics: Mapping[str, Metric],
    batches: Iterable[Batch],
    device: Device,
    mesh: Mesh,
    most: int,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, float]:
    """Loss, its terms, perplexity and the user's metrics over this rank's part of at most `most` held-out batches."""
    was_training = [model.training for model in forward.models]
    for model in forward.models:
        model.eval()
    key = torch.zeros(2, dtype=torch.int32, device=device.handle)
    names = [*loss.names, *metrics]
    sums = Sums(names, device.handle, mesh)

    def take(output: Output, micro: Batch) -> Tensor:
        found = {**loss.terms(output, micro), **{name: pair(own(output, micro), own) for name, own in metrics.items()}}
        sums.add(found)
        return sums.values[0, 0]

    for batch in islice(batches, most):
        if stop():
            break
        forward(forward.send(batch), key, take, backward=False)
    for model, training in zip(forward.models, was_training, strict=True):
        model.train(training)
    totals, counts, _ = sums.over(torch.zeros(1, device=device.handle))
    means = {
        name: total / count if count else 0.0
        for name, total, count in zip(names, totals.tolist(), counts.tolist(), strict=True)
    }
    result = {"loss": sum(means[name] for name in loss.names)}
    for name in set(loss.names) & set(PERPLEXITY):
        result["perplexity"] = exp(min(means[name], 700.0))
    # A single term is the loss and need not be said twice.
    return result | {name: mean for name, mean in means.items() if loss.names != (name,)}
