"""Attention within the documents of packed samples, or in a sliding window, by a variable-length kernel: it computes no
score that is hidden, where a mask would compute all and hide most. Soft-caps have such a kernel too, of our own.

The kernel takes one row of sequences and where they start. Documents are numbered tokens, and how many there are is
known on the device only; a bound, which the host knows, gives the starts a static shape.

Shapes: B samples, T tokens, H heads, G kv heads, K head size, V width of values, N = B T, D documents of all samples at
most.
"""

import torch
from torch import Tensor

from trainyard import compat
from trainyard.kernels.reference import AttentionScores
from trainyard.parallel.attention_blocks import add_sinks


def sequence_starts(documents_BT: Tensor, max_documents: int) -> Tensor:
    """Start of each document in the row of all tokens, then N for those that are missing: int32 [D + 1]."""
    B, T = documents_BT.shape
    is_start = torch.ones(B, T, dtype=torch.bool, device=documents_BT.device)
    is_start[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    is_start = is_start.flatten()
    tokens = torch.arange(B * T, dtype=torch.int32, device=documents_BT.device)
    starts = torch.full((max_documents + 1,), B * T, dtype=torch.int32, device=documents_BT.device)
    # Tokens inside of documents write N to the last element, which has that value anyway.
    index = torch.where(is_start, is_start.cumsum(0) - 1, max_documents)
    return starts.scatter_(0, index, torch.where(is_start, tokens, B * T))


def forward(
    q_BHTK: Tensor, k_BGTK: Tensor, v_BGTV: Tensor, documents_BT: Tensor | None, max_documents: int, window: int,
    scores: AttentionScores,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output, with the memory layout of q in `ring_attention`, and log-sum-exp [B, H, T]."""
    (B, H, T, K), V = q_BHTK.shape, v_BGTV.shape[3]
    q_NHK, k_NGK, v_NGK = (_rows(x) for x in (q_BHTK, k_BGTK, compat.pad_columns(v_BGTV, K)))
    starts = _starts(q_BHTK, documents_BT, max_documents)
    if scores.soft_cap is None:
        out_NHK, lse_HN = compat.varlen_flash(q_NHK, k_NGK, v_NGK, starts, T, window, scores.scale_of(K))
    else:
        from trainyard.kernels.triton.attention.ops import capped_attention  # on GPUs only

        out_NHK, lse_HN = capped_attention(q_NHK, k_NGK, v_NGK, starts, T, window, scores)
    # Copies: an operator may not return a view of one layout where its rule says another.
    out_BHTV, lse_BHT = _samples(out_NHK[..., :V].contiguous(), B), lse_HN.view(H, B, T).transpose(0, 1).contiguous()
    add_sinks(out_BHTV, lse_BHT, scores)
    return out_BHTV, lse_BHT


def backward(
    dout_BHTV: Tensor, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTV: Tensor, out_BHTV: Tensor, lse_BHT: Tensor,
    documents_BT: Tensor | None, max_documents: int, window: int, scores: AttentionScores,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    (B, _, T, K), V = q_BHTK.shape, v_BGTV.shape[3]
    dout, v, out = (_rows(compat.pad_columns(x, K)) for x in (dout_BHTV, v_BGTV, out_BHTV))
    lse_HN = lse_BHT.transpose(0, 1).reshape(-1, B * T)
    inputs = (dout, _rows(q_BHTK), _rows(k_BGTK), v, out, lse_HN, _starts(q_BHTK, documents_BT, max_documents))
    if scores.soft_cap is None:
        dq, dk, dv = compat.varlen_flash_backward(*inputs, T, window, scores.scale_of(K))
    else:
        from trainyard.kernels.triton.attention.ops import capped_attention_backward

        dq, dk, dv = capped_attention_backward(*inputs, T, window, scores)
    return _samples(dq.contiguous(), B), _samples(dk.contiguous(), B), _samples(dv[..., :V].contiguous(), B)


def _starts(q_BHTK: Tensor, documents_BT: Tensor | None, max_documents: int) -> Tensor:
    """Those of documents, or of samples without any."""
    B, _, T, _ = q_BHTK.shape
    if documents_BT is not None:
        return sequence_starts(documents_BT, max_documents)
    return torch.arange(0, B * T + 1, T, dtype=torch.int32, device=q_BHTK.device)


def _rows(x_BHTK: Tensor) -> Tensor:
    """[N, H, K]; no copy of what is token-major in memory."""
    return x_BHTK.transpose(1, 2).flatten(0, 1)


def _samples(x_NHK: Tensor, samples: int) -> Tensor:
    """[B, H, T, K], token-major in memory."""
    return x_NHK.view(samples, -1, *x_NHK.shape[1:]).transpose(1, 2)
