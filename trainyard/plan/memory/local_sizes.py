"""What of a configuration, on one rank, decides on activations."""

from dataclasses import dataclass
from math import ceil
from typing import Literal

from trainyard.config.schema import Config
from trainyard.parallel.layout import Layout, head_range
from trainyard.plan.memory.device_kinds import DTYPE_BYTES, DeviceKind
from trainyard.train.micro_batches import PACKED_LENGTH_MULTIPLE


@dataclass(frozen=True)
class RankSizes:
    """What of a configuration, on one rank, decides on activations."""

    tokens: int
    """Of a micro batch (t)."""
    local_tokens: int
    """Held between the parts of a block (s)."""
    samples: int
    """Of a micro batch."""
    element_size: int
    """Bytes of a number that is computed with."""
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
    """Context parallel by gathering, not by a ring."""
    sequence_parallel: bool = False
    fused_kernels: bool = False
    """Kernels of the device's own."""
    fused_wgrad: bool = False
    """Products add their weights' gradients to the sum themselves."""
    gathers_by_all_reduce: bool = False
    """Ranks gather and scatter by sums (CPU)."""
    accumulating_gemm: bool = False
    """Products of bf16 can add to an fp32 sum, and torch's RMS norm is one operation (GPU)."""
    gqa_fp32: bool = True
    """Attention in fp32 takes fewer kv heads than heads (not on GPUs)."""
    packed_batch: bool = False
    """Samples have left their padding behind."""
    document_mask: bool = False
    """Causal attention within documents."""
    fp8: Literal["", "e5m2", "bf16"] = ""
    """What gradients are multiplied as."""

    @property
    def is_fp32(self) -> bool:
        return self.element_size == 4


def rank_sizes(config: Config, layout: Layout, device: DeviceKind) -> RankSizes:
    model, section = config.model, config.layout
    fused = device.fused_kernels and config.device.kernels == "fused"
    packed = fused and model.family == "bert" and layout.tp == layout.pp == layout.cp == 1
    length = config.data.seq_len // layout.cp
    samples = config.train.micro_batch
    sequence = section.sequence_parallel and layout.tp > 1
    tokens = samples * length
    if packed and config.data.source == "synthetic":  # how much padding there is, the data decide; here half to none
        room = length - 3
        mean = 3 + (room // 2 + room) / 2
        tokens = ceil(samples * mean / PACKED_LENGTH_MULTIPLE) * PACKED_LENGTH_MULTIPLE
    first, end = head_range(model.num_kv_heads, layout.tp, 0)
    direct = fused and not config.compile.enabled and section.pipeline_schedule == "1f1b" and section.zero < 2
    return RankSizes(
        tokens=tokens,
        local_tokens=tokens // layout.tp if sequence else tokens,
        samples=samples,
        element_size=DTYPE_BYTES[config.precision.compute_dtype],
        hidden=model.hidden,
        ffn=model.ffn_size // layout.tp,
        heads=model.heads // layout.tp,
        kv_heads=end - first,
        head_size=model.head_size,
        seq_len=length,
        tp=layout.tp,
        cp=layout.cp,
        cp_all_gather=section.cp_method == "all_gather",
        sequence_parallel=sequence,
        fused_kernels=fused,
        fused_wgrad=direct and not sequence and config.precision.kind != "fp8",
        gathers_by_all_reduce=device.gathers_by_all_reduce,
        accumulating_gemm=device.accumulating_gemm,
        gqa_fp32=device.gqa_fp32,
        packed_batch=packed,
        document_mask=config.data.document_mask and model.family != "bert",
        fp8=config.precision.fp8_backward if config.precision.kind == "fp8" else "",
    )
