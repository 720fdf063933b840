"""A mixture of experts in the place of an MLP: each token goes to its top-k experts, none is dropped.

B batch, T tokens, N = B T, D hidden, E experts, k experts per token, F ffn of an expert.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainyard.families.moe import MoeConfig
from trainyard.kernels.grouped_linear import grouped_linear
from trainyard.models.factory import ModuleFactory
from trainyard.models.layers import SwiGLU
from trainyard.parallel.recompute import Recomputable


class MoeMLP(Recomputable):
    """Every tensor-parallel rank routes all tokens and computes its columns of every expert."""

    recompute_name = "mlp"
    pair_counts: Tensor
    """(token, expert) pairs of each expert in training, fp32 [E]; whoever reads them sets them to 0. Recomputation
    counts all of them again, which does not change the shares."""

    def __init__(self, c: MoeConfig, make: ModuleFactory, name: str) -> None:
        super().__init__()
        self.c, self.tp, self.cp = c, make.tp, make.cp
        self.router = make.parameters(f"{name}.router", ["weight"])
        self.experts = make.parameters(f"{name}.experts", ["gate_up", "down"])
        self.activation = SwiGLU(make.kernels)
        self.register_buffer("pair_counts", torch.zeros(c.experts), persistent=False)
        self.samples_per_step = 1
        """Samples of a global batch, of which the losses of the router are means; `set_samples_per_step` sets it."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = self.tp.gather_sum_grads(x_BTD) if self.tp.sequence_parallel else self.tp.copy_sum_grads(x_BTD)
        logits_BTE = F.linear(x_BTD.float(), self.router["weight"].float())
        weight_NK, expert_NK = self._choose_experts(logits_BTE)
        if self.training and torch.is_grad_enabled():
            count_BE = self._count(expert_NK.view(*x_BTD.shape[:2], -1)).float()
            self.pair_counts += count_BE.sum(0)
            if self.c.balance_loss or self.c.z_loss:
                x_BTD = _AddLoss.apply(x_BTD, self._router_loss(logits_BTE, count_BE))  # type: ignore[no-untyped-call]
        y_ND = self._apply_experts(x_BTD.flatten(0, 1), weight_NK.to(x_BTD.dtype), expert_NK)
        return self.tp.reduce_output(y_ND.view_as(x_BTD))

    def _choose_experts(self, logits_BTE: Tensor) -> tuple[Tensor, Tensor]:
        weight_NK, expert_NK = logits_BTE.flatten(0, 1).softmax(-1).topk(self.c.top_k, -1)
        if self.c.normalize_top_k:
            weight_NK = weight_NK / weight_NK.sum(-1, keepdim=True)
        return weight_NK, expert_NK

    def _apply_experts(self, x_ND: Tensor, weight_NK: Tensor, expert_NK: Tensor) -> Tensor:
        """Sort the (token, expert) pairs by expert, multiply group by group, and sum what belongs to a token."""
        E, D = self.c.experts, x_ND.shape[1]
        order = expert_NK.flatten().argsort(stable=True)
        ends_E = self._count(expert_NK).cumsum(0, dtype=torch.int32)
        rows = x_ND.index_select(0, order // self.c.top_k)
        gate_up = grouped_linear(rows, self.experts["gate_up"].view(E, -1, D), ends_E)
        out = grouped_linear(self.activation(gate_up), self.experts["down"].view(E, D, -1), ends_E)
        out_NKD = out.index_select(0, order.argsort()).view(*expert_NK.shape, D)
        return (out_NKD * weight_NK[..., None]).sum(1)

    def _count(self, expert: Tensor) -> Tensor:
        """Pairs of each expert, int32 [..., E], over the last two dims."""
        number = torch.arange(self.c.experts, device=expert.device)
        return (expert[..., None] == number).sum((-3, -2), dtype=torch.int32)

    def _router_loss(self, logits_BTE: Tensor, count_BE: Tensor) -> Tensor:
        """This rank's share of the load-balancing loss and the z loss, as means over the samples of a step.

        The balance of a sample is E sum_e f_e p_e, where f_e is the share of its (token, expert) pairs that expert e
        has and p_e the mean probability of e. The sum over all ranks does not depend on the layout: f covers the full
        sample, and the rest is linear. All tensor-parallel ranks compute the same, and their gradients are summed.
        """
        _, T, E = logits_BTE.shape
        tokens = T * self.cp.size
        share_BE = self.cp.group.all_reduce_sum(count_BE) / (tokens * self.c.top_k)
        balance = E * (share_BE[:, None] * logits_BTE.softmax(-1)).sum() / tokens
        z = logits_BTE.logsumexp(-1).square().sum() / tokens
        return (self.c.balance_loss * balance + self.c.z_loss * z) / (self.samples_per_step * self.tp.size)


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
