"""The train step: micro batches forward and backward, then one update. Fixed shapes, no question to the device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from trainyard.config.schema import Config
from trainyard.core.counter_rng import key32
from trainyard.core.errors import UserError
from trainyard.devices import Device
from trainyard.models import Batch, ModelOutput, TransformerStage
from trainyard.parallel.layout import StageSpec
from trainyard.parallel.mesh import Mesh
from trainyard.train.cuda_graphs import CudaGraphRunner
from trainyard.train.losses import Loss, LossTerms
from trainyard.train.micro_batches import context_parallel_shard, padding_free_micro_batches, split_micro_batches
from trainyard.train.optim.optimizer import DTYPES, Optimizer

if TYPE_CHECKING:  # torch's pipelining takes half a second to import, for those who use it
    from trainyard.parallel.pipeline import Pipeline


@dataclass
class StepResult:
    """What a step leaves behind, still on the device: reading it waits for the step."""

    step: int
    """Of the update; 1 is the first."""
    lr: float
    loss: Tensor
    terms: dict[str, Tensor]
    grad_norm: Tensor
    status: Callable[[], Tensor]
    """Steps skipped in all, and in a row, and then the sums of what all ranks said. Its copy to the host was queued
    with the step: it can be read while the next step runs."""


class StagedBatch(NamedTuple):
    """A batch in host memory, cut up as it will be sent."""

    batches: list[Batch]


class MicroBatchRunner:
    """Runs micro batches through this rank's stages and hands the last stage's output to `take`."""

    def __init__(
        self,
        models: Sequence[tuple[StageSpec, TransformerStage]],
        config: Config,
        device: Device,
        mesh: Mesh,
        padding_free: bool = False,
    ) -> None:
        """With `packs`, samples leave their padding behind."""
        self.models = [model for _, model in models]
        self.micro_batch = config.train.micro_batch
        self.device, self.attention_kernel, self.mesh = device, config.device.attention, mesh
        self.padding_free = padding_free
        replay = config.compile.cuda_graphs and device.supports_graphs
        if replay and mesh.layout.world_size > 1:
            raise UserError(
                f"compile.cuda_graphs=true: on {mesh.layout.world_size} ranks, gradients that travel cannot be recorded; "
                "nearest: false"
            )
        self.graph_runner = CudaGraphRunner(device) if replay else None
        self.stages = [_StageModule(model) for model in self.models]
        self.pipeline: Pipeline | None = None
        if mesh.layout.pp > 1:
            length = config.data.seq_len // mesh.layout.cp
            from trainyard.parallel import pipeline

            shared = mesh.layout.tp if config.layout.sequence_parallel else 1
            self.pipeline = pipeline.Pipeline(
                [(stage, module) for (stage, _), module in zip(models, self.stages, strict=True)],
                mesh,
                config.layout.pipeline_schedule,
                torch.empty(self.micro_batch, length, dtype=torch.int32, device="meta"),
                torch.empty(
                    self.micro_batch,
                    length // shared,
                    config.model.hidden,
                    dtype=DTYPES[config.precision.compute_dtype],
                    device="meta",
                    requires_grad=True,  # so that gradients travel back
                ),
                device.torch_device,
            )

    def stage_batch(self, batch: Batch) -> "StagedBatch":
        """All that the host has to do for a batch, in memory that the device can read: in any thread."""
        parts = (
            padding_free_micro_batches(batch, self.micro_batch)
            if self.padding_free
            else [context_parallel_shard(batch, self.mesh.cp.size, self.mesh.cp.rank)]
        )
        return StagedBatch([{name: self.device.pin_memory(tensor) for name, tensor in part.items()} for part in parts])

    def to_device(self, batch: "Batch | StagedBatch") -> list[Batch]:
        """This data-parallel rank's samples, in host memory, to what the device works on: micro batches, or all of them
        for a pipeline."""
        ready = batch if isinstance(batch, StagedBatch) else self.stage_batch(batch)
        parts = [{name: self.device.to_device(tensor) for name, tensor in part.items()} for part in ready.batches]
        return parts if self.padding_free or self.pipeline else list(split_micro_batches(parts[0], self.micro_batch))

    def __call__(
        self, batches: list[Batch], rng_key: Tensor, loss_fn: Callable[[ModelOutput, Batch], Tensor], backward: bool
    ) -> None:
        """`parts` are from `send`; `take` gives the part of the loss to go backward from."""
        with self.device.sdpa_priority(self.attention_kernel):
            if self.pipeline:
                for stage in self.stages:
                    stage.rng_key, stage.loss_fn = rng_key, loss_fn
                self.pipeline.run(batches[0], backward)
                return

            def work(micro: Batch) -> None:
                part = loss_fn(self.models[0]({**micro, "rng_key": rng_key}), micro)
                if backward:
                    part.backward()  # type: ignore[no-untyped-call]

            for micro in batches:
                if backward and self.graph_runner:
                    self.graph_runner(micro, work)
                else:
                    work(micro)
                self.device.flush()


class _StageModule(nn.Module):
    """A stage as the pipeline sees it: tensors in, one tensor out."""

    rng_key: Tensor
    loss_fn: Callable[[ModelOutput, Batch], Tensor]

    def __init__(self, model: TransformerStage) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, **micro: Tensor) -> Tensor:
        output = self.model({**micro, "rng_key": self.rng_key}, x)
        return self.loss_fn(output, micro).reshape(1) if isinstance(output, ModelOutput) else output


class TrainStep:
    def __init__(
        self, forward: MicroBatchRunner, loss: Loss, optimizer: Optimizer, device: Device, mesh: Mesh, seed: int
    ) -> None:
        self.runner = forward
        self.loss_fn = loss
        self.optimizer = optimizer
        self.device = device
        self.mesh = mesh
        self.seed = seed
        # At fixed places in memory, so that what reads them can be replayed.
        self.rng_key = torch.zeros(2, dtype=torch.int32, device=device.torch_device)
        self.loss_divisors = torch.ones(len(loss.term_names), device=device.torch_device)
        self.loss_sums = LossAccumulator(loss.term_names, device.torch_device, mesh)
        self.on_gradients_ready: Callable[[], None] | None = None
        """Called when gradients are complete, before the update."""

    def __call__(self, batch: Batch | StagedBatch, step: int, lr: float, piggyback: Sequence[float] = ()) -> StepResult:
        """`batch` holds this data-parallel rank's samples, in host memory; `says` are numbers of this rank that all
        ranks are to know the sums of."""
        mesh = self.mesh
        parts = self.runner.to_device(batch)
        self.rng_key.copy_(self.device.to_device(torch.tensor(key32(self.seed, "step", step), dtype=torch.int32)))
        self.optimizer.zero_grad(mesh.layout.micro_batches)
        # Counts known from the labels divide the loss before backward; those of a user's own loss divide the gradient.
        ahead = [torch.stack(list(count.values())) for part in parts if (count := self.loss_fn.label_counts(part))]
        if ahead:
            self.loss_divisors.copy_(at_least_one(mesh.dp_cp.all_reduce_sum(torch.stack(ahead).sum(0))))
        self.loss_sums.values.zero_()
        self.runner(parts, self.rng_key, self._micro_batch_loss, backward=True)
        said = self.device.to_device(torch.tensor(piggyback, dtype=torch.float32))
        totals, counts, said = self.loss_sums.all_reduce(said)
        means = dict(zip(self.loss_fn.term_names, totals / at_least_one(counts), strict=True))
        loss = torch.stack(list(means.values())).sum()
        scale = torch.ones_like(loss) if ahead else 1 / at_least_one(counts[0])
        rate = self.device.to_device(torch.tensor(lr, dtype=torch.float32))
        self.optimizer.reduce_gradients()
        if self.on_gradients_ready:
            self.on_gradients_ready()
        norm = self.optimizer.step(rate, scale, loss, step)
        control = torch.cat((self.optimizer.skip_counts, said.int()))
        return StepResult(step, lr, loss, means, norm, self.device.copy_to_host(control))

    def _micro_batch_loss(self, output: ModelOutput, micro: Batch) -> Tensor:
        terms = self.loss_fn.terms(output, micro)
        self.loss_sums.add(terms)
        return torch.stack([terms[name][0] for name in self.loss_fn.term_names]).div(self.loss_divisors).sum()


class LossAccumulator:
    """Each term's sum and count, over micro batches and then over ranks."""

    def __init__(self, names: Sequence[str], device: torch.device, mesh: Mesh) -> None:
        self.names, self.mesh = list(names), mesh
        self.values = torch.zeros(2, len(names), device=device)
        self.is_tp_leader = torch.tensor(mesh.tp.rank == 0, device=device)
        """A tensor, so that the graph does not depend on the rank."""

    def add(self, terms: LossTerms) -> None:
        self.values += torch.stack(
            [torch.stack([terms[name][which].detach() for name in self.names]) for which in (0, 1)]
        )

    def all_reduce(self, extra: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(sums, counts) of the whole batch, and `extra` [N] summed over all ranks.

        Tensor-parallel ranks have found the same numbers, so one of them speaks; stages without a loss have zeros.
        """
        mine = self.values if self.mesh.tp.size == 1 else torch.where(self.is_tp_leader, self.values, 0.0)
        whole = self.mesh.world.all_reduce_sum(torch.cat((mine.flatten(), extra)))
        terms = len(self.names)
        return whole[:terms], whole[terms : 2 * terms], whole[2 * terms :]


def at_least_one(count: Tensor) -> Tensor:
    """A batch in which nothing counts has loss 0, not 0 / 0."""
    return count.clamp(min=1)
