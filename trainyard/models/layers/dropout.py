"""Dropout and noise that are functions of (seed, step, site, global element index), so that no layout changes them."""

import torch
from torch import Tensor, nn

from trainyard.core.batch import Batch
from trainyard.core.counter_rng import DropoutRng, RowSeeds, element_bits, key32, row_seeds
from trainyard.kernels.reference import Kernels


def token_seeds(batch: Batch, position_T: Tensor) -> RowSeeds:
    """The row seeds of each token, from its global sample index and global position."""
    sample = batch["sample_ids"]  # [B], or [1, N] in a packed batch
    return row_seeds(batch["rng_key"], sample if sample.dim() > 1 else sample[:, None], position_T)


def dropout_site(name: str) -> Tensor:
    """The id of a dropout site. It is a buffer of the module, not a constant, so that blocks share a compiled graph."""
    return torch.tensor(key32("dropout", name)[0], dtype=torch.int32)


def add_uniform_noise(x_BTD: Tensor, bound: float, seeds: RowSeeds, site: Tensor) -> Tensor:
    """x plus a random number between -bound and bound for each element."""
    column = torch.arange(x_BTD.shape[-1], dtype=torch.int32, device=x_BTD.device)
    bits = element_bits((seeds.seed0[..., None], seeds.seed1[..., None]), site, column)
    return x_BTD + (bits.float() * (bound * 2.0**-31)).to(x_BTD.dtype)


class Dropout(nn.Module):
    """Dropout of activations, alone or fused with bias and residual."""

    site: Tensor

    def __init__(self, p: float, site: str, kernels: Kernels) -> None:
        super().__init__()
        self.p, self.kernels = p, kernels
        self.register_buffer("site", dropout_site(site), persistent=False)

    def rng(self, seeds: RowSeeds) -> DropoutRng | None:
        """The inputs of the mask; None if nothing is dropped."""
        return DropoutRng(self.p, *seeds, self.site) if self.training and self.p else None

    def forward(self, y_BTD: Tensor, seeds: RowSeeds) -> Tensor:
        rng = self.rng(seeds)
        return y_BTD if rng is None else self.kernels.add_dropout(None, y_BTD, None, rng)

    def add_to_residual(self, x_BTD: Tensor, y_BTD: Tensor, bias: Tensor | None, seeds: RowSeeds) -> Tensor:
        """x + dropout(y + bias)."""
        return self.kernels.add_dropout(x_BTD, y_BTD, bias, self.rng(seeds))
