"""NVIDIA GPUs."""

from trainyard.core.constants import MIB
from trainyard.devices.kind import DeviceKind, Efficiency

DEVICE = DeviceKind(
    module="trainyard.devices.cuda:CudaDevice",
    max_logits_bytes=1 << 30,  # fewer tokens at a time would read and write the gradient of the weight more often
    aliases=("gpu", "nvidia", "h100", "h200", "a100"),
    attention_kernels=("cudnn", "flash", "efficient", "math"),
    fused_kernels=True,
    gqa_fp32=False,
    gpu_operators=True,
    overlaps_gradients=True,
    workspace_bytes=64 * MIB,  # cuBLAS and cuBLASLt, 32 MiB each on Hopper
    # The largest of the runs in bench/results/plan-memory-gpu.json (H200, torch 2.11), which have 0.1 to 2.0 %, and
    # 2.6 % in fp32.
    fragmentation=0.02,
    # The rounded fit of bench/calibrate.py to runs on H200; link and network are guesses.
    efficiency=Efficiency(0.66, 0.61, 0.63, 0.7, 0.7),
)
DATA_SHEET_FLOPS = {
    "H200": (989e12, 67e12),
    "H100": (989e12, 67e12),
    "A100": (312e12, 19.5e12),
    "L40S": (362e12, 91.6e12),
    "L4": (121e12, 30.3e12),
}
"""Dense bf16 and fp32 FLOP/s from the vendor's data sheets (SXM parts), by part of the device name. fp32 is the rate
without tensor cores, because precision.kind=fp32 multiplies in true fp32."""
DEFAULT_GPU, GPUS_PER_NODE = "h100", 8
"""The GPU that a plan assumes for a foreign script, which does not name one."""
