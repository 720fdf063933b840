"""Losses as (sum, count) pairs: a step's loss is each term's sum over its count in the whole global batch, in fp32.

Means of micro batches are never averaged, so neither micro batch size nor rank count changes the number. Labels of -100
count nowhere.
"""

import importlib
import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from trainyard.errors import UserError
from trainyard.models import Batch, Output

IGNORED = -100
LOGITS_BYTES = 1 << 26
"""fp32 logits held at a time, roughly; but never fewer than LEAST tokens' worth, so that products stay efficient."""
LEAST = 1024

Terms = dict[str, tuple[Tensor, Tensor]]
LossFunction = Callable[[Output, Batch], tuple[Tensor, Tensor]]
Chunk = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Loss(Protocol):
    def counts(self, batch: Batch) -> dict[str, Tensor] | None:
        """How many labels each term counts, known from the labels alone; None where only the forward pass tells."""

    def terms(self, output: Output, batch: Batch) -> Terms:
        """Each term's sum and count over this batch."""


class CausalLoss:
    """Next-token cross entropy."""

    def __init__(self, chunk: Chunk | None = None) -> None:
        self.chunk = chunk or softmax_chunk

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        return {"lm": counted(batch["labels"])}

    def terms(self, output: Output, batch: Batch) -> Terms:
        return {"lm": (cross_entropy(output, batch["labels"], self.chunk), counted(batch["labels"]))}


class BertLoss:
    """Masked-token cross entropy plus next-sentence cross entropy, each divided by its own count."""

    def __init__(self, chunk: Chunk | None = None) -> None:
        self.chunk = chunk or softmax_chunk

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        return {"mlm": counted(batch["labels"]), "nsp": counted(batch["next_sentence"])}

    def terms(self, output: Output, batch: Batch) -> Terms:
        counts = self.counts(batch)
        assert output.next_sentence is not None
        target = batch["next_sentence"].long()
        nsp = F.cross_entropy(output.next_sentence.float(), target, ignore_index=IGNORED, reduction="sum")
        return {"mlm": (cross_entropy(output, batch["labels"], self.chunk), counts["mlm"]), "nsp": (nsp, counts["nsp"])}


class OwnLoss:
    """A user's function (output, batch) -> (sum, count). Its count is known only afterwards and divides last."""

    def __init__(self, function: LossFunction) -> None:
        self.function = function

    def counts(self, batch: Batch) -> None:
        return None

    def terms(self, output: Output, batch: Batch) -> Terms:
        total, count = pair(self.function(output, batch), self.function)
        return {"loss": (total, count)}


def pair(result: Any, function: Callable[..., Any]) -> tuple[Tensor, Tensor]:
    """What a user's loss or metric must give: (sum, count)."""
    name = getattr(function, "__name__", str(function))
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Tensor)):
        raise UserError(f"{name}: gave {type(result).__name__}; a loss or metric gives (sum, count), the sum a tensor")
    total, count = result
    if total.numel() != 1:
        raise UserError(f"{name}: its sum has shape {list(total.shape)}; give the sum over all counted elements")
    return total.float().reshape(()), torch.as_tensor(count, device=total.device).float().reshape(())


def counted(labels: Tensor) -> Tensor:
    return (labels != IGNORED).sum().float()


def cross_entropy(output: Output, labels: Tensor, chunk: Chunk | None = None) -> Tensor:
    """Sum of -log softmax(logits)[label] over labels that count; the logits exist only a chunk at a time."""
    hidden = output.hidden.flatten(0, -2)
    return _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, output.weight, output.bias, labels.flatten(), chunk or softmax_chunk, torch.is_grad_enabled()
    )


def softmax_chunk(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Loss summed over a chunk, and its gradient with respect to the logits (in their dtype). One fp32 buffer."""
    x = logits.float()  # fp32 logits are overwritten: nobody else reads them
    counts = (labels != IGNORED)[:, None]
    target = torch.where(counts, labels[:, None], 0).long()
    x.sub_(x.amax(-1, keepdim=True))
    picked = x.gather(1, target)
    total = x.exp_().sum(-1, keepdim=True)
    loss = torch.where(counts, total.log() - picked, 0.0).sum()
    x.mul_(counts / total).scatter_add_(1, target, -counts.float())
    return loss, x.to(logits.dtype)


def softmax_chunk_fusible(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The same without writing in place and without a scatter: a compiler makes it two passes over the logits."""
    x = logits.float()
    counts = (labels != IGNORED)[:, None]
    hit = torch.arange(x.shape[1], dtype=torch.int32, device=x.device) == labels[:, None]
    x = x - x.amax(-1, keepdim=True)
    total = x.exp().sum(-1, keepdim=True)
    picked = torch.where(hit, x, 0.0).sum(-1, keepdim=True)
    loss = torch.where(counts, total.log() - picked, 0.0).sum()
    gradient = torch.where(counts, x.exp() / total - hit.float(), 0.0)
    return loss, gradient.to(logits.dtype)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Output head and cross entropy in one: gradients are made in the forward pass, chunk by chunk of tokens, so that
    each logit is computed once and dropped."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, chunk: Chunk, train: bool
    ) -> Tensor:
        tokens, vocab = hidden.shape[0], weight.shape[0]
        pieces = -(-tokens // max(LEAST, LOGITS_BYTES // (4 * vocab)))
        loss = torch.zeros((), device=hidden.device)
        d_hidden = torch.empty_like(hidden) if train else None
        d_weight: Tensor | None = None
        d_bias: Tensor | None = None
        start = 0
        for h, y in zip(hidden.chunk(pieces), labels.chunk(pieces), strict=True):
            total, d_logits = chunk(F.linear(h, weight, bias), y)
            loss += total
            if d_hidden is not None:
                d_hidden[start : start + len(h)] = d_logits @ weight
                d_weight = _accumulate(d_weight, d_logits, h)
                if bias is not None:
                    d_bias = d_logits.float().sum(0) + (d_bias if d_bias is not None else 0)
            start += len(h)
        ctx.save_for_backward(d_hidden, d_weight, d_bias)
        ctx.dtypes = (hidden.dtype, weight.dtype, bias.dtype if bias is not None else None)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return (*(d.mul(grads[0]).to(dtype) if d is not None else None for d, dtype in saved), None, None, None)


def _accumulate(total: Tensor | None, d_logits: Tensor, hidden: Tensor) -> Tensor:
    """Add this chunk's gradient of the head. Summed in fp32: many bf16 sums would lose the small ones."""
    if hidden.dtype == torch.float32:
        return torch.addmm(total, d_logits.T, hidden) if total is not None else d_logits.T @ hidden
    piece = d_logits.T @ hidden
    return total.add_(piece) if total is not None else piece.float()


def import_function(dotted: str, key: str) -> Callable[..., Any]:
    """The function that `module:function` names; the current directory is searched too."""
    module, _, name = dotted.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        function = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise UserError(f"{key}={dotted}: cannot import {module}: {error}") from None
    if not callable(function):
        raise UserError(f"{key}={dotted}: {module} has no function {name}")
    return function
