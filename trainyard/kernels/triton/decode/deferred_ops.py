"""Tensors that are computed when something reads them, so that the next operation can absorb the one before."""

# A model calls a matmul, then adds the residual. If the matmul is still pending at the addition, one kernel
# does both. Any other use of a pending tensor computes it first, so that model code needs to know nothing about this.

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainyard.compat import call_as_plain_tensor, tensor_without_memory
from trainyard.kernels.reference import Activation, apply_rope
from trainyard.kernels.triton import rms_norm
from trainyard.kernels.triton.decode.skinny_linear import ScaledRows, scaled_linear, skinny_linear


class PendingTensor(Tensor):
    """A tensor whose value is computed on first use. It has no gradient."""

    _value: Tensor | None = None

    @staticmethod
    def __new__(cls, shape: torch.Size, like: Tensor) -> Any:
        return tensor_without_memory(cls, shape, like.dtype, like.device)

    def compute(self) -> Tensor:
        raise NotImplementedError

    def value(self) -> Tensor:
        if self._value is None:
            self._value = self.compute()
        return self._value

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.linear and not kwargs:  # torch would split it into several operators
            return PendingLinear.of(*args)
        return call_as_plain_tensor(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.add.Tensor and not kwargs:
            for y, x in (args, args[::-1]):
                if isinstance(y, PendingLinear) and isinstance(x, Tensor) and y.can_add(x):
                    return y.add_residual(x)
        return func(*[value_of(x) for x in args], **{name: value_of(x) for name, x in (kwargs or {}).items()})


def value_of(x: Any) -> Any:
    """x, with pending tensors computed, in lists too."""
    if isinstance(x, PendingTensor):
        return x.value()
    return type(x)(value_of(item) for item in x) if type(x) in (list, tuple) else x


class PendingNorm(PendingTensor):
    """An RMSNorm that the next matrix multiplication computes on the way."""

    @staticmethod
    def __new__(cls, x: Tensor, weight: Tensor, eps: float, scaled: ScaledRows | None = None) -> Any:
        return PendingTensor.__new__(cls, x.shape, x)

    def __init__(self, x: Tensor, weight: Tensor, eps: float, scaled: ScaledRows | None = None) -> None:
        self.x, self.weight, self.eps, self.scaled = x, weight, eps, scaled

    def compute(self) -> Tensor:
        _, out, _ = rms_norm.add_rms_norm(self.x, None, self.weight, self.eps)
        return out


class PendingLinear(PendingTensor):
    """A matmul that absorbs the RMSNorm before it, and the bias, activation or residual sum after it."""

    @staticmethod
    def __new__(cls, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None) -> Any:
        return PendingTensor.__new__(cls, torch.Size((*x.shape[:-1], weight.shape[0])), x)

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None) -> None:
        self.x, self.weight, self.bias, self.residual = x, weight, bias, residual

    @classmethod
    def of(cls, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> "PendingLinear":
        return cls(x if isinstance(x, PendingNorm) else value_of(x), weight, bias)

    def compute(self, activation: Activation = "none", bias: Tensor | None = None) -> Tensor:
        bias = self.bias if bias is None else bias
        x = self.x
        if isinstance(x, PendingNorm) and x.scaled:
            return scaled_linear(x.scaled, self.weight, bias, self.residual, activation=activation)[0]
        if isinstance(x, PendingNorm) and _is_row(x):
            return skinny_linear(x.x, self.weight, bias, self.residual, x.weight, x.eps, activation)
        return skinny_linear(value_of(x), self.weight, bias, self.residual, activation=activation)

    def compute_with_norm(self, norm_weight: Tensor, eps: float) -> tuple[Tensor, PendingNorm]:
        """The value and its RMSNorm, still pending."""
        if self._value is not None or _is_row(self) or isinstance(self.x, PendingNorm):
            value, scaled = self.value(), None
        else:
            value, scaled = scaled_linear(self.x, self.weight, self.bias, self.residual, (norm_weight, eps))
        return value, PendingNorm(value, norm_weight, eps, scaled)

    @property
    def is_plain(self) -> bool:
        """True for x W^T that nothing has computed yet. A computed value may have been changed in place since then."""
        return self.bias is None and self.residual is None and self._value is None

    def can_add(self, x: Tensor) -> bool:
        return self.residual is None and self._value is None and x.shape == self.shape and x.dtype == self.dtype

    def add_residual(self, x: Tensor, bias: Tensor | None = None) -> "PendingLinear":
        """x + self (+ bias), still pending."""
        assert bias is None or self.bias is None
        return PendingLinear(self.x, self.weight, self.bias if bias is None else bias, value_of(x))


def _is_row(x: Tensor) -> bool:
    return x.numel() == x.shape[-1]


class PendingRope(PendingTensor):
    """Queries or keys [B, H, T, K] that attention rotates while it loads them."""

    @staticmethod
    def __new__(cls, unrotated: Tensor, rope_cos: Tensor, rope_sin: Tensor) -> Any:
        return PendingTensor.__new__(cls, unrotated.shape, unrotated)

    def __init__(self, unrotated: Tensor, rope_cos: Tensor, rope_sin: Tensor) -> None:
        self.unrotated, self.rope_cos, self.rope_sin = unrotated, rope_cos, rope_sin

    def compute(self) -> Tensor:
        return apply_rope(self.unrotated, self.rope_cos, self.rope_sin)
