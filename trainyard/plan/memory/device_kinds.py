"""Traits of a kind of device that decide how much memory a run needs there."""

from dataclasses import dataclass

from trainyard.core.constants import MIB


@dataclass(frozen=True)
class DeviceKind:
    fused_kernels: bool
    """The device has Triton kernels."""
    gathers_by_all_reduce: bool
    """all-gather and reduce-scatter are emulated by an all-reduce."""
    accumulating_gemm: bool
    """A bf16 matrix product can add to an fp32 buffer, and torch's RMS norm is a single operation."""
    gqa_fp32: bool
    """Attention in fp32 takes fewer kv heads than query heads (as `Kernels.gqa_fp32`)."""
    logits_bytes: int
    """fp32 logits that exist at one time (as `Device.max_logits_bytes`)."""
    workspace_bytes: int
    """Workspaces that libraries hold through torch's allocator."""
    fragmentation: float
    """Memory that the allocator reserves beyond what is allocated, as a fraction of the allocated bytes."""


DEVICE_KINDS = {
    # A CPU's allocator returns freed memory at once.
    "cpu": DeviceKind(
        fused_kernels=False,
        gathers_by_all_reduce=True,
        accumulating_gemm=False,
        gqa_fp32=True,
        logits_bytes=1 << 25,
        workspace_bytes=0,
        fragmentation=0.0,
    ),
    # Workspaces: cuBLAS and cuBLASLt, 32 MiB each on Hopper. Fragmentation: the largest of the runs in
    # bench/results/plan-memory-gpu.json (H200, torch 2.11), which have 0.1 to 2.0 %, and 2.6 % in fp32.
    "gpu": DeviceKind(
        fused_kernels=True,
        gathers_by_all_reduce=False,
        accumulating_gemm=True,
        gqa_fp32=False,
        logits_bytes=1 << 29,
        workspace_bytes=64 * MIB,
        fragmentation=0.02,
    ),
    # Not measured. Assumed: torch's operations one by one, no workspaces, no fragmentation.
    "trainium": DeviceKind(
        fused_kernels=False,
        gathers_by_all_reduce=False,
        accumulating_gemm=False,
        gqa_fp32=True,
        logits_bytes=1 << 25,
        workspace_bytes=0,
        fragmentation=0.0,
    ),
}
