"""Log-probabilities that a reference gives both answers of pairs, found by the key of a pair and never by its place."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainyard.core.atomic_files import atomic_file
from trainyard.core.batch import Batch
from trainyard.core.errors import UserError
from trainyard.models import ModelOutput
from trainyard.train.micro_batches.runner import MicroBatchRunner
from trainyard.train.pair_loss import PairLoss, answer_sums

logger = logging.getLogger(__name__)
LOG_INTERVAL_S, SAVE_INTERVAL_S = 2.0, 60.0
BATCHES_PER_MERGE = 64


class ReferenceScores:
    """Scores by key. A file of them is a table sorted by keys."""

    def __init__(self, keys: NDArray[np.int64] | None = None, scores: NDArray[np.float32] | None = None) -> None:
        self.keys: NDArray[np.int64] = np.zeros(0, np.int64) if keys is None else keys
        self.scores: NDArray[np.float32] = np.zeros((0, 2), np.float32) if scores is None else scores
        """Of the chosen and of the rejected answer [N, 2]."""

    @classmethod
    def read(cls, file: Path) -> "ReferenceScores":
        """Those of a file; none if there is no such file."""
        try:
            with np.load(file, allow_pickle=False) as content:
                return cls(content["keys"], content["scores"])
        except (OSError, ValueError, KeyError):
            return cls()

    def write(self, file: Path) -> None:
        content = BytesIO()
        np.savez(content, keys=self.keys, scores=self.scores)
        with atomic_file(file) as opened:
            opened.write(content.getbuffer())

    def add(self, keys: NDArray[np.int64], scores: NDArray[np.float32]) -> None:
        """Add those that are not known. A key of 0 is no pair."""
        joined = np.concatenate((self.keys, keys[keys != 0]))
        self.keys, first = np.unique(joined, return_index=True)
        self.scores = np.concatenate((self.scores, scores[keys != 0]))[first]

    def lacks(self, batch: Batch) -> bool:
        keys = pair_keys(batch["pair_keys"])
        return not np.isin(keys[keys != 0], self.keys).all()

    def attach(self, batch: Batch) -> Batch:
        """The batch with `reference_scores`."""
        keys = pair_keys(batch["pair_keys"])
        places = np.searchsorted(self.keys, keys).clip(max=max(len(self.keys) - 1, 0))
        known = (self.keys[places] == keys) if len(self.keys) else np.zeros_like(keys, np.bool_)
        if not (known | (keys == 0)).all():
            raise UserError(f"{int((~known & (keys != 0)).sum())} pairs of a batch have no score of the reference")
        scores = np.where(known[..., None], self.scores[places], np.float32(0)).reshape(len(keys), -1)
        return {**batch, "reference_scores": torch.from_numpy(scores)}


def pair_keys(words: Tensor) -> NDArray[np.int64]:
    """[B, P] from the two words of each key [B, 2 P]."""
    return np.ascontiguousarray(words.numpy()).view(np.int64)


@torch.no_grad()
def answer_scores(
    runner: MicroBatchRunner, loss: PairLoss, batches: list[Batch], rng_key: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """The keys [B, 2 P] of each micro batch on the device, and what the model gives its answers [B, 2 P]. Stages of a
    pipeline but the last one get none."""

    def score(batches: list[Batch]) -> list[tuple[Tensor, Tensor]]:
        scores: list[tuple[Tensor, Tensor]] = []

        def collect(output: ModelOutput, micro: Batch) -> Tensor:
            sums = answer_sums(loss.token_losses(output, micro), output, micro)[..., 0]
            scores.append((micro["pair_keys"], -sums))
            return sums.sum()

        runner(batches, rng_key, collect, backward=False)
        return scores

    with runner.eval_mode():
        views = [score(list(view)) for view in zip(*map(loss.views, batches), strict=True)]
    # An answer has no labels in all views but one.
    return [(parts[0][0], torch.stack([scores for _, scores in parts]).sum(0)) for parts in zip(*views, strict=True)]


def batch_scores(runner: MicroBatchRunner, loss: PairLoss, batches: list[Batch], rng_key: Tensor) -> list[Tensor]:
    """What the model gives the answers of each of the batches [B, 2 P]; zeros where it ends on another stage."""
    found = [scores for _, scores in answer_scores(runner, loss, batches, rng_key)]
    if not runner.pipeline:
        return found
    # One batch, whose micro batches the last stage has met in their order.
    return [torch.cat(found) if found else torch.zeros_like(batches[0]["pair_keys"], dtype=torch.float32)]


class LiveReference:
    """Gives each step the scores of a reference whose weights `in_place` puts into the model for a moment."""

    def __init__(self, in_place: Callable[[], AbstractContextManager[None]]) -> None:
        self.in_place = in_place

    def __call__(self, runner: MicroBatchRunner, loss: PairLoss, batches: list[Batch], rng_key: Tensor) -> None:
        """Add `reference_scores` to each of the batches."""
        with self.in_place():
            found = batch_scores(runner, loss, batches, rng_key)
        for batch, scores in zip(batches, found, strict=True):
            batch["reference_scores"] = scores


@torch.no_grad()
def score_pairs(
    runner: MicroBatchRunner, loss: PairLoss, known: ReferenceScores, batches: Iterable[Batch]
) -> Iterator[int]:
    """Add the scores that the model gives to the pairs of batches, of which this is a data-parallel rank's part, and
    that are not known. All ranks call this, and know all scores in the end. Yields after each batch how many samples of
    all ranks were looked at."""
    mesh, device = runner.mesh, runner.device.torch_device
    is_owner = mesh.tp.rank == 0 and mesh.cp.rank == 0
    rng_key = torch.zeros(2, dtype=torch.int32, device=device)
    found: list[tuple[Tensor, Tensor]] = []

    def add_found() -> None:
        own = [(pair_keys(words.cpu()).flatten(), scores.view(-1, 2).cpu().numpy()) for words, scores in found]
        every_rank = mesh.all_gather_object(own if is_owner else [])
        if parts := [part for parts in every_rank for part in parts]:
            keys, scores = zip(*parts, strict=True)
            known.add(np.concatenate(keys), np.concatenate(scores))
        found.clear()

    for count, batch in enumerate(batches, 1):
        if any(mesh.all_gather_object(known.lacks(batch))):
            found += answer_scores(runner, loss, runner.to_device(batch), rng_key)
        if count % BATCHES_PER_MERGE == 0:
            add_found()
        yield count * len(batch["tokens"]) * mesh.layout.dp
    add_found()


def log_progress(sample_counts: Iterable[int], total: int, save: Callable[[], None]) -> None:
    """Log how far it is, and call `save` now and then, since scoring a large data set takes hours."""
    start = logged = saved = time.monotonic()
    for done in sample_counts:
        now = time.monotonic()
        if now - logged > LOG_INTERVAL_S:
            share = min(done / total, 1.0)
            logger.info("scores of the reference: %.0f%%, %.0f s left", 100 * share, (now - start) * (1 / share - 1))
            logged = now
        if now - saved > SAVE_INTERVAL_S:
            save()
            saved = now
