"""Attention within the documents of packed samples by a variable-length kernel: it computes no score between documents,
where a mask would compute all and hide most.

The kernel takes one row of sequences and where they start. Documents are numbered tokens, and how many there are is
known on the device only; a bound, which the host knows, gives the starts a static shape.

Shapes: B samples, T tokens, H heads, G kv heads, K head size, N = B T, D documents of all samples at most.
"""

import torch
from torch import Tensor

from trainyard import compat


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
    q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, documents_BT: Tensor, max_documents: int, window: int
) -> tuple[Tensor, Tensor]:
    """Output, with the memory layout of q in `ring_attention`, and log-sum-exp [B, H, T]."""
    B, H, T, _ = q_BHTK.shape
    q_NHK, k_NGK, v_NGK = (_rows(x) for x in (q_BHTK, k_BGTK, v_BGTK))
    starts = sequence_starts(documents_BT, max_documents)
    out_NHK, lse_HN = compat.varlen_flash(q_NHK, k_NGK, v_NGK, starts, T, window)
    # A copy: an operator may not return a view of one layout where its rule says another.
    return _samples(out_NHK, B), lse_HN.view(H, B, T).transpose(0, 1).contiguous()


def backward(
    dout_BHTK: Tensor, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, out_BHTK: Tensor, lse_BHT: Tensor,
    documents_BT: Tensor, max_documents: int, window: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    B, _, T, _ = q_BHTK.shape
    dout, q, k, v, out = (_rows(x) for x in (dout_BHTK, q_BHTK, k_BGTK, v_BGTK, out_BHTK))
    lse_HN = lse_BHT.transpose(0, 1).reshape(-1, B * T)
    starts = sequence_starts(documents_BT, max_documents)
    dq, dk, dv = compat.varlen_flash_backward(dout, q, k, v, out, lse_HN, starts, T, window)
    return _samples(dq, B), _samples(dk, B), _samples(dv, B)


def _rows(x_BHTK: Tensor) -> Tensor:
    """[N, H, K]; no copy of what is token-major in memory."""
    return x_BHTK.transpose(1, 2).flatten(0, 1)


def _samples(x_NHK: Tensor, samples: int) -> Tensor:
    """[B, H, T, K], token-major in memory."""
    return x_NHK.view(samples, -1, *x_NHK.shape[1:]).transpose(1, 2)
