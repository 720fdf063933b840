"""Work of each part of a model for one micro batch: matrix multiplications, attention, memory traffic and messages.

Memory traffic is that of fused kernels, the least that must be moved, whatever device runs the model.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainyard.devices.kind import DeviceKind
from trainyard.kernels.custom_op import PARTIAL_SUM_OPS, WORKSPACE_BYTES
from trainyard.models.layers import CoreAttention
from trainyard.models.module_factory import ModuleFactory
from trainyard.parallel.ring_attention import CpMethod, attention_messages
from trainyard.preflight.dryrun.meta_ops import tensors_in
from trainyard.preflight.plan.planned_run import PlannedRun
from trainyard.preflight.plan.trace.part_recorder import PartRecorder
from trainyard.preflight.plan.trace.stage_run import StageRun, TracedStage

aten = torch.ops.aten
MATMULS = {
    **dict.fromkeys((aten.mm.default, aten.mm.out, aten.bmm.default), 0),
    **dict.fromkeys((aten.addmm.default, aten.addmm_.default, aten.baddbmm.default), 1),
}
"""Matrix multiplications, and the index of their first operand. The second one follows it."""
FP8_MATMUL = "trainyard::fp8_matmul"
STORED_GEMMS = {"trainyard::nf4_matmul": 1, "trainyard::cast_matmul": 1, "trainyard::fp8_dgrad": 2}
"""GEMMs of a frozen matrix, and the index of its values, from which they first make another matrix."""
GROUPED_GEMMS = {"trainyard::grouped_linear": 1, "trainyard::grouped_wgrad": -1, "trainyard::mm_fp32": 1}
"""GEMMs of groups of rows, or of bf16 into fp32, and the dim of the second operand that the first one does not have."""
EXPERT_EXCHANGES = ("trainyard::exchange_counts", "trainyard::dispatch_rows", "trainyard::combine_rows")
"""Operators with an all-to-all in them. A trace has as many rows as experts that have equally many."""
TRACED_DEVICE = DeviceKind("", 0, fused_kernels=True, gpu_operators=True)
MessageKey = tuple[str, int, str, str, int]
"""Group, its size, kind, dtype and bytes of a message."""


class AttentionCall(NamedTuple):
    """One attention of a micro batch on one rank."""

    scores: int
    """Elements of the matrix of scores, over all keys of all context-parallel ranks."""
    head_size: int
    value_size: int
    causal: bool
    nbytes: int
    """Queries, keys, values and output."""
    cp: int
    cp_method: CpMethod
    key_elements: int
    """Elements of this rank's keys."""
    value_elements: int
    document_elements: int
    dtype: torch.dtype

    def messages(self, backward: bool) -> Iterator[tuple[str, torch.dtype, int, int]]:
        """(kind, dtype, bytes, times)."""
        sizes = self.key_elements, self.value_elements, self.document_elements
        return attention_messages(self.cp_method, self.cp, *sizes, self.dtype, backward)

    @property
    def flops(self) -> int:
        """Forward, if no score is masked."""
        return 2 * self.scores * (self.head_size + self.value_size)


OnAttention = Callable[[AttentionCall, bool], None]
"""Called with each attention, and with True in the backward pass."""


class AttentionFactory(ModuleFactory):
    """Builds models whose attention reports its work."""

    def __init__(self, on_attention: OnAttention, *args: Any) -> None:
        super().__init__(*args)
        self.on_attention = on_attention

    def _attention(self, *arguments: Any) -> CoreAttention:
        return CountedAttention(self.on_attention, *arguments)


class CountedAttention(CoreAttention):
    """Core attention as one operator whose work is counted, whatever computes it on a device."""

    def __init__(self, on_attention: OnAttention, *args: Any) -> None:
        super().__init__(*args)
        self.on_attention = on_attention

    def forward(
        self, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTV: Tensor, documents_BT: Any = None, seeds: Any = None
    ) -> Tensor:
        (B, H, T, K), V = q_BHTK.shape, v_BGTV.shape[3]
        k_BGTK, v_BGTV = self.even_kv_heads(k_BGTK), self.even_kv_heads(v_BGTV)
        call = self._call((B, H, T, K), V, k_BGTK.numel(), documents_BT, q_BHTK.dtype)
        tensors = [x for x in (q_BHTK, k_BGTK, v_BGTV, self.sinks) if x is not None]
        out: Tensor = _Attention.apply(self.on_attention, call, (B, T, H, V), *tensors)  # type: ignore[no-untyped-call]
        return out.transpose(1, 2)

    def forward_qkv(self, projections: tuple[Tensor, ...], head_size: int, documents_BT: Any, seeds: Any) -> Tensor:
        B, T = projections[0].shape[:2]
        width = sum(projection.shape[-1] for projection in projections) // 3
        shape = (B, width // head_size, T, head_size)
        call = self._call(shape, head_size, B * T * width, documents_BT, projections[0].dtype)
        return _Attention.apply(self.on_attention, call, (B, T, width), *projections)  # type: ignore[no-untyped-call]

    def _call(
        self, shape_BHTK: tuple[int, int, int, int], V: int, keys: int, documents: Tensor | None, dtype: torch.dtype
    ) -> AttentionCall:
        (B, H, T, K), values = shape_BHTK, keys // shape_BHTK[3] * V
        document_elements = 0 if documents is None else documents.numel()
        nbytes = (B * H * T * (K + V) + keys + values) * dtype.itemsize
        return AttentionCall(
            B * H * T * T * self.cp.size, K, V, self.causal, nbytes, self.cp.size, self.cp.method, keys, values,
            document_elements, dtype,
        )  # fmt: skip


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, on_attention: OnAttention, call: AttentionCall, shape: Any, *tensors: Tensor) -> Tensor:
        on_attention(call, False)
        ctx.on_attention, ctx.call = on_attention, call
        out = tensors[0].new_empty(shape)
        ctx.save_for_backward(*tensors, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, _ = ctx.saved_tensors
        ctx.on_attention(ctx.call, True)
        return None, None, None, *(tensor.new_empty(tensor.shape) for tensor in tensors)


@dataclass
class PartWork:
    """Work of one part, forward and backward, with what is recomputed."""

    matmul_flops: int = 0
    """Floating-point operations of matrix multiplications in the compute dtype."""
    fp8_flops: int = 0
    moved_bytes: int = 0
    """Bytes that all other operators read and write."""
    attention: Counter[tuple[AttentionCall, bool]] = field(default_factory=Counter)
    """Number of times that an attention is computed forward (False) and backward (True)."""
    messages: Counter[MessageKey] = field(default_factory=Counter)


def trace_work(run: PlannedRun, forward_only: bool = False) -> dict[int, PartWork]:
    """Work by part of a model with the first layer of each kind, or its part in the forward pass."""
    # Padding counts as work here: `layer_time` takes its share off where a run removes it.
    unpacked = replace(run.micro_batch, packed_tokens=None)
    stage = run.traced_stage(_traced_layers(run.alike, run.fp8_layers))
    fused = replace(stage, micro_batch=unpacked, device=TRACED_DEVICE, fused_kernels=True, fused_wgrad=False)
    return _trace_stage_work(fused)[forward_only]


def _traced_layers(alike: tuple[int, ...], fp8_layers: range) -> tuple[int, ...]:
    """The first layer of each kind. Those in fp8 follow another one: the first block also adds the gradients of a
    tensor that it takes twice (BERT)."""
    last, layers = len(alike) - 1, sorted(set(alike), key=lambda layer: (layer in fp8_layers, layer))
    return (last, *layers) if layers[0] in fp8_layers and last not in layers else tuple(layers)


@lru_cache(maxsize=4096)
def _trace_stage_work(stage: TracedStage) -> tuple[dict[int, PartWork], dict[int, PartWork]]:
    recorder = _WorkRecorder(stage.ep)
    factory = partial(AttentionFactory, recorder.on_attention)
    StageRun(stage, recorder, factory, traced_chunks=0, accumulates=False).run()
    return dict(recorder.work), recorder.forward_work


class _WorkRecorder(PartRecorder):  # type: ignore[no-untyped-call]
    def __init__(self, ep: int) -> None:
        super().__init__()
        self.ep = ep
        self.work: dict[int, PartWork] = defaultdict(PartWork)
        self.forward_work: dict[int, PartWork] = {}
        self.partial_sums: list[Tensor] = []
        """Not counted: their size depends on the number of programs of a GPU, not on the work."""

    def end_forward(self) -> None:
        self.forward_work = deepcopy(dict(self.work))

    def on_message(self, group: str, size: int, kind: str, tensor: Tensor) -> None:
        self._add_message(group, size, kind, tensor.dtype, tensor.nbytes, 1)

    def _add_message(self, group: str, size: int, kind: str, dtype: torch.dtype, nbytes: int, times: int) -> None:
        if size > 1 and nbytes and times:
            self.work[self.part].messages[group, size, kind, str(dtype).removeprefix("torch."), nbytes] += times

    def on_attention(self, call: AttentionCall, backward: bool) -> None:
        work = self.work[self.part]
        work.attention[call, backward] += 1
        work.moved_bytes += call.nbytes * (2 if backward else 1)
        for kind, dtype, nbytes, times in call.messages(backward):
            self._add_message("cp", call.cp, kind, dtype, nbytes, times)

    def observe(self, function: Any, args: Any, kwargs: Any, out: Any) -> None:
        work = self.work[self.part]
        if function in MATMULS:
            first = MATMULS[function]
            work.matmul_flops += 2 * args[first].numel() * args[first + 1].shape[-1]
        elif function.name() in GROUPED_GEMMS:
            work.matmul_flops += 2 * args[0].numel() * args[1].shape[GROUPED_GEMMS[function.name()]]
        elif function.name() == FP8_MATMUL:
            work.fp8_flops += 2 * args[0].numel() * args[2].shape[0]
        elif function.name() in STORED_GEMMS:
            flops = 2 * args[0].numel() * out.shape[-1]
            if args[0].element_size() == 1:
                work.fp8_flops += flops
            else:
                work.matmul_flops += flops
            work.moved_bytes += args[STORED_GEMMS[function.name()]].nbytes + WORKSPACE_BYTES[function](*args, **kwargs)
        elif function.namespace != "_c10d_functional":
            if function.name() in EXPERT_EXCHANGES:
                self.on_message("ep", self.ep, "all_to_all", args[0])
            outputs = tensors_in(out)
            if function in PARTIAL_SUM_OPS:
                self.partial_sums.append(outputs.pop())
            if not any(tensor is partial for tensor in tensors_in(args) for partial in self.partial_sums):
                work.moved_bytes += _moved_bytes(function, tensors_in(args), outputs)


def _moved_bytes(function: Any, inputs: list[Tensor], outputs: list[Tensor]) -> int:
    """Bytes that an operator reads and writes; none if it only returns views or memory without values."""
    name = function.__name__.split(".")[0]
    storages = {id(tensor.untyped_storage()) for tensor in inputs}
    is_view = all(id(tensor.untyped_storage()) in storages for tensor in outputs)
    if "empty" in name or (is_view and not name.endswith("_")):
        return 0
    return sum(tensor.nbytes for tensor in (*inputs, *outputs))
