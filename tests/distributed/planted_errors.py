"""What ranks of the pool run, with errors planted on request, or with attention as traced devices have it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from trainyard import models
from trainyard.config.schema import Config
from trainyard.devices.cpu import CpuDevice
from trainyard.models.base import TransformerStage
from trainyard.models.layers import CoreAttention
from trainyard.parallel import ring_attention
from trainyard.parallel.process_group import Group
from trainyard.parallel.zero1 import GradientReducer
from trainyard.train import build, cross_entropy
from trainyard.train.optim.replicated_params import ReplicaSync
from trainyard.verify.compare_layouts import VerifyRecord, record_training


def job(config: Config, steps: int, planted: str = "") -> VerifyRecord:
    with PLANT[planted]() if planted else _nothing():
        return record_training(config, steps)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _rank() -> int:
    return dist.get_rank()


def _without_job(which: Callable[[ReplicaSync, Group], bool]) -> Any:
    """Leave out the gradient sums over some group."""
    real = ReplicaSync.sum_gradients

    def broken(self: ReplicaSync, sums: torch.Tensor) -> None:
        kept = self.jobs
        self.jobs = [job for job in kept if not which(self, job[0])]
        real(self, sums)
        self.jobs = kept

    return patch.object(ReplicaSync, "sum_gradients", broken)


def _data_not_summed() -> Any:
    """Each rank takes its own gradients for the sum."""

    def broken(self: GradientReducer) -> None:
        for bucket in self.flat.buckets:
            dealt = torch.zeros(self.flat.num_shards, bucket.shard_range.stop - bucket.shard_range.start)
            self.flat.scatter_to_shards(bucket, self.gradients, dealt)
            self.reduced_grads[bucket.shard_range] = dealt[self.group.rank]

    quiet = patch.object(GradientReducer, "on_grad_ready", lambda self, name: None)
    return _both(patch.object(GradientReducer, "finish", broken), quiet)


@contextmanager
def _both(first: Any, second: Any) -> Iterator[None]:
    with first, second:
        yield


def _mean_of_means() -> Any:
    """Each rank divides by its own count and by the number of ranks."""
    real = Group.all_reduce_sum

    def broken(self: Group, x: torch.Tensor) -> torch.Tensor:
        counts = x.shape == (2,) and bool((x > 1).all())  # what the step asks ahead: masked words and pairs
        return x * self.size if counts and self.size > 1 else real(self, x)

    return patch.object(Group, "all_reduce_sum", broken)


def _copies_counted_in_norm() -> Any:
    real = ReplicaSync.reduce_norms

    def broken(self: ReplicaSync, squares: torch.Tensor) -> torch.Tensor:
        self.replica_weight = torch.ones_like(self.replica_weight)
        return real(self, squares)

    return patch.object(ReplicaSync, "reduce_norms", broken)


def _dropout_by_rank() -> Any:
    real = TransformerStage.dropout_seeds

    def broken(self: TransformerStage, batch: models.Batch) -> Any:
        return real(self, {**batch, "sample_ids": batch["sample_ids"] + _rank()})

    return patch.object(TransformerStage, "dropout_seeds", broken)


def _ring_without_last_block() -> Any:
    real = ring_attention.forward

    def broken(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **named: Any) -> Any:
        out = real(q, k, v, *rest, **named)
        out[0][:, :, -1] = 0
        return out

    return patch.object(ring_attention, "forward", broken)


def _softmax_of_own_words() -> Any:
    real = cross_entropy.softmax_

    def broken(logits: torch.Tensor, counts: torch.Tensor, picked: torch.Tensor, tp: Any) -> torch.Tensor:
        alone = type(tp)()
        return real(logits, counts, picked, alone)

    return patch.object(cross_entropy, "softmax_", broken)


def _rank_dependent_init() -> Any:
    real = build.initial_values

    def broken(blueprint: Any, seed: int, *rest: Any) -> Any:
        return real(blueprint, seed + _rank(), *rest)

    return patch.object(build, "initial_values", broken)


def _batch_shifted() -> Any:
    from trainyard.data.loading.loader import BatchLoader

    real = BatchLoader.batch

    def broken(self: BatchLoader, number: int, rows: slice = slice(None)) -> Any:
        return real(self, number + (1 if rows.start else 0), rows)

    return patch.object(BatchLoader, "batch", broken)


def _traced() -> Any:
    """No error: attention in plain operations over gathered keys."""
    return patch.object(CpuDevice, "decomposes_attention", True)


PLANT: dict[str, Callable[[], Any]] = {
    "kv-gradient-not-summed": lambda: _without_job(lambda shares, group: group.ranks == shares.mesh.kv_replicas.ranks),
    "norm-gradient-not-summed": lambda: _without_job(lambda shares, group: group.name == shares.mesh.tp.name),
    "tied-gradient-not-summed": lambda: _without_job(
        lambda shares, group: group.name == shares.mesh.tied_embedding.name
    ),
    "data-not-summed": _data_not_summed,
    "mean-of-means": _mean_of_means,
    "copies-counted-in-norm": _copies_counted_in_norm,
    "dropout-by-rank": _dropout_by_rank,
    "ring-without-last-block": _ring_without_last_block,
    "softmax-of-own-words": _softmax_of_own_words,
    "rank-dependent-init": _rank_dependent_init,
    "batch-shifted": _batch_shifted,
    "gathered-out-of-order": lambda: _both(_traced(), patch.object(CoreAttention, "_visible_keys", lambda *_: None)),
    "traced": _traced,
}
