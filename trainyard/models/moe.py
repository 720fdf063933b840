"""A mixture of experts in the place of an MLP: each token goes to its top-k experts. None is dropped, unless the
experts have a capacity.

B batch, T tokens, N = B T, D hidden, E experts, k experts per token, F ffn of an expert.
"""

from collections.abc import Callable
from math import ceil
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainyard.families.moe import MoeConfig
from trainyard.kernels.grouped_linear import grouped_linear
from trainyard.kernels.reference import Kernels
from trainyard.models.expert_slots import assign_slots
from trainyard.models.layers import GatedActivation
from trainyard.models.lora import add_expert_adapters
from trainyard.models.module_factory import ModuleFactory
from trainyard.parallel.recompute import Recomputable


class MoeMLP(Recomputable):
    """Every tensor-parallel rank routes all tokens and computes its columns of this expert-parallel rank's experts."""

    recompute_name = "mlp"
    cp_rank: Tensor
    pair_counts: Tensor
    """(token, expert) pairs of each expert in training, fp32 [E]; whoever reads them sets them to 0. Recomputation
    counts all of them again, which does not change the shares."""

    def __init__(self, c: MoeConfig, make: ModuleFactory, name: str) -> None:
        super().__init__()
        self.c, self.tp, self.cp, self.ep = c, make.tp, make.cp, make.ep
        self.router = make.parameters(f"{name}.router", ["weight", "bias"] if c.router_bias else ["weight"])
        self.experts = make.parameters(f"{name}.experts", ["gate_up", "down"])
        self.update_scale = add_expert_adapters(self.experts, make, f"{name}.experts")
        self.kernels, self.activation = make.kernels, GatedActivation(c.style.activation, make.kernels)
        self.register_buffer("pair_counts", torch.zeros(c.experts), persistent=False)
        self.register_buffer("cp_rank", torch.tensor(self.cp.rank, dtype=torch.int32), persistent=False)
        self.has_grouped_gemm = True
        """False on devices that multiply in slots of a fixed number."""
        self.samples_per_step = 1
        """Samples of a global batch, of which the losses of the router are means; `set_samples_per_step` sets it."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        # All tokens on every tensor-parallel rank: each has some columns of all experts. The ranks' gradients are sums.
        x_BTD = self.tp.gather_sum_grads(x_BTD) if self.tp.sequence_parallel else self.tp.copy_sum_grads(x_BTD)
        logits_BTE = F.linear(x_BTD.float(), self.router["weight"].float())
        weight_NK, expert_NK = self._choose_experts(logits_BTE)
        pairs_BE = self._count(expert_NK.view(*x_BTD.shape[:2], -1))
        if self.training and torch.is_grad_enabled():
            count_BE = pairs_BE.float()
            self.pair_counts.add_(count_BE.sum(0))
            if self.c.balance_loss or self.c.z_loss or self.c.router_bias:
                x_BTD = _AddLoss.apply(x_BTD, self._router_loss(logits_BTE, count_BE))  # type: ignore[no-untyped-call]
        has_capacity = self.c.capacity_factor is not None and (self.training or not self.has_grouped_gemm)
        if has_capacity:
            out_NKD = self._apply_in_slots(x_BTD, expert_NK)
            y_ND = (out_NKD * weight_NK.to(x_BTD.dtype)[..., None]).sum(1)
        else:
            y_ND = self._apply_all(x_BTD, expert_NK, weight_NK, pairs_BE.sum(0, dtype=torch.int32))
        return self.tp.reduce_output(y_ND.view_as(x_BTD))

    def _choose_experts(self, logits_BTE: Tensor) -> tuple[Tensor, Tensor]:
        probability_NE = logits_BTE.flatten(0, 1).softmax(-1)
        score_NE = probability_NE + self.router["bias"].detach() if self.c.router_bias else probability_NE
        if not self.has_grouped_gemm:
            weight_NK, expert_NK = _top_k_by_maximum(probability_NE, score_NE, self.c.top_k)
        elif self.c.router_bias:
            expert_NK = score_NE.topk(self.c.top_k, -1).indices
            weight_NK = probability_NE.gather(-1, expert_NK)
        else:
            weight_NK, expert_NK = probability_NE.topk(self.c.top_k, -1)
        if self.c.normalize_top_k:
            weight_NK = weight_NK / weight_NK.sum(-1, keepdim=True)
        return weight_NK, expert_NK

    def _apply_all(self, x_BTD: Tensor, expert_NK: Tensor, weight_NK: Tensor, count_E: Tensor) -> Tensor:
        """The weighted sums over experts, [N, D]: sort the (token, expert) pairs by expert, multiply group by group."""
        order = expert_NK.flatten().argsort(stable=True)
        place_NK = torch.empty_like(order).index_copy(0, order, torch.arange(len(order), device=order.device))
        place_NK = place_NK.view_as(expert_NK)
        rows = _GatherRows.apply(x_BTD.flatten(0, 1), order, place_NK, self.kernels)  # type: ignore[no-untyped-call]
        if self.ep.size == 1:
            out = self._multiply(rows, count_E.cumsum(0, dtype=torch.int32))
        else:
            counts = self.ep.exchange_counts(count_E)
            ends_E = counts[1].sum(0).cumsum(0, dtype=torch.int32).to(rows.device, non_blocking=True)
            out = self._multiply(self.ep.dispatch(rows, counts), ends_E)
            out = self.ep.combine(out, counts, rows.shape[0])
        y_ND: Tensor = _SumRows.apply(out, place_NK, weight_NK, self.kernels)  # type: ignore[no-untyped-call]
        return y_ND

    def _multiply(self, rows: Tensor, ends_E: Tensor) -> Tensor:
        """The rows of this rank's experts, sorted by expert, times their matrices; those of expert e end at ends[e]."""
        E = ends_E.shape[0]

        def linear(x: Tensor, matrices: str) -> Tensor:
            return grouped_linear(x, self.experts[matrices].view(E, -1, x.shape[-1]), ends_E)

        return self._adapted(linear, self.activation(self._adapted(linear, rows, "gate_up")), "down")

    def _adapted(self, linear: Callable[[Tensor, str], Tensor], x: Tensor, matrices: str) -> Tensor:
        """x times the matrices of experts, plus the update of their adapters if they have any."""
        y = linear(x, matrices)
        if not self.update_scale:
            return y
        # The scale is multiplied where the matrix is small.
        return y + linear(linear(x, f"{matrices}_lora_A") * self.update_scale, f"{matrices}_lora_B")

    def _apply_in_slots(self, x_BTD: Tensor, expert_NK: Tensor) -> Tensor:
        """The results of the (token, expert) pairs, [N, K, D]; zeros for those that find no slot in training."""
        B, T, D = x_BTD.shape
        tokens, E = T * self.cp.size, self.c.experts
        assert self.c.capacity_factor
        capacity = min(ceil(self.c.capacity_factor * tokens * self.c.top_k / E), tokens) if self.training else tokens
        slots = assign_slots(expert_NK.view(B, T, -1).int(), E, capacity, self.cp, self.cp_rank)
        ep, local = self.ep.size, E // self.ep.size
        x = self.ep.exchange_slots(slots.gather(x_BTD.flatten(0, 1)).view(ep, -1, D))
        x = x.view(ep, local, -1, D).transpose(0, 1).reshape(local, -1, D)

        def linear(x: Tensor, matrices: str) -> Tensor:
            return x @ self.experts[matrices].view(local, -1, x.shape[-1]).mT

        out = self._adapted(linear, self.activation(self._adapted(linear, x, "gate_up")), "down")
        out = out.view(local, ep, -1, D).transpose(0, 1).reshape(ep, -1, D)
        return slots.scatter(self.ep.exchange_slots(out).flatten(0, 1))

    def _count(self, expert: Tensor) -> Tensor:
        """Pairs of each expert, int32 [..., E], over the last two dims."""
        number = torch.arange(self.c.experts, device=expert.device)
        return (expert[..., None] == number).sum((-3, -2), dtype=torch.int32)

    def _router_loss(self, logits_BTE: Tensor, count_BE: Tensor) -> Tensor:
        """This rank's share of the load-balancing loss and the z loss, as means over the samples of a step.

        The balance of a sample in a layer is E sum_e f_e p_e, where f_e is the share of its tokens that expert e has
        and p_e the mean probability of e: for a single sample and layer, that of transformers. The sum over all ranks
        does not depend on the layout: f covers the full sample, and the rest is linear. All tensor-parallel ranks
        compute the same, and their gradients are summed.

        A bias of the router gets a term whose gradient is the load: how many pairs an expert has beyond its share,
        times E, so that sums over micro batches and ranks are exact.
        """
        _, T, E = logits_BTE.shape
        tokens = T * self.cp.size
        share_BE = self.cp.group.all_reduce_sum(count_BE) / tokens
        balance = E * (share_BE[:, None] * logits_BTE.softmax(-1)).sum() / tokens / len(self.c.expert_layers)
        z = logits_BTE.logsumexp(-1).square().sum() / tokens
        loss = (self.c.balance_loss * balance + self.c.z_loss * z) / (self.samples_per_step * self.tp.size)
        if self.c.router_bias:
            count_E = count_BE.sum(0)
            loss = loss + (self.router["bias"] * (E * count_E - count_E.sum())).sum()
        return loss


def _top_k_by_maximum(x_NE: Tensor, score_NE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k values of each row with the highest scores and their indices, int32, as `topk`: one after the other,
    without sorting."""
    number_E = torch.arange(x_NE.shape[1], dtype=torch.int32, device=x_NE.device)
    rest_NE, values, indices = score_NE.detach(), [], []
    for _ in range(k):
        is_largest_NE = rest_NE == rest_NE.amax(-1, keepdim=True)
        index_N1 = torch.where(is_largest_NE, number_E, len(number_E)).amin(-1, keepdim=True)
        chosen_NE = number_E == index_N1
        values.append((x_NE * chosen_NE).sum(-1))
        indices.append(index_N1)
        rest_NE = torch.where(chosen_NE, -torch.inf, rest_NE)
    return torch.stack(values, -1), torch.cat(indices, -1)


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


class _AddLoss(torch.autograd.Function):
    """Returns x; backward passes the gradient 1 to `loss`. A block can so add to the loss in any pipeline stage."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return grads[0], torch.ones_like(loss)
