"""Records a training on ranks of the pool, with an error planted on request, or with decomposed attention."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from trainyard import models
from trainyard.config.schema import Config
from trainyard.data.loading import packing
from trainyard.data.loading.loader import BatchLoader
from trainyard.devices.cpu import CpuDevice
from trainyard.models.base import TransformerStage
from trainyard.models.layers import CoreAttention
from trainyard.parallel import expert_parallel, ring_attention
from trainyard.parallel.process_group import Group
from trainyard.parallel.zero1 import GradientReducer
from trainyard.preflight.verify import VerifyRecord, record_training
from trainyard.train import build, cross_entropy
from trainyard.train.optim.replicated_params import ReplicaSync
from trainyard.train.step import TrainStep


def record_with_error(config: Config, steps: int, planted: str = "") -> VerifyRecord:
    no_peak = patch.object(CpuDevice, "peak_throughput", lambda self, dtype: None)
    with no_peak, PLANTED_ERRORS[planted]() if planted else nullcontext():
        return record_training(config, steps)


def _patch_all(*patches: Any) -> ExitStack:
    stack = ExitStack()
    for each in patches:
        stack.enter_context(each)
    return stack


def _skip_sync(skips: Callable[[ReplicaSync, Group], bool]) -> Any:
    """Leave out the gradient sums over some groups."""
    original = ReplicaSync.sum_gradients

    def broken(self: ReplicaSync, reduced_grads: torch.Tensor) -> None:
        jobs = self.jobs
        self.jobs = [job for job in jobs if not skips(self, job.group)]
        original(self, reduced_grads)
        self.jobs = jobs

    return patch.object(ReplicaSync, "sum_gradients", broken)


def _data_parallel_gradients_not_summed() -> Any:
    """Each rank takes its own gradients for the sum."""

    def broken(self: GradientReducer) -> None:
        for bucket in self.flat.buckets:
            shards = torch.zeros(bucket.num_shards, bucket.shard_elements)
            self.flat.scatter_to_shards(bucket, self.gradients, shards)
            self.reduced_grads[bucket.shard_range] = shards[self.data_group(bucket.of_experts).rank]

    no_reduction = patch.object(GradientReducer, "on_grad_ready", lambda self, name: None)
    return _patch_all(patch.object(GradientReducer, "finish", broken), no_reduction)


def _expert_gradients_not_summed() -> Any:
    """Ranks that hold the same experts take their own gradients for the sum."""
    original = GradientReducer._start_bucket

    def broken(self: GradientReducer, index: int) -> None:
        if not self.flat.buckets[index].of_experts:
            original(self, index)

    return patch.object(GradientReducer, "_start_bucket", broken)


def _mean_of_means() -> Any:
    """Each rank divides by its own count and by the number of ranks."""
    original = Group.all_reduce_sum

    def broken(self: Group, x: torch.Tensor) -> torch.Tensor:
        is_label_count = x.shape == (2,) and bool((x > 1).all())  # masked tokens and sentence pairs
        return x * self.size if is_label_count and self.size > 1 else original(self, x)

    return patch.object(Group, "all_reduce_sum", broken)


def _replicas_counted_in_norm() -> Any:
    original = ReplicaSync.reduce_norms

    def broken(self: ReplicaSync, squares: torch.Tensor) -> torch.Tensor:
        self.replica_weight = torch.ones_like(self.replica_weight)
        return original(self, squares)

    return patch.object(ReplicaSync, "reduce_norms", broken)


def _dropout_depends_on_rank() -> Any:
    original = TransformerStage.dropout_seeds

    def broken(self: TransformerStage, batch: models.Batch) -> Any:
        return original(self, {**batch, "sample_ids": batch["sample_ids"] + dist.get_rank()})

    return patch.object(TransformerStage, "dropout_seeds", broken)


def _ring_misses_last_token() -> Any:
    original = ring_attention.forward

    def broken(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        outputs = original(q, k, v, *args, **kwargs)
        outputs[0][:, :, -1] = 0
        return outputs

    return patch.object(ring_attention, "forward", broken)


def _softmax_over_local_vocabulary() -> Any:
    original = cross_entropy.softmax_

    def broken(logits: torch.Tensor, counts: torch.Tensor, label_logits: torch.Tensor, tp: Any) -> torch.Tensor:
        single_rank = type(tp)()
        return original(logits, counts, label_logits, single_rank)

    return patch.object(cross_entropy, "softmax_", broken)


def _init_depends_on_rank() -> Any:
    original = build.initial_values

    def broken(blueprint: Any, seed: int, *args: Any) -> Any:
        return original(blueprint, seed + dist.get_rank(), *args)

    return patch.object(build, "initial_values", broken)


def _batches_shifted() -> Any:
    original = BatchLoader.batch

    def broken(self: BatchLoader, index: int, samples: slice = slice(None)) -> Any:
        return original(self, index + (1 if samples.start else 0), samples)

    return patch.object(BatchLoader, "batch", broken)


def _documents_without(field: str) -> Any:
    """Packed samples in which documents see each other, or positions do not restart."""
    original = packing.document_ids

    def broken(document_starts: Any) -> Any:
        fields = original(document_starts)
        one_document = original(np.zeros_like(document_starts))
        return {**fields, field: one_document[field]}

    return patch.object(packing, "document_ids", broken)


def _mean_of_micro_batch_means() -> Any:
    """Each micro batch divides by its own count and by the number of micro batches."""

    def broken(self: TrainStep, output: Any, micro: models.Batch) -> torch.Tensor:
        terms = self.loss_fn.terms(output, micro)
        self.loss_sums.add(terms)
        means = [total / count.clamp(min=1) for total, count in terms.values()]
        return torch.stack(means).sum() / (self.mesh.layout.micro_batches * self.mesh.layout.dp)

    return patch.object(TrainStep, "_micro_batch_loss", broken)


def _decomposed_attention() -> Any:
    """Not an error: attention in plain operators over gathered keys."""
    return patch.object(CpuDevice, "kind", replace(CpuDevice.kind, decomposes_attention=True))


PLANTED_ERRORS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "kv-gradients-not-summed": lambda: _skip_sync(lambda sync, group: group.ranks == sync.mesh.kv_replicas.ranks),
    "norm-gradients-not-summed": lambda: _skip_sync(lambda sync, group: group.name == sync.mesh.tp.name),
    "tied-gradients-not-summed": lambda: _skip_sync(lambda sync, group: group.name == sync.mesh.tied_embedding.name),
    "data-parallel-gradients-not-summed": _data_parallel_gradients_not_summed,
    "expert-gradients-not-summed": _expert_gradients_not_summed,
    "rows-out-of-order": lambda: patch.object(
        expert_parallel, "_by_expert", lambda received: torch.arange(int(received.sum()))
    ),
    "mean-of-means": _mean_of_means,
    "replicas-counted-in-norm": _replicas_counted_in_norm,
    "dropout-depends-on-rank": _dropout_depends_on_rank,
    "ring-misses-last-token": _ring_misses_last_token,
    "softmax-over-local-vocabulary": _softmax_over_local_vocabulary,
    "init-depends-on-rank": _init_depends_on_rank,
    "batches-shifted": _batches_shifted,
    "gathered-keys-out-of-order": lambda: _patch_all(
        _decomposed_attention(), patch.object(CoreAttention, "_visible_keys", lambda *_: None)
    ),
    "documents-see-each-other": lambda: _documents_without("document_ids"),
    "positions-not-reset": lambda: _documents_without("position_ids"),
    "mean-of-micro-batch-means": _mean_of_micro_batch_means,
    "decomposed-attention": _decomposed_attention,
}
