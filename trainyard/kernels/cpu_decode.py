"""`Kernels` for decoding on a CPU: matmuls of few rows with large matrices."""

import torch
from torch import Tensor

from trainyard.kernels.fp8_linear import Fp8Options
from trainyard.kernels.reference import PLAIN_SCORES, AttentionScores, Kernels, visible_tokens, write_cache

MAX_ROWS = 64
HAS_MKL: bool = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
MAX_COPIED_OUTPUTS = 8192
"""Larger results, such as logits, stay transposed in memory."""


class CpuDecodeKernels(Kernels):
    """Kernels for a step of one token per sequence. Larger inputs get the plain kernels."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, fp8: Fp8Options | None = None) -> Tensor:
        """With few rows, oneMKL multiplies W by x^T up to three times faster than x by W^T, unless W is wide; OpenBLAS
        up to 1.5 times, whatever W, and 1.1 times more if x^T is contiguous."""
        rows, (outputs, inputs) = x.numel() // x.shape[-1], weight.shape
        is_wide = outputs < inputs and HAS_MKL
        if fp8 or not 1 < rows <= MAX_ROWS or is_wide or x.dtype != torch.float32:
            return super().linear(x, weight, bias, fp8)
        y = (weight @ x.reshape(rows, inputs).T.contiguous()).T
        y = (y if outputs > MAX_COPIED_OUTPUTS else y.contiguous()).view(*x.shape[:-1], outputs)
        return y if bias is None else y + bias

    def rope_angles(self, position: Tensor, frequency: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
        cos, sin = super().rope_angles(position, frequency, factor)
        return _compute_once(cos), _compute_once(sin)

    def greedy_tokens(self, logits: Tensor) -> Tensor:
        return logits.max(-1).indices  # the first of equal ones; faster than argmax if logits are transposed

    def decode_attention(
        self, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTV: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor,
        visible: int, window: int | None = None, scores: AttentionScores = PLAIN_SCORES,
    ) -> Tensor:  # fmt: skip
        """Two batched matmuls: torch's fused kernel divides its work over queries, of which there is one."""
        B, H, _, K = q_BHTK.shape
        write_cache(k_BGTK, v_BGTV, k_cache, v_cache, lengths)
        k, v = (cache[:B, :, :visible] for cache in (k_cache, v_cache))
        q_BGRK = _compute_once(q_BHTK.reshape(B, k.shape[1], -1, K) * scores.scale_of(K))
        score_BGRS = scores.cap((q_BGRK @ k.transpose(2, 3)).float())
        hidden = ~visible_tokens(k_cache.shape[2], visible, lengths, window)
        score_BHS = score_BGRS.masked_fill(hidden[:, None, None], -torch.inf).reshape(B, H, 1, -1)
        weight = scores.weights(score_BHS).to(v.dtype).view(score_BGRS.shape)
        return (weight @ v).reshape(B, H, 1, -1)


def _compute_once(x: Tensor) -> Tensor:
    """x, stored: torch.compile would compute it again for everything that reads it, the query for every key.

    Nothing is merged with an indexed store.
    """
    if not torch.compiler.is_compiling():
        return x
    return torch.empty_like(x).index_put_((torch.arange(len(x), device=x.device),), x)
