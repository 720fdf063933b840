"""Runs the micro batches of a step through this rank's pipeline stages, forward and backward."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor, nn

from trainyard.config.schema import Config
from trainyard.core.batch import Batch, map_batch
from trainyard.core.errors import UserError
from trainyard.devices import Device
from trainyard.models import ModelOutput, TransformerStage
from trainyard.parallel.layout import StageSpec
from trainyard.parallel.mesh import Mesh
from trainyard.train.micro_batches.cuda_graphs import CudaGraphRunner
from trainyard.train.micro_batches.split import context_parallel_shard, padding_free_micro_batches, split_micro_batches
from trainyard.train.optim.flat_state import DTYPES

if TYPE_CHECKING:  # importing torch's pipelining takes half a second, which only pp > 1 should pay
    from trainyard.parallel.pipeline import Pipeline

MicroBatchLoss = Callable[[ModelOutput, Batch], Tensor]
"""Returns the part of the loss to start the backward pass from."""


class StagedBatch(NamedTuple):
    """A rank's batch in pinned host memory, divided as it will be copied to the device."""

    batches: list[Batch]


class MicroBatchRunner:
    """Runs micro batches through this rank's stages and passes the last stage's output to the loss."""

    def __init__(
        self,
        stages: Sequence[tuple[StageSpec, TransformerStage]],
        config: Config,
        device: Device,
        mesh: Mesh,
        padding_free: bool = False,
    ) -> None:
        """With `padding_free`, micro batches hold their samples without padding."""
        self.models = [model for _, model in stages]
        self.micro_batch = config.train.micro_batch
        self.device, self.attention_kernel, self.mesh = device, config.device.attention, mesh
        self.padding_free = padding_free
        use_graphs = config.compile.cuda_graphs and device.supports_graphs
        if use_graphs and mesh.layout.world_size > 1:
            raise UserError(
                f"compile.cuda_graphs=true: on {mesh.layout.world_size} ranks gradients are communicated during "
                "backward, which a graph cannot capture; nearest: false"
            )
        self.graph_runner = CudaGraphRunner(device) if use_graphs else None
        self._stage_inputs = _StageInputs()
        self.pipeline: Pipeline | None = _build_pipeline(stages, self._stage_inputs, config, device, mesh)

    def stage_batch(self, batch: Batch) -> StagedBatch:
        """Do all host work for a batch and pin the result. Safe to call from any thread."""
        batches = (
            padding_free_micro_batches(batch, self.micro_batch)
            if self.padding_free
            else [context_parallel_shard(batch, self.mesh.cp.size, self.mesh.cp.rank)]
        )
        return StagedBatch([map_batch(self.device.pin_memory, part) for part in batches])

    def to_device(self, batch: "Batch | StagedBatch") -> list[Batch]:
        """Copy this data-parallel rank's samples to the device: as micro batches, or as one batch for a pipeline, which
        splits it itself."""
        staged = batch if isinstance(batch, StagedBatch) else self.stage_batch(batch)
        batches = [map_batch(self.device.to_device, part) for part in staged.batches]
        if self.padding_free or self.pipeline:
            return batches
        return list(split_micro_batches(batches[0], self.micro_batch))

    def __call__(self, batches: list[Batch], rng_key: Tensor, loss_fn: MicroBatchLoss, backward: bool) -> None:
        """Run the result of `to_device`. `rng_key` is the step's random key for dropout."""
        with self.device.sdpa_priority(self.attention_kernel):
            if self.pipeline:
                self._stage_inputs.rng_key, self._stage_inputs.loss_fn = rng_key, loss_fn
                self.pipeline.run(batches[0], backward)
                return

            def run(micro: Batch) -> None:
                loss = loss_fn(self.models[0]({**micro, "rng_key": rng_key}), micro)
                if backward:
                    loss.backward()  # type: ignore[no-untyped-call]

            for micro in batches:
                if backward and self.graph_runner:
                    self.graph_runner(micro, run)
                else:
                    run(micro)
                self.device.flush()


@dataclass
class _StageInputs:
    """Inputs of a step that torch's pipelining cannot pass to the stages, shared by the runner and all its stages."""

    rng_key: Tensor | None = None
    loss_fn: MicroBatchLoss | None = None


class _StageModule(nn.Module):
    """A stage in the form that torch's pipelining requires: tensors in, one tensor out."""

    def __init__(self, model: TransformerStage, inputs: _StageInputs) -> None:
        super().__init__()
        self.model, self.inputs = model, inputs

    def forward(self, x: Tensor, **micro: Tensor) -> Tensor:
        assert self.inputs.rng_key is not None
        assert self.inputs.loss_fn is not None
        batch = cast(Batch, micro)
        output = self.model({**batch, "rng_key": self.inputs.rng_key}, x)
        return self.inputs.loss_fn(output, batch).reshape(1) if isinstance(output, ModelOutput) else output


def _build_pipeline(
    stages: Sequence[tuple[StageSpec, TransformerStage]],
    inputs: _StageInputs,
    config: Config,
    device: Device,
    mesh: Mesh,
) -> "Pipeline | None":
    layout = mesh.layout
    if layout.pp == 1:
        return None
    from trainyard.parallel import pipeline

    micro_batch, seq_len = config.train.micro_batch, config.data.seq_len // layout.cp
    local_seq_len = seq_len // (layout.tp if config.layout.sequence_parallel else 1)
    return pipeline.Pipeline(
        [(spec, _StageModule(model, inputs)) for spec, model in stages],
        mesh,
        config.layout.pipeline_schedule,
        torch.empty(micro_batch, seq_len, dtype=torch.int32, device="meta"),
        torch.empty(
            micro_batch,
            local_seq_len,
            config.model.hidden,
            dtype=DTYPES[config.precision.compute_dtype],
            device="meta",
            requires_grad=True,  # the pipeline sends gradients back only for such inputs
        ),
        device.torch_device,
    )
