"""Work of each part of a model for one micro batch: matrix multiplications, attention, memory traffic and messages.

Memory traffic is that of fused kernels, the least that must be moved, whatever device runs the model.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from trainyard.config.schema import Config
from trainyard.kernels.custom_op import PARTIAL_SUM_OPS
from trainyard.models import family_of
from trainyard.parallel.layout import Layout
from trainyard.preflight.dryrun.meta_ops import tensors_in
from trainyard.preflight.plan.layer_kinds import traced_alike
from trainyard.preflight.plan.memory.device_kinds import DeviceKind
from trainyard.preflight.plan.trace.attention_work import AttentionCall, AttentionFactory
from trainyard.preflight.plan.trace.micro_batch import MicroBatchShape
from trainyard.preflight.plan.trace.part_recorder import PartRecorder
from trainyard.preflight.plan.trace.stage_run import StageRun, TracedStage
from trainyard.train.decisions import fp8_layer_range

aten = torch.ops.aten
MATMULS = {aten.mm.default: 0, aten.bmm.default: 0, aten.addmm.default: 1, aten.addmm_.default: 1, aten.mm.out: 0}
"""Matrix multiplications, and the index of their first operand. The second one follows it."""
FP8_MATMUL = "trainyard::fp8_matmul"
GROUPED_GEMMS = {"trainyard::grouped_linear": 1, "trainyard::grouped_wgrad": -1}
"""Grouped GEMM: groups of rows, and the dim of the second operand that the first one does not have."""
EXPERT_EXCHANGES = ("trainyard::exchange_counts", "trainyard::dispatch_rows", "trainyard::combine_rows")
"""Operators with an all-to-all in them. A trace has as many rows as experts that have equally many."""
TRACED_DEVICE = DeviceKind(0, fused_kernels=True, gpu_operators=True)
MessageKey = tuple[str, int, str, str, int]
"""Group, its size, kind, dtype and bytes of a message."""


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


def trace_work(config: Config, layout: Layout) -> dict[int, PartWork]:
    """Work by part of a model with the first layer of each kind."""
    micro_batch = MicroBatchShape(
        config.train.micro_batch,
        config.data.seq_len // layout.cp,
        None,
        config.data.max_predictions,
        config.data.document_mask and not family_of(config.model).has_padding,
    )
    stage = TracedStage(
        config.model,
        _traced_layers(config),
        micro_batch,
        layout.tp,
        layout.cp,
        layout.ep,
        config.layout.cp_method,
        config.layout.sequence_parallel and layout.tp > 1,
        config.recompute,
        config.precision,
        fp8_layer_range(config),
        TRACED_DEVICE,
        fused_kernels=True,
        fused_wgrad=False,
        is_first=True,
        is_last=True,
    )
    return _trace_stage_work(stage)


def _traced_layers(config: Config) -> tuple[int, ...]:
    """The first layer of each kind. Those in fp8 follow another one: the first block also adds the gradients of a
    tensor that it takes twice (BERT)."""
    fp8_layers, last = fp8_layer_range(config), config.model.layers - 1
    layers = sorted(set(traced_alike(config)), key=lambda layer: (layer in fp8_layers, layer))
    return (last, *layers) if layers[0] in fp8_layers and last not in layers else tuple(layers)


@lru_cache(maxsize=4096)
def _trace_stage_work(stage: TracedStage) -> dict[int, PartWork]:
    recorder = _WorkRecorder(stage.ep)
    factory = partial(AttentionFactory, recorder.on_attention)
    StageRun(stage, recorder, factory, traced_chunks=0, accumulates=False).run()
    return dict(recorder.work)


class _WorkRecorder(PartRecorder):  # type: ignore[no-untyped-call]
    def __init__(self, ep: int) -> None:
        super().__init__()
        self.ep = ep
        self.work: dict[int, PartWork] = defaultdict(PartWork)
        self.partial_sums: list[Tensor] = []
        """Not counted: their size depends on the number of programs of a GPU, not on the work."""

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
