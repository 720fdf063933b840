"""NVIDIA GPUs."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainyard.devices.base import Device, Peak
from trainyard.errors import UserError

# Dense bf16 FLOP/s by the vendor's data sheets (SXM parts), matched against the device name. fp32 is the plain
# (non-tensor-core) rate: precision fp32 asks for true fp32 products.
DATA_SHEET = {
    "H200": (989e12, 67e12),
    "H100": (989e12, 67e12),
    "A100": (312e12, 19.5e12),
    "L40S": (362e12, 91.6e12),
    "L4": (121e12, 30.3e12),
}


class Cuda(Device):
    name = "cuda"
    process_group = "nccl"
    synchronous = False
    logits_bytes = 1 << 29

    @classmethod
    def available(cls) -> bool:
        return torch.cuda.is_available()

    def ranks(self) -> int:
        return torch.cuda.device_count()

    def describe(self) -> str:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"

    def peak(self, dtype: torch.dtype) -> Peak | None:
        name = torch.cuda.get_device_name()
        for model, (bf16, fp32) in DATA_SHEET.items():
            if model in name:
                return Peak(fp32 if dtype == torch.float32 else bf16, f"{model} data sheet, dense")
        return None

    def memory_peak(self) -> int:
        return torch.cuda.max_memory_allocated()

    def prepare(self, deterministic: bool, local_rank: int = 0) -> None:
        if local_rank >= self.ranks():
            raise UserError(f"local rank {local_rank}: this machine has {self.ranks()} GPUs, one for each rank")
        torch.cuda.set_device(local_rank)
        # The fastest backward passes of attention add in no fixed order. cuBLAS reads its variable when first used.
        if deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(deterministic)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    @contextmanager
    def attention(self) -> Iterator[None]:
        # Compiled 1.3B step, sequence 4096, one H200, one run of each: this order 59,274 tokens/s, flash alone 59,148.
        order = [
            SDPBackend.CUDNN_ATTENTION,
            SDPBackend.FLASH_ATTENTION,
            SDPBackend.EFFICIENT_ATTENTION,
            SDPBackend.MATH,
        ]
        with sdpa_kernel(order, set_priority=True):
            yield

    def fetch(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()

        def wait() -> torch.Tensor:
            copied.synchronize()
            return host

        return wait

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        return host.pin_memory().to(self.handle, non_blocking=True)
