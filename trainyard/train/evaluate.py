"""Evaluation: exact over tokens, whatever the batch size; sums and counts are added up and divided once."""

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from math import exp

import torch
from torch import Tensor, nn

from trainyard.data.loader import Loader
from trainyard.devices import Device
from trainyard.models import Batch, Output
from trainyard.train.losses import Loss
from trainyard.train.own import pair
from trainyard.train.step import micro_batches, send

Metric = Callable[[Output, Batch], tuple[Tensor, Tensor]]
PERPLEXITY = ("lm", "mlm")
"""Terms whose exponential is a perplexity."""


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loss: Loss,
    metrics: Mapping[str, Metric],
    loader: Loader,
    device: Device,
    micro_batch: int,
    batches: int,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, float]:
    """Loss, its terms, perplexity and the user's metrics over the held-out samples (at most `batches` batches)."""
    was_training = model.training
    model.eval()
    sums: dict[str, tuple[Tensor, Tensor]] = {}
    names: set[str] = set()
    with device.attention():
        for micro in _micros(islice(loader.once(), batches), device, micro_batch):
            if stop():
                break
            output = model({**micro, "key": torch.zeros(2, dtype=torch.int32, device=device.handle)})
            terms = loss.terms(output, micro)
            names.update(terms)
            found = {**terms, **{name: pair(metric(output, micro), metric) for name, metric in metrics.items()}}
            for name, (total, count) in found.items():
                old = sums.get(name, (torch.zeros_like(total), torch.zeros_like(count)))
                sums[name] = (old[0] + total, old[1] + count)
    model.train(was_training)
    means = {name: (total / count).item() if count.item() else 0.0 for name, (total, count) in sums.items()}
    result = {"loss": sum(means[name] for name in names)}
    for name in names & set(PERPLEXITY):
        result["perplexity"] = exp(min(means[name], 700.0))
    # A single term is the loss and need not be said twice.
    return result | {name: mean for name, mean in means.items() if names != {name}}


def _micros(batches: Iterable[Batch], device: Device, size: int) -> Iterable[Batch]:
    for batch in batches:
        yield from micro_batches(send(batch, device), size)
