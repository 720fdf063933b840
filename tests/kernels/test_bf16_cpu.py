"""bf16 on CPUs without bf16 instructions: the results are fp32 rounded once, and torch dispatches to these kernels."""

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trainyard.kernels import bf16_cpu
from trainyard.kernels.bf16_cpu import BF16_KERNELS, FLASH_OP


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bf16_cpu, "TILE_ELEMENTS", 300)
    monkeypatch.setattr(bf16_cpu, "MIN_TILE_ROWS", 4)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def test_matmul() -> None:
    a, b, c = random(37, 20), random(20, 29), random(29)
    product = a.float() @ b.float()
    assert torch.equal(BF16_KERNELS["mm"](a, b), product.bfloat16())
    assert torch.equal(BF16_KERNELS["mm"](a, b.T.contiguous().T), product.bfloat16())
    added = (0.5 * c.float() + 3 * product).bfloat16()
    assert torch.equal(BF16_KERNELS["addmm"](c, a, b, beta=0.5, alpha=3), added)
    assert torch.equal(BF16_KERNELS["addmm"](torch.full((29,), torch.nan).bfloat16(), a, b, beta=0), product.bfloat16())
    total = random(37, 29)
    expected = (total.float() + product).bfloat16()
    assert BF16_KERNELS["addmm_"](total, a, b) is total
    assert torch.equal(total, expected)


def test_out_argument() -> None:
    a, b = random(6, 4), random(4, 5)
    out = torch.zeros(12, 10).bfloat16()
    assert BF16_KERNELS["mm.out"](a, b, out=out[::2, ::2]).data_ptr() == out.data_ptr()
    assert torch.equal(out[::2, ::2], (a.float() @ b.float()).bfloat16())
    assert not out[1::2].any()
    empty = torch.empty(0).bfloat16()
    assert BF16_KERNELS["mm.out"](a, b, out=empty) is empty
    assert empty.shape == (6, 5)


@pytest.mark.parametrize("rows", [5, 50])
@pytest.mark.parametrize("batch", [0, 1, 9])
def test_batched_matmul(batch: int, rows: int) -> None:
    a, b, c = random(batch, rows, 8), random(batch, 8, 3), random(batch, rows, 3)
    product = a.float() @ b.float()
    assert torch.equal(BF16_KERNELS["bmm"](a, b), product.bfloat16())
    added = (c.float() + 2 * product).bfloat16()
    assert torch.equal(BF16_KERNELS["baddbmm"](c, a, b, alpha=2), added)
    BF16_KERNELS["baddbmm_"](c, a, b, alpha=2)
    assert torch.equal(c, added)


def test_empty_inner_dim() -> None:
    assert not BF16_KERNELS["mm"](random(3, 0), random(0, 4)).any()


@pytest.mark.parametrize("has_mask", [False, True])
def test_attention(has_mask: bool) -> None:
    q, k, v = random(3, 4, 10, 8), random(3, 4, 12, 8), random(3, 4, 12, 8)
    options: dict[str, Any] = {"attn_mask": random(3, 1, 10, 12)} if has_mask else {}
    out, lse = BF16_KERNELS[FLASH_OP](q, k, v, 0.0, False, **options)
    inputs = [x.float().requires_grad_() for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(*inputs, options["attn_mask"].float() if has_mask else None)
    assert torch.equal(out, expected.bfloat16())
    assert out.stride() == q.stride()
    dout = random(*out.shape)
    grads = BF16_KERNELS[f"{FLASH_OP}_backward"](dout, q, k, v, out, lse, 0.0, False, **options)
    expected.backward(dout.float())
    for actual, x in zip(grads, inputs, strict=True):
        assert x.grad is not None
        assert torch.allclose(actual.float(), x.grad, atol=2e-2, rtol=2e-2)  # computed from a rounded output


INSTALLED = """
import torch
import torch.nn.functional as F
from trainyard.kernels import bf16_cpu

called = []
for name, kernel in list(bf16_cpu.BF16_KERNELS.items()):
    bf16_cpu.BF16_KERNELS[name] = lambda *args, name=name, kernel=kernel, **kwargs: (
        called.append(name), kernel(*args, **kwargs))[1]
bf16_cpu.install(), bf16_cpu.install()

def work(x, w, b):
    y = F.linear(x, w, b)
    return F.scaled_dot_product_attention(y, y, y, is_causal=True).float().square().sum() + (x @ w.T).float().sum()

def gradients(function, dtype):
    torch.manual_seed(0)
    inputs = [torch.randn(shape).to(dtype).requires_grad_() for shape in ((2, 3, 16, 8), (8, 8), (8,))]
    function(*inputs).backward()
    return [x.grad for x in inputs]

exact = gradients(work, torch.float32)
assert not called, called
function = torch.compile(work, backend="aot_eager") if COMPILED else work
for actual, expected in zip(gradients(function, torch.bfloat16), exact, strict=True):
    assert actual.dtype == torch.bfloat16
    assert (actual.float() - expected).abs().max() < 0.05 * expected.abs().max()
for prefix in ("mm", "addmm", "_scaled_dot_product_flash_attention_for_cpu_backward"):
    assert any(name.startswith(prefix) for name in called), (prefix, called)
"""


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_torch_dispatches_to_the_replacements(compiled: bool) -> None:
    """Runs in its own process, because the replacements stay installed."""
    script = INSTALLED.replace("COMPILED", str(compiled))
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Overriding" not in done.stderr
