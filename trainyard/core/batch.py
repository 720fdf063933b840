"""The batch: named tensors of one global or micro batch, on their way from the loader to the model and the loss."""

from collections.abc import Callable
from typing import TypedDict, cast

from torch import Tensor


class Batch(TypedDict, total=False):
    """Fields of a batch, int32 unless said. B samples, T tokens per sample, P predictions per sample.

    Causal models have `tokens` and `labels` [B, T]. BERT adds the fields of masked sentence pairs, and its `labels`
    are [B, P]. Micro batches without padding hold all their samples in one row: B is 1 and T the tokens of all.
    """

    tokens: Tensor
    """[B, T] input token ids."""
    labels: Tensor
    """[B, T] next-token ids, or for BERT [B, P] ids at `masked_positions`. IGNORE_INDEX has no loss."""
    sample_ids: Tensor
    """[B] index of each sample within the global batch ([B, T] without padding). Dropout masks are a function of it."""
    rng_key: Tensor
    """[2] random key of the step; dropout masks are a function of it."""
    document_ids: Tensor
    """[B, T] document of each token within its sample. Tokens attend within their document only."""
    position_ids: Tensor
    """[B, T] position of each token within its document, or within its sample without padding."""
    segment_ids: Tensor
    """[B, T] BERT: 0 in the first segment of the pair and in padding, 1 in the second segment."""
    attention_mask: Tensor
    """[B, T] BERT: 1 for tokens, 0 for padding."""
    masked_positions: Tensor
    """[B, P] BERT: positions to predict; 0 fills up the list where `labels` is IGNORE_INDEX."""
    next_sentence_labels: Tensor
    """[B] BERT: 1 if the second segment comes from another document, 0 if it follows the first."""
    pair_keys: Tensor
    """[B, 2 P] pairs of answers: two words for each of at most P pairs of a sample, which name it by its tokens; 0: no
    pair. Its chosen answer is an even document, and the rejected one the next."""
    margins: Tensor
    """[B, P] fp32: by how much a record wants the reward of the chosen answer to be larger."""
    answer_labels: Tensor
    """[B, P] instead of pairs, single answers: 1 if it is good, 0 if not. `pair_keys` name each with its prompt and the
    answer to another one, which the fields kl_tokens, kl_labels, kl_document_ids and kl_position_ids have after the
    same prompt. An answer is document 2 k, and the other one after its prompt 2 k + 1."""
    counterparts: Tensor
    """[B, P, 2] fp32: what the answers of pairs are compared with, if not with each other."""
    reference_scores: Tensor
    """[B, 2 P] fp32: log-probability that the reference gives each answer."""
    old_log_probs: Tensor
    """[B, T] fp32: log-probability that the sampler gave each label of a completion."""
    reference_log_probs: Tensor
    """[B, T] fp32: the same of a reference."""
    advantages: Tensor
    """[B] fp32: how much better a completion is than others of its prompt."""
    completion_stats: Tensor
    """[B, N] fp32: numbers about each completion to report, such as its rewards; NaN where there is none."""
    sequence_lengths: Tensor
    """[B] in generation: tokens that each sequence had when these were computed, those of the prompt together."""
    cu_seqlens: Tensor
    """[samples + 1] start of each sample in a row without padding, and the end of the last one."""


def batch_tensors(batch: Batch) -> dict[str, Tensor]:
    """The same object as a plain dictionary, for code that treats all fields alike."""
    return cast(dict[str, Tensor], batch)


def map_batch(function: Callable[[Tensor], Tensor], batch: Batch) -> Batch:
    """A batch with `function` applied to every field."""
    return cast(Batch, {name: function(tensor) for name, tensor in batch_tensors(batch).items()})
