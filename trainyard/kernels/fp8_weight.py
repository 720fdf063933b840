"""Weight matrices in fp8 for inference: half the bytes of bf16, in memory and for every token that is decoded."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainyard.compat import call_as_plain_tensor
from trainyard.kernels.fp8_linear import power_of_two_scales

FORMAT = torch.float8_e4m3fn
MATMULS = {F.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__}


class Fp8Weight(nn.Parameter):
    """A matrix in e4m3 with a scale per row.

    Scales are powers of two, so that bf16 represents every value exactly: a model has the numbers of a bf16 model whose
    weights were rounded. Operators that know nothing of fp8 compute with the matrix in the dtype of the other operand.
    """

    row_scale: Tensor
    """What each row is multiplied by, fp32 [rows]."""

    @classmethod
    def quantize(cls, matrix: Tensor, reduce_max: Callable[[Tensor], Tensor] = lambda amax: amax) -> "Fp8Weight":
        """Round a matrix to fp8. `reduce_max` is given the largest magnitude of each row, fp32, and returns that of the
        full row if ranks split rows."""
        amax = reduce_max(matrix.float().abs().amax(1))
        scale, inverse_scale = power_of_two_scales(amax.view(torch.int32), FORMAT)
        weight = cls((matrix.float() * scale[:, None]).to(FORMAT), requires_grad=False)
        weight.row_scale = inverse_scale
        return weight

    def to_dtype(self, dtype: torch.dtype) -> Tensor:
        values: Tensor = call_as_plain_tensor(torch.Tensor.to, (self, dtype), {})
        return values * self.row_scale[:, None].to(dtype)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in MATMULS:
            dtype = next(x.dtype for x in args if isinstance(x, Tensor) and not isinstance(x, Fp8Weight))
            return func(*(x.to_dtype(dtype) if isinstance(x, Fp8Weight) else x for x in args), **(kwargs or {}))
        return call_as_plain_tensor(func, args, kwargs or {})
