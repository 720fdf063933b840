"""Log-probabilities of continuations: how lm-evaluation-harness compares answers."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from trainyard.core.errors import UserError
from trainyard.core.quantities import counted
from trainyard.models import Batch, ModelOutput, TransformerStage

ROWS_PER_CHUNK = 1024
"""Tokens whose logits exist at one time."""

TokenPair = tuple[list[int], list[int]]
"""Tokens of a context and of its continuation."""


class ScoredContinuation(NamedTuple):
    logprob: float
    """Sum of the log-probabilities of the continuation's tokens."""
    is_greedy: bool
    """Each of them is the most likely token."""


class _ScoringRow(NamedTuple):
    """One sequence of inputs, which all pairs share that differ in their last token only."""

    inputs: list[int]
    pair_indices: list[int]


@torch.no_grad()
def score_continuations(
    model: TransformerStage,
    pairs: Sequence[TokenPair],
    max_length: int,
    batch_size: int,
    device: torch.device,
    on_progress: Callable[[int], None] = lambda pairs: None,
) -> list[ScoredContinuation]:
    """Score each continuation after its context, of which the last `max_length` tokens count. `on_progress` is called
    with the number of pairs of each batch. All tensor-parallel ranks call this with the same pairs."""
    rows: dict[tuple[int, ...], _ScoringRow] = {}
    for index, (context, continuation) in enumerate(pairs):
        if not continuation or not context:
            raise UserError("a continuation and its context need at least one token each")
        if len(continuation) > max_length:
            raise UserError(
                f"a continuation of {counted(len(continuation), 'token')}: the model's limit is {max_length}"
            )
        inputs = (context + continuation)[-(max_length + 1) : -1]
        rows.setdefault(tuple(inputs), _ScoringRow(inputs, [])).pair_indices.append(index)
    # Longest first: what does not fit into memory fails at once, and a batch has little padding.
    ordered = sorted(rows.values(), key=lambda row: -len(row.inputs))
    scores: dict[int, ScoredContinuation] = {}
    for start in range(0, len(ordered), batch_size):
        batch = ordered[start : start + batch_size]
        output = forward_padded(model, [row.inputs for row in batch], device)
        for row, hidden_TD in zip(batch, output.hidden, strict=True):
            for index in row.pair_indices:
                label_ids = torch.tensor(pairs[index][1], device=device)
                first = len(row.inputs) - len(label_ids)
                scores[index] = _score(output, hidden_TD[first : len(row.inputs)], label_ids)
        on_progress(sum(len(row.pair_indices) for row in batch))
    return [scores[index] for index in range(len(pairs))]


def forward_padded(model: TransformerStage, rows: Sequence[Sequence[int]], device: torch.device) -> ModelOutput:
    """Run sequences of different lengths, filled up at the end: causal models do not see what follows."""
    length = max(map(len, rows))
    length += -length % model.tp.size  # sequence parallelism divides it
    tokens = torch.tensor([[*row, *[0] * (length - len(row))] for row in rows], dtype=torch.int32)
    batch: Batch = {
        "tokens": tokens.to(device),
        "sample_ids": torch.arange(len(rows), dtype=torch.int32, device=device),
        "rng_key": torch.zeros(2, dtype=torch.int32, device=device),
    }
    output = model(batch)
    assert isinstance(output, ModelOutput)
    return output


def row_logits(output: ModelOutput, hidden_ND: Tensor) -> Tensor:
    """fp32 logits [N, V] of some of the hidden states of `output`, equal on all tensor-parallel ranks."""
    return replace(output, local_hidden=hidden_ND, tokens_sharded=False).logits().float()


def _score(output: ModelOutput, hidden_ND: Tensor, label_ids: Tensor) -> ScoredContinuation:
    total, is_greedy = 0.0, True
    for start in range(0, len(label_ids), ROWS_PER_CHUNK):
        labels = label_ids[start : start + ROWS_PER_CHUNK]
        logprobs = row_logits(output, hidden_ND[start : start + ROWS_PER_CHUNK]).log_softmax(-1)
        total += float(logprobs.gather(1, labels[:, None]).double().sum())
        is_greedy &= bool((logprobs.argmax(-1) == labels).all())
    return ScoredContinuation(total, is_greedy)
