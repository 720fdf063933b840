"""Attention over packed sequences, with dropout whose mask depends only on global indices.

No library kernel computes our mask, and reading one from memory costs more than attention itself, so the kernels
compute the random bits next to the scores. Sequences are packed, so padding costs nothing.

- Forward: a program handles a block of queries of one head and iterates over the keys.
- Backward for short sequences (one block), one kv head per head and small heads: a program handles one sequence and
  head and computes all three gradients, so scores and bits are computed once.
- Backward otherwise: one kernel for dq, then one for dk and dv.

Integer instructions dominate: about 17 per random bit, while tensor cores compute the score in passing. So invariant
factors are hoisted out of the loops, and blocks that need no mask have their own loop.

The last program along the sequence dim handles the tokens after the last sequence (padding up to a round N) and writes
zeros.

Shapes: N tokens, S sequences, H heads, G kv heads, R heads per kv head, K head dim; in the kernels, blocks of M queries
and N keys. Exponents and log-sum-exps (lse) are base 2.
"""

from math import log
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from trainyard.compat import has_memory
from trainyard.core.counter_rng import DropoutRng
from trainyard.kernels.custom_op import WORKSPACE_BYTES, kernel_op
from trainyard.kernels.reference import PLAIN_SCORES, AttentionScores, split_qkv
from trainyard.kernels.triton.attention.backward import dkdv_kernel, dq_kernel
from trainyard.kernels.triton.attention.forward import forward_kernel
from trainyard.kernels.triton.language import triton

DropoutArgs = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""The tensors of `DropoutRng`, or none of them."""
NO_DROPOUT: DropoutArgs = (None, None, None, None)
FUSED_BACKWARD_MAX_HEAD_DIM = 64
"""Largest head dim for which one kernel computes all gradients. Triton 3.6 miscompiles transposed matmuls (gradients
several times too large, or reads past the end of shared memory) for larger heads, and for blocks of 64 queries by 32
keys. Ten head dims are tested."""


class BlockSizes(NamedTuple):
    """Block shape and launch options of a kernel."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    """Register limit per thread. At 128, 16 warps fit on a multiprocessor: one computes while another waits."""

    def launch_options(self, K: int) -> dict[str, int | None]:
        """Arguments of a launch for this head dim, which is padded to a power of two of at least 16."""
        m, n, warps, stages, max_registers = self
        block_k = max(16, triton.next_power_of_2(K))
        return {
            "BLOCK_K": block_k, "M": m, "N": n, "num_warps": warps, "num_stages": stages, "maxnreg": max_registers
        }  # fmt: skip


def block_sizes(
    kernel: Literal["forward", "fused_backward", "dq", "dkdv"], K: int, R: int, max_seqlen: int, bf16: bool
) -> BlockSizes:
    """Block sizes for a kernel, head dim and longest sequence. `fused_backward` is `dq_kernel` with FUSED.

    Chosen so that the loops of common models spill almost no registers on sm_90 (according to ptxas, not measured).
    Small blocks leave room for a second program on a multiprocessor: while one waits for matmuls, the other computes
    random bits.
    """
    if not bf16:  # without tensor cores, operands stay in registers: for tests, not for speed
        return BlockSizes(32, 32, 8, 1) if K <= 64 else BlockSizes(16, 16, 8, 1)
    narrow = K <= 64
    if kernel == "forward" and narrow:
        return BlockSizes(64, 32, 4, 3, 96) if max_seqlen <= 128 else BlockSizes(128, 64, 8, 3, 128)
    if kernel == "forward":
        return BlockSizes(128, 32, 8, 3, 128) if K <= 128 else BlockSizes(128, 32, 8, 2)
    if kernel == "fused_backward":
        return BlockSizes(128, 32, 8, 1, 128)
    if kernel == "dq":
        return BlockSizes(128, 32, 8, 2, 128 if K <= 128 else None)
    return BlockSizes(32, 128 if K <= 128 else 64, 8, 2, 128 if narrow and R == 1 else None)


@kernel_op
def varlen_attention_forward(
    qkv: Tensor, cu_seqlens: Tensor,
    seed0: Tensor | None, seed1: Tensor | None, site: Tensor | None, head_offset: Tensor | None,
    heads: int, kv_heads: int, p: float, max_seqlen: int, causal: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the output and the log-sum-exp of the scores, [H, N]. The four tensors of `DropoutRng` are given together
    or not at all."""
    N, width = qkv.shape  # not len(): it would specialize a dynamic length
    H, K = heads, width // (heads + 2 * kv_heads)
    out, lse = qkv.new_empty((N, H, K)), qkv.new_empty((H, N), dtype=torch.float32)
    if has_memory(out):
        q, k, v = split_qkv(_last_dim_contiguous(qkv), heads, kv_heads)
        _launch_forward(q, k, v, out, lse, cu_seqlens, (seed0, seed1, site, head_offset), p, max_seqlen, causal)
    return out, lse


def _launch_forward(
    q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor,
    dropout_args: DropoutArgs, p: float, max_seqlen: int, causal: bool, scores: AttentionScores = PLAIN_SCORES,
    window: int = 0,
) -> None:  # fmt: skip
    (N, H, K), R = q_NHK.shape, q_NHK.shape[1] // k_NGK.shape[1]
    blocks = block_sizes("forward", K, R, max_seqlen, q_NHK.dtype == torch.bfloat16)
    forward_kernel[(triton.cdiv(max(max_seqlen, 1), blocks.queries), H, cu_seqlens.numel())](
        q_NHK, k_NGK, v_NGK, out, lse, cu_seqlens, *dropout_args, round(p * 2**31), 1 / (1 - p), N,
        *q_NHK.stride()[:2], *k_NGK.stride()[:2], *v_NGK.stride()[:2],
        CAUSAL=causal, DROPOUT=dropout_args[0] is not None, SCALE=scores.scale_of(K), SOFT_CAP=scores.soft_cap or 0.0,
        WINDOW=window, R=R, K=K, **blocks.launch_options(K),
    )  # fmt: skip


@kernel_op
def varlen_attention_backward(
    dout: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor,
    seed0: Tensor | None, seed1: Tensor | None, site: Tensor | None, head_offset: Tensor | None,
    heads: int, kv_heads: int, p: float, max_seqlen: int, causal: bool,
) -> Tensor:  # fmt: skip
    """Return the gradient of qkv; the kernels write dq, dk and dv in place."""
    d_qkv = qkv.new_empty(qkv.shape)
    if not has_memory(d_qkv):
        return d_qkv
    q, k, v = split_qkv(_last_dim_contiguous(qkv), heads, kv_heads)
    inputs = (_last_dim_contiguous(dout), q, k, v, out, lse, d_qkv, cu_seqlens)
    _launch_backward(*inputs, (seed0, seed1, site, head_offset), p, max_seqlen, causal)
    return d_qkv


def _launch_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, d_qkv: Tensor, cu_seqlens: Tensor,
    dropout_args: DropoutArgs, p: float, max_seqlen: int, causal: bool, scores: AttentionScores = PLAIN_SCORES,
    window: int = 0,
) -> None:  # fmt: skip
    (N, H, K), kv_heads, S = q.shape, k.shape[1], cu_seqlens.numel()
    dq, dk, dv = split_qkv(d_qkv, H, kv_heads)
    R, inputs = H // kv_heads, (cu_seqlens, *dropout_args, round(p * 2**31), 1 / (1 - p), N)
    strides = [step for x in (q, k, v, dout) for step in x.stride()[:2]] + [dq.stride(0)]
    constants: dict[str, float] = {"CAUSAL": causal, "DROPOUT": dropout_args[0] is not None, "R": R, "K": K}
    constants |= {"SCALE": scores.scale_of(K), "SOFT_CAP": scores.soft_cap or 0.0, "WINDOW": window}
    bf16, delta = q.dtype == torch.bfloat16, torch.empty_like(lse)
    blocks = block_sizes("fused_backward", K, R, max_seqlen, bf16)
    fused = R == 1 and K <= FUSED_BACKWARD_MAX_HEAD_DIM and max_seqlen <= blocks.queries
    if not fused:
        blocks = block_sizes("dq", K, R, max_seqlen, bf16)
    dq_kernel[(triton.cdiv(max(max_seqlen, 1), blocks.queries), H, S)](
        q, k, v, out, lse, dout, dq, dk, dv, delta, *inputs, *strides,
        FUSED=fused, **constants, **blocks.launch_options(K),
    )  # fmt: skip
    if not fused:
        blocks = block_sizes("dkdv", K, R, max_seqlen, bf16)
        dkdv_kernel[(triton.cdiv(max(max_seqlen, 1), blocks.keys), kv_heads, S)](
            q, k, v, lse, dout, delta, dk, dv, *inputs, *strides, **constants, **blocks.launch_options(K)
        )


def capped_attention(
    q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor, cu_seqlens: Tensor, max_seqlen: int, window: int,
    scores: AttentionScores,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Causal attention within sequences whose scores have a scale and a soft-cap: output [N, H, K] and log-sum-exp
    [H, N] to the base e, without sinks."""
    N, H, _ = q_NHK.shape
    out, lse = torch.empty_like(q_NHK, memory_format=torch.contiguous_format), q_NHK.new_empty((H, N)).float()
    _launch_forward(q_NHK, k_NGK, v_NGK, out, lse, cu_seqlens, NO_DROPOUT, 0.0, max_seqlen, True, scores, window)
    return out, lse.mul_(log(2))


def capped_attention_backward(
    dout: Tensor, q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor,
    max_seqlen: int, window: int, scores: AttentionScores,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Its gradients, given output and log-sum-exp over keys and sinks."""
    (N, H, K), G = q_NHK.shape, k_NGK.shape[1]
    d_qkv, lse = q_NHK.new_empty((N, (H + 2 * G) * K)), (lse / log(2)).contiguous()
    inputs = (dout, q_NHK, k_NGK, v_NGK, out.contiguous(), lse, d_qkv, cu_seqlens)
    _launch_backward(*inputs, NO_DROPOUT, 0.0, max_seqlen, True, scores, window)
    return split_qkv(d_qkv, H, G)


def _last_dim_contiguous(x: Tensor) -> Tensor:
    """Kernels accept any strides except in the last dim. (A gradient may be an expanded scalar.)"""
    return x if x.stride(-1) == 1 else x.contiguous()


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    qkv, *dropout_args = inputs[:6]
    ctx.options = inputs[6:]
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(qkv, *output, *dropout_args)


def _backward(ctx: Any, dout: Tensor, _dlse: None) -> tuple[Any, ...]:
    return varlen_attention_backward(dout, *ctx.saved_tensors, *ctx.options), *[None] * 10


varlen_attention_forward.register_autograd(_backward, setup_context=_setup_context)
# `delta`: a number per query and head.
WORKSPACE_BYTES[torch.ops.trainyard.varlen_attention_backward.default] = lambda dout, qkv, out, lse, *_, **__: (
    lse.nbytes
)


def varlen_attention(
    qkv: Tensor, heads: int, kv_heads: int, cu_seqlens: Tensor, max_seqlen: int, causal: bool,
    dropout: DropoutRng | None = None,
) -> Tensor:  # fmt: skip
    """softmax(q k / sqrt(K)) v within each sequence: [N, (H + 2 G) K] to [N, H, K].

    A row of qkv has a token's queries of all heads, then its keys, then its values. Sequence s has the tokens
    cu_seqlens[s] to cu_seqlens[s + 1] - 1 (int32 [S + 1], on the device), at most `max_seqlen` and possibly none.
    Tokens after the last sequence get zeros, and so do their gradients.
    """
    p, *dropout_args = dropout if dropout is not None and dropout.p > 0 else (0.0, None, None, None, None)
    assert 0 <= p < 1
    out, _ = varlen_attention_forward(qkv, cu_seqlens, *dropout_args, heads, kv_heads, p, max_seqlen, causal)
    return out
