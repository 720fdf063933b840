"""Builds a stage of the real model on the meta device and runs one micro batch forward and backward."""

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from trainyard import compat, models
from trainyard.config.schema import PrecisionSection, RecomputeSection
from trainyard.core.batch import Batch
from trainyard.kernels.fp8_linear import Fp8Options
from trainyard.kernels.reference import Kernels
from trainyard.models import ModelConfig, ModelOutput, TransformerStage, family_of
from trainyard.models.module_factory import ModuleFactory
from trainyard.models.rank_model import FactoryClass
from trainyard.parallel.axes import Axes
from trainyard.parallel.context_parallel import ContextAxis
from trainyard.parallel.expert_parallel import ExpertAxis
from trainyard.parallel.layout import StageSpec
from trainyard.parallel.recompute import apply_recompute
from trainyard.parallel.ring_attention import CpMethod
from trainyard.parallel.tensor_parallel import TensorAxis
from trainyard.preflight.plan.memory.device_kinds import DeviceKind
from trainyard.preflight.plan.trace.device_mode import DeviceMode
from trainyard.preflight.plan.trace.eager_checkpoint import eager_checkpoint
from trainyard.preflight.plan.trace.micro_batch import MicroBatchShape
from trainyard.preflight.plan.trace.part_recorder import EMBEDDING, HEAD, LOSS, PartRecorder
from trainyard.preflight.plan.trace.traced_collectives import traced_group
from trainyard.train.cross_entropy import make_head_loss
from trainyard.train.losses import make_loss
from trainyard.train.optim.flat_state import DTYPES
from trainyard.train.optim.gradient_sync import accumulate_into

META = torch.device("meta")
TRACED_CHUNKS = 2
"""Chunks of logits that are traced: the second one has what the first one leaves."""


@dataclass(frozen=True)
class TracedStage:
    """What decides which tensors a stage allocates. Equal ones have equal traces."""

    model: ModelConfig
    layers: tuple[int, ...]
    """The layers that are traced, in the order in which they run."""
    micro_batch: MicroBatchShape
    tp: int
    cp: int
    ep: int
    cp_method: CpMethod
    sequence_parallel: bool
    recompute: RecomputeSection
    precision: PrecisionSection
    fp8_layers: range
    """The layers of the model that multiply in fp8."""
    device: DeviceKind
    fused_kernels: bool
    fused_wgrad: bool
    is_first: bool
    is_last: bool


class StageRun:
    """A stage whose tensors have shapes only."""

    def __init__(
        self,
        stage: TracedStage,
        recorder: PartRecorder,
        factory: FactoryClass = ModuleFactory,
        traced_chunks: int = TRACED_CHUNKS,
        accumulates: bool = True,
    ) -> None:
        """With `accumulates`, weight gradients are added to those of other micro batches."""
        self.stage, self.recorder, self.traced_chunks = stage, recorder, traced_chunks
        self.kernels, precision = _make_kernels(stage), stage.precision
        by_all_reduce = stage.device.gathers_by_all_reduce
        tp, cp, ep = (
            traced_group(name, size, by_all_reduce, recorder.on_message)
            for name, size in (("tp", stage.tp), ("cp", stage.cp), ("ep", stage.ep))
        )
        axes = Axes(TensorAxis(tp, stage.sequence_parallel), ContextAxis(cp, stage.cp_method), ExpertAxis(ep))
        self.fp8 = Fp8Options(precision.fp8_scaling, precision.fp8_backward) if precision.kind == "fp8" else None
        fp8 = models.Fp8Layers(self.fp8, stage.fp8_layers) if self.fp8 else None
        spec = StageSpec(0, stage.layers, stage.is_first, stage.is_last)
        self.model: TransformerStage = models.build_model(stage.model, META, axes, spec, self.kernels, fp8, factory)
        self.model.max_seq_len = stage.micro_batch.seq_len
        self.model.pre_layer_hook = self._enter
        self.block_inputs: tuple[Any, ...] = ()
        """What all blocks read. It lives until the last block ends, so that each layer adds the same."""
        make_block_inputs = self.model.block_inputs

        def keep_block_inputs(batch: Batch) -> tuple[Any, ...]:
            self.block_inputs = make_block_inputs(batch)
            return self.block_inputs

        self.model.block_inputs = keep_block_inputs  # type: ignore[method-assign]
        apply_recompute(list(self.model.layers.children()), stage.recompute, eager_checkpoint)
        self.dtype = DTYPES[precision.compute_dtype]
        shapes = {name: parameter.shape for name, parameter in self.model.named_parameters()}
        self.parameters = models.assign_parameters(
            self.model, lambda name: torch.empty(shapes[name], dtype=self.dtype, device=META)
        )
        self.gradients = {
            name: torch.empty(shape, dtype=DTYPES[precision.grad_accum_dtype], device=META)
            for name, shape in shapes.items()
        }
        for name, gradient in self.gradients.items():
            if accumulates:
                accumulate_into(self.parameters[name], gradient, None)
            if stage.fused_wgrad:
                self.kernels.wgrad_buffers[self.parameters[name]] = gradient
        shape = stage.micro_batch
        self.batch = shape.meta_batch(family_of(stage.model))
        tokens = shape.seq_len // (stage.tp if stage.sequence_parallel else 1)
        size = (shape.samples, tokens, stage.model.hidden)
        self.received = None if stage.is_first else torch.empty(size, dtype=self.dtype, device=META).requires_grad_()
        """The activation of the stage before, in the pipeline's receive buffer."""
        self.received_gradient = None if stage.is_last else torch.empty(size, dtype=self.dtype, device=META)

    def existing_tensors(self) -> list[Tensor]:
        """Tensors that exist before the micro batch."""
        given = [tensor for tensor in (self.received, self.received_gradient) if tensor is not None]
        tensors = (*self.model.buffers(), *self.batch.values(), *self.parameters.values(), *self.gradients.values())
        return [*given, *cast(tuple[Tensor, ...], tensors)]

    def run(self) -> None:
        with DeviceMode(self.stage.device), self.recorder:
            self.recorder.enter(EMBEDDING)
            out = self._forward()
            self.recorder.in_backward = True
            self.recorder.end_forward()
            gradient = torch.empty_like(out) if self.received_gradient is None else self.received_gradient
            compat.run_backward(out, gradient)

    def _forward(self) -> Tensor:
        output = self.model(self.batch, self.received)
        if isinstance(output, ModelOutput):
            return self._loss(output)
        self._enter("last")
        return output

    def _loss(self, output: ModelOutput) -> Tensor:
        fp8 = self.fp8 if self.stage.precision.head_dtype == "fp8" else None
        head_loss = make_head_loss(self.kernels, None, fp8, self.stage.device.logits_bytes)

        def traced_head_loss(output: ModelOutput, labels: Tensor) -> Tensor:
            self.recorder.enter(LOSS)
            return cast(partial[Tensor], head_loss)(output, labels, max_chunks=self.traced_chunks)

        terms = make_loss(family_of(self.stage.model), traced_head_loss).terms(output, self.batch)
        return torch.stack([total for total, _ in terms.values()]).sum()

    def _enter(self, layer: str) -> None:
        if layer != "first":
            self.recorder.enter(HEAD if layer == "last" else int(layer))
        if layer == "last":
            self.block_inputs = ()


def _make_kernels(stage: TracedStage) -> Kernels:
    if stage.fused_kernels:
        from trainyard.kernels.triton.ops import TritonKernels

        return TritonKernels(stage.device.gqa_fp32)
    return Kernels(stage.device.gqa_fp32)
