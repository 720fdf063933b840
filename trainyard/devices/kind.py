"""DeviceKind: everything about a device that the rest of the package must know before the device is used."""

from dataclasses import dataclass, field
from typing import NamedTuple


class Efficiency(NamedTuple):
    """Fraction of each peak rate that runs reach, 0 to 1."""

    matmul: float = 1.0
    attention: float = 1.0
    memory: float = 1.0
    link: float = 1.0
    network: float = 1.0


@dataclass(frozen=True)
class DeviceKind:
    """A kind of device, built in or from outside the package, without torch. By default it runs torch's operators one
    by one, without workspaces or fragmentation."""

    module: str
    """Its subclass of Device, `package.module:Class`, imported when the device is looked for: reading a configuration
    then does not import torch."""
    max_logits_bytes: int
    """Size of the fp32 logits that the loss materializes at a time: large enough for efficient GEMMs."""
    label: str = "this device"
    """How messages of `plan` call it."""
    aliases: tuple[str, ...] = ()
    """Other words for it, for which messages suggest its name, and which names of its hardware contain."""
    attention_kernels: tuple[str, ...] = ()
    """Attention kernels that `device.attention` can select, in order of speed."""
    is_host: bool = False
    """Its memory is that of the host. `auto` prefers any other device."""
    always_compiles: bool = False
    """Every graph is compiled, with or without compile.enabled."""
    has_grouped_gemm: bool = True
    """A grouped GEMM (groups of rows with a matrix of their own), for mixtures of experts; without one, every shape is
    static."""
    decomposes_attention: bool = False
    """Attention across ranks or within documents uses plain operations on gathered keys and values, which the device's
    compiler traces like everything else. All ranks then have the same graph."""

    # What only `plan` reads.
    fused_kernels: bool = False
    """It has Triton kernels."""
    fused_attention: bool = True
    """A kernel computes attention: scores stay on the chip, masked ones are skipped, the backward pass computes them
    again."""
    gqa_fp32: bool = True
    """Attention in fp32 takes fewer kv heads than query heads (as `Kernels.has_fp32_gqa`)."""
    gpu_operators: bool = False
    """torch's operators are those of a GPU: a bf16 matmul can add to an fp32 buffer, and RMS norm is one operator."""
    gathers_by_all_reduce: bool = False
    """all-gather and reduce-scatter are emulated by an all-reduce."""
    sends_by_all_gather: bool = False
    """A send is an all-gather of two ranks, and so is a receive: they do not overlap."""
    overlaps_gradients: bool = False
    """Gradients and weights are exchanged while the device computes."""
    workspace_bytes: int = 0
    """Workspaces that libraries hold through torch's allocator."""
    fragmentation: float = 0.0
    """Memory that the allocator reserves beyond what is allocated, as a fraction of the allocated bytes."""
    efficiency: Efficiency = field(default=Efficiency())
