"""Traits of a kind of device that decide how much memory a run needs there."""

from dataclasses import dataclass

from trainyard.core.constants import MIB
from trainyard.devices.cpu import CpuDevice
from trainyard.devices.cuda import CudaDevice
from trainyard.devices.neuron.device import NeuronDevice


@dataclass(frozen=True)
class DeviceKind:
    """By default a device that runs torch's operations one by one, without workspaces or fragmentation."""

    logits_bytes: int
    """fp32 logits that exist at one time."""
    fused_kernels: bool = False
    """The device has Triton kernels."""
    gathers_by_all_reduce: bool = False
    """all-gather and reduce-scatter are emulated by an all-reduce."""
    gpu_operators: bool = False
    """torch's operators are those of a GPU: a bf16 matmul can add to an fp32 buffer, and RMS norm is one operator."""
    gqa_fp32: bool = True
    """Attention in fp32 takes fewer kv heads than query heads (as `Kernels.has_fp32_gqa`)."""
    workspace_bytes: int = 0
    """Workspaces that libraries hold through torch's allocator."""
    fragmentation: float = 0.0
    """Memory that the allocator reserves beyond what is allocated, as a fraction of the allocated bytes."""


DEVICE_KINDS = {
    # A CPU's allocator returns freed memory at once.
    "cpu": DeviceKind(CpuDevice.max_logits_bytes, gathers_by_all_reduce=True),
    # Workspaces: cuBLAS and cuBLASLt, 32 MiB each on Hopper. Fragmentation: the largest of the runs in
    # bench/results/plan-memory-gpu.json (H200, torch 2.11), which have 0.1 to 2.0 %, and 2.6 % in fp32.
    "gpu": DeviceKind(
        CudaDevice.max_logits_bytes,
        fused_kernels=True,
        gpu_operators=True,
        gqa_fp32=False,
        workspace_bytes=64 * MIB,
        fragmentation=0.02,
    ),
    "trainium": DeviceKind(NeuronDevice.max_logits_bytes),  # not measured
}
