"""Evaluation that is exact over tokens at any batch size and layout: sums and counts are accumulated and divided once.

Sums of a batch are fp32, sums over batches and ranks fp64.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from math import exp

import torch
from torch import Tensor

from trainyard.core.errors import UserError
from trainyard.models import Batch, ModelOutput
from trainyard.train.loss import Loss
from trainyard.train.micro_batches.runner import MicroBatchRunner
from trainyard.train.step import LossAccumulator, mean_loss
from trainyard.train.user_functions import check_sum_and_count

Metric = Callable[[ModelOutput, Batch], tuple[Tensor, Tensor]]
PERPLEXITY_TERMS = ("lm", "mlm")
"""Loss terms whose exponential is a perplexity."""
MAX_PENDING_BATCHES = 8
"""Batches of an evaluation whose sums the host has not read."""
RESERVED_NAMES = ("loss", "perplexity")
"""Results of every evaluation, besides the loss terms; metrics have other names."""


@dataclass(frozen=True)
class EvaluationTotals:
    """Sum and count of each loss term and metric over all evaluated samples and ranks."""

    term_names: tuple[str, ...]
    """The loss terms; all other names are metrics."""
    sums: dict[str, float]
    counts: dict[str, float]

    def means(self) -> dict[str, float]:
        """Loss, its terms, perplexity and the user's metrics; NaN where nothing was counted."""
        names = list(self.sums)
        sums, counts = (
            torch.tensor([values[name] for name in names], dtype=torch.float64) for values in (self.sums, self.counts)
        )
        loss, every_mean = mean_loss(sums, counts, len(self.term_names))
        means, result = dict(zip(names, every_mean.tolist(), strict=True)), {"loss": float(loss)}
        for name in set(self.term_names) & set(PERPLEXITY_TERMS):
            result["perplexity"] = perplexity_of(means[name])
        # A single term equals the loss and is not repeated.
        return result | {name: mean for name, mean in means.items() if self.term_names != (name,)}


def perplexity_of(loss: float) -> float:
    return exp(min(loss, 700.0))


@torch.no_grad()
def evaluate(
    runner: MicroBatchRunner,
    loss: Loss,
    metrics: Mapping[str, Metric],
    batches: Iterable[Batch | list[Batch]],
    max_batches: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> EvaluationTotals:
    """Evaluate the loss and the user's metrics on at most `max_batches` batches (None: all).

    All ranks call this, each with its own samples. `should_stop` is asked before every batch.
    """
    device = runner.device.torch_device
    rng_key = torch.zeros(2, dtype=torch.int32, device=device)
    names = [*loss.term_names, *loss.metric_names, *metrics]
    batch_sums = LossAccumulator(names, device, runner.mesh)
    totals = torch.zeros(2, len(names), dtype=torch.float64)
    # Sums of the last batches on their way to the host. Waiting for each would leave the device idle.
    pending: deque[Callable[[], Tensor]] = deque()

    def accumulate(output: ModelOutput, micro: Batch) -> Tensor:
        terms = loss.terms(output, micro)
        terms |= {name: check_sum_and_count(metric(output, micro), metric) for name, metric in metrics.items()}
        batch_sums.add(terms)
        return batch_sums.values[0, 0]

    with runner.eval_mode():
        for batch in islice(batches, max_batches):
            if should_stop():
                break
            batch_sums.values.zero_()
            batches = runner.to_device(batch)
            loss.prepare(runner, batches, rng_key)
            runner(batches, rng_key, accumulate, backward=False)
            pending.append(runner.device.copy_to_host(batch_sums.values.clone()))
            if len(pending) > MAX_PENDING_BATCHES:
                totals += torch.tensor(pending.popleft()().tolist(), dtype=torch.float64)
    for wait in pending:
        totals += torch.tensor(wait().tolist(), dtype=torch.float64)
    sums, counts = sum_over_ranks(totals, runner).tolist()
    return EvaluationTotals(loss.term_names, dict(zip(names, sums, strict=True)), dict(zip(names, counts, strict=True)))


def evaluate_sets(
    runner: MicroBatchRunner,
    loss: Loss,
    metrics: Mapping[str, Metric],
    sets: Mapping[str, Iterable[Batch]],
    max_batches: int | None,
    should_stop: Callable[[], bool],
) -> dict[str, float]:
    """The means over each set of batches. Results of the set NAME are called NAME/loss and so on; those of the set ""
    have no prefix."""
    if not sets:
        raise UserError("data.validation_fraction=0: there are no validation samples to evaluate on; nearest: 0.05")
    results: dict[str, float] = {}
    for name, batches in sets.items():
        totals = evaluate(runner, loss, metrics, batches, max_batches, should_stop)
        results |= {f"{name}/{key}" if name else key: value for key, value in totals.means().items()}
    return results


def sum_over_ranks(totals: Tensor, runner: MicroBatchRunner) -> Tensor:
    """The fp64 sums of all ranks' host tensors, exact also on devices without fp64.

    Each rank puts its values into a row of its own, as three fp32 numbers that add up to an fp64 number; the sum of all
    tables then rounds nothing. Tensor-parallel ranks have the same values, so only the first of them contributes.
    """
    mesh = runner.mesh
    if mesh.world.size == 1:
        return totals
    table = torch.zeros(mesh.world.size, 3, *totals.shape)
    remainder = totals if mesh.tp.rank == 0 else torch.zeros_like(totals)
    for part in table[mesh.layout_rank]:
        part.copy_(remainder)
        remainder = torch.where(part.isfinite(), remainder - part.double(), 0.0)
    reduced = mesh.world.all_reduce_sum(runner.device.to_device(table))
    return torch.tensor(reduced.tolist(), dtype=torch.float64).sum((0, 1))
