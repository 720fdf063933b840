"""Sizes and options of one rank that decide how much memory its activations need."""

from dataclasses import dataclass
from math import ceil
from typing import Literal

from trainyard.config.schema import Config
from trainyard.core.constants import DTYPE_BYTES
from trainyard.parallel.layout import Layout, head_range
from trainyard.plan.memory.device_kinds import DeviceKind
from trainyard.train.decisions import fuses_wgrad, packs_batches
from trainyard.train.micro_batches.split import PACKED_LENGTH_MULTIPLE


@dataclass(frozen=True)
class RankSizes:
    tokens: int
    """Tokens of a micro batch on this rank (t)."""
    local_tokens: int
    """Tokens between attention and MLP (s): fewer than t under sequence parallelism."""
    samples: int
    """Samples of a micro batch."""
    element_size: int
    """Bytes of an element in the compute dtype."""
    hidden: int
    ffn: int
    heads: int
    """Query heads of this rank."""
    kv_heads: int
    head_size: int
    seq_len: int
    """Tokens of a sample on this rank."""
    tp: int = 1
    cp: int = 1
    cp_all_gather: bool = False
    """Context parallelism gathers keys and values instead of passing them around a ring."""
    sequence_parallel: bool = False
    fused_kernels: bool = False
    """Triton kernels are used."""
    fused_wgrad: bool = False
    """Matrix products add weight gradients directly to the gradient buffer."""
    gathers_by_all_reduce: bool = False
    """all-gather and reduce-scatter are emulated by an all-reduce (CPU)."""
    accumulating_gemm: bool = False
    """A bf16 matrix product can add to an fp32 buffer, and torch's RMS norm is a single operation (GPU)."""
    gqa_fp32: bool = True
    """Attention in fp32 takes fewer kv heads than query heads (not on GPUs)."""
    packed_batch: bool = False
    """Padding is removed from BERT samples."""
    document_mask: bool = False
    """Causal attention does not cross documents."""
    fp8: Literal["", "e5m2", "bf16"] = ""
    """Dtype of gradients in fp8 matrix products; empty without fp8."""

    @property
    def is_fp32(self) -> bool:
        return self.element_size == 4


def rank_sizes(config: Config, layout: Layout, device: DeviceKind) -> RankSizes:
    model, section = config.model, config.layout
    fused = device.fused_kernels and config.device.kernels == "fused"
    packed = packs_batches(config, layout, fused)
    seq_len = config.data.seq_len // layout.cp
    samples = config.train.micro_batch
    sequence_parallel = section.sequence_parallel and layout.tp > 1
    tokens = samples * seq_len
    if packed and config.data.source == "synthetic":
        # The data decide how much padding there is: synthetic samples are half full to full, without 3 special tokens.
        room = seq_len - 3
        mean = 3 + (room // 2 + room) / 2
        tokens = ceil(samples * mean / PACKED_LENGTH_MULTIPLE) * PACKED_LENGTH_MULTIPLE
    kv_start, kv_end = head_range(model.num_kv_heads, layout.tp, 0)
    return RankSizes(
        tokens=tokens,
        local_tokens=tokens // layout.tp if sequence_parallel else tokens,
        samples=samples,
        element_size=DTYPE_BYTES[config.precision.compute_dtype],
        hidden=model.hidden,
        ffn=model.ffn_size // layout.tp,
        heads=model.heads // layout.tp,
        kv_heads=kv_end - kv_start,
        head_size=model.head_size,
        seq_len=seq_len,
        tp=layout.tp,
        cp=layout.cp,
        cp_all_gather=section.cp_method == "all_gather",
        sequence_parallel=sequence_parallel,
        fused_kernels=fused,
        fused_wgrad=fuses_wgrad(config, layout, fused, config.compile.enabled),
        gathers_by_all_reduce=device.gathers_by_all_reduce,
        accumulating_gemm=device.accumulating_gemm,
        gqa_fp32=device.gqa_fp32,
        packed_batch=packed,
        document_mask=config.data.document_mask and model.family != "bert",
        fp8=config.precision.fp8_backward if config.precision.kind == "fp8" else "",
    )
