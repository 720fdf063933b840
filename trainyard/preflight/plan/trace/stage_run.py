"""A stage of the real model on the meta device, and one micro batch run through it forward and backward.

Collectives return shapes and report what they would send; operators are those that a kind of device would run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trainyard import compat, models
from trainyard.config.schema import PrecisionSection, RecomputeSection
from trainyard.core.batch import Batch
from trainyard.devices.kind import DeviceKind
from trainyard.kernels.fp8_linear import Fp8Options
from trainyard.kernels.frozen_linear import quantize_frozen
from trainyard.kernels.nf4 import quantize_nf4
from trainyard.kernels.reference import Kernels
from trainyard.models import Blueprint, Family, ModelConfig, ModelOutput, TransformerStage, family_of
from trainyard.models.module_factory import ModuleFactory
from trainyard.models.rank_model import FactoryClass
from trainyard.parallel.axes import Axes
from trainyard.parallel.context_parallel import ContextAxis
from trainyard.parallel.expert_parallel import ExpertAxis
from trainyard.parallel.layout import StageSpec
from trainyard.parallel.process_group import Group
from trainyard.parallel.recompute import apply_recompute
from trainyard.parallel.ring_attention import CpMethod
from trainyard.parallel.tensor_parallel import TensorAxis
from trainyard.preflight.plan.trace.eager_checkpoint import eager_checkpoint
from trainyard.preflight.plan.trace.part_recorder import EMBEDDING, HEAD, LOSS, PartRecorder
from trainyard.train.cross_entropy import make_head_loss
from trainyard.train.loss import make_loss
from trainyard.train.micro_batches.split import TOKEN_FIELDS
from trainyard.train.optim.flat_state import DTYPES
from trainyard.train.optim.gradient_sync import accumulate_into
from trainyard.train.optim.stored_weights import StoredMatrix

BYTES_PER_INTEGER = 4
META = torch.device("meta")
TRACED_CHUNKS = 2
"""Chunks of logits that are traced: the second one has what the first one leaves."""
OnMessage = Callable[[str, int, str, Tensor], None]
"""(group, group size, kind, the larger of input and output)."""


@dataclass(frozen=True)
class MicroBatchShape:
    """A micro batch on one rank."""

    samples: int
    seq_len: int
    """Tokens of a sample, on one context-parallel rank."""
    packed_tokens: int | None
    """Tokens of all samples, if their padding is removed."""
    predictions: int
    """Masked positions of a sample, for families that have them."""
    document_ids: bool

    def field_shapes(self, family: Family, packed: bool) -> dict[str, tuple[int, ...]]:
        """Shapes of the fields that samples have, with or without their padding."""
        tokens = self.packed_tokens if packed else None
        per_token = (self.samples, self.seq_len) if tokens is None else (1, tokens)
        shapes: dict[str, tuple[int, ...]] = {"sample_ids": (self.samples,)}
        for name in family.batch_fields:
            if name in TOKEN_FIELDS or (name == "labels" and not family.has_masked_positions):
                shapes[name] = per_token
            else:
                is_prediction = name in ("labels", "masked_positions")
                shapes[name] = (self.samples, self.predictions) if is_prediction else (self.samples,)
        if self.document_ids:
            shapes |= {"document_ids": per_token, "position_ids": per_token}
        if tokens is not None:
            shapes |= {"sample_ids": per_token, "position_ids": per_token, "cu_seqlens": (self.samples + 1,)}
            shapes["masked_positions"] = (1, self.samples * self.predictions)
            del shapes["attention_mask"]
        return shapes

    def full_bytes(self, family: Family) -> int:
        """Bytes of the micro batch with its padding."""
        return BYTES_PER_INTEGER * sum(map(prod, self.field_shapes(family, packed=False).values()))

    def meta_batch(self, family: Family) -> Batch:
        """The micro batch that a model receives, without memory."""
        shapes = self.field_shapes(family, packed=True) | {"rng_key": (2,)}
        tensors = {name: torch.empty(size, dtype=torch.int32, device="meta") for name, size in shapes.items()}
        return cast(Batch, tensors)


class TracedCollectives:
    """Allocates what the collectives of a device allocate. With `by_all_reduce`, gathers and scatters are emulated."""

    def __init__(self, group: str, size: int, by_all_reduce: bool, on_message: OnMessage) -> None:
        self.group, self.size, self.by_all_reduce, self.on_message = group, size, by_all_reduce, on_message

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        self.on_message(self.group, self.size, "all_reduce", x)
        return x.contiguous().new_empty(x.shape)

    def all_gather(self, x: Tensor) -> Tensor:
        out = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        self.on_message(self.group, self.size, "all_gather", out)
        return out

    def reduce_scatter(self, x: Tensor) -> Tensor:
        self.on_message(self.group, self.size, "reduce_scatter", x)
        x = x.contiguous()
        total = x.new_empty(x.shape) if self.by_all_reduce else None  # exists while the result is cut out of it
        out = x.new_empty(x.shape[0] // self.size, *x.shape[1:])
        del total
        return out

    def all_to_all(self, x: Tensor) -> Tensor:
        self.on_message(self.group, self.size, "all_to_all", x)
        return x.contiguous().new_empty(x.shape)


def traced_group(name: str, size: int, by_all_reduce: bool, on_message: OnMessage) -> Group:
    """The first of `size` ranks."""
    collectives = TracedCollectives(name, size, by_all_reduce, on_message)
    return Group(tuple(range(size)), 0, name, None, collectives)


class DeviceMode(TorchFunctionMode):
    """On the meta device torch would decompose attention, and not use what only GPUs have."""

    def __init__(self, device: DeviceKind) -> None:
        super().__init__()
        self.gpu_operators = device.gpu_operators

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return fused_attention(self.gpu_operators, *args, **kwargs)
        if self.gpu_operators and func is F.rms_norm:
            return _RmsNorm.apply(args[0], kwargs["weight"])  # type: ignore[no-untyped-call]
        # Attention and wgrad accumulation choose their operator by this: a meta tensor answers as one of a GPU would.
        if self.gpu_operators and func == Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return True
        return func(*args, **kwargs)


def fused_attention(
    gpu_operators: bool, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any
) -> Tensor:
    """scaled_dot_product_attention as one operator that keeps no scores."""
    causal = options.get("is_causal", False)
    bias = None if mask is None or gpu_operators else torch.empty_like(mask, dtype=q.dtype)
    return compat.fused_attention_kernel(gpu_operators, q.dtype)(q, k, v, causal, bias, options.get("scale"))[0]


class _RmsNorm(torch.autograd.Function):
    """RMS norm as the single operator that it is on a GPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        rstd = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(x, weight, rstd)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


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
    compiled: bool
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
        apply_recompute(self.model.blocks, stage.recompute, eager_checkpoint, stage.compiled)
        self.dtype = DTYPES[precision.compute_dtype]
        blueprint = models.blueprint_of(stage.model)
        models.store_weights(self.model, _stored_weights(blueprint, self.model, precision))
        shapes = {name: parameter.shape for name, parameter in self.model.named_parameters()}
        self.parameters = models.assign_parameters(
            self.model, lambda name: torch.empty(shapes[name], dtype=self.dtype, device=META)
        )
        for name, parameter in self.parameters.items():
            parameter.requires_grad_(blueprint.is_trained(name))
        self.gradients = {
            name: torch.empty(shape, dtype=DTYPES[precision.grad_accum_dtype], device=META)
            for name, shape in shapes.items()
            if blueprint.is_trained(name)
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
            if out.requires_grad:  # not if nothing up to here is trained
                compat.run_backward(out, gradient)

    def _forward(self) -> Tensor:
        output = self.model(self.batch, self.received)
        if isinstance(output, ModelOutput):
            return self._loss(output)
        self._enter("last")
        return output

    def _loss(self, output: ModelOutput) -> Tensor:
        fp8 = self.fp8 if self.stage.precision.head_dtype == "fp8" else None
        head_loss = make_head_loss(self.kernels, None, fp8, self.stage.device.max_logits_bytes)

        def traced_head_loss(output: ModelOutput, labels: Tensor) -> Tensor:
            self.recorder.enter(LOSS)
            return cast(partial[Tensor], head_loss)(output, labels, max_chunks=self.traced_chunks)

        terms = make_loss(family_of(self.stage.model).loss, traced_head_loss).terms(output, self.batch)
        return torch.stack([total for total, _ in terms.values()]).sum()

    def _enter(self, layer: str) -> None:
        if layer != "first":
            self.recorder.enter(HEAD if layer == "last" else int(layer))
        if layer == "last":
            self.block_inputs = ()


def _stored_weights(blueprint: Blueprint, model: nn.Module, precision: PrecisionSection) -> dict[str, StoredMatrix]:
    """The weights that are kept in 4 or 8 bits, as shapes."""
    dtype = DTYPES[precision.compute_dtype]

    def store(storage: str, weight: Tensor) -> StoredMatrix:
        return quantize_nf4(weight) if storage == "nf4" else quantize_frozen(weight, precision.fp8_scaling)

    return {
        name: store(blueprint.spec(name).storage, torch.empty_like(parameter, dtype=dtype))
        for name, parameter in model.named_parameters()
        if blueprint.spec(name).storage
    }


def _make_kernels(stage: TracedStage) -> Kernels:
    if stage.fused_kernels:
        from trainyard.kernels.triton.ops import TritonKernels

        return TritonKernels(stage.device.gqa_fp32)
    return Kernels(stage.device.gqa_fp32)
