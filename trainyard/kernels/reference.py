"""Reference kernels in plain torch: correct on any device, easy for a compiler to fuse, and what the fused kernels are
tested against."""

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trainyard.compat import bmm_to_fp32
from trainyard.core.counter_rng import DropoutRng, element_bits
from trainyard.kernels.fp8_linear import Fp8Options, fp8_linear
from trainyard.kernels.frozen_linear import FrozenMatrix, frozen_linear

Activation = Literal["none", "swiglu", "gelu", "gelu_tanh"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


class AttentionScores(NamedTuple):
    """How queries and keys become the weights of values. Values may have another width than keys (V)."""

    scale: float | None = None
    """Multiplies q k; none: 1 / sqrt(K)."""
    soft_cap: float | None = None
    """c: a score becomes c tanh(score / c), before the mask."""
    sinks: Tensor | None = None
    """[H]: a learned logit of each head, which takes part in the softmax without a value."""

    def scale_of(self, head_size: int) -> float:
        return head_size**-0.5 if self.scale is None else self.scale

    def cap(self, score: Tensor) -> Tensor:
        return score if self.soft_cap is None else torch.tanh(score / self.soft_cap) * self.soft_cap

    def weights(self, score_BHTS: Tensor) -> Tensor:
        """The softmax of masked scores."""
        if self.sinks is None:
            return score_BHTS.softmax(-1)
        return score_BHTS.softmax(-1) * self.share_of_keys(score_BHTS.logsumexp(-1))[..., None]

    def share_of_keys(self, lse_BHT: Tensor) -> Tensor:
        """What the sinks leave of the weights, for the log-sum-exp of the scores of all keys."""
        assert self.sinks is not None
        return (lse_BHT - self.sinks.float()[:, None]).sigmoid()


PLAIN_SCORES = AttentionScores()


class Kernels:
    """The operations of a model besides attention over dense tensors. `Device.kernels` returns these or a subclass with
    fused kernels."""

    fused_wgrad = False
    """True if kernels accumulate weight gradients directly into the fp32 buffer (fused wgrad accumulation)."""
    has_fp8_matmul = False
    """True if the device multiplies fp8 matrices; otherwise `linear` emulates fp8."""

    cross_entropy_: Callable[..., Tensor] | None = None
    """(logits, labels, ignore_index, weights, writes_gradient) -> loss of each row; the logits become the gradient.
    train/cross_entropy.py has the plain torch version."""
    adamw_: Callable[..., None] | None = None
    """One update of flat fp32 memory, with the scalars in one tensor. train/optim has the plain torch version."""
    adamw_stochastic_rounding_: Callable[..., None] | None = None
    """The same for bf16 weights with stochastic rounding."""
    has_varlen_attention = False
    """True if `varlen_attention` exists; otherwise batches are never packed."""
    varlen_attention: Callable[[Tensor, int, int, Tensor, int, bool, DropoutRng | None], Tensor]
    """(qkv, heads, kv heads, cu_seqlens, max_seqlen, causal, dropout) -> attention within packed sequences,
    [N, (H + 2 G) K] to [N, H, K]."""

    is_batch_invariant = False
    """True if the result for a sequence has the same bits whatever else is in the batch, decoded token by token or
    computed at once. `attention` exists then."""
    attention: Callable[..., Tensor]
    """(q, k, v, first_B, documents_BT, window, AttentionScores) -> causal attention [B, H, T, V] of queries from
    position first_B on over keys [B, G, S, K] from position 0 on."""

    has_decode_attention = False
    """True if `decode_attention` reads only what each row needs, so that one static shape serves all lengths."""

    def __init__(self, has_fp32_gqa: bool = True) -> None:
        self.has_fp32_gqa = has_fp32_gqa
        """True if torch's attention has an fp32 kernel for fewer kv heads than heads. Otherwise each query head gets a
        copy of its keys and values, because torch's fallback would save the scores."""
        self.wgrad_buffers: dict[Tensor, Tensor] = {}
        """The buffer that accumulates each parameter's gradient, if `fused_wgrad`. The optimizer registers its buffers
        here. Autograd sees no gradient for these parameters but still runs their post-accumulate hooks."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, fp8: Fp8Options | None = None) -> Tensor:
        return fp8_linear(x, weight, bias, fp8, reference=True) if fp8 else F.linear(x, weight, bias)

    def fp32_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + b in fp32, whatever the dtypes of x and the parameters."""
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float())

    def frozen_linear(
        self, x: Tensor, weight: FrozenMatrix, bias: Tensor | None = None, fp8: Fp8Options | None = None
    ) -> Tensor:
        """`linear` of a matrix without a gradient, which may be stored in 4 or 8 bits."""
        return frozen_linear(x, weight, bias, fp8, reference=True)

    def embedding(self, index: Tensor, weight: Tensor) -> Tensor:
        return F.embedding(index, weight)

    def add_rms_norm(self, x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return the residual x + y (x if y is None) and its RMS norm."""
        x = x if y is None else x + y
        return x, rms_norm(x, weight, eps)

    def add_layer_norm(
        self, x: Tensor, y: Tensor | None, y_bias: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float,
        dropout: DropoutRng | None, post_norm: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return (residual, normed). Pre-norm: residual = x + dropout(y + y_bias) (x if y is None). `post_norm`:
        residual = normed."""
        x = x if y is None else self.add_dropout(x, y, y_bias, dropout)
        out = F.layer_norm(x, weight.shape, weight, bias, eps)
        return out if post_norm else x, out

    def add_dropout(self, x: Tensor | None, y: Tensor, bias: Tensor | None, dropout: DropoutRng | None) -> Tensor:
        """x + dropout(y + bias); x and bias are optional."""
        y = y if bias is None else y + bias
        y = y if dropout is None else row_dropout(y, dropout)
        return y if x is None else x + y

    def bias_gelu(self, x: Tensor, bias: Tensor, tanh: bool) -> Tensor:
        """GELU(x + bias)."""
        return F.gelu(x + bias, approximate="tanh" if tanh else "none")

    def activate(self, kind: str, x: Tensor) -> Tensor:
        """One of ACTIVATIONS."""
        return ACTIVATIONS[kind](x)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up on the two halves of each row."""
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    def clamped_swiglu(self, gate_up: Tensor, alpha: float, limit: float) -> Tensor:
        """gate * sigmoid(alpha * gate) * (up + 1) on the two halves of each row, both clamped at the limit."""
        gate, up = gate_up.chunk(2, -1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(gate * alpha) * (up + 1)

    def rope_angles(self, position: Tensor, frequency: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
        """Cosines and sines [..., R] of the angles at integer positions [...], from radians per position [R], times a
        factor."""
        angle = position.unsqueeze(-1) * frequency
        cos, sin = angle.cos(), angle.sin()
        return (cos, sin) if factor == 1 else (cos * factor, sin * factor)

    def rope(
        self, qkv: Tensor, cos: Tensor | None, sin: Tensor | None, heads: int, kv_heads: int, interleaved: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T, (H + 2 G) K] to q [B, H, T, K], k and v [B, G, T, K]; q and k rotated as `apply_rope` does. Without
        cosines and sines, nothing rotates."""
        head_dim = qkv.shape[-1] // (heads + 2 * kv_heads)
        projections = torch.split(qkv, [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], -1)
        q, k, v = (y.view(*y.shape[:2], -1, head_dim).transpose(1, 2) for y in projections)
        if cos is None or sin is None:
            return q, k, v
        return apply_rope(q, cos, sin, interleaved), apply_rope(k, cos, sin, interleaved), v

    def norm_rope(
        self, qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, cos: Tensor | None, sin: Tensor | None,
        heads: int, kv_heads: int, interleaved: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """`rope` after an RMSNorm of each head of q and k."""
        x = qkv.view(*qkv.shape[:2], heads + 2 * kv_heads, -1)
        q, k, v = torch.split(x, [heads, kv_heads, kv_heads], 2)
        q, k = (rms_norm(y, w, eps) for y, w in ((q, q_weight), (k, k_weight)))
        return self.rope(torch.cat((q, k, v), 2).flatten(2), cos, sin, heads, kv_heads, interleaved)

    def rotate_end(self, x_BHTK: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        """x with as many of its last dims rotated as the cosines have."""
        fixed, rotated = torch.split(x_BHTK, [x_BHTK.shape[-1] - cos.shape[-1], cos.shape[-1]], -1)
        return torch.cat((fixed, apply_rope(rotated, cos, sin, interleaved)), -1)

    def join_keys(self, expanded_BTHE: Tensor, shared_BTR: Tensor, value_size: int) -> tuple[Tensor, Tensor]:
        """Keys [B, H, T, K] and values [B, H, T, V]: a head has its own columns of both, and the last columns of keys
        are those that all heads share."""
        key, value = torch.split(expanded_BTHE, [expanded_BTHE.shape[-1] - value_size, value_size], -1)
        key = torch.cat((key, shared_BTR[:, :, None].expand(-1, -1, key.shape[2], -1)), -1)
        return key.transpose(1, 2), value.transpose(1, 2)

    def sum_rows(self, x: Tensor, index: Tensor, weight: Tensor | None) -> Tensor:
        """Row n of the result is the sum over k of weight[n, k] (fp32; None: 1) times x[index[n, k]]."""
        rows = x.index_select(0, index.flatten()).view(*index.shape, -1)
        return (rows if weight is None else rows * weight.to(x.dtype)[..., None]).sum(1)

    def sum_rows_backward(self, dy: Tensor, x: Tensor, index: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of x and of the weights. Every row of x belongs to exactly one entry of the index."""
        rows = x.index_select(0, index.flatten()).view(*index.shape, -1)
        d_rows = (dy[:, None] * weight.to(x.dtype)[..., None]).flatten(0, 1)
        dx = torch.empty_like(x).index_copy(0, index.flatten(), d_rows)
        return dx, (dy[:, None] * rows).sum(-1, dtype=torch.float32)

    def decode_attention(
        self, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTV: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor,
        visible: int, window: int | None = None, scores: AttentionScores = PLAIN_SCORES,
    ) -> Tensor:  # fmt: skip
        """The function `decode_attention` below, for slots of at most `visible` tokens, the new one included."""
        write_cache(k_BGTK, v_BGTV, k_cache, v_cache, lengths)
        k, v = (cache[: len(q_BHTK), :, :visible] for cache in (k_cache, v_cache))
        past = visible_tokens(k_cache.shape[2], visible, lengths, window)[:, None, None]
        if scores.soft_cap is None and scores.sinks is None:
            grouped = q_BHTK.shape[1] != k.shape[1]
            return F.scaled_dot_product_attention(q_BHTK, k, v, past, scale=scores.scale, enable_gqa=grouped)
        return cached_attention(q_BHTK, k, v, past, scores)

    def decode_latent_attention(
        self, q_BHC: Tensor, c_BTC: Tensor, latents: Tensor, lengths: Tensor, visible: int, latent_size: int,
        scale: float,
    ) -> Tensor:  # fmt: skip
        """Attention of one new token of each slot over latents [slots, 1, S, C], of which the first `latent_size`
        columns are also the values. The new latent is written behind the slot's others; [B, H, latent_size]."""
        slot = torch.arange(len(q_BHC), device=lengths.device)
        latents[slot, 0, lengths] = c_BTC[:, 0]
        c_BSC = latents[: len(q_BHC), 0, :visible]
        hidden = ~visible_tokens(latents.shape[2], visible, lengths, None)
        score_BHS = bmm_to_fp32(q_BHC, c_BSC.transpose(1, 2)) * scale
        weight_BHS = score_BHS.masked_fill(hidden[:, None], -torch.inf).softmax(-1).to(c_BSC.dtype)
        return weight_BHS @ c_BSC[..., :latent_size]

    def log_softmax(self, logits: Tensor) -> Tensor:
        """The log-probabilities of rows of fp32 logits [M, V]."""
        return logits.log_softmax(-1)

    def greedy_tokens(self, logits: Tensor) -> Tensor:
        """The most likely token of each row of [M, V], int64."""
        return logits.argmax(-1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """In the dtype of x, which a weight in fp32 multiplies before it is rounded."""
    if weight.dtype == x.dtype:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def row_dropout(x: Tensor, dropout: DropoutRng) -> Tensor:
    """Dropout of [..., D], with row seeds of shape [...]."""
    column = torch.arange(x.shape[-1], dtype=torch.int32, device=x.device)
    return counter_dropout(x, dropout.p, (dropout.seed0[..., None], dropout.seed1[..., None]), dropout.site, column)


def counter_dropout(x: Tensor, p: float, seeds: tuple[Tensor, Tensor], site: Tensor, column: Tensor) -> Tensor:
    """Zero each element with probability p. Seeds and column, broadcast to the shape of x, identify the element."""
    bits = element_bits(seeds, site, column) & 0x7FFFFFFF
    return torch.where(bits >= round(p * 2**31), x / (1 - p), 0.0)


def apply_rope(x_BHTK: Tensor, cos_TR: Tensor, sin_TR: Tensor, interleaved: bool = False) -> Tensor:
    """Rotary embedding of the first R dims, (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), in fp32. x1 and x2 are
    halves of these dims, or its even and odd dims if `interleaved`. If positions differ between samples, cos and sin
    are [B, 1, T, R]."""
    size = cos_TR.shape[-1]
    x, rest = x_BHTK[..., :size].float(), x_BHTK[..., size:]
    if interleaved:
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    else:
        x1, x2 = x.chunk(2, -1)
        turned = torch.cat((-x2, x1), -1)
    rotated = (x * cos_TR + turned * sin_TR).to(x_BHTK.dtype)
    return torch.cat((rotated, rest), -1) if rest.shape[-1] else rotated


def split_qkv(qkv: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views [N, H, K], [N, G, K] and [N, G, K]."""
    x = qkv.view(len(qkv), heads + 2 * kv_heads, -1)
    return x[:, :heads], x[:, heads : heads + kv_heads], x[:, heads + kv_heads :]


def skinny_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None,
    norm_weight: Tensor | None = None, eps: float = 0.0, activation: Activation = "none",
) -> Tensor:  # fmt: skip
    """activation(rms_norm(x) W^T + bias) + residual. Without `norm_weight`, x is multiplied as it is. SwiGLU halves the
    columns."""
    x = x if norm_weight is None else rms_norm(x, norm_weight, eps)
    y = F.linear(x, weight, bias)
    if activation == "swiglu":
        gate, up = y.chunk(2, -1)
        y = F.silu(gate) * up
    elif activation != "none":
        y = F.gelu(y, approximate="tanh" if activation == "gelu_tanh" else "none")
    return y if residual is None else residual + y


def write_cache(k_BGTK: Tensor, v_BGTK: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor) -> None:
    """Store the key and value of one new token of each slot behind the slot's `lengths` [B] tokens. Token p is at p
    modulo the length of the cache."""
    slot, place = torch.arange(len(k_BGTK), device=lengths.device), lengths % k_cache.shape[2]
    k_cache[slot, :, place] = k_BGTK[:, :, 0]
    v_cache[slot, :, place] = v_BGTK[:, :, 0]


def cached_attention(q_BH1K: Tensor, k: Tensor, v: Tensor, past_B11S: Tensor, scores: AttentionScores) -> Tensor:
    """Attention of one token per slot over its cache [B, G, S, K] as two batched matmuls."""
    (B, H, _, K), G = q_BH1K.shape, k.shape[1]
    q_BGRK = (q_BH1K * scores.scale_of(K)).view(B, G, -1, K)
    score_BH1S = scores.cap((q_BGRK @ k.transpose(2, 3)).float()).view(B, H, 1, -1)
    weight_BH1S = scores.weights(score_BH1S.masked_fill(~past_B11S, -torch.inf)).to(v.dtype)
    return (weight_BH1S.view(B, G, H // G, -1) @ v).view(B, H, 1, -1)


def visible_tokens(size: int, visible: int, lengths: Tensor, window: int | None) -> Tensor:
    """Which of the first `visible` places of a cache of `size` the token behind `lengths` others sees, [B, S]. A cache
    as long as the window is a ring."""
    age = lengths[:, None] - torch.arange(min(visible, size), device=lengths.device)
    if window == size:
        return age % size <= lengths[:, None]
    return age >= 0 if window is None else (age >= 0) & (age < window)


def decode_attention(
    q_BHTK: Tensor, k_BGTK: Tensor, v_BGTV: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor,
    cos: Tensor | None = None, sin: Tensor | None = None, window: int | None = None,
    scores: AttentionScores = PLAIN_SCORES,
) -> Tensor:  # fmt: skip
    """Attention of one new token (T = 1) of each slot over the tokens before it, [B, H, 1, V].

    The caches are [slots, G, S, K or V], and row b of q, k and v belongs to slot b. `lengths` (int32, [slots]) counts
    the tokens of a slot that are in the cache already; the new key and value are written behind them, in place. With
    cos and sin [B, 1, 1, K], q and k are rotated first. A token sees the last `window` tokens, itself included. Caches
    that are as long as the window are rings.
    """
    B, H, T, K = q_BHTK.shape
    assert T == 1
    if cos is not None and sin is not None:
        q_BHTK, k_BGTK = apply_rope(q_BHTK, cos, sin), apply_rope(k_BGTK, cos, sin)
    lengths = lengths[:B].long()
    write_cache(k_BGTK, v_BGTV, k_cache, v_cache, lengths)
    visible = visible_tokens(k_cache.shape[2], k_cache.shape[2], lengths, window)
    keys, values = k_cache[:B], v_cache[:B]
    # Unwritten positions may hold anything; 0 * nan would be nan.
    values = torch.where(visible[:, None, :, None], values, 0.0)
    repeat = H // keys.shape[1]
    keys, values = (x.repeat_interleave(repeat, 1) for x in (keys, values))
    score = scores.cap((q_BHTK.float() @ keys.float().transpose(2, 3)) * scores.scale_of(K))
    weight = scores.weights(score.masked_fill(~visible[:, None, None], -torch.inf))
    return (weight @ values.float()).to(q_BHTK.dtype)
