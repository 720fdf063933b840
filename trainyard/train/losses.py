"""Losses as (sum, count) pairs: a step's loss is each term's sum over its count in the whole global batch, in fp32.

Means of micro batches are never averaged, so neither micro batch size nor rank count changes the number. Labels of -100
count nowhere.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from trainyard.models import Batch, Output
from trainyard.train.own import pair

IGNORED = -100
LOGITS_BYTES = 1 << 25
"""fp32 logits held at a time unless the device asks for another size; but never fewer than LEAST tokens' worth."""
LEAST = 256

Terms = dict[str, tuple[Tensor, Tensor]]
LossFunction = Callable[[Output, Batch], tuple[Tensor, Tensor]]
Softmax = Callable[[Tensor, Tensor], Tensor]


class Loss(Protocol):
    def counts(self, batch: Batch) -> dict[str, Tensor] | None:
        """How many labels each term counts, known from the labels alone; None where only the forward pass tells."""

    def terms(self, output: Output, batch: Batch) -> Terms:
        """Each term's sum and count over this batch."""


class CausalLoss:
    """Next-token cross entropy."""

    def __init__(self, softmax: Softmax | None = None, logits_bytes: int = LOGITS_BYTES) -> None:
        self.head = partial(cross_entropy, softmax=softmax or softmax_, logits_bytes=logits_bytes)

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        return {"lm": counted(batch["labels"])}

    def terms(self, output: Output, batch: Batch) -> Terms:
        return {"lm": (self.head(output, batch["labels"]), counted(batch["labels"]))}


class BertLoss:
    """Masked-token cross entropy plus next-sentence cross entropy, each divided by its own count."""

    def __init__(self, softmax: Softmax | None = None, logits_bytes: int = LOGITS_BYTES) -> None:
        self.head = partial(cross_entropy, softmax=softmax or softmax_, logits_bytes=logits_bytes)

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        return {"mlm": counted(batch["labels"]), "nsp": counted(batch["next_sentence"])}

    def terms(self, output: Output, batch: Batch) -> Terms:
        counts = self.counts(batch)
        assert output.next_sentence is not None
        target = batch["next_sentence"].long()
        nsp = F.cross_entropy(output.next_sentence.float(), target, ignore_index=IGNORED, reduction="sum")
        return {"mlm": (self.head(output, batch["labels"]), counts["mlm"]), "nsp": (nsp, counts["nsp"])}


class OwnLoss:
    """A user's function (output, batch) -> (sum, count). Its count is known only afterwards and divides last."""

    def __init__(self, function: LossFunction) -> None:
        self.function = function

    def counts(self, batch: Batch) -> None:
        return None

    def terms(self, output: Output, batch: Batch) -> Terms:
        total, count = pair(self.function(output, batch), self.function)
        return {"loss": (total, count)}


def counted(labels: Tensor) -> Tensor:
    return (labels != IGNORED).sum().float()


def cross_entropy(
    output: Output, labels: Tensor, softmax: Softmax | None = None, logits_bytes: int = LOGITS_BYTES
) -> Tensor:
    """Sum of -log softmax(logits)[label] over labels that count; the logits exist only a chunk at a time."""
    hidden = output.hidden.flatten(0, -2)
    size = max(LEAST, logits_bytes // (4 * output.weight.shape[0]))
    return _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, output.weight, output.bias, labels.flatten(), softmax or softmax_, size, torch.is_grad_enabled()
    )


def softmax_(logits: Tensor, counts: Tensor) -> Tensor:
    """Overwrite each row with its softmax (zeros where `counts` is false); gives the log of its sum of exponentials.
    The one part of the loss with many passes over the logits, and so the one worth compiling."""
    x = logits.float()  # fp32 logits themselves, or one fp32 copy
    most = x.amax(-1, keepdim=True)
    total = x.sub_(most).exp_().sum(-1, keepdim=True)
    x.mul_(counts / total)
    if x is not logits:
        logits.copy_(x)
    return total.log() + most


def _chunk_loss(logits: Tensor, labels: Tensor, softmax: Softmax) -> Tensor:
    """Loss summed over a chunk; the logits are overwritten with the loss's gradient with respect to them."""
    counts = (labels != IGNORED)[:, None]
    target = torch.where(counts, labels[:, None], 0).long()
    picked = logits.gather(1, target).float()
    total = softmax(logits, counts)
    logits.scatter_(1, target, logits.gather(1, target) - counts.to(logits.dtype))
    return torch.where(counts, total - picked, 0.0).sum()


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Output head and cross entropy in one: gradients are made in the forward pass, chunk by chunk of tokens, so that
    each logit is computed once and dropped. One buffer of logits serves all chunks."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        softmax: Softmax,
        most: int,
        train: bool,
    ) -> Tensor:
        tokens, vocab = hidden.shape[0], weight.shape[0]
        size = -(-tokens // -(-tokens // most))  # all chunks of one size but perhaps the last
        buffer = hidden.new_empty(size, vocab)
        loss = torch.zeros((), device=hidden.device)
        # Summed over chunks in fp32: many bf16 sums would lose the small ones.
        d_hidden = torch.empty_like(hidden) if train else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if train else None
        d_bias = torch.zeros_like(bias, dtype=torch.float32) if train and bias is not None else None
        for start in range(0, tokens, size):
            h, y = hidden[start : start + size], labels[start : start + size]
            logits = buffer[: len(h)]
            if bias is None:
                torch.mm(h, weight.T, out=logits)
            else:
                torch.addmm(bias, h, weight.T, out=logits)
            loss += _chunk_loss(logits, y, softmax)
            if d_hidden is not None and d_weight is not None:
                torch.mm(logits, weight, out=d_hidden[start : start + size])
                if h.dtype == torch.float32:
                    d_weight.addmm_(logits.T, h)
                else:
                    d_weight.add_(logits.T @ h)
            if d_bias is not None:
                d_bias += logits.sum(0, dtype=torch.float32)
        ctx.save_for_backward(d_hidden, d_weight, d_bias)
        ctx.used = False
        ctx.dtypes = (hidden.dtype, weight.dtype, bias.dtype if bias is not None else None)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        assert not ctx.used, "the gradients were scaled in place: one backward pass only"
        ctx.used = True
        saved = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return (*(d.mul_(grads[0]).to(dtype) if d is not None else None for d, dtype in saved), None, None, None, None)
