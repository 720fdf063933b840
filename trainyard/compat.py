"""Private torch names, each with the version range it was seen to hold for. The only file that may use one."""

import torch
from torch import Tensor


def foreach_norm(tensors: list[Tensor]) -> Tensor:
    """The 2-norm of each tensor in fp32, in one pass over memory (torch 2.11 to 2.14; used by clip_grad_norm_ too)."""
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32))
