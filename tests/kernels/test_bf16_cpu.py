"""bf16 on CPUs without instructions for it: what fp32 gives, rounded once; and torch asks these kernels."""

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
    monkeypatch.setattr(bf16_cpu, "TILE", 300)
    monkeypatch.setattr(bf16_cpu, "LEAST", 4)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def test_products() -> None:
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


def test_outputs_that_are_given() -> None:
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
def test_batches_of_products(batch: int, rows: int) -> None:
    a, b, c = random(batch, rows, 8), random(batch, 8, 3), random(batch, rows, 3)
    product = a.float() @ b.float()
    assert torch.equal(BF16_KERNELS["bmm"](a, b), product.bfloat16())
    added = (c.float() + 2 * product).bfloat16()
    assert torch.equal(BF16_KERNELS["baddbmm"](c, a, b, alpha=2), added)
    BF16_KERNELS["baddbmm_"](c, a, b, alpha=2)
    assert torch.equal(c, added)


def test_nothing_to_sum() -> None:
    assert not BF16_KERNELS["mm"](random(3, 0), random(0, 4)).any()


@pytest.mark.parametrize("masked", [False, True])
def test_attention(masked: bool) -> None:
    q, k, v = random(3, 4, 10, 8), random(3, 4, 12, 8), random(3, 4, 12, 8)
    options: dict[str, Any] = {"attn_mask": random(3, 1, 10, 12)} if masked else {}
    out, lse = BF16_KERNELS[FLASH_OP](q, k, v, 0.0, False, **options)
    inputs = [x.float().requires_grad_() for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(*inputs, options["attn_mask"].float() if masked else None)
    assert torch.equal(out, expected.bfloat16())
    assert out.stride() == q.stride()
    dout = random(*out.shape)
    found = BF16_KERNELS[f"{FLASH_OP}_backward"](dout, q, k, v, out, lse, 0.0, False, **options)
    expected.backward(dout.float())
    for mine, x in zip(found, inputs, strict=True):
        assert x.grad is not None
        assert torch.allclose(mine.float(), x.grad, atol=2e-2, rtol=2e-2)  # from a rounded output


INSTALLED = """
import torch
import torch.nn.functional as F
from trainyard.kernels import bf16_cpu

asked = []
for name, ours in list(bf16_cpu.OURS.items()):
    bf16_cpu.OURS[name] = lambda *args, name=name, ours=ours, **kwargs: (asked.append(name), ours(*args, **kwargs))[1]
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
assert not asked, asked
for function in (work, torch.compile(work)):
    for mine, wanted in zip(gradients(function, torch.bfloat16), exact, strict=True):
        assert mine.dtype == torch.bfloat16
        assert (mine.float() - wanted).abs().max() < 0.05 * wanted.abs().max()
    for part in ("mm", "addmm", "_scaled_dot_product_flash_attention_for_cpu_backward"):
        assert any(name.startswith(part) for name in asked), (part, asked)
    asked.clear()
"""


@pytest.mark.nightly
def test_torch_asks_for_them() -> None:
    """In a process of its own: they stay installed."""
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", INSTALLED], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Overriding" not in done.stderr
