"""What of a configuration, on one rank, decides on activations."""

from dataclasses import dataclass
from math import ceil
from typing import Literal

from trainyard.config.schema import Config
from trainyard.parallel.layout import Layout, share
from trainyard.plan.memory.device_kinds import BYTES, Kind
from trainyard.train.micro_batches import ROUND


@dataclass(frozen=True)
class Run:
    """What of a configuration, on one rank, decides on activations."""

    tokens: int
    """Of a micro batch (t)."""
    own: int
    """Held between the parts of a block (s)."""
    samples: int
    """Of a micro batch."""
    element: int
    """Bytes of a number that is computed with."""
    hidden: int
    ffn: int
    heads: int
    """Query heads of this rank."""
    kv: int
    head_size: int
    length: int
    """Tokens of a sample on this rank."""
    tp: int = 1
    cp: int = 1
    gathers: bool = False
    """Context parallel by gathering, not by a ring."""
    sequence: bool = False
    fused: bool = False
    """Kernels of the device's own."""
    sinks: bool = False
    """Products add their weights' gradients to the sum themselves."""
    sums: bool = False
    """Ranks gather and scatter by sums (CPU)."""
    adds: bool = False
    """Products of bf16 can add to an fp32 sum, and torch's RMS norm is one operation (GPU)."""
    groups: bool = True
    """Attention in fp32 takes fewer kv heads than heads (not on GPUs)."""
    packed: bool = False
    """Samples have left their padding behind."""
    documents: bool = False
    """Causal attention within documents."""
    fp8: Literal["", "e5m2", "bf16"] = ""
    """What gradients are multiplied as."""

    @property
    def wide(self) -> bool:
        return self.element == 4


def run_of(config: Config, layout: Layout, device: Kind) -> Run:
    model, section = config.model, config.layout
    fused = device.fused and config.device.kernels == "fused"
    packed = fused and model.family == "bert" and layout.tp == layout.pp == layout.cp == 1
    length = config.data.sequence // layout.cp
    samples = config.train.micro_batch
    sequence = section.sequence_parallel and layout.tp > 1
    tokens = samples * length
    if packed and config.data.source == "synthetic":  # how much padding there is, the data decide; here half to none
        room = length - 3
        mean = 3 + (room // 2 + room) / 2
        tokens = ceil(samples * mean / ROUND) * ROUND
    first, end = share(model.kv, layout.tp, 0)
    direct = fused and not config.compile.enabled and section.schedule == "1f1b" and section.zero < 2
    return Run(
        tokens=tokens,
        own=tokens // layout.tp if sequence else tokens,
        samples=samples,
        element=BYTES[config.precision.compute],
        hidden=model.hidden,
        ffn=model.inner // layout.tp,
        heads=model.heads // layout.tp,
        kv=end - first,
        head_size=model.head_size,
        length=length,
        tp=layout.tp,
        cp=layout.cp,
        gathers=section.context == "all_gather",
        sequence=sequence,
        fused=fused,
        sinks=direct and not sequence and config.precision.kind != "fp8",
        sums=device.sums,
        adds=device.adds,
        groups=device.groups,
        packed=packed,
        documents=config.data.separate and model.family != "bert",
        fp8=config.precision.backward if config.precision.kind == "fp8" else "",
    )
