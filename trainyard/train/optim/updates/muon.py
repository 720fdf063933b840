"""Muon over the flat state of a rank: AdamW for embeddings, output projection, norms and biases.

Muon replaces the momentum of a matrix by an approximation of its nearest orthogonal matrix, computed with Newton-Schulz
iterations. They need the full, unfused matrix:

1. Every rank updates its shard of the momentum and all-gathers the update directions over ZeRO shards,
   tensor-parallel ranks and, for experts, expert-parallel ranks, one bucket at a time. It keeps the matrices that are
   assigned to it.
2. Every rank orthogonalizes its matrices, all ranks of a pipeline stage in parallel.
3. A reduce-scatter returns the rows of each rank's shard. Every element has one owner and zeros elsewhere, so the sum
   is exact and the result does not depend on the layout.
"""

from collections.abc import Iterator
from itertools import product
from math import prod, sqrt

import torch
from torch import Tensor

from trainyard.core.splits import ModelShard
from trainyard.models.sharding import fused_starts, shard_tensor, unshard_tensor
from trainyard.parallel.flat_buffer import Bucket, ParamSpan
from trainyard.parallel.mesh import SINGLE_RANK
from trainyard.parallel.process_group import Group
from trainyard.train.optim.rules.muon import Muon
from trainyard.train.optim.updates.adamw import AdamWUpdate
from trainyard.train.optim.updates.context import StepScalars, UpdateContext

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Quintic iteration of the reference implementation: steep at 0, singular values end up between about 0.7 and 1.2."""
NORM_EPS = 1e-7


class MuonUpdate:
    """Holds the matrices that are assigned to this rank between the steps of the update."""

    def __init__(self, rule: Muon, context: UpdateContext) -> None:
        self.context, self.state, self.mesh = context, context.state, context.mesh
        self.options, lr = rule.options, context.config.lr
        self.adamw = AdamWUpdate(rule, context)
        self.adamw_lr_ratio = (rule.options.adamw_lr or lr) / lr
        start = self.state.flat.shard_undecayed_end
        self.buckets = [bucket for bucket in self.state.flat.buckets if bucket.shard_range.start >= start]
        names = [span.name for bucket in self.buckets for span in bucket.spans]
        self.owned = self._assign_matrices(names)
        self.lr_factors = {name: self._row_factors(name) for name in names}

    def update(self, scalars: StepScalars) -> None:
        self.adamw.update(scalars._replace(lr=scalars.lr * self.adamw_lr_ratio))
        directions: dict[str, Tensor] = {}
        for bucket in self.buckets:
            directions |= self._gather_owned(bucket, self._update_momentum(bucket, scalars))
        orthogonal = {name: newton_schulz(matrix, self.options.ns_steps) for name, matrix in directions.items()}
        for bucket in self.buckets:
            self._apply(bucket, self._scatter(bucket, orthogonal), scalars)
        if self.state.copies_weights:
            matrices = slice(self.state.flat.shard_undecayed_end, None)
            self.state.weights[matrices].copy_(self.state.master_weights[matrices])

    def _update_momentum(self, bucket: Bucket, scalars: StepScalars) -> Tensor:
        """Update this shard's momentum and return the direction to orthogonalize, in the compute dtype."""
        momentum = self.options.momentum
        g = self.state.reduced_grads[bucket.shard_range].float() * scalars.grad_scale
        exp_avg = self.state.exp_avg[bucket.shard_range]
        new_avg = exp_avg.lerp(g, 1 - momentum)
        exp_avg.copy_(torch.where(scalars.finite, new_avg, exp_avg))
        return (g.lerp(new_avg, momentum) if self.options.nesterov else new_avg).to(self.state.compute_dtype)

    def _gather_owned(self, bucket: Bucket, shard: Tensor) -> dict[str, Tensor]:
        """The full unfused matrices of a bucket that this rank owns, from every rank's shard of it."""
        mesh, shards, data_group, ep = self.mesh, *self._sharding(bucket)
        gathered = data_group.all_gather(shard) if shards > 1 else shard
        gathered = ep.all_gather(mesh.tp.all_gather(gathered)).view(ep.size * mesh.tp.size, shards, -1)
        owned: dict[str, Tensor] = {}
        for span, start in self._offsets(bucket):
            if not self.owned[span.name]:
                continue
            parts = gathered[:, :, start : start + span.shard_numel].flatten(1)[:, : prod(span.shape)]
            parts = parts.reshape(len(parts), *span.shape)
            full = unshard_tensor(self.context.blueprint, span.name, parts.unbind(), ep.size)
            owned |= {matrix: full[rows].clone() for matrix, rows in self.owned[span.name].items()}
        return owned

    def _scatter(self, bucket: Bucket, orthogonal: dict[str, Tensor]) -> Tensor:
        """This rank's shard of a bucket, from the matrices that every rank has orthogonalized."""
        tp, shards, data_group, ep = self.mesh.tp, *self._sharding(bucket)
        shape = (ep.size, tp.size, shards, bucket.shard_elements)
        out = torch.zeros(shape, dtype=self.state.compute_dtype, device=self.state.master_weights.device)
        blueprint = self.context.blueprint
        for span, start in self._offsets(bucket):
            if not self.owned[span.name]:
                continue
            full = out.new_zeros(blueprint.spec(span.name).shape)
            for matrix, rows in self.owned[span.name].items():
                full[rows] = orthogonal[matrix]
            for ep_rank, rank in product(range(ep.size), range(tp.size)):
                shard = ModelShard(tp.size, rank, ep.size, ep_rank)
                local = out.new_zeros(shards * span.shard_numel)
                local[: prod(span.shape)] = shard_tensor(blueprint, span.name, full, shard).flatten()
                out[ep_rank, rank, :, start : start + span.shard_numel] = local.view(shards, span.shard_numel)
        reduced = tp.reduce_scatter(ep.reduce_scatter(out.view(-1)))
        if shards > 1:
            return data_group.reduce_scatter(reduced)
        return data_group.all_reduce_sum(reduced)

    def _sharding(self, bucket: Bucket) -> tuple[int, Group, Group]:
        """Number of ZeRO shards of a bucket, the ranks that have the same values, and those that divide experts."""
        ep = self.mesh.ep if bucket.of_experts else SINGLE_RANK
        return bucket.num_shards, self.mesh.data_group(bucket.of_experts), ep

    def _apply(self, bucket: Bucket, directions: Tensor, scalars: StepScalars) -> None:
        state = self.state
        for span, start in self._offsets(bucket):
            old = state.shard_view(state.master_weights, span.name).float()
            direction = directions[start : start + old.numel()].view_as(old).float()
            lr = scalars.at_lr_scale(self.context.lr_scale(span.name)).lr
            decayed = old * (1 - lr * self.context.weight_decay(span.name))
            new = decayed - lr * self.lr_factors[span.name] * direction
            self.context.store_weights(span.name, torch.where(scalars.finite, new, old), scalars)

    def _offsets(self, bucket: Bucket) -> Iterator[tuple[ParamSpan, int]]:
        """Each parameter of a bucket and its first element in the bucket's shard."""
        for span in bucket.spans:
            yield span, span.shard_start - bucket.shard_range.start

    def _assign_matrices(self, names: list[str]) -> dict[str, dict[str, slice]]:
        """The unfused matrices that this rank orthogonalizes, by parameter, with their rows in the full parameter. The
        most expensive matrix goes first, to the rank with the least work."""
        blueprint, mesh = self.context.blueprint, self.mesh
        matrices = [(name, piece) for name in names for piece in blueprint.local_slices(name)]
        costs = {}
        for _, piece in matrices:
            short, long = sorted(piece.sizes)
            costs[piece.name] = short * short * (2 * long + short)
        work = [0] * (mesh.dp_cp.size * mesh.tp.size)
        owned: dict[str, dict[str, slice]] = {name: {} for name in names}
        for name, piece in sorted(matrices, key=lambda item: (-costs[item[1].name], item[1].name)):
            owner = work.index(min(work))
            work[owner] += costs[piece.name]
            if owner == mesh.dp_cp.rank * mesh.tp.size + mesh.tp.rank:
                start = fused_starts(blueprint, name)[piece.name]
                owned[name][piece.name] = slice(start, start + piece.sizes[0])
        return owned

    def _row_factors(self, name: str) -> Tensor:
        """[rows, 1] learning rate factors of this rank's rows, from the shapes of the full unfused matrices."""
        adjust, local = self.options.lr_adjust, self.context.blueprint.local_slices(name, self.mesh.model_shard)
        factors = torch.cat([torch.full((piece.sizes[0], 1), lr_factor(piece.global_shape, adjust)) for piece in local])
        rows = self.state.shard_row_range(name)
        return factors[rows.start : rows.stop].to(self.state.master_weights.device)


def lr_factor(shape: tuple[int, ...], adjust: str) -> float:
    """Learning rate factor of a matrix: `match_rms_adamw` makes the RMS of updates that of AdamW, about 0.2 (Moonlight,
    arXiv 2502.16982), `original` is sqrt(max(1, rows / columns))."""
    rows, columns = shape
    return 0.2 * sqrt(max(rows, columns)) if adjust == "match_rms_adamw" else sqrt(max(1, rows / columns))


def newton_schulz(matrix: Tensor, steps: int) -> Tensor:
    """Approximate U V^T of the singular value decomposition U S V^T of `matrix`, in its dtype."""
    a, b, c = COEFFICIENTS
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=NORM_EPS)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x
