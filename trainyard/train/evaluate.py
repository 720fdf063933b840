"""Evaluation that is exact over tokens at any batch size: sums and counts are accumulated and divided once."""

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from math import exp

import torch
from torch import Tensor

from trainyard.models import Batch, ModelOutput
from trainyard.train.losses import Loss
from trainyard.train.micro_batches.runner import MicroBatchRunner
from trainyard.train.step import LossAccumulator, mean_loss
from trainyard.train.user_functions import check_sum_and_count

Metric = Callable[[ModelOutput, Batch], tuple[Tensor, Tensor]]
PERPLEXITY_TERMS = ("lm", "mlm")
"""Loss terms whose exponential is a perplexity."""
RESERVED_NAMES = ("loss", "perplexity")
"""Results of every evaluation, besides the loss terms; metrics have other names."""


@torch.no_grad()
def evaluate(
    runner: MicroBatchRunner,
    loss: Loss,
    metrics: Mapping[str, Metric],
    batches: Iterable[Batch | list[Batch]],
    max_batches: int,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, float]:
    """Loss, its terms, perplexity and the user's metrics over at most `max_batches` validation batches; NaN where
    nothing was counted.

    All ranks call this, each with its own samples. `should_stop` is asked before every batch.
    """
    device = runner.device.torch_device
    was_training = [model.training for model in runner.models]
    for model in runner.models:
        model.eval()
    rng_key = torch.zeros(2, dtype=torch.int32, device=device)
    names = [*loss.term_names, *metrics]
    sums = LossAccumulator(names, device, runner.mesh)

    def accumulate(output: ModelOutput, micro: Batch) -> Tensor:
        terms = loss.terms(output, micro)
        terms |= {name: check_sum_and_count(metric(output, micro), metric) for name, metric in metrics.items()}
        sums.add(terms)
        return sums.values[0, 0]

    for batch in islice(batches, max_batches):
        if should_stop():
            break
        runner(runner.to_device(batch), rng_key, accumulate, backward=False)
    for model, training in zip(runner.models, was_training, strict=True):
        model.train(training)
    totals, counts, _ = sums.all_reduce(torch.zeros(1, device=device))
    exact = [torch.tensor(values.tolist(), dtype=torch.float64) for values in (totals, counts)]
    means = dict(zip(names, mean_loss(*exact)[1].tolist(), strict=True))
    terms = len(loss.term_names)
    result = {"loss": float(mean_loss(*(values[:terms] for values in exact))[0])}
    for name in set(loss.term_names) & set(PERPLEXITY_TERMS):
        result["perplexity"] = exp(min(means[name], 700.0))
    # A single term equals the loss and is not repeated.
    return result | {name: mean for name, mean in means.items() if loss.term_names != (name,)}
