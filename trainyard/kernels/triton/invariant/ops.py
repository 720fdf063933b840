"""Batch-invariant `Kernels` for NVIDIA GPUs. The norms, activations and RoPE of `TritonKernels` already are: a program
computes a row, and nothing depends on the number of rows."""

from torch import Tensor

from trainyard.kernels.batch_invariant import InvariantLinear
from trainyard.kernels.fp8_linear import Fp8Options
from trainyard.kernels.reference import PLAIN_SCORES, AttentionScores, write_cache
from trainyard.kernels.triton.invariant.attention import attention
from trainyard.kernels.triton.invariant.linear import linear
from trainyard.kernels.triton.invariant.log_softmax import log_softmax
from trainyard.kernels.triton.ops import TritonKernels


class InvariantTritonKernels(TritonKernels):
    is_batch_invariant = has_decode_attention = True
    has_varlen_attention = False
    attention = staticmethod(attention)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, fp8: Fp8Options | None = None) -> Tensor:
        assert fp8 is None
        return InvariantLinear.apply(x, weight, bias, linear, *self._wgrad_buffers(weight))  # type: ignore[no-untyped-call]

    def log_softmax(self, logits: Tensor) -> Tensor:
        return log_softmax(logits)

    def decode_attention(
        self, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTV: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor,
        visible: int, window: int | None = None, scores: AttentionScores = PLAIN_SCORES,
    ) -> Tensor:  # fmt: skip
        write_cache(k_BGTK, v_BGTV, k_cache, v_cache, lengths)
        k, v = k_cache[: len(q_BHTK)], v_cache[: len(q_BHTK)]
        return attention(q_BHTK, k, v, lengths, None, window, scores)
