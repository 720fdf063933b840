"""`Kernels` whose result for a sequence does not depend on what else is in the batch, in plain torch for CPUs.

A sampler that decodes one token of a sequence and a trainer that computes the whole sequence then get the same bits.
Libraries choose how to sum by the shape of the problem, so every product here is a loop over problems of one shape:
`LINEAR_ROWS` rows of activations, or `QUERIES` rows of queries against `KEYS` keys. Zeros fill the last one. Functions
of single elements need fixed shapes too, because torch computes what does not fill a vector register with another
implementation. Norms and softmax of torch add up each row for itself, for rows of up to 32,767 elements.

Backward is that of the plain formulas: only forward has to repeat the sampler's bits.

B batch, T tokens, H heads, G kv heads, R heads per kv head, S keys, K head size, V width of values.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainyard.compat import add_matmul_
from trainyard.kernels.fp8_linear import Fp8Options
from trainyard.kernels.reference import (
    ACTIVATIONS,
    PLAIN_SCORES,
    AttentionScores,
    Kernels,
    visible_tokens,
    write_cache,
)

LINEAR_ROWS = 32
"""Fewer make training slower, more make decoding slower."""
QUERIES, KEYS = 64, 64
ELEMENTS = 1 << 14
"""Below torch's limit for several threads, and a multiple of all vector registers."""
HIDDEN = -1e30
"""Finite, so that a query that has seen no key yet yields no nan."""


class BatchInvariantKernels(Kernels):
    is_batch_invariant = True

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, fp8: Fp8Options | None = None) -> Tensor:
        assert fp8 is None
        return InvariantLinear.apply(x, weight, bias, linear_by_rows)  # type: ignore[no-untyped-call]

    def activate(self, kind: str, x: Tensor) -> Tensor:
        function = ACTIVATIONS[kind]
        return with_gradients_of(function, partial(elementwise, function), x)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        return with_gradients_of(super().swiglu, _swiglu, gate_up)

    def bias_gelu(self, x: Tensor, bias: Tensor, tanh: bool) -> Tensor:
        gelu = partial(F.gelu, approximate="tanh" if tanh else "none")
        return with_gradients_of(lambda x, bias: gelu(x + bias), lambda x, bias: elementwise(gelu, x + bias), x, bias)

    def rope_angles(self, position: Tensor, frequency: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
        angle = position.unsqueeze(-1) * frequency
        return elementwise(torch.cos, angle) * factor, elementwise(torch.sin, angle) * factor

    def attention(
        self, q_BHTK: Tensor, k_BGSK: Tensor, v_BGSV: Tensor, first_B: Tensor, documents_BT: Tensor | None,
        window: int | None, scores: AttentionScores = PLAIN_SCORES,
    ) -> Tensor:  # fmt: skip
        if documents_BT is None:
            return attend(q_BHTK, k_BGSK, v_BGSV, first_B, window, scores)
        out = q_BHTK.new_empty(*q_BHTK.shape[:3], v_BGSV.shape[3])
        for sample, documents in enumerate(documents_BT):
            end = 0
            for length in documents.unique_consecutive(return_counts=True)[1].tolist():
                tokens, end = slice(end, end + length), end + length
                q, k, v = (x[sample : sample + 1, :, tokens] for x in (q_BHTK, k_BGSK, v_BGSV))
                out[sample, :, tokens] = attend(q, k, v, first_B[:1], window, scores)[0]
        return out

    def decode_attention(
        self, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTV: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor,
        visible: int, window: int | None = None, scores: AttentionScores = PLAIN_SCORES,
    ) -> Tensor:  # fmt: skip
        write_cache(k_BGTK, v_BGTV, k_cache, v_cache, lengths)
        k, v = (cache[: len(q_BHTK), :, :visible] for cache in (k_cache, v_cache))
        # What another sequence left in the cache may be infinite, and 0 times that is not 0.
        v = torch.where(visible_tokens(k_cache.shape[2], visible, lengths, window)[:, None, :, None], v, 0.0)
        return attend(q_BHTK, k, v, lengths, window, scores)


def with_gradients_of(plain: Callable[..., Tensor], forward: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """`forward(*inputs)`, with the gradients of `plain`, another formula for the same result."""
    if not torch.is_grad_enabled():
        return forward(*inputs)
    return _WithGradientsOf.apply(plain, forward, *inputs)  # type: ignore[no-untyped-call]


class _WithGradientsOf(torch.autograd.Function):
    """Backward computes the plain formula once more."""

    @staticmethod
    def forward(ctx: Any, plain: Callable[..., Tensor], forward: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.plain = plain
        ctx.save_for_backward(*inputs)
        return forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.saved_tensors, ctx.needs_input_grad[2:], strict=True)
        inputs = [x.detach().requires_grad_(needed) for x, needed in pairs]
        with torch.enable_grad():
            y = ctx.plain(*inputs)
        found = iter(torch.autograd.grad(y, [x for x in inputs if x.requires_grad], grads[0]))
        return None, None, *(next(found) if x.requires_grad else None for x in inputs)


class InvariantLinear(torch.autograd.Function):
    """x W^T + bias, multiplied by `product(x_MD, weight, bias)`. The gradient of the weight goes to a buffer, if
    given."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, product: Callable[..., Tensor],
        buffer: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, weight)
        ctx.buffer, ctx.has_bias = buffer, bias is not None
        return product(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy, dw = grads[0].flatten(0, -2), None
        dx = (dy @ weight).view_as(x) if ctx.needs_input_grad[0] else None
        if ctx.buffer is not None:
            add_matmul_(ctx.buffer, dy.t(), x.flatten(0, -2))
        elif ctx.needs_input_grad[1]:
            dw = dy.t() @ x.flatten(0, -2)
        return dx, dw, dy.sum(0) if ctx.has_bias else None, None, None


def linear_by_rows(x_MD: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear, `LINEAR_ROWS` rows at a time."""
    rows = x_MD.shape[0]
    blocks = torch.split(pad_dim(x_MD, LINEAR_ROWS, 0).contiguous(), LINEAR_ROWS)
    return torch.cat([F.linear(block, weight, bias) for block in blocks])[:rows]


def elementwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A function of single elements, `ELEMENTS` of them at a time."""
    blocks = torch.split(pad_dim(x.reshape(-1), ELEMENTS, 0), ELEMENTS)
    return torch.cat([function(block) for block in blocks])[: x.numel()].view(x.shape)


def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return elementwise(F.silu, gate) * up


def attend(
    q_BHTK: Tensor, k_BGSK: Tensor, v_BGSV: Tensor, first_B: Tensor, window: int | None,
    scores: AttentionScores = PLAIN_SCORES,
) -> Tensor:  # fmt: skip
    """Causal attention of queries at the positions `first_B`, `first_B` + 1, ... over the keys from position 0 on.

    Every query goes over the keys in the same blocks, in order, and rescales its sum when it meets a larger score. A
    block without a key that it sees changes nothing in it, so blocks that no query of a problem sees are left out.
    """
    (B, H, T, K), (_, G, _, V) = q_BHTK.shape, v_BGSV.shape
    R = H // G
    # The heads of one kv head share its keys: their queries are rows of one problem.
    q_BGMK = q_BHTK.view(B, G, R, T, K).transpose(2, 3).reshape(B, G, T * R, K).float() * scores.scale_of(K)
    q_BGMK, k_BGSK, v_BGSV = pad_dim(q_BGMK, QUERIES, 2), pad_dim(k_BGSK, KEYS, 2), pad_dim(v_BGSV, KEYS, 2)
    position_BM = first_B[:, None] + torch.arange(q_BGMK.shape[2]) // R
    if scores.sinks is not None:  # a first key, as it were, whose value is 0
        sink_BGM1 = scores.sinks.float().view(G, 1, R).expand(B, G, T, R).reshape(B, G, T * R, 1)
        sink_BGM1 = pad_dim(sink_BGM1, QUERIES, 2)
    outs = []
    for q_row in range(0, q_BGMK.shape[2], QUERIES):
        q = q_BGMK[:, :, q_row : q_row + QUERIES].flatten(0, 1)
        position = position_BM[:, q_row : q_row + QUERIES, None]
        top, total = q.new_full((B * G, QUERIES, 1), HIDDEN), q.new_zeros(B * G, QUERIES, 1)
        if scores.sinks is not None:
            top, total = sink_BGM1[:, :, q_row : q_row + QUERIES].flatten(0, 1), total + 1
        out = q.new_zeros(B * G, QUERIES, V)
        oldest = max(int(position.min()) + 1 - window, 0) if window else 0
        for key in range(oldest // KEYS * KEYS, min(int(position.max()) + 1, k_BGSK.shape[2]), KEYS):
            k, v = (x[:, :, key : key + KEYS].flatten(0, 1).float() for x in (k_BGSK, v_BGSV))
            key_position = torch.arange(key, key + KEYS)
            seen = key_position <= position
            if window:
                seen &= key_position > position - window
            hidden = ~seen[:, None].expand(-1, G, -1, -1).flatten(0, 1)
            score = torch.bmm(q, k.transpose(1, 2))
            if scores.soft_cap is not None:
                score = elementwise(torch.tanh, score / scores.soft_cap) * scores.soft_cap
            score = score.masked_fill_(hidden, -torch.inf)
            new_top = torch.maximum(top, score.amax(-1, keepdim=True))
            weight, decay = elementwise(torch.exp, score - new_top), elementwise(torch.exp, top - new_top)
            total = total * decay + weight.sum(-1, keepdim=True)
            out = out * decay + torch.bmm(weight, v)
            top = new_top
        outs.append(out / total)
    out_BGTRV = torch.cat(outs, 1)[:, : T * R].view(B, G, T, R, V)
    return out_BGTRV.transpose(2, 3).reshape(B, H, T, V).to(q_BHTK.dtype)


def pad_dim(x: Tensor, multiple: int, dim: int) -> Tensor:
    """x with zeros at the end of a dim, so that its size is a multiple."""
    missing = -x.shape[dim] % multiple
    return F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, missing)) if missing else x
