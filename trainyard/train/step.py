"""The train step: forward and backward of all micro batches, then one update. Shapes are fixed, and the host never
waits for the device."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from trainyard.core.batch import Batch
from trainyard.core.counter_rng import key32
from trainyard.devices.stopwatch import Stopwatch
from trainyard.models import ModelOutput
from trainyard.parallel.mesh import Mesh
from trainyard.parallel.zero1 import Waiting
from trainyard.train.loss import Loss, LossTerms
from trainyard.train.micro_batches.runner import MicroBatchRunner
from trainyard.train.optim.optimizer import Optimizer
from trainyard.train.status import NO_FLAGS, HostStatus, StepStatus


@dataclass
class StepResult:
    """Results of a step, still on the device: reading a tensor waits for the step."""

    step: int
    """Number of the update; the first is 1."""
    lr: float
    loss: Tensor
    terms: dict[str, Tensor]
    """Mean of each loss term over the global batch; NaN if none of its labels count."""
    metrics: dict[str, Tensor]
    """Mean of each metric of the loss."""
    grad_norm: Tensor
    """Before clipping."""
    label_count: Tensor
    """Counted labels of the global batch, of the term that has most; 0 if the batch has none, which skips the step."""
    host_status: Callable[[], Tensor]
    """Waits for the host copy of the skip counts, loss, norm, label count and flags. The copy is queued with the step,
    so it can be read while the next step runs."""

    def read_status(self) -> HostStatus:
        total, in_a_row, loss, grad_norm, label_count, *flags = self.host_status().tolist()
        return HostStatus(int(total), int(in_a_row), loss, grad_norm, label_count, StepStatus(*flags))


class TrainStep:
    """Runs one step on this rank's samples."""

    def __init__(
        self,
        runner: MicroBatchRunner,
        loss_fn: Loss,
        optimizer: Optimizer,
        seed: int,
        on_gradients_ready: Callable[[], None] | None = None,
        stopwatch: Stopwatch | None = None,
        waiting: Waiting = nullcontext,
    ) -> None:
        """`on_gradients_ready` is called between the gradient reduction and the update. A running `stopwatch` stops
        when this rank's own gradients are complete. `waiting` is entered while this rank waits for others."""
        self.runner, self.loss_fn, self.optimizer = runner, loss_fn, optimizer
        self.device, self.mesh, self.seed = runner.device, runner.mesh, seed
        device = runner.device.torch_device
        # These keep their addresses, so that CUDA graphs can read them.
        self.rng_key = torch.zeros(2, dtype=torch.int32, device=device)
        self.loss_divisors = torch.ones(len(loss_fn.term_names), device=device)
        self.loss_sums = LossAccumulator((*loss_fn.term_names, *loss_fn.metric_names), device, runner.mesh)
        self.on_gradients_ready, self.stopwatch = on_gradients_ready, stopwatch
        self.spans, self.waiting = runner.spans, waiting

    def __call__(self, batch: Batch | list[Batch], step: int, lr: float, status: StepStatus = NO_FLAGS) -> StepResult:
        """`batch` holds this data-parallel rank's samples in host memory, perhaps staged by the runner. `status` is
        summed over all ranks."""
        mesh = self.mesh
        batches = self.runner.to_device(batch)
        self.rng_key.copy_(self.device.to_device(torch.tensor(key32(self.seed, "step", step), dtype=torch.int32)))
        self.loss_fn.prepare(self.runner, batches, self.rng_key)
        self.optimizer.zero_grad(mesh.layout.micro_batches)
        # Counts that the labels determine divide the loss before backward; a user's loss divides the gradients after.
        counts_per_batch = [torch.stack(terms) for part in batches if (terms := self.loss_fn.label_counts(part))]
        if counts_per_batch:
            local_counts = torch.stack(counts_per_batch).sum(0)
            with self.waiting():
                global_counts = mesh.dp_cp.all_reduce_sum(local_counts)
            self.loss_divisors.copy_(global_counts.clamp(min=1))
        self.loss_sums.values.zero_()
        self.runner(batches, self.rng_key, self._micro_batch_loss, backward=True)
        if self.stopwatch:
            self.stopwatch.stop()
        local_status = self.device.to_device(torch.tensor(status, dtype=torch.float32))
        with self.waiting():
            totals, counts, status_sums = self.loss_sums.all_reduce(local_status)
        loss, means = mean_loss(totals, counts, len(self.loss_divisors))
        means_by_name = dict(zip(self.loss_sums.names, means, strict=True))
        metrics = {name: means_by_name.pop(name) for name in self.loss_fn.metric_names}
        grad_scale = torch.ones_like(loss) if counts_per_batch else torch.where(counts[0] > 0, 1 / counts[0], 1.0)
        lr_tensor = self.device.to_device(torch.tensor(lr, dtype=torch.float32))
        with self.spans("reduce"):
            self.optimizer.reduce_gradients()
        if self.on_gradients_ready:
            self.on_gradients_ready()
        with self.spans("optimizer"):
            norm = self.optimizer.step(lr_tensor, grad_scale, loss, step)
        label_count = counts[: len(self.loss_divisors)].max()
        numbers = torch.stack((*self.optimizer.guard.skip_counts.float(), loss, norm, label_count))
        host_status = self.device.copy_to_host(torch.cat((numbers, status_sums)))
        return StepResult(step, lr, loss, means_by_name, metrics, norm, label_count, host_status)

    def _micro_batch_loss(self, output: ModelOutput, micro: Batch) -> Tensor:
        terms = self.loss_fn.terms(output, micro)
        self.loss_sums.add(terms)
        return torch.stack([terms[name][0] for name in self.loss_fn.term_names]).div(self.loss_divisors).sum()


class LossAccumulator:
    """Sum and count of each loss term, over micro batches and then over ranks."""

    def __init__(self, names: Sequence[str], device: torch.device, mesh: Mesh) -> None:
        self.names, self.mesh = list(names), mesh
        self.values = torch.zeros(2, len(names), device=device)
        self.is_tp_leader = torch.tensor(mesh.tp.rank == 0, device=device)
        """A tensor, so that the graph is the same on every rank."""

    def add(self, terms: LossTerms) -> None:
        self.values += torch.stack(
            [torch.stack([terms[name][index].detach() for name in self.names]) for index in (0, 1)]
        )

    def all_reduce(self, extra: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (sums, counts) over the global batch, and `extra` [N] summed over all ranks in the same message.

        Tensor-parallel ranks compute the same values, so only the first of them contributes. Stages without a loss
        contribute zeros.
        """
        local = self.values if self.mesh.tp.size == 1 else torch.where(self.is_tp_leader, self.values, 0.0)
        reduced = self.mesh.world.all_reduce_sum(torch.cat((local.flatten(), extra)))
        terms = len(self.names)
        return reduced[:terms], reduced[terms : 2 * terms], reduced[2 * terms :]


def mean_loss(totals: Tensor, counts: Tensor, terms: int) -> tuple[Tensor, Tensor]:
    """The loss, and the mean of each of its `terms` and of the metrics that follow, from their sums and counts, as
    fractions too. A term without a count is NaN and does not add to the loss; without any count, the loss is NaN, so
    that the step is skipped."""
    means = torch.where(counts > 0, totals / counts, float("nan"))
    loss = torch.where(counts > 0, means, 0.0)[:terms].sum()
    return torch.where((counts[:terms] > 0).any(), loss, float("nan")), means
