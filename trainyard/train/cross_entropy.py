"""Output projection fused with vocab-parallel cross entropy: logits exist for one chunk of tokens at a time, and each
is computed once.

`HeadGemm` selects how the projection multiplies (in the weights' dtype or in fp8), `ChunkLossFn` what computes the loss
of a chunk (torch, compiled torch, or one fused kernel of the device).
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainyard.compat import add_matmul_
from trainyard.core.constants import IGNORE_INDEX
from trainyard.kernels.fp8_linear import SIZE_MULTIPLE, Fp8Options, compute_amax, matmul, quantize
from trainyard.kernels.reference import Kernels
from trainyard.models import ModelOutput
from trainyard.parallel.tensor_parallel import TensorAxis
from trainyard.train.compile.compile_blocks import CompileFn
from trainyard.train.decisions import loss_chunk_tokens

MAX_LOGITS_BYTES = 1 << 25
"""Size of the fp32 logits that exist at one time, unless the device sets another."""

ChunkLossFn = Callable[[Tensor, Tensor, ModelOutput, Tensor | None, bool], Tensor]
"""(logits, labels, output, weights, needs_gradient): returns the loss of each token and overwrites the logits with the
gradient of their sum, weighted if `weights` are given; with something else if no gradient is needed."""


class HeadGemm:
    """The three matrix products of the output projection with a chunk of hidden states, in the dtype of the weights.
    `weight` [V, D] and `bias` are padded."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def logits(self, hidden: Tensor, out: Tensor) -> None:
        """Write the logits of `hidden` to `out`."""
        if self.bias is None:
            torch.mm(hidden, self.weight.T, out=out)
        else:
            torch.addmm(self.bias, hidden, self.weight.T, out=out)

    def backward(self, gradient: Tensor, hidden: Tensor, d_hidden: Tensor, d_weight: Tensor | None) -> None:
        """Write `d_hidden` and accumulate into `d_weight` (fp32; None: frozen) from the gradient of the logits."""
        torch.mm(gradient, self.weight, out=d_hidden)
        if d_weight is not None:
            add_matmul_(d_weight, gradient.T, hidden)


class Fp8HeadGemm(HeadGemm):
    """fp8 products as in kernels/fp8_linear.py. The weight is quantized once for all chunks."""

    def __init__(self, weight: Tensor, bias: Tensor | None, recipe: Fp8Options, use_reference: bool) -> None:
        """`use_reference` emulates fp8 products on devices without them."""
        super().__init__(weight, bias)
        self.recipe, self.use_reference = recipe, use_reference
        self.weight_fp8, self.weight_t = self._quantize(weight, torch.float8_e4m3fn)

    def logits(self, hidden: Tensor, out: Tensor) -> None:
        hidden_fp8, self.hidden_t = self._quantize(hidden, torch.float8_e4m3fn)
        logits = matmul(hidden_fp8, self.weight_fp8, self.bias, self.recipe.fast_accum, self.use_reference, out.dtype)
        out.copy_(logits[: len(out)])

    def backward(self, gradient: Tensor, hidden: Tensor, d_hidden: Tensor, d_weight: Tensor | None) -> None:
        if self.recipe.grad_format == "bf16":
            super().backward(gradient, hidden, d_hidden, d_weight)
            return
        gradient_fp8, gradient_t = self._quantize(gradient, torch.float8_e5m2)
        options = (None, False, self.use_reference, d_hidden.dtype)
        d_hidden.copy_(matmul(gradient_fp8, self.weight_t, *options)[: len(d_hidden)])
        if d_weight is not None:
            d_weight += matmul(gradient_t, self.hidden_t, *options)

    def _quantize(self, x: Tensor, dtype: torch.dtype) -> Any:
        rowwise, reference = self.recipe.scaling == "row", self.use_reference
        amax = compute_amax(x, rowwise, True, reference)
        return quantize(x, amax, dtype, rowwise, reference, transposed=True)


class InvariantHeadGemm(HeadGemm):
    """Logits as the sampler computes them, with the same bits (`device.batch_invariant`)."""

    def __init__(self, weight: Tensor, bias: Tensor | None, kernels: Kernels) -> None:
        super().__init__(weight, bias)
        self.kernels = kernels

    def logits(self, hidden: Tensor, out: Tensor) -> None:
        out.copy_(self.kernels.linear(hidden, self.weight, self.bias))


def chunked_cross_entropy(
    output: ModelOutput,
    labels: Tensor,
    chunk_loss: ChunkLossFn | None = None,
    make_gemm: Callable[[Tensor, Tensor | None], HeadGemm] = HeadGemm,
    logits_bytes: int = MAX_LOGITS_BYTES,
    max_chunks: int | None = None,
    per_token: bool = False,
    size_multiple: int = SIZE_MULTIPLE,
) -> Tensor:
    """Sum of -log softmax(logits)[label] over all labels except IGNORE_INDEX. Each tensor-parallel rank computes the
    logits of its part of the vocabulary, one chunk of tokens at a time. A trace, which needs no values, takes only the
    first `max_chunks` of them, because all allocate the same. The vocabulary is padded to a multiple of
    `size_multiple`.

    `per_token` returns the terms of the sum, in the shape of the labels. Its gradients are not known before those of
    the terms are, so backward computes the logits once more."""
    hidden = output.hidden_for_head().flatten(0, -2)
    size = loss_chunk_tokens(hidden.shape[0], output.weight.shape[0], logits_bytes)
    starts = range(0, hidden.shape[0], size)[:max_chunks]
    chunks = _Chunks(labels.flatten(), output, chunk_loss or torch_chunk_loss, make_gemm, size, starts, size_multiple)
    inputs = (hidden, output.weight, output.bias, chunks)
    if per_token:
        return _TokenLosses.apply(*inputs).view(labels.shape)  # type: ignore[no-untyped-call]
    return _ChunkedCrossEntropy.apply(*inputs, torch.is_grad_enabled())  # type: ignore[no-untyped-call]


def make_head_loss(
    kernels: Kernels, compile_fn: CompileFn | None, fp8: Fp8Options | None, logits_bytes: int
) -> Callable[[ModelOutput, Tensor], Tensor]:
    """`chunked_cross_entropy` with the fastest parts that the device has, in fp8 if `fp8` is given."""
    if kernels.is_batch_invariant:  # with the vocabulary as the sampler has it: a wider matmul may sum otherwise
        return partial(
            chunked_cross_entropy,
            chunk_loss=partial(invariant_chunk_loss, log_softmax=kernels.log_softmax),
            make_gemm=partial(InvariantHeadGemm, kernels=kernels),
            logits_bytes=logits_bytes,
            size_multiple=1,
        )
    make_gemm: Callable[..., HeadGemm] = HeadGemm
    if fp8:
        make_gemm = partial(Fp8HeadGemm, recipe=fp8, use_reference=not kernels.has_fp8_matmul)
    chunk_loss = select_chunk_loss(kernels, compile_fn)
    return partial(chunked_cross_entropy, chunk_loss=chunk_loss, make_gemm=make_gemm, logits_bytes=logits_bytes)


def select_chunk_loss(kernels: Kernels, compile_fn: CompileFn | None) -> ChunkLossFn:
    """The device's fused kernel if a rank has the full vocabulary, else torch with a compiled softmax if asked."""
    unfused = partial(torch_chunk_loss, softmax=compile_fn(softmax_) if compile_fn else softmax_)
    fused = kernels.cross_entropy_
    if fused is None:
        return unfused

    def chunk_loss(
        logits: Tensor, labels: Tensor, output: ModelOutput, weights: Tensor | None, needs_gradient: bool
    ) -> Tensor:
        if output.tp.size > 1:
            return unfused(logits, labels, output, weights, needs_gradient)
        return fused(logits, labels, IGNORE_INDEX, weights, needs_gradient)

    return chunk_loss


def softmax_(logits: Tensor, counts: Tensor, label_logits: Tensor, tp: TensorAxis) -> Tensor:
    """Overwrite each row with its softmax (zeros where `counts` is false) and return the loss of each row.

    `label_logits` has the logit of each row's label, or 0 on ranks that do not hold it. This is the only part of the
    loss with many passes over the logits, and so the only one worth compiling.
    """
    x = logits.float()  # fp32 logits themselves, or one fp32 copy
    row_max = tp.group.all_reduce_max(x.amax(-1, keepdim=True))
    exp_sum = x.sub_(row_max).exp_().sum(-1, keepdim=True)
    total, label_logits = tp.group.all_reduce_sum(torch.stack((exp_sum, label_logits))).unbind()
    x.mul_(counts / total)
    if x is not logits:
        logits.copy_(x)
    return torch.where(counts, total.log() + row_max - label_logits, 0.0)


def torch_chunk_loss(
    logits: Tensor,
    labels: Tensor,
    output: ModelOutput,
    weights: Tensor | None = None,
    needs_gradient: bool = True,
    softmax: Callable[..., Tensor] = softmax_,
) -> Tensor:
    """The losses of a chunk in plain torch, for a vocabulary that is split over tensor-parallel ranks or not."""
    counts = (labels != IGNORE_INDEX)[:, None]
    target = torch.where(counts, labels[:, None], 0)
    is_local = counts
    if output.tp.size > 1:
        assert output.vocab_start is not None
        assert output.vocab_size is not None
        target = target - output.vocab_start
        is_local = counts & (target >= 0) & (target < logits.shape[1])
        if output.vocab_size % output.tp.size:  # the last ranks have padding
            token = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device) + output.vocab_start
            logits.masked_fill_(token >= output.vocab_size, -torch.inf)
    target = torch.where(is_local, target, 0)  # int32 like the labels: 64-bit indices are slow on some devices
    label_logits = torch.where(is_local, logits.gather(1, target).float(), 0.0)
    loss = softmax(logits, counts, label_logits, output.tp)
    if needs_gradient:
        logits.scatter_(1, target, logits.gather(1, target) - is_local.to(logits.dtype))
        if weights is not None:
            logits.mul_(weights[:, None])
    return loss[:, 0]


def invariant_chunk_loss(
    logits: Tensor,
    labels: Tensor,
    output: ModelOutput,
    weights: Tensor | None,
    needs_gradient: bool,
    *,
    log_softmax: Callable[[Tensor], Tensor],
) -> Tensor:
    """The losses of a chunk from the log-probabilities of the sampler. One rank has the full vocabulary."""
    counts = (labels != IGNORE_INDEX)[:, None]
    target = torch.where(counts, labels[:, None], 0).long()
    logprobs = log_softmax(logits.float())
    loss = torch.where(counts, -logprobs.gather(1, target), 0.0)
    if needs_gradient:
        logits.copy_(logprobs.exp_().mul_(counts))
        logits.scatter_(1, target, logits.gather(1, target) - counts.to(logits.dtype))
        if weights is not None:
            logits.mul_(weights[:, None])
    return loss[:, 0]


def soft_cap_(logits: Tensor, cap: float) -> Tensor:
    """Overwrite logits x with cap tanh(x / cap) and return the derivative, fp32."""
    tanh = (logits.float() / cap).tanh_()
    logits.copy_(tanh * cap)
    return tanh.square_().neg_().add_(1)


def pad_rows(x: Tensor, count: int) -> Tensor:
    """`x` with `count` rows of zeros appended."""
    return torch.cat((x, x.new_zeros(count, *x.shape[1:])))


class _Chunks(NamedTuple):
    """How the loss is computed: one chunk of tokens after the other, in one buffer of logits."""

    labels: Tensor
    output: ModelOutput
    loss: ChunkLossFn
    make_gemm: Callable[[Tensor, Tensor | None], HeadGemm]
    size: int
    starts: range
    size_multiple: int
    """GPUs are slow with odd matrix sizes and reject them in fp8."""

    def losses(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, gradients: "_HeadGradients | None" = None,
        weights: Tensor | None = None,
    ) -> Iterator[tuple[int, Tensor]]:  # fmt: skip
        """The first token of each chunk, and the losses of its tokens. `gradients` are those of their sum, with a
        weight for each token if given."""
        vocab = weight.shape[0]
        padding = -vocab % self.size_multiple  # tokens that the softmax does not see
        if padding:
            weight, bias = pad_rows(weight, padding), None if bias is None else pad_rows(bias, padding)
        head = self.make_gemm(weight, bias)
        buffer = hidden.new_empty(self.size, vocab + padding)
        for start in self.starts:
            tokens = slice(start, start + self.size)
            h, y = hidden[tokens], self.labels[tokens]
            logits = buffer[: len(h)]
            head.logits(h, logits)
            slope = None if self.output.soft_cap is None else soft_cap_(logits, self.output.soft_cap)
            of_chunk = None if weights is None else weights[tokens]
            loss = self.loss(logits[:, :vocab], y, self.output, of_chunk, gradients is not None)
            if gradients:
                if slope is not None:
                    logits.mul_(slope)
                if padding:
                    logits[:, vocab:].zero_()
                head.backward(logits, h, gradients.hidden[tokens], gradients.weight)
                if gradients.bias is not None:
                    gradients.bias += logits.sum(0, dtype=torch.float32)
            yield start, loss


class _HeadGradients:
    """Accumulated over chunks, of what is trained in fp32: bf16 would lose small terms."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, trains_weight: bool, multiple: int) -> None:
        rows = weight.shape[0] + -weight.shape[0] % multiple
        self.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        self.vocab, self.hidden = weight.shape[0], torch.empty_like(hidden)
        self.weight = weight.new_zeros(rows, weight.shape[1], dtype=torch.float32) if trains_weight else None
        self.bias = None if bias is None else bias.new_zeros(rows, dtype=torch.float32)

    def tensors(self) -> list[Tensor | None]:
        """Of hidden, weight and bias, without padding."""
        return [self.hidden, *(None if each is None else each[: self.vocab] for each in (self.weight, self.bias))]


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Computes the gradients in the forward pass, so that each logit is computed once."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, chunks: _Chunks, train: bool) -> Tensor:
        gradients = (
            _HeadGradients(hidden, weight, bias, ctx.needs_input_grad[1], chunks.size_multiple) if train else None
        )
        loss = torch.zeros((), device=hidden.device)
        for _, losses in chunks.losses(hidden, weight, bias, gradients):
            loss += losses.sum()
        ctx.save_for_backward(*(gradients.tensors() if gradients else ()))
        ctx.scaled_by = None
        ctx.dtypes = (hidden.dtype, weight.dtype, bias.dtype if bias is not None else None)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Scales in place (`.data` creates no new version). A pipeline schedule that splits the backward pass calls this
        # twice.
        scale = grads[0] if ctx.scaled_by is None else grads[0] / ctx.scaled_by
        ctx.scaled_by = grads[0]
        saved = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return *(d.data.mul_(scale).to(dtype) if d is not None else None for d, dtype in saved), None, None


class _TokenLosses(torch.autograd.Function):
    """The loss of each token. Backward, which learns how much each counts, computes the logits again."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, chunks: _Chunks) -> Tensor:
        losses = torch.zeros(len(hidden), device=hidden.device)
        for start, found in chunks.losses(hidden, weight, bias):
            losses[start : start + len(found)] = found
        ctx.save_for_backward(hidden, weight, bias)
        ctx.chunks = chunks
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        gradients = _HeadGradients(hidden, weight, bias, ctx.needs_input_grad[1], ctx.chunks.size_multiple)
        for _ in ctx.chunks.losses(hidden, weight, bias, gradients, grads[0]):
            pass
        found = zip(gradients.tensors(), gradients.dtypes, strict=True)
        return *(None if each is None else each.to(dtype) for each, dtype in found), None
