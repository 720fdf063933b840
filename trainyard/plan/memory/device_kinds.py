"""Kinds of device, as far as memory goes."""

from dataclasses import dataclass

MIB = 1 << 20
BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class Kind:
    fused: bool
    """It has kernels of its own."""
    sums: bool
    """Its ranks gather and scatter by sums."""
    adds: bool
    """Its products of bf16 can add to an fp32 sum, and torch's RMS norm is one operation on it."""
    groups: bool
    """As its Kernels.groups_fp32."""
    logits: int
    """As its Device.logits_bytes."""
    workspace: int
    """Held by libraries through torch's allocator."""
    fragmentation: float
    """What the allocator holds beyond what is allocated, as a share of it."""


KINDS = {
    # A CPU's allocator gives back what is freed.
    "cpu": Kind(fused=False, sums=True, adds=False, groups=True, logits=1 << 25, workspace=0, fragmentation=0.0),
    # Workspaces of cuBLAS and cuBLASLt, 32 MiB each on Hopper. The share is the largest of the runs in
    # bench/results/plan-memory-gpu.json (an H200, torch 2.11): 0.1 to 2.0 %, and 2.6 % in fp32.
    "gpu": Kind(
        fused=True, sums=False, adds=True, groups=False, logits=1 << 29, workspace=64 * MIB, fragmentation=0.02
    ),
    # Nothing was measured on one: torch's operations one by one, without workspaces or gaps.
    "trainium": Kind(fused=False, sums=False, adds=False, groups=True, logits=1 << 25, workspace=0, fragmentation=0.0),
}
