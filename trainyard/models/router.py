"""The router of a mixture of experts: which experts a token goes to, with which weights, and what balances them.

B batch, T tokens, N = B T, D hidden, E experts, G groups of experts, k experts per token.
"""

from typing import Any

import torch
from torch import Tensor, nn

from trainyard.families.moe import MoeConfig
from trainyard.models.module_factory import ModuleFactory


class Router(nn.Module):
    """Every tensor-parallel rank routes all tokens, in fp32."""

    def __init__(self, c: MoeConfig, make: ModuleFactory, name: str) -> None:
        super().__init__()
        self.c, self.tp, self.cp, self.kernels = c, make.tp, make.cp, make.kernels
        self.weight = make.parameter(f"{name}.weight")
        self.logit_bias = make.optional_parameter(f"{name}.logit_bias")
        self.bias = make.optional_parameter(f"{name}.bias")
        """Balances the load of the experts: it is added to scores for the choice only."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Logits of the experts, [B, T, E]."""
        return self.kernels.fp32_linear(x_BTD, self.weight, self.logit_bias)

    def choose(self, logits_NE: Tensor, sorts: bool = True) -> tuple[Tensor, Tensor]:
        """The weights of each token's experts, and their indices, [N, K]. Without `sorts`, nothing is sorted."""
        c, top_k = self.c, torch.topk if sorts else _top_k_by_maximum
        score_NE = logits_NE.sigmoid() if c.router_scores == "sigmoid" else logits_NE.softmax(-1)
        choice_NE = score_NE if self.bias is None else score_NE + self.bias.detach()
        if c.expert_groups > 1:
            choice_NGE = torch.unflatten(choice_NE.detach(), 1, (c.expert_groups, -1))
            best_NGK = top_k(choice_NGE.flatten(0, 1), 1 if c.group_score == "max" else 2)[0]
            group_NK = top_k(best_NGK.sum(-1).view(-1, c.expert_groups), c.top_k_groups)[1]
            number_G = torch.arange(c.expert_groups, dtype=group_NK.dtype, device=group_NK.device)
            is_chosen_NG = (group_NK[..., None] == number_G).any(1)
            choice_NE = choice_NGE.masked_fill(~is_chosen_NG[..., None], -torch.inf).flatten(1)
        weight_NK, expert_NK = top_k(choice_NE, c.top_k)
        if choice_NE is not score_NE:
            weight_NK = _chosen(score_NE, expert_NK, sorts)
        if c.normalize_top_k:
            weight_NK = weight_NK / (weight_NK.sum(-1, keepdim=True) + c.weight_epsilon)
        return weight_NK if c.routed_scale == 1 else weight_NK * c.routed_scale, expert_NK

    def add_loss(self, x_BTD: Tensor, logits_BTE: Tensor, count_BE: Tensor, samples: int) -> Tensor:
        """x, whose backward pass also adds the gradients of the router's losses. `samples` are those of a step."""
        if not (self.c.balance_loss or self.c.z_loss or self.bias is not None):
            return x_BTD
        loss = self._loss(logits_BTE, count_BE, samples)
        out: Tensor = _AddLoss.apply(x_BTD, loss)  # type: ignore[no-untyped-call]
        return out

    def _loss(self, logits_BTE: Tensor, count_BE: Tensor, samples: int) -> Tensor:
        """This rank's share of the load-balancing loss and the z loss, as means over the samples of a step.

        The balance of a sample in a layer is E sum_e f_e p_e, where f_e is the share of its tokens that expert e has
        and p_e the mean probability of e: for a single sample and layer, that of transformers. The sum over all ranks
        does not depend on the layout: f covers the full sample, and the rest is linear. All tensor-parallel ranks
        compute the same, and their gradients are summed. The probabilities of sigmoids are their shares of their sum.

        A bias that balances gets a term whose gradient is the load: how many pairs an expert has beyond its share,
        times E, so that sums over micro batches and ranks are exact.
        """
        _, T, E = logits_BTE.shape
        tokens = T * self.cp.size
        if self.c.router_scores == "sigmoid":
            score_BTE = logits_BTE.sigmoid()
            probability_BTE = score_BTE / (score_BTE.sum(-1, keepdim=True) + self.c.weight_epsilon)
        else:
            probability_BTE = logits_BTE.softmax(-1)
        share_BE = self.cp.group.all_reduce_sum(count_BE) / tokens
        balance = E * (share_BE[:, None] * probability_BTE).sum() / tokens / len(self.c.expert_layers)
        z = logits_BTE.logsumexp(-1).square().sum() / tokens
        loss = (self.c.balance_loss * balance + self.c.z_loss * z) / (samples * self.tp.size)
        if self.bias is not None:
            count_E = count_BE.sum(0)
            loss = loss + (self.bias * (E * count_E - count_E.sum())).sum()
        return loss


def _chosen(x_NE: Tensor, index_NK: Tensor, sorts: bool) -> Tensor:
    """The elements of each row at its indices. Devices that do not sort do not look up single elements either."""
    if sorts:
        return x_NE.gather(-1, index_NK)
    number_E = torch.arange(x_NE.shape[1], dtype=index_NK.dtype, device=x_NE.device)
    return (x_NE[:, None] * (index_NK[..., None] == number_E)).sum(-1)


def _top_k_by_maximum(x_NE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest values of each row and their indices, int32, as `topk`: one after the other, without sorting."""
    number_E = torch.arange(x_NE.shape[1], dtype=torch.int32, device=x_NE.device)
    rest_NE, values, indices = x_NE.detach(), [], []
    for _ in range(k):
        is_largest_NE = rest_NE == rest_NE.amax(-1, keepdim=True)
        index_N1 = torch.where(is_largest_NE, number_E, len(number_E)).amin(-1, keepdim=True)
        chosen_NE = number_E == index_N1
        values.append(torch.where(chosen_NE, x_NE, 0.0).sum(-1))
        indices.append(index_N1)
        rest_NE = torch.where(chosen_NE, -torch.inf, rest_NE)
    return torch.stack(values, -1), torch.cat(indices, -1)


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
