"""The gated delta rule, a linear attention (Yang et al., arXiv 2412.06464), in plain torch and fp32.

A head keeps a matrix S [K, V] instead of the keys and values of all tokens. Each token fades it by e^g, replaces a
share beta of what S has for its key k by its value v, and reads what S has for its query q:

    S = e^g S + k (beta (v - e^g S^T k))^T        y = S^T q

`gated_delta_step` is one such token, for generation. `gated_delta_chunks` computes all tokens of a chunk at once: what
they add depends on S at the start of the chunk linearly, so that a single product per chunk is left to do in order.

B sequences, T tokens, N chunks of C tokens, G key heads, R value heads of each, H = G R, K width of keys, V of values.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64


def normalize_keys(x: Tensor) -> Tensor:
    """Vectors of length 1."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def gated_delta_chunks(
    q_BTGK: Tensor, k_BTGK: Tensor, v_BTHV: Tensor, g_BTH: Tensor, beta_BTH: Tensor,
    state_BHKV: Tensor | None = None, documents_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(y [B, T, H, V], S after the last token). S starts as `state_BHKV`, or as zeros; or again as zeros at the first
    token of every document. A token with g = beta = 0 leaves S as it is."""
    B, T, G, K = q_BTGK.shape
    H, V = v_BTHV.shape[2:]
    N = -(-T // CHUNK)

    def chunks(x: Tensor) -> Tensor:
        """[B, T, heads, ...] to [B, G, R (or 1), N, C, ...], with zeros behind the end."""
        heads, rest = x.shape[2], x.shape[3:]
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, N * CHUNK - T)).view(B, N, CHUNK, heads, *rest)
        return x.movedim(3, 1).view(B, G, heads // G, N, CHUNK, *rest)

    q, k, v, g, beta = map(chunks, (q_BTGK, k_BTGK, v_BTHV, g_BTH, beta_BTH))
    fade = g.cumsum(-1)  # log of what is left at a token of S at the start of the chunk
    position = torch.arange(CHUNK, device=q.device)
    hidden = position > position[:, None]
    from_start, to_end = fade.exp(), (fade[..., -1:] - fade).exp()
    if documents_BT is not None:
        document = F.pad(documents_BT[:, None].float(), (0, N * CHUNK - T), mode="replicate")
        document = document.view(B, 1, 1, N, CHUNK)
        last = document[..., -1:]
        before = torch.cat((document[:, :, :, :1, :1], last[:, :, :, :-1]), 3)  # at the end of the chunk before
        hidden = hidden | (document[..., :, None] != document[..., None, :])
        from_start, to_end = from_start * (document == before), to_end * (document == last)
    pair = (fade[..., :, None] - fade[..., None, :]).masked_fill(hidden, -torch.inf).exp()
    # What each token writes depends on those before it in the chunk: a triangular system.
    system = beta[..., None] * (k @ k.mT) * pair
    given = beta[..., None] * torch.cat((v, (k * from_start[..., None]).expand(*v.shape[:-1], K)), -1)
    values, reads = torch.linalg.solve_triangular(system, given, upper=False, unitriangular=True).split([V, K], -1)
    k_to_end = (k * to_end[..., None]).mT
    keep = from_start[..., -1, None, None] * torch.eye(K, device=q.device) - k_to_end @ reads
    add = k_to_end @ values
    state = q.new_zeros(B * H, K, V) if state_BHKV is None else state_BHKV.flatten(0, 1)
    states = [state]
    for keep_n, add_n in zip(keep.flatten(0, 2).unbind(1), add.flatten(0, 2).unbind(1), strict=True):
        states.append(torch.baddbmm(add_n, keep_n, states[-1]))
    start = torch.stack(states[:-1], 1).view(B, G, H // G, N, K, V)
    y = (q * from_start[..., None]) @ start + ((q @ k.mT) * pair) @ (values - reads @ start)
    return y.flatten(1, 2).movedim(1, 3).flatten(1, 2)[:, :T], states[-1].view(B, H, K, V)


def gated_delta_step(
    q_BGK: Tensor, k_BGK: Tensor, v_BHV: Tensor, g_BH: Tensor, beta_BH: Tensor, state_BHKV: Tensor
) -> tuple[Tensor, Tensor]:
    """(y [B, H, V], S) of one token of each sequence."""
    G, H = q_BGK.shape[1], v_BHV.shape[1]
    q, k = (x.repeat_interleave(H // G, 1)[:, :, None] for x in (q_BGK, k_BGK))
    state = state_BHKV * g_BH.exp()[..., None, None]
    added = beta_BH[..., None, None] * (v_BHV[:, :, None] - k @ state)
    state = state + k.mT @ added
    return (q @ state)[:, :, 0], state


def causal_convolution(
    x_BTC: Tensor, weight_CW: Tensor, before_BSC: Tensor | None = None, documents_BT: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Weighted sums of the W last tokens of each channel, [B, T, C], and the inputs of S = W - 1 tokens before and all
    others. Tokens before the first one are `before_BSC` or zeros; those of other documents count as zeros."""
    (T, C), W = x_BTC.shape[1:], weight_CW.shape[1]
    before = x_BTC.new_zeros(len(x_BTC), W - 1, C) if before_BSC is None else before_BSC
    x = torch.cat((before, x_BTC), 1)
    y = x_BTC * weight_CW[:, -1]
    for back in range(1, W):
        earlier = x[:, W - 1 - back : W - 1 - back + T] * weight_CW[:, -1 - back]
        if documents_BT is not None:
            same = F.pad(documents_BT, (back, 0), value=-1)[:, :T] == documents_BT
            earlier = earlier * same[..., None]
        y = y + earlier
    return y, x
