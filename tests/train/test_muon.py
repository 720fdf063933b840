"""Muon against torch.optim.Muon, and its Newton-Schulz iteration against a singular value decomposition."""

import pytest
import torch
from torch import nn

from tests.support import configs
from tests.train.test_optimizers import gradient, make_optimizer, master, set_gradients, update, weights
from trainyard import models
from trainyard.train.optim.optimizer import Optimizer
from trainyard.train.optim.updates.muon import newton_schulz


def muon_matrices(optimizer: Optimizer, blueprint: models.Blueprint) -> dict[str, tuple[str, slice]]:
    """Parameter and rows of each unfused matrix that Muon updates."""
    matrices = {}
    for name in optimizer.state.names:
        start = 0
        for piece in blueprint.local_slices(name) if not optimizer.state.has(name, "exp_avg_sq") else ():
            matrices[piece.name] = (name, slice(start, start + piece.sizes[0]))
            start += piece.sizes[0]
    return matrices


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("lr_adjust", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("family", configs.TINY_MODELS)
def test_muon_equals_torch(family: str, lr_adjust: str, nesterov: bool) -> None:
    """torch.optim.Muon orthogonalizes in bf16, so this compares a bf16 run: fused matrices by their unfused parts, and
    torch.optim.AdamW for all other parameters."""
    options = {"nesterov": nesterov, "lr_adjust": lr_adjust, "adamw_lr": 5e-3, "momentum": 0.9}
    _, optimizer = make_optimizer("bf16", "muon", family, **options)
    config = configs.tiny_config(family).model
    matrices = muon_matrices(optimizer, models.family_of(config).blueprint(config))
    assert all("layers." in name for name in matrices)
    assert "layers.0.attention.q.weight" in matrices
    parts = {name: nn.Parameter(master(optimizer, owner)[rows].clone()) for name, (owner, rows) in matrices.items()}
    others = {
        name: nn.Parameter(value)
        for name, value in weights(optimizer).items()
        if optimizer.state.has(name, "exp_avg_sq")
    }
    decayed = [p for p in others.values() if p.ndim > 1]
    plain = [p for p in others.values() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=5e-3, betas=(0.9, 0.95), eps=1e-8)
    muon = torch.optim.Muon(
        parts.values(), lr=1e-2, weight_decay=0.1, momentum=0.9, nesterov=nesterov, adjust_lr_fn=lr_adjust
    )
    for step in range(1, 4):
        set_gradients(optimizer, step)
        for name, (owner, rows) in matrices.items():
            parts[name].grad = gradient(optimizer, owner)[rows].clone()
        for name, copy in others.items():
            copy.grad = gradient(optimizer, name).clone()
        update(optimizer, step)
        muon.step()
        adamw.step()
    for name, (owner, rows) in matrices.items():
        torch.testing.assert_close(master(optimizer, owner)[rows], parts[name].detach(), rtol=1e-5, atol=1e-6)
    for name, copy in others.items():
        torch.testing.assert_close(master(optimizer, name), copy.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(8, 8), (6, 20), (20, 6)])
def test_newton_schulz_applies_its_polynomial_to_the_singular_values(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    torch.testing.assert_close(newton_schulz(matrix, 5).double(), u @ torch.diag(s) @ v, rtol=1e-4, atol=1e-4)
    assert ((s > 0.6) & (s < 1.3)).all()


def test_muon_keeps_no_second_moment_of_matrices() -> None:
    _, optimizer = make_optimizer(rule="muon")
    state = optimizer.state
    assert state.exp_avg.numel() == state.flat.shard_size
    others = [name for name in state.names if state.has(name, "exp_avg_sq")]
    assert others == ["embedding.weight", "output.weight", *(name for name in others if "norm" in name)]
    assert state.exp_avg_sq.numel() == state.flat.shard_undecayed_end < state.flat.shard_size
