"""The chunked cross entropy equals torch's, ignores IGNORE_INDEX, and never allocates the full logits."""

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tests.support import configs
from trainyard.core.errors import UserError
from trainyard.models.output import ModelOutput
from trainyard.train import decisions
from trainyard.train.cross_entropy import chunked_cross_entropy
from trainyard.train.losses.causal_lm import CausalLoss
from trainyard.train.user_functions import check_sum_and_count


def case(tokens: int = 50, vocab: int = 37, hidden: int = 16, bias: bool = False, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(2, tokens // 2, hidden, generator=generator).to(dtype).requires_grad_()
    w = torch.randn(vocab, hidden, generator=generator).to(dtype).requires_grad_()
    b = torch.randn(vocab, generator=generator).to(dtype).requires_grad_() if bias else None
    labels = torch.randint(0, vocab, (2, tokens // 2), generator=generator, dtype=torch.int32)
    labels[0, ::3] = -100
    return h, w, b, labels


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk_tokens", [7, 25, 1000])
def test_equals_torch_cross_entropy(monkeypatch: pytest.MonkeyPatch, chunk_tokens: int, bias: bool) -> None:
    monkeypatch.setattr(decisions, "MIN_CHUNK_TOKENS", chunk_tokens)
    h, w, b, labels = case(bias=bias)
    inputs = [x for x in (h, w, b) if x is not None]
    own = chunked_cross_entropy(ModelOutput(h, w, b), labels, logits_bytes=1)
    plain = F.cross_entropy(
        F.linear(h, w, b).flatten(0, 1), labels.flatten().long(), ignore_index=-100, reduction="sum"
    )
    torch.testing.assert_close(own, plain, rtol=1e-6, atol=1e-5)
    for mine, theirs in zip(
        torch.autograd.grad(own * 0.3, inputs), torch.autograd.grad(plain * 0.3, inputs), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
def test_losses_of_tokens_have_gradients_of_their_own(monkeypatch: pytest.MonkeyPatch, bias: bool) -> None:
    monkeypatch.setattr(decisions, "MIN_CHUNK_TOKENS", 7)
    h, w, b, labels = case(bias=bias)
    inputs = [x for x in (h, w, b) if x is not None]
    own = chunked_cross_entropy(ModelOutput(h, w, b), labels, logits_bytes=1, per_token=True)
    logits = F.linear(h, w, b).flatten(0, 1)
    plain = F.cross_entropy(logits, labels.flatten().long(), ignore_index=-100, reduction="none").view(labels.shape)
    torch.testing.assert_close(own, plain, rtol=1e-6, atol=1e-5)
    for mine, theirs in zip(
        torch.autograd.grad(own.square().sum(), inputs), torch.autograd.grad(plain.square().sum(), inputs), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-4)


def test_bf16_stays_close_to_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "MIN_CHUNK_TOKENS", 8)
    h, w, _, labels = case(tokens=400, dtype=torch.bfloat16)
    own = chunked_cross_entropy(ModelOutput(h, w), labels, logits_bytes=1)
    assert own.dtype == torch.float32
    exact_h, exact_w = h.detach().float().requires_grad_(), w.detach().float().requires_grad_()
    exact = chunked_cross_entropy(ModelOutput(exact_h, exact_w), labels)
    assert own.item() == pytest.approx(exact.item(), rel=5e-3)
    own.backward()
    exact.backward()
    for mine, theirs in ((h.grad, exact_h.grad), (w.grad, exact_w.grad)):
        assert mine is not None
        assert (mine.float() - theirs).norm() < 0.02 * theirs.norm()


def test_batch_without_counted_labels_has_loss_zero() -> None:
    h, w, _, labels = case()
    loss = chunked_cross_entropy(ModelOutput(h, w), torch.full_like(labels, -100))
    loss.backward()
    assert loss.item() == 0
    assert h.grad is not None
    assert not h.grad.any()
    assert not w.grad.any()


class PeakMemory(TorchDispatchMode):
    """Peak bytes of live tensors, measured on the result of every operator."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self.seen:
                    self.seen.add(key)
                    size = storage.nbytes()
                    self.now += size
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self._free, key, size)
        return result

    def _free(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size


def peak(chunked: bool) -> int:
    h, w = torch.randn(8192, 64, requires_grad=True), torch.randn(8192, 64, requires_grad=True)
    labels = torch.randint(0, 8192, (8192,))
    with PeakMemory() as memory:
        if chunked:
            chunked_cross_entropy(ModelOutput(h, w), labels).backward()
        else:
            F.cross_entropy(h @ w.T, labels).backward()
    return memory.peak


def test_full_logits_are_never_allocated() -> None:
    logits = 8192 * 8192 * 4
    assert peak(chunked=False) > 2 * logits  # torch allocates them, and the measurement shows it
    assert peak(chunked=True) < logits


def test_loss_does_not_depend_on_the_micro_batch_size() -> None:
    """Ignored labels are distributed unevenly, so a mean of micro batch means would differ."""
    config = configs.tiny_config()
    model = configs.tiny_model(config.model)
    torch.manual_seed(0)
    tokens = torch.randint(0, 260, (4, 16), dtype=torch.int32)
    labels = torch.randint(0, 260, (4, 16), dtype=torch.int32)
    labels[0, 1:] = -100
    labels[1, 4:] = -100
    loss = CausalLoss()

    def terms(rows: slice):
        batch = {"tokens": tokens[rows], "labels": labels[rows]}
        return loss.terms(model(batch), batch)["lm"]

    full = terms(slice(None))
    parts = [terms(slice(i, i + 1)) for i in range(4)]
    total = sum(part[0] for part in parts) / sum(part[1] for part in parts)
    torch.testing.assert_close(total, full[0] / full[1], rtol=1e-6, atol=0)
    mean_of_means = sum(part[0] / part[1] for part in parts) / 4
    assert abs(mean_of_means - total) > 1e-3


def test_user_functions_must_return_sum_and_count() -> None:
    def mean(output, batch):
        return torch.zeros(())

    with pytest.raises(UserError, match=r"mean.*\(sum, count\)"):
        check_sum_and_count(mean(None, None), mean)
    with pytest.raises(UserError, match=r"shape \[3\]"):
        check_sum_and_count((torch.zeros(3), 3), mean)
    total, count = check_sum_and_count((torch.ones((), dtype=torch.bfloat16), 3), mean)
    assert (total.dtype, count.item()) == (torch.float32, 3.0)
