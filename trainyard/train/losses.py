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

from trainyard.compat import add_product_
from trainyard.kernels.plain import Kernels
from trainyard.models import Batch, Output
from trainyard.parallel.axes import TensorAxis
from trainyard.train.compile import Compiler
from trainyard.train.own import pair

IGNORED = -100
LOGITS_BYTES = 1 << 25
"""fp32 logits held at a time unless the device asks for another size; but never fewer than LEAST tokens' worth."""
LEAST = 256

Terms = dict[str, tuple[Tensor, Tensor]]
LossFunction = Callable[[Output, Batch], tuple[Tensor, Tensor]]
Softmax = Callable[[Tensor, Tensor, Tensor, TensorAxis], Tensor]
ChunkLoss = Callable[[Tensor, Tensor, Output], Tensor]
"""(logits, labels, output): the loss summed over a chunk; the logits become its gradient with respect to them."""


class Loss(Protocol):
    @property
    def names(self) -> tuple[str, ...]:
        """Of the terms."""

    def counts(self, batch: Batch) -> dict[str, Tensor] | None:
        """How many labels each term counts, known from the labels alone; None where only the forward pass tells."""

    def terms(self, output: Output, batch: Batch) -> Terms:
        """Each term's sum and count over this batch."""


class CausalLoss:
    """Next-token cross entropy."""

    names = ("lm",)

    def __init__(self, chunk_loss: ChunkLoss | None = None, logits_bytes: int = LOGITS_BYTES) -> None:
        self.head = partial(cross_entropy, chunk_loss=chunk_loss, logits_bytes=logits_bytes)

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        return {"lm": counted(batch["labels"])}

    def terms(self, output: Output, batch: Batch) -> Terms:
        return {"lm": (self.head(output, batch["labels"]), counted(batch["labels"]))}


class BertLoss:
    """Masked-token cross entropy plus next-sentence cross entropy, each divided by its own count."""

    names = ("mlm", "nsp")

    def __init__(self, chunk_loss: ChunkLoss | None = None, logits_bytes: int = LOGITS_BYTES) -> None:
        self.head = partial(cross_entropy, chunk_loss=chunk_loss, logits_bytes=logits_bytes)

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

    names = ("loss",)

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
    output: Output, labels: Tensor, chunk_loss: ChunkLoss | None = None, logits_bytes: int = LOGITS_BYTES
) -> Tensor:
    """Sum of -log softmax(logits)[label] over labels that count; the logits exist only a chunk at a time, and each
    tensor-parallel rank has only its own words' logits."""
    hidden = output.to_head().flatten(0, -2)
    size = max(LEAST, logits_bytes // (4 * output.weight.shape[0]))
    return _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden,
        output.weight,
        output.bias,
        labels.flatten(),
        output,
        chunk_loss or plain_chunk_loss,
        size,
        torch.is_grad_enabled(),
    )


def best_chunk_loss(kernels: Kernels, compiler: Compiler | None) -> ChunkLoss:
    """One kernel where the device has it and a rank has all words; else plain torch, its softmax compiled if asked."""
    plain = partial(plain_chunk_loss, softmax=compiler(softmax_) if compiler else softmax_)
    fused = kernels.cross_entropy_
    if fused is None:
        return plain

    def chunk_loss(logits: Tensor, labels: Tensor, output: Output) -> Tensor:
        return fused(logits, labels, IGNORED).sum() if output.tp.size == 1 else plain(logits, labels, output)

    return chunk_loss


def softmax_(logits: Tensor, counts: Tensor, picked: Tensor, tp: TensorAxis) -> Tensor:
    """Overwrite each row with its softmax (zeros where `counts` is false); gives the row's loss, with `picked` the
    label's logit (0 on ranks that do not hold it). The one part of the loss with many passes over the logits, and so
    the one worth compiling."""
    x = logits.float()  # fp32 logits themselves, or one fp32 copy
    most = tp.group.max(x.amax(-1, keepdim=True))
    total, label = tp.group.sum(torch.stack((x.sub_(most).exp_().sum(-1, keepdim=True), picked))).unbind()
    x.mul_(counts / total)
    if x is not logits:
        logits.copy_(x)
    return torch.where(counts, total.log() + most - label, 0.0)


def plain_chunk_loss(logits: Tensor, labels: Tensor, output: Output, softmax: Softmax = softmax_) -> Tensor:
    counts = (labels != IGNORED)[:, None]
    target = torch.where(counts, labels[:, None], 0)
    here = counts
    if output.tp.size > 1:
        assert output.first is not None
        assert output.vocab is not None
        target = target - output.first
        here = counts & (target >= 0) & (target < logits.shape[1])
        if output.vocab % output.tp.size:  # the last ranks have rows of padding
            word = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device) + output.first
            logits.masked_fill_(word >= output.vocab, -torch.inf)
    target = torch.where(here, target, 0).long()
    picked = torch.where(here, logits.gather(1, target).float(), 0.0)
    loss = softmax(logits, counts, picked, output.tp)
    logits.scatter_(1, target, logits.gather(1, target) - here.to(logits.dtype))
    return loss.sum()


def pad(x: Tensor, count: int) -> Tensor:
    """With so many rows of zeros after the last."""
    return torch.cat((x, x.new_zeros(count, *x.shape[1:])))


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
        output: Output,
        chunk_loss: ChunkLoss,
        most: int,
        train: bool,
    ) -> Tensor:
        tokens, vocab = hidden.shape[0], weight.shape[0]
        size = -(-tokens // -(-tokens // most))  # all chunks of one size but perhaps the last
        # A matrix whose size is no multiple of 8 is slow to multiply on GPUs: words are added that no softmax sees.
        gap = -vocab % 8
        if gap:
            weight, bias = pad(weight, gap), None if bias is None else pad(bias, gap)
        buffer = hidden.new_empty(size, vocab + gap)
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
            loss += chunk_loss(logits[:, :vocab], y, output)
            if gap:
                logits[:, vocab:].zero_()
            if d_hidden is not None and d_weight is not None:
                torch.mm(logits, weight, out=d_hidden[start : start + size])
                add_product_(d_weight, logits.T, h)
            if d_bias is not None:
                d_bias += logits.sum(0, dtype=torch.float32)
        d_weight, d_bias = (None if x is None else x[:vocab] for x in (d_weight, d_bias))
        ctx.save_for_backward(d_hidden, d_weight, d_bias)
        ctx.scaled_by = None
        ctx.dtypes = (hidden.dtype, weight.dtype, bias.dtype if bias is not None else None)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Scaled in place (`.data`: no new version). A schedule that takes gradients of activations and of weights apart
        # comes twice.
        by = grads[0] if ctx.scaled_by is None else grads[0] / ctx.scaled_by
        ctx.scaled_by = grads[0]
        saved = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return (
            *(d.data.mul_(by).to(dtype) if d is not None else None for d, dtype in saved),
            None,
            None,
            None,
            None,
            None,
        )
