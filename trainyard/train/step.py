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
from trainyard.models import Batch, Output, Stack
from trainyard.parallel.layout import Stage
from trainyard.parallel.mesh import Mesh
from trainyard.train.cuda_graphs import Replays
from trainyard.train.losses import Loss, Terms
from trainyard.train.micro_batches import context_part, micro_batches, pack
from trainyard.train.optim.optimizer import DTYPES, Optimizer

if TYPE_CHECKING:  # torch's pipelining takes half a second to import, for those who use it
    from trainyard.parallel.pipeline import Pipeline


@dataclass
class StepResult:
    """What a step leaves behind, still on the device: reading it waits for the step."""

    number: int
    """Of the update; 1 is the first."""
    lr: float
    loss: Tensor
    terms: dict[str, Tensor]
    grad_norm: Tensor
    control: Callable[[], Tensor]
    """Steps skipped in all, and in a row, and then the sums of what all ranks said. Its copy to the host was queued
    with the step: it can be read while the next step runs."""


class Prepared(NamedTuple):
    """A batch in host memory, cut up as it will be sent."""

    parts: list[Batch]


class Forward:
    """Runs micro batches through this rank's stages and hands the last stage's output to `take`."""

    def __init__(
        self, models: Sequence[tuple[Stage, Stack]], config: Config, device: Device, mesh: Mesh, packs: bool = False
    ) -> None:
        """With `packs`, samples leave their padding behind."""
        self.models = [model for _, model in models]
        self.micro_batch = config.train.micro_batch
        self.device, self.first, self.mesh = device, config.device.attention, mesh
        self.packs = packs
        replay = config.compile.replay and device.records
        if replay and mesh.layout.world > 1:
            raise UserError(
                f"compile.replay=true: on {mesh.layout.world} ranks, gradients that travel cannot be recorded; "
                "nearest: false"
            )
        self.replays = Replays(device) if replay else None
        self.stages = [_StageModule(model) for model in self.models]
        self.pipeline: Pipeline | None = None
        if mesh.layout.pp > 1:
            length = config.data.sequence // mesh.layout.cp
            from trainyard.parallel import pipeline

            shared = mesh.layout.tp if config.layout.sequence_parallel else 1
            self.pipeline = pipeline.Pipeline(
                [(stage, module) for (stage, _), module in zip(models, self.stages, strict=True)],
                mesh,
                config.layout.schedule,
                torch.empty(self.micro_batch, length, dtype=torch.int32, device="meta"),
                torch.empty(
                    self.micro_batch,
                    length // shared,
                    config.model.hidden,
                    dtype=DTYPES[config.precision.compute],
                    device="meta",
                    requires_grad=True,  # so that gradients travel back
                ),
                device.handle,
            )

    def prepare(self, batch: Batch) -> "Prepared":
        """All that the host has to do for a batch, in memory that the device can read: in any thread."""
        parts = (
            pack(batch, self.micro_batch) if self.packs else [context_part(batch, self.mesh.cp.size, self.mesh.cp.rank)]
        )
        return Prepared([{name: self.device.pin(tensor) for name, tensor in part.items()} for part in parts])

    def send(self, batch: "Batch | Prepared") -> list[Batch]:
        """This data-parallel rank's samples, in host memory, to what the device works on: micro batches, or all of them
        for a pipeline."""
        ready = batch if isinstance(batch, Prepared) else self.prepare(batch)
        parts = [{name: self.device.to_device(tensor) for name, tensor in part.items()} for part in ready.parts]
        return parts if self.packs or self.pipeline else list(micro_batches(parts[0], self.micro_batch))

    def __call__(
        self, parts: list[Batch], key: Tensor, take: Callable[[Output, Batch], Tensor], backward: bool
    ) -> None:
        """`parts` are from `send`; `take` gives the part of the loss to go backward from."""
        with self.device.attention(self.first):
            if self.pipeline:
                for stage in self.stages:
                    stage.key, stage.take = key, take
                self.pipeline.run(parts[0], backward)
                return

            def work(micro: Batch) -> None:
                part = take(self.models[0]({**micro, "key": key}), micro)
                if backward:
                    part.backward()  # type: ignore[no-untyped-call]

            for micro in parts:
                if backward and self.replays:
                    self.replays(micro, work)
                else:
                    work(micro)
                self.device.mark()


class _StageModule(nn.Module):
    """A stage as the pipeline sees it: tensors in, one tensor out."""

    key: Tensor
    take: Callable[[Output, Batch], Tensor]

    def __init__(self, model: Stack) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, **micro: Tensor) -> Tensor:
        output = self.model({**micro, "key": self.key}, x)
        return self.take(output, micro).reshape(1) if isinstance(output, Output) else output


class Step:
    def __init__(
        self, forward: Forward, loss: Loss, optimizer: Optimizer, device: Device, mesh: Mesh, seed: int
    ) -> None:
        self.forward = forward
        self.loss = loss
        self.optimizer = optimizer
        self.device = device
        self.mesh = mesh
        self.seed = seed
        # At fixed places in memory, so that what reads them can be replayed.
        self.key = torch.zeros(2, dtype=torch.int32, device=device.handle)
        self.divisors = torch.ones(len(loss.names), device=device.handle)
        self.sums = Sums(loss.names, device.handle, mesh)
        self.look: Callable[[], None] | None = None
        """Called when gradients are complete, before the update."""

    def __call__(self, batch: Batch | Prepared, number: int, lr: float, says: Sequence[float] = ()) -> StepResult:
        """`batch` holds this data-parallel rank's samples, in host memory; `says` are numbers of this rank that all
        ranks are to know the sums of."""
        mesh = self.mesh
        parts = self.forward.send(batch)
        self.key.copy_(self.device.to_device(torch.tensor(key32(self.seed, "step", number), dtype=torch.int32)))
        self.optimizer.clear(mesh.layout.micro_batches)
        # Counts known from the labels divide the loss before backward; those of a user's own loss divide the gradient.
        ahead = [torch.stack(list(count.values())) for part in parts if (count := self.loss.counts(part))]
        if ahead:
            self.divisors.copy_(at_least_one(mesh.data.sum(torch.stack(ahead).sum(0))))
        self.sums.values.zero_()
        self.forward(parts, self.key, self._take, backward=True)
        said = self.device.to_device(torch.tensor(says, dtype=torch.float32))
        totals, counts, said = self.sums.over(said)
        means = dict(zip(self.loss.names, totals / at_least_one(counts), strict=True))
        loss = torch.stack(list(means.values())).sum()
        scale = torch.ones_like(loss) if ahead else 1 / at_least_one(counts[0])
        rate = self.device.to_device(torch.tensor(lr, dtype=torch.float32))
        self.optimizer.collect()
        if self.look:
            self.look()
        norm = self.optimizer.step(rate, scale, loss, number)
        control = torch.cat((self.optimizer.skipped, said.int()))
        return StepResult(number, lr, loss, means, norm, self.device.fetch(control))

    def _take(self, output: Output, micro: Batch) -> Tensor:
        terms = self.loss.terms(output, micro)
        self.sums.add(terms)
        return torch.stack([terms[name][0] for name in self.loss.names]).div(self.divisors).sum()


class Sums:
    """Each term's sum and count, over micro batches and then over ranks."""

    def __init__(self, names: Sequence[str], device: torch.device, mesh: Mesh) -> None:
        self.names, self.mesh = list(names), mesh
        self.values = torch.zeros(2, len(names), device=device)
        self.speaks = torch.tensor(mesh.tp.rank == 0, device=device)
        """A tensor, so that the graph does not depend on the rank."""

    def add(self, terms: Terms) -> None:
        self.values += torch.stack(
            [torch.stack([terms[name][which].detach() for name in self.names]) for which in (0, 1)]
        )

    def over(self, extra: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(sums, counts) of the whole batch, and `extra` [N] summed over all ranks.

        Tensor-parallel ranks have found the same numbers, so one of them speaks; stages without a loss have zeros.
        """
        mine = self.values if self.mesh.tp.size == 1 else torch.where(self.speaks, self.values, 0.0)
        whole = self.mesh.everyone.sum(torch.cat((mine.flatten(), extra)))
        terms = len(self.names)
        return whole[:terms], whole[terms : 2 * terms], whole[2 * terms :]


def at_least_one(count: Tensor) -> Tensor:
    """A batch in which nothing counts has loss 0, not 0 / 0."""
    return count.clamp(min=1)
