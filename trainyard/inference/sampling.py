"""Chooses the next token of each row of logits: temperature, top-k, top-p and the most likely token.

The noise is counter-based: a choice depends on its own row, seed and position, and on nothing else in the batch. All
operations have fixed shapes and never wait for the device, so a CUDA graph can contain them.
"""

import torch
from torch import Tensor

from trainyard.core.counter_rng import element_bits, mix64, right_shift, row_seeds

SEED_OFFSET = 0x2545F4914F6CDD1D
"""Added to seeds before they are mixed: `mix64` maps 0 to 0."""
FIXED_POINT = 2.0**40
"""Probabilities are summed as integers in this unit, so that the order of the sum does not change the tokens kept."""


def choose_tokens(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, seeds: Tensor, positions: Tensor
) -> Tensor:
    """[N] int32: the next token of each row of fp32 `logits` [N, V]. All other arguments have shape [N].

    temperature 0 takes the most likely token, the lowest id of equal ones. top_k 0 (or V) and top_p 1 keep all tokens.
    Filters apply in the order of transformers: temperature, then top-k, then top-p on what top-k kept. `seeds` (int64)
    and `positions` (the index of the new token in its sequence) determine the noise.
    """
    is_greedy = (temperature <= 0)[:, None]
    # Subtracting the maximum first keeps a small temperature from overflowing.
    shifted = logits - logits.amax(1, keepdim=True)
    scaled = shifted / torch.where(is_greedy, 1.0, temperature[:, None])
    noisy = torch.where(
        kept_tokens(scaled, top_k, top_p), scaled + gumbel_noise(seeds, positions, logits.shape[1]), -torch.inf
    )
    return torch.where(is_greedy, logits, noisy).argmax(1).int()


def kept_tokens(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """[N, V] bool: tokens among the `top_k` most likely ones, and of those the fewest whose probabilities sum to
    `top_p`. Tokens equal to the last one kept are kept too."""
    vocab = logits.shape[1]
    descending = logits.sort(1, descending=True).values
    k = torch.where(top_k > 0, top_k, vocab).clamp(max=vocab).long()[:, None]
    kth = descending.gather(1, k - 1)
    probabilities = torch.where(descending >= kth, descending, -torch.inf).softmax(1)
    # Integers, because a sum of floats depends on its order, and torch has no deterministic cumsum of them on GPUs.
    units = (probabilities * FIXED_POINT).long()
    before = units.cumsum(1) - units  # mass of the more likely tokens
    count = (before < (top_p * FIXED_POINT).long()[:, None]).sum(1, keepdim=True).clamp(min=1)
    last = torch.where(top_p[:, None] < 1, descending.gather(1, count - 1), -torch.inf)
    return logits >= torch.maximum(kth, last)


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """[N, V] fp32 noise with the standard Gumbel distribution: the argmax of logits plus noise is a sample."""
    mixed = mix64(seeds.long() + SEED_OFFSET)
    key = torch.stack((mixed, right_shift(mixed, 32))).int()
    zero = torch.zeros_like(key[0])
    rows = row_seeds(key, zero, positions.int())
    column = torch.arange(vocab, dtype=torch.int32, device=seeds.device)
    bits = element_bits((rows.seed0[:, None], rows.seed1[:, None]), zero[:, None], column)
    # 31 bits. Small values are exact in fp32; they are the large noise, which decides.
    uniform = ((bits & 0x7FFFFFFF).float() + 0.5) * 2.0**-31
    return -torch.log(-torch.log1p(-uniform.clamp(max=1 - 2.0**-24)))


def token_logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log probability [N] of `tokens` [N] under `logits` [N, V], and the ids and log probabilities [N, num_top] of the
    most likely tokens, in descending order."""
    logprobs = logits.log_softmax(1)
    top = logprobs.topk(num_top, 1)
    return logprobs.gather(1, tokens.long()[:, None])[:, 0], top.indices.int(), top.values
