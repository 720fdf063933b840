"""Private torch names, each with the version range it was seen to hold for. The only file that may use one."""

import torch
from torch import Tensor


def foreach_norm(tensors: list[Tensor]) -> Tensor:
    """The 2-norm of each tensor in fp32, in one pass over memory (torch 2.11 to 2.14; used by clip_grad_norm_ too)."""
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32))


def fused_adamw_(
    weight: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    updates: Tensor,
    lr: Tensor,
    scale: Tensor,
    ok: Tensor,
    decay: float,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """torch's one-pass AdamW on fp32 tensors (torch 2.11 to 2.14; behind torch.optim.AdamW(fused=True)).

    Gradients are multiplied by `scale` (in place); nothing changes where `ok` is false. `updates` counts this one too.
    """
    torch._fused_adamw_(
        [weight],
        [gradient],
        [first],
        [second],
        [],
        [updates],
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
        grad_scale=1 / scale,
        found_inf=1 - ok.float(),
    )
