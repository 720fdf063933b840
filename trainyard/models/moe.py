"""A mixture of experts in the place of an MLP: each token goes to its top-k experts. None is dropped, unless the
experts have a capacity.

B batch, T tokens, N = B T, D hidden, E experts, k experts per token, F ffn of an expert.
"""

from math import ceil
from typing import Any

import torch
from torch import Tensor, nn

from trainyard.families.moe import MoeConfig
from trainyard.kernels.reference import Kernels
from trainyard.models.expert_slots import assign_slots
from trainyard.models.experts import Experts
from trainyard.models.module_factory import ModuleFactory
from trainyard.models.router import Router
from trainyard.parallel.recompute import Recomputable


class MoeMLP(Recomputable):
    """Every tensor-parallel rank routes all tokens and computes its columns of this expert-parallel rank's experts."""

    recompute_name = "mlp"
    cp_rank: Tensor
    pair_counts: Tensor
    """(token, expert) pairs of each expert in training, fp32 [E]; whoever reads them sets them to 0. Recomputation
    counts all of them again, which does not change the shares."""

    def __init__(self, c: MoeConfig, make: ModuleFactory, name: str, shared: nn.Module | None = None) -> None:
        """`shared` is the shared expert: from all tokens to this tensor-parallel rank's part of its output."""
        super().__init__()
        self.c, self.tp, self.cp, self.ep = c, make.tp, make.cp, make.ep
        self.router = Router(c, make, f"{name}.router")
        self.experts = Experts(c, make, f"{name}.experts")
        self.shared = shared
        self.shared_gate = make.linear(f"{name}.shared_gate") if shared and c.moe_style.shared_gate else None
        self.kernels = make.kernels
        self.register_buffer("pair_counts", torch.zeros(c.experts), persistent=False)
        self.register_buffer("cp_rank", torch.tensor(self.cp.rank, dtype=torch.int32), persistent=False)
        self.has_grouped_gemm = True
        """False on devices that multiply in slots of a fixed number."""
        self.samples_per_step = 1
        """Samples of a global batch, of which the losses of the router are means; `set_samples_per_step` sets it."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        # All tokens on every tensor-parallel rank: each has some columns of all experts. The ranks' gradients are sums.
        x_BTD = self.tp.gather_sum_grads(x_BTD)
        logits_BTE = self.router(x_BTD)
        weight_NK, expert_NK = self.router.choose(logits_BTE.flatten(0, 1), self.has_grouped_gemm)
        pairs_BE = self._count(expert_NK.view(*x_BTD.shape[:2], -1))
        if self.training and torch.is_grad_enabled():
            count_BE = pairs_BE.float()
            self.pair_counts.add_(count_BE.sum(0))
            x_BTD = self.router.add_loss(x_BTD, logits_BTE, count_BE, self.samples_per_step)
        has_capacity = self.c.capacity_factor is not None and (self.training or not self.has_grouped_gemm)
        if has_capacity:
            y_ND = self._apply_in_slots(x_BTD, expert_NK, weight_NK)
        else:
            y_ND = self._apply_all(x_BTD, expert_NK, weight_NK, pairs_BE.sum(0, dtype=torch.int32))
        y_BTD = y_ND.view_as(x_BTD)
        if self.shared is not None:
            shared_BTD = self.shared(x_BTD)
            if self.shared_gate is not None:
                shared_BTD = shared_BTD * torch.sigmoid(self.shared_gate(x_BTD))
            y_BTD = y_BTD + shared_BTD
        return self.tp.reduce_output(y_BTD)

    def _apply_all(self, x_BTD: Tensor, expert_NK: Tensor, weight_NK: Tensor, count_E: Tensor) -> Tensor:
        """The weighted sums over experts, [N, D]: sort the (token, expert) pairs by expert, multiply group by group."""
        # A radix sort takes a pass for each byte of its keys.
        order = expert_NK.flatten().to(torch.int16).argsort(stable=True)
        place_NK = torch.empty_like(order).index_copy(0, order, torch.arange(len(order), device=order.device))
        place_NK = place_NK.view_as(expert_NK)
        rows = _GatherRows.apply(x_BTD.flatten(0, 1), order, place_NK, self.kernels)  # type: ignore[no-untyped-call]
        if self.c.moe_style.scales_inputs:
            rows = rows * weight_NK.flatten().index_select(0, order)[:, None].to(rows.dtype)
            weight_NK = torch.ones_like(weight_NK)
        if self.ep.size == 1:
            out = self.experts(rows, count_E.cumsum(0, dtype=torch.int32))
        else:
            counts = self.ep.exchange_counts(count_E)
            ends_E = counts[1].sum(0).cumsum(0, dtype=torch.int32).to(rows.device, non_blocking=True)
            out = self.experts(self.ep.dispatch(rows, counts), ends_E)
            out = self.ep.combine(out, counts, rows.shape[0])
        y_ND: Tensor = _SumRows.apply(out, place_NK, weight_NK, self.kernels)  # type: ignore[no-untyped-call]
        return y_ND

    def _apply_in_slots(self, x_BTD: Tensor, expert_NK: Tensor, weight_NK: Tensor) -> Tensor:
        """The same, without the (token, expert) pairs that find no slot in training."""
        B, T, D = x_BTD.shape
        tokens, E = T * self.cp.size, self.c.experts
        assert self.c.capacity_factor
        capacity = min(ceil(self.c.capacity_factor * tokens * self.c.top_k / E), tokens) if self.training else tokens
        slots = assign_slots(expert_NK.view(B, T, -1).int(), E, capacity, self.cp, self.cp_rank)
        ep, local = self.ep.size, E // self.ep.size
        x, weight_NK = slots.gather(x_BTD.flatten(0, 1)), weight_NK.to(x_BTD.dtype)
        if self.c.moe_style.scales_inputs:
            x, weight_NK = x * slots.weights(weight_NK)[:, None], torch.ones_like(weight_NK)
        x = self.ep.exchange_slots(x.view(ep, -1, D))
        out = self.experts.in_slots(x.view(ep, local, -1, D).transpose(0, 1).reshape(local, -1, D))
        out = out.view(local, ep, -1, D).transpose(0, 1).reshape(ep, -1, D)
        out_NKD = slots.scatter(self.ep.exchange_slots(out).flatten(0, 1))
        return (out_NKD * weight_NK[..., None]).sum(1)

    def _count(self, expert: Tensor) -> Tensor:
        """Pairs of each expert, int32 [..., E], over the last two dims."""
        number = torch.arange(self.c.experts, device=expert.device)
        return (expert[..., None] == number).sum((-3, -2), dtype=torch.int32)


class _GatherRows(torch.autograd.Function):
    """The rows of (token, expert) pairs, sorted by expert: row m is that of token order[m] // K.

    Backward gathers too: adding rows to their tokens one by one would need atomic operations, which are slow and add in
    any order.
    """

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, order: Tensor, place_NK: Tensor, kernels: Kernels) -> Tensor:
        ctx.save_for_backward(place_NK)
        ctx.kernels = kernels
        return x_ND.index_select(0, order // place_NK.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.kernels.sum_rows(grads[0], ctx.saved_tensors[0], None), None, None, None


class _SumRows(torch.autograd.Function):
    """The results of each token's experts, times their weights, [N, D]."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, place_NK: Tensor, weight_NK: Tensor, kernels: Kernels) -> Tensor:
        ctx.save_for_backward(out, place_NK, weight_NK)
        ctx.kernels = kernels
        return kernels.sum_rows(out, place_NK, weight_NK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_out, d_weight = ctx.kernels.sum_rows_backward(grads[0], *ctx.saved_tensors)
        return d_out, None, d_weight, None
