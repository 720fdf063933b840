"""Makes tensors of the meta device run the operators that a kind of device would run."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from trainyard import compat
from trainyard.preflight.plan.memory.device_kinds import DeviceKind


class DeviceMode(TorchFunctionMode):
    """On the meta device torch would decompose attention, and not use what only GPUs have."""

    def __init__(self, device: DeviceKind) -> None:
        super().__init__()
        self.gpu_operators = device.gpu_operators

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return fused_attention(self.gpu_operators, *args, **kwargs)
        if self.gpu_operators and func is F.rms_norm:
            return _RmsNorm.apply(args[0], kwargs["weight"])  # type: ignore[no-untyped-call]
        if self.gpu_operators and func == Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return True
        return func(*args, **kwargs)


def fused_attention(
    gpu_operators: bool, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any
) -> Tensor:
    """scaled_dot_product_attention as one operator that keeps no scores."""
    causal = options.get("is_causal", False)
    bias = None if mask is None or gpu_operators else torch.empty_like(mask, dtype=q.dtype)
    return compat.fused_attention_kernel(gpu_operators, q.dtype)(q, k, v, causal, bias)[0]


class _RmsNorm(torch.autograd.Function):
    """RMS norm as the single operator that it is on a GPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        rstd = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(x, weight, rstd)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)
