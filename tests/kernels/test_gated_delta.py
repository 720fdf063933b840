"""The gated delta rule against that of transformers: chunks, single tokens, states, documents and gradients."""

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn, torch_recurrent_gated_delta_rule

from trainyard.kernels.gated_delta import causal_convolution, gated_delta_chunks, gated_delta_step, normalize_keys


def inputs(tokens: int, key_heads: int = 2, heads: int = 4, fades: float = 1.0) -> list[Tensor]:
    torch.manual_seed(tokens)
    q, k = (normalize_keys(torch.randn(2, tokens, key_heads, 16)) for _ in range(2))
    v, g = torch.randn(2, tokens, heads, 24), -fades * torch.rand(2, tokens, heads)
    return [x.requires_grad_() for x in (q, k, v, g, torch.rand(2, tokens, heads))]


def reference(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Token by token, as transformers does. It scales queries, and has a copy of each key for its value heads."""
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q * q.shape[-1] ** 0.5, k))
    out: tuple[Tensor, ...] = torch_recurrent_gated_delta_rule(q, k, v, g, beta, state, output_final_state=True)
    return out


@pytest.mark.parametrize("fades", [0.0, 1.0, 8.0])
@pytest.mark.parametrize("tokens", [1, 5, 63, 64, 65, 200])
def test_chunks_equal_single_tokens(tokens: int, fades: float) -> None:
    """Outputs, last state and gradients, for lengths that are no multiple of a chunk, with and without forgetting."""
    tensors = inputs(tokens, fades=fades)
    state = torch.randn(2, 4, 16, 24, requires_grad=True)
    results = [function(*tensors, state) for function in (gated_delta_chunks, reference)]
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    weights = [torch.randn_like(x) for x in results[0]]
    gradients = [
        torch.autograd.grad(sum((x * w).sum() for x, w in zip(result, weights, strict=True)), [*tensors, state])
        for result in results
    ]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=1e-4)


def test_equal_keys_do_not_overflow() -> None:
    """A triangular system whose powers are huge: every token replaces all that the one before has written."""
    q, k, v, g, beta = inputs(256, fades=0.0)
    k = k[:, :1].expand_as(k)
    ours, theirs = (function(q, k, v, g, torch.ones_like(beta)) for function in (gated_delta_chunks, reference))
    torch.testing.assert_close(ours[0], theirs[0], atol=1e-5, rtol=1e-5)


def test_steps_equal_chunks() -> None:
    q, k, v, g, beta = inputs(70)
    expected, last = gated_delta_chunks(q, k, v, g, beta)
    state = torch.zeros(2, 4, 16, 24)
    for token in range(70):
        y, state = gated_delta_step(*(x[:, token] for x in (q, k, v, g, beta)), state)
        torch.testing.assert_close(y, expected[:, token], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(state, last, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("ends", [(3, 64, 130), (64, 128), (1, 2, 100), (40, 50, 60)])
def test_documents_are_computed_apart(ends: tuple[int, ...]) -> None:
    """Packed documents equal each alone, wherever chunks end; and so do the gradients."""
    tokens, starts = inputs(150), (0, *ends)
    documents = torch.zeros(2, 150, dtype=torch.int32)
    for end in ends:
        documents[:, end:] += 1
    packed, state = gated_delta_chunks(*tokens, documents_BT=documents)
    parts = [gated_delta_chunks(*(x[:, a:b] for x in tokens)) for a, b in zip(starts, (*ends, 150), strict=True)]
    alone = torch.cat([y for y, _ in parts], 1)
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(state, parts[-1][1], atol=1e-5, rtol=1e-5)
    weight = torch.randn_like(packed)
    for ours, theirs in zip(*(torch.autograd.grad((y * weight).sum(), tokens) for y in (packed, alone)), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("tokens", [1, 3, 20])
def test_convolution(tokens: int) -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(2, tokens, 6), torch.randn(6, 4)
    y, _ = causal_convolution(x, weight)
    torch.testing.assert_close(y.mT, causal_conv1d_fn(x.mT, weight))
    if tokens > 1:  # in two parts, as of two chunks of a prompt
        first, seen = causal_convolution(x[:, :2], weight)
        second, _ = causal_convolution(x[:, 2:], weight, seen[:, -3:])
        torch.testing.assert_close(torch.cat((first, second), 1), y)
        documents = torch.tensor([[0] * 2 + [1] * (tokens - 2)] * 2, dtype=torch.int32)
        apart = torch.cat([causal_convolution(part, weight)[0] for part in (x[:, :2], x[:, 2:])], 1)
        torch.testing.assert_close(causal_convolution(x, weight, documents_BT=documents)[0], apart)
