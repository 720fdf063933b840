"""Evaluation: exact over tokens, whatever the batch size; sums and counts are added up and divided once."""

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from math import exp

import torch
from torch import Tensor

from trainyard.devices import Device
from trainyard.models import Batch, ModelOutput
from trainyard.parallel.mesh import Mesh
from trainyard.train.losses import Loss
from trainyard.train.step import LossAccumulator, MicroBatchRunner
from trainyard.train.user_functions import check_sum_and_count

Metric = Callable[[ModelOutput, Batch], tuple[Tensor, Tensor]]
PERPLEXITY_TERMS = ("lm", "mlm")
"""Terms whose exponential is a perplexity."""


@torch.no_grad()
def evaluate(
    runner: MicroBatchRunner,
    loss: Loss,
    metrics: Mapping[str, Metric],
    batches: Iterable[Batch],
    device: Device,
    mesh: Mesh,
    max_batches: int,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, float]:
    """Loss, its terms, perplexity and the user's metrics over this rank's part of at most `most` held-out batches."""
    was_training = [model.training for model in runner.models]
    for model in runner.models:
        model.eval()
    key = torch.zeros(2, dtype=torch.int32, device=device.torch_device)
    names = [*loss.term_names, *metrics]
    sums = LossAccumulator(names, device.torch_device, mesh)

    def take(output: ModelOutput, micro: Batch) -> Tensor:
        found = {
            **loss.terms(output, micro),
            **{name: check_sum_and_count(own(output, micro), own) for name, own in metrics.items()},
        }
        sums.add(found)
        return sums.values[0, 0]

    for batch in islice(batches, max_batches):
        if should_stop():
            break
        runner(runner.to_device(batch), key, take, backward=False)
    for model, training in zip(runner.models, was_training, strict=True):
        model.train(training)
    totals, counts, _ = sums.all_reduce(torch.zeros(1, device=device.torch_device))
    means = {
        name: total / count if count else 0.0
        for name, total, count in zip(names, totals.tolist(), counts.tolist(), strict=True)
    }
    result = {"loss": sum(means[name] for name in loss.term_names)}
    for name in set(loss.term_names) & set(PERPLEXITY_TERMS):
        result["perplexity"] = exp(min(means[name], 700.0))
    # A single term is the loss and need not be said twice.
    return result | {name: mean for name, mean in means.items() if loss.term_names != (name,)}
