"""torch's fused attention kernels with their log-sum-exp, behind scaled_dot_product_attention (torch 2.11 to 2.14).

Queries are [B, H, T, K], keys [B, G, S, K] and values [B, G, S, V] with G a divisor of H and a contiguous last dim;
the log-sum-exp is fp32 [B, H, T], the bias [B, 1, T, S]. A backward accepts `out` and `lse` over more keys than it is
given, and then returns these keys' contribution to the gradients: it recomputes weights as exp(score - lse), and
otherwise needs only the row sums of dout * out.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

MAX_FLASH_HEAD_SIZE = 256
"""Of the kernels in torch."""


class AttentionKernel(NamedTuple):
    """Forward and backward of one of torch's fused attention kernels."""

    forward: Callable[[Tensor, Tensor, Tensor, bool, Tensor | None, float | None], tuple[Tensor, Tensor]]
    """(q, k, v, causal, bias, scale) -> (out, lse). `causal` needs as many queries as keys and no bias."""
    backward: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool, Tensor | None, float | None],
        tuple[Tensor, Tensor, Tensor],
    ]
    """(dout, q, k, v, out, lse, causal, bias, scale) -> gradients of q, k and v."""

    def with_padded_values(self) -> "AttentionKernel":
        """The kernel for values that are narrower than keys: zeros fill them up."""

        def forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
            out, lse = self.forward(q, k, pad_columns(v, k.shape[-1]), *options)
            return out[..., : v.shape[-1]], lse

        def backward(
            dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *rest: Any
        ) -> tuple[Tensor, Tensor, Tensor]:
            padded_dout, padded_v, padded_out = (pad_columns(x, k.shape[-1]) for x in (dout, v, out))
            dq, dk, dv = self.backward(padded_dout, q, k, padded_v, padded_out, *rest)
            return dq, dk, dv[..., : v.shape[-1]]

        return AttentionKernel(forward, backward)


def pad_columns(x: Tensor, columns: int) -> Tensor:
    """x with zeros at the end of its last dim."""
    return F.pad(x, (0, columns - x.shape[-1])) if columns > x.shape[-1] else x


def select_attention_kernel(q: Tensor, k: Tensor, v: Tensor, causal: bool, has_bias: bool) -> AttentionKernel | None:
    """The kernel that scaled_dot_product_attention would choose; None if that kernel does not return its
    log-sum-exp. For narrower values than keys, it may be one that needs both to be of one width."""
    if q.is_cuda and (q.shape[-1] % 8 or v.shape[-1] % 8 or q.shape[2] == k.shape[2] == 1):
        return None  # torch pads the head dim before it calls the kernel; the kernel rejects a single query and key
    bias = q.new_empty(k.shape[2]).expand(*q.shape[:3], -1) if has_bias else None
    # Ask as for training: some kernels have no backward for inputs that their forward accepts.
    backend = torch._fused_sdp_choice(q.detach().requires_grad_(), k, v, bias, 0.0, causal, enable_gqa=True)
    kernel = ATTENTION_KERNELS.get((q.is_cuda, backend))
    if kernel or v.shape[-1] >= k.shape[-1]:
        return kernel
    kernel = select_attention_kernel(q, k, k, causal, has_bias)
    return kernel and kernel.with_padded_values()


def _flash_on_cpu(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)


def _flash_on_cpu_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, bias: Tensor | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale
    )


def _flash(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    assert bias is None
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
    return out, lse


def _flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, bias: Tensor | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    assert bias is None
    rng_state = torch.empty(0, dtype=torch.uint64, device=q.device)  # of dropout, which is off
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        dout, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal, rng_state, rng_state,
        scale=scale,
    )  # fmt: skip


def _cudnn(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    bias = None if bias is None else bias.expand(-1, q.shape[1], -1, -1)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, bias, True, 0.0, causal, scale=scale)
    return out, lse.squeeze(-1)


def _cudnn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, bias: Tensor | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    bias = None if bias is None else bias.expand(-1, q.shape[1], -1, -1)
    # torch keeps plans by the shapes and the strides of q, k and v: one for an `out` in another memory order than that
    # of q, as the forward returns it, would be taken for this one, and gradients would be wrong.
    is_token_major = q.stride(1) < q.stride(2)
    out = out.transpose(1, 2).contiguous().transpose(1, 2) if is_token_major else out.contiguous()
    lse, rng_state = lse.contiguous().unsqueeze(-1), torch.empty(0, dtype=torch.int64, device=q.device)
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse, rng_state, rng_state, bias, None, None, q.shape[2], k.shape[2], 0.0, causal,
        scale=scale,
    )  # fmt: skip


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, causal, scale=scale)
    return out, lse


def has_varlen_flash(q: Tensor) -> bool:
    """True if `varlen_flash` takes these queries [B, H, T, K]."""
    K = q.shape[-1]
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and K % 8 == 0 and K <= MAX_FLASH_HEAD_SIZE


def varlen_flash(
    q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor, cu_seqlens: Tensor, max_seqlen: int, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Causal attention within sequences that lie one behind the other: output [N, H, K] and log-sum-exp [H, N]."""
    left = window - 1 if window else None
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q_NHK, k_NGK, v_NGK, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, 0.0, True, False,
        scale=scale, window_size_left=left, window_size_right=0 if window else None,
    )  # fmt: skip
    return out, lse


def varlen_flash_backward(
    dout_NHK: Tensor, q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor, out_NHK: Tensor, lse_HN: Tensor,
    cu_seqlens: Tensor, max_seqlen: int, window: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    left = window - 1 if window else None
    rng_state = torch.empty(2, dtype=torch.uint64, device=q_NHK.device)  # of dropout, which is off
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        dout_NHK, q_NHK, k_NGK, v_NGK, out_NHK, lse_HN, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, 0.0, True,
        rng_state, rng_state[:0], scale=scale, window_size_left=left, window_size_right=0 if window else None,
    )  # fmt: skip
    return dq, dk, dv


def fused_attention_kernel(on_gpu: bool, dtype: torch.dtype) -> Callable[..., tuple[Tensor, Tensor]]:
    """The forward of a kernel as torch chooses it on a CPU or a GPU, for tensors of any device."""
    if on_gpu and dtype == torch.float32:
        return _efficient
    return ATTENTION_KERNELS[on_gpu, SDPBackend.FLASH_ATTENTION.value].forward


ATTENTION_KERNELS = {
    (False, SDPBackend.FLASH_ATTENTION.value): AttentionKernel(_flash_on_cpu, _flash_on_cpu_backward),
    (True, SDPBackend.FLASH_ATTENTION.value): AttentionKernel(_flash, _flash_backward),
    (True, SDPBackend.CUDNN_ATTENTION.value): AttentionKernel(_cudnn, _cudnn_backward),
}
