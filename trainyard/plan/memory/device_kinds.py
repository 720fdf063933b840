"""Kinds of device, as far as memory goes."""

from dataclasses import dataclass

MIB = 1 << 20
DTYPE_BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class DeviceKind:
    fused_kernels: bool
    """It has kernels of its own."""
    gathers_by_all_reduce: bool
    """Its ranks gather and scatter by sums."""
    accumulating_gemm: bool
    """Its products of bf16 can add to an fp32 sum, and torch's RMS norm is one operation on it."""
    gqa_fp32: bool
    """As its Kernels.groups_fp32."""
    logits_bytes: int
    """As its Device.logits_bytes."""
    workspace_bytes: int
    """Held by libraries through torch's allocator."""
    fragmentation: float
    """What the allocator holds beyond what is allocated, as a share of it."""


DEVICE_KINDS = {
    # A CPU's allocator gives back what is freed.
    "cpu": DeviceKind(
        fused_kernels=False,
        gathers_by_all_reduce=True,
        accumulating_gemm=False,
        gqa_fp32=True,
        logits_bytes=1 << 25,
        workspace_bytes=0,
        fragmentation=0.0,
    ),
    # Workspaces of cuBLAS and cuBLASLt, 32 MiB each on Hopper. The share is the largest of the runs in
    # bench/results/plan-memory-gpu.json (an H200, torch 2.11): 0.1 to 2.0 %, and 2.6 % in fp32.
    "gpu": DeviceKind(
        fused_kernels=True,
        gathers_by_all_reduce=False,
        accumulating_gemm=True,
        gqa_fp32=False,
        logits_bytes=1 << 29,
        workspace_bytes=64 * MIB,
        fragmentation=0.02,
    ),
    # Nothing was measured on one: torch's operations one by one, without workspaces or gaps.
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
