"""Runs the micro batches of a step through this rank's pipeline stages, forward and backward."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor, nn

from trainyard.core.batch import Batch, map_batch
from trainyard.core.errors import UserError
from trainyard.metrics.span_recorder import SpanRecorder
from trainyard.models import ModelOutput, TransformerStage
from trainyard.parallel.rank_context import RankContext
from trainyard.train.micro_batches.cuda_graphs import CudaGraphRunner
from trainyard.train.micro_batches.split import (
    context_parallel_shard,
    count_documents,
    padding_free_micro_batches,
    split_micro_batches,
)

if TYPE_CHECKING:  # importing torch's pipelining takes half a second, which only pp > 1 should pay
    from trainyard.parallel.pipeline import Pipeline

MIN_DOCUMENTS_BOUND = 32
MIN_DOCUMENTS_PER_SAMPLE = 8
MicroBatchLoss = Callable[[ModelOutput, Batch], Tensor]
"""Returns the part of the loss to start the backward pass from."""


class MicroBatchOptions(NamedTuple):
    """The shape of micro batches, and how they run."""

    samples: int
    seq_len: int
    """The largest."""
    hidden: int
    """Width of the activations between stages."""
    dtype: torch.dtype
    """Of activations."""
    padding_free: bool
    """Micro batches hold their samples without padding."""
    cuda_graphs: bool
    """Capture each micro batch as a graph, where the device can."""
    attention_kernel: str
    """The value of device.attention."""


class MicroBatchRunner:
    """Runs micro batches through this rank's stages and passes the last stage's output to the loss."""

    def __init__(
        self,
        models: Sequence[TransformerStage],
        context: RankContext,
        options: MicroBatchOptions,
        spans: SpanRecorder | None = None,
    ) -> None:
        """`spans` records forward and backward."""
        self.models, self.vocab_size = models, models[0].vocab_size
        self.micro_batch, self.attention_kernel = options.samples, options.attention_kernel
        self.device, self.mesh = context.device, context.mesh
        self.padding_free, self.spans = options.padding_free, spans or SpanRecorder()
        use_graphs = options.cuda_graphs and self.device.supports_graphs
        if use_graphs and self.mesh.layout.world_size > 1:
            raise UserError(
                f"compile.cuda_graphs=true: on {self.mesh.layout.world_size} ranks gradients are communicated during "
                "backward, which a graph cannot capture; nearest: false"
            )
        self.graph_runner = CudaGraphRunner(self.device) if use_graphs else None
        self.rng_key: Tensor
        self.loss_fn: MicroBatchLoss
        """Inputs of the current step, which torch's pipelining cannot pass to the stages."""
        self.options = options
        self.add_reference: Callable[[Batch], Batch] | None = None
        """Adds the scores of a reference to a batch of pairs, in host memory."""
        self.pipeline = self._build_pipeline(options.seq_len) if self.mesh.layout.pp > 1 else None
        self.pipelines = {options.seq_len: self.pipeline}
        """By length: torch's pipelining has fixed shapes. Those of other lengths are built when a batch has one."""

    def stage_batch(self, batch: Batch) -> list[Batch]:
        """Do all host work for a batch: divide it as it will be copied to the device, in pinned memory. Safe to call
        from any thread."""
        self._check_tokens(batch["tokens"])
        batch = self.add_reference(batch) if self.add_reference else batch
        batches = (
            padding_free_micro_batches(batch, self.micro_batch)
            if self.padding_free
            else [context_parallel_shard(batch, self.mesh.cp.size, self.mesh.cp.rank)]
        )
        self._bound_documents(batch)
        return [map_batch(self.device.pin_memory, part) for part in batches]

    def _bound_documents(self, batch: Batch) -> None:
        """Raise the bound of documents per micro batch to what the batch has. It never falls and starts high enough for
        most data, so that graphs, which depend on it, rarely change; captured ones cannot. Attention takes longer the
        higher it is."""
        count = count_documents(batch, self.micro_batch)
        if count and not self.graph_runner:
            usual = max(MIN_DOCUMENTS_BOUND, MIN_DOCUMENTS_PER_SAMPLE * self.micro_batch)
            for model in self.models:
                model.cp.max_documents = max(model.cp.max_documents, count, usual)

    def _check_tokens(self, tokens: Tensor) -> None:
        """Raise UserError for a token without an embedding. Devices would fail in other ways, or read another row."""
        if type(tokens) is not Tensor or not tokens.is_cpu:  # a dry run, or a batch that is on the device already
            return
        values = tokens.numpy()
        for token in (int(values.max()), int(values.min())) if values.size else ():
            if not 0 <= token < self.vocab_size:
                raise UserError(
                    f"a batch contains token {token}, but model.vocab={self.vocab_size}; the samples were made with "
                    "another vocabulary, or model.vocab is too small"
                )

    def to_device(self, batch: Batch | list[Batch]) -> list[Batch]:
        """Copy this data-parallel rank's samples (a batch, or the result of `stage_batch`) to the device: as micro
        batches, or as one batch for a pipeline, which splits it itself."""
        staged = batch if isinstance(batch, list) else self.stage_batch(batch)
        batches = [map_batch(self.device.to_device, part) for part in staged]
        if self.padding_free or self.pipeline:
            return batches
        return split_micro_batches(batches[0], self.micro_batch)

    def __call__(self, batches: list[Batch], rng_key: Tensor, loss_fn: MicroBatchLoss, backward: bool) -> None:
        """Run the result of `to_device`. `rng_key` is the step's random key for dropout."""
        with self.device.sdpa_priority(self.attention_kernel):
            if self.pipeline:
                self.rng_key, self.loss_fn = rng_key, loss_fn
                seq_len = batches[0]["tokens"].shape[1] * self.mesh.cp.size
                pipeline = self.pipelines.get(seq_len) or self._build_pipeline(seq_len)
                self.pipelines[seq_len] = pipeline
                with self.spans("pipeline"):
                    pipeline.run(batches[0], backward)
                return

            def run(micro: Batch, span: Callable[[str], AbstractContextManager[None]] = self.spans) -> None:
                with span("forward"):
                    loss = loss_fn(self.models[0]({**micro, "rng_key": rng_key}), micro)
                if backward:
                    with span("backward"):
                        loss.backward()  # type: ignore[no-untyped-call]

            for micro in batches:
                if backward and self.graph_runner:
                    with self.spans("forward and backward"):  # a graph replays both
                        self.graph_runner(micro, lambda micro: run(micro, lambda name: nullcontext()))
                else:
                    run(micro)
                self.device.flush()

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Put all stages into evaluation mode, and back into the mode they were in."""
        was_training = [model.training for model in self.models]
        for model in self.models:
            model.eval()
        try:
            yield
        finally:
            for model, training in zip(self.models, was_training, strict=True):
                model.train(training)

    def _build_pipeline(self, full_seq_len: int) -> "Pipeline":
        from trainyard.parallel import pipeline

        layout, options = self.mesh.layout, self.options
        seq_len = full_seq_len // layout.cp
        local_seq_len = seq_len // (layout.tp if layout.sequence_parallel else 1)
        tokens = torch.empty(options.samples, seq_len, dtype=torch.int32, device="meta")
        activations = torch.empty(options.samples, local_seq_len, options.hidden, dtype=options.dtype, device="meta")
        activations.requires_grad_()  # the pipeline sends gradients back only for such inputs
        modules = [_StageModule(model, self) for model in self.models]
        device = self.device.torch_device
        return pipeline.Pipeline(modules, self.mesh, tokens, activations, device, self.spans)


class _StageModule(nn.Module):
    """A stage in the form that torch's pipelining requires: tensors in, one tensor out."""

    def __init__(self, model: TransformerStage, runner: MicroBatchRunner) -> None:
        super().__init__()
        self.model, self.runner = model, runner

    def forward(self, x: Tensor, **micro: Tensor) -> Tensor:
        batch = cast(Batch, micro)
        output = self.model({**batch, "rng_key": self.runner.rng_key}, x)
        return self.runner.loss_fn(output, batch).reshape(1) if isinstance(output, ModelOutput) else output
