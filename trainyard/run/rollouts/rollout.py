"""Completions of prompts, as a run generates, saves and trains on them.

N completions, T tokens of the longest with its prompt.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainyard.core.batch import Batch
from trainyard.core.constants import IGNORE_INDEX

PAD_TOKEN = 0
"""Follows a completion. It has no label, and no token sees it."""
TENSOR_KEY = "rollouts.{}.0"
"""The names of arrays in a checkpoint, in the file of the first rank."""


@dataclass
class Rollout:
    """A prompt and what followed it."""

    prompt: int
    """The index of the prompt in the dataset."""
    tokens: list[int]
    """Of the prompt, the model and its tool."""
    log_probs: list[float]
    """What the sampler gave each token that it drew; 0 for the others."""
    sampled: list[bool]
    """The tokens that the model drew."""
    finished: bool = False
    """It ended itself, and was not cut off."""
    answers: list[str] = field(default_factory=list)
    """Of the tool, in their order."""
    rewards: list[float] = field(default_factory=list)
    """NaN where a reward does not apply."""


@dataclass
class RolloutBatch:
    """The completions of several steps, as arrays."""

    tokens: NDArray[np.int32]
    """[N, T]"""
    sampled: NDArray[np.bool_]
    """[N, T]"""
    log_probs: NDArray[np.float32]
    """[N, T]"""
    reference_log_probs: NDArray[np.float32]
    """[N, T]; zeros without a reference."""
    prompts: NDArray[np.int64]
    """[N]"""
    stats: NDArray[np.float32]
    """[N, R + 2] the reward, each of its parts, and whether it finished; NaN where a reward does not apply."""
    advantages: NDArray[np.float32]
    """[N]"""
    steps: NDArray[np.int64]
    """The first step that trains on them, of which 0 is the first of the run, and the first that does not."""

    @classmethod
    def join(
        cls, completions: Sequence[Rollout], rewards: NDArray[np.float32], steps: tuple[int, int]
    ) -> "RolloutBatch":
        """`rewards` [N] are the weighted sums. Advantages and the reference's numbers are zeros."""
        longest = max(len(each.tokens) for each in completions)

        def padded(name: str, dtype: Any, fill: Any) -> NDArray[Any]:
            out = np.full((len(completions), longest), fill, dtype)
            for row, each in zip(out, completions, strict=True):
                values = getattr(each, name)
                row[: len(values)] = values
            return out

        stats = [[total, *each.rewards, each.finished] for total, each in zip(rewards, completions, strict=True)]
        return cls(
            padded("tokens", np.int32, PAD_TOKEN),
            padded("sampled", np.bool_, False),
            padded("log_probs", np.float32, 0),
            np.zeros((len(completions), longest), np.float32),
            np.array([each.prompt for each in completions], np.int64),
            np.array(stats, np.float32),
            np.zeros(len(completions), np.float32),
            np.array(steps, np.int64),
        )

    def batch(self, rows: NDArray[np.int64], sample_ids: NDArray[np.int64], seq_len: int) -> Batch:
        """The samples of a step in these rows. The label of a token is the next one, if the model drew that."""
        shape = (len(rows), seq_len)
        tokens, labels = np.full(shape, PAD_TOKEN, np.int32), np.full(shape, IGNORE_INDEX, np.int32)
        old, reference = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        width = min(self.tokens.shape[1], seq_len)
        tokens[:, :width] = self.tokens[rows, :width]
        labels[:, : width - 1] = np.where(self.sampled[rows, 1:width], self.tokens[rows, 1:width], IGNORE_INDEX)
        old[:, : width - 1] = self.log_probs[rows, 1:width]
        reference[:, : width - 1] = self.reference_log_probs[rows, 1:width]
        return {
            "tokens": torch.from_numpy(tokens),
            "labels": torch.from_numpy(labels),
            "sample_ids": torch.from_numpy(sample_ids.astype(np.int32)),
            "old_log_probs": torch.from_numpy(old),
            "reference_log_probs": torch.from_numpy(reference),
            "advantages": torch.from_numpy(self.advantages[rows]),
            "completion_stats": torch.from_numpy(self.stats[rows]),
        }

    def tensors(self) -> dict[str, Tensor]:
        """The arrays, for a checkpoint."""
        return {TENSOR_KEY.format(name): torch.from_numpy(array) for name, array in vars(self).items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> "RolloutBatch | None":
        """None if they are those of a checkpoint without rollouts."""
        found = {name: tensors.get(TENSOR_KEY.format(name)) for name in cls.__dataclass_fields__}
        arrays: dict[str, Any] = {name: tensor.numpy().copy() for name, tensor in found.items() if tensor is not None}
        return cls(**arrays) if len(arrays) == len(found) else None
