"""The output head and cross entropy in one: logits exist only a chunk of tokens at a time, and each is computed once.

How the head multiplies is a choice (`Products`): as the weights are, or in fp8. What happens to a chunk of logits is
another (`ChunkLoss`): plain torch, compiled, or one kernel of the device.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from trainyard.compat import add_matmul_
from trainyard.compile.compile_blocks import CompileFn
from trainyard.core.constants import IGNORE_INDEX
from trainyard.kernels.fp8_linear import SIZE_MULTIPLE, Fp8Options, compute_amax, matmul, quantize
from trainyard.kernels.reference import Kernels
from trainyard.models import ModelOutput
from trainyard.parallel.tensor_parallel import TensorAxis
from trainyard.train.decisions import loss_chunk_tokens

MAX_LOGITS_BYTES = 1 << 25
"""fp32 logits that exist at one time, unless the device asks for another size."""

SoftmaxFn = Callable[[Tensor, Tensor, Tensor, TensorAxis], Tensor]
ChunkLossFn = Callable[[Tensor, Tensor, ModelOutput], Tensor]
"""(logits, labels, output): the loss summed over a chunk; the logits become its gradient with respect to them."""


class HeadGemm(Protocol):
    """The three products of the head with a chunk of hidden states. `weight` [V, D] and `bias` are padded."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None: ...

    def logits(self, hidden: Tensor, out: Tensor) -> None: ...

    def backward(self, gradient: Tensor, hidden: Tensor, d_hidden: Tensor, d_weight: Tensor) -> None:
        """Fill `d_hidden` and add to `d_weight`, fp32, from the gradient of the logits."""


class DenseHeadGemm:
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def logits(self, hidden: Tensor, out: Tensor) -> None:
        if self.bias is None:
            torch.mm(hidden, self.weight.T, out=out)
        else:
            torch.addmm(self.bias, hidden, self.weight.T, out=out)

    def backward(self, gradient: Tensor, hidden: Tensor, d_hidden: Tensor, d_weight: Tensor) -> None:
        torch.mm(gradient, self.weight, out=d_hidden)
        add_matmul_(d_weight, gradient.T, hidden)


class Fp8HeadGemm:
    """As `kernels.fp8` multiplies, the weight cast once for all chunks."""

    def __init__(self, weight: Tensor, bias: Tensor | None, how: Fp8Options, plain: bool) -> None:
        self.bias, self.how, self.use_reference, self.rowwise = bias, how, plain, how.scaling == "row"
        self.weight, self.weight_t = self._cast(weight, torch.float8_e4m3fn)
        self.weight_bf16 = weight

    def logits(self, hidden: Tensor, out: Tensor) -> None:
        rows, self.hidden_t = self._cast(hidden, torch.float8_e4m3fn)
        out.copy_(matmul(rows, self.weight, self.bias, self.how.fast_accum, self.use_reference, out.dtype)[: len(out)])

    def backward(self, gradient: Tensor, hidden: Tensor, d_hidden: Tensor, d_weight: Tensor) -> None:
        if self.how.grad_format == "bf16":
            torch.mm(gradient, self.weight_bf16, out=d_hidden)
            add_matmul_(d_weight, gradient.T, hidden)
            return
        rows, turned = self._cast(gradient, torch.float8_e5m2)
        d_hidden.copy_(matmul(rows, self.weight_t, None, False, self.use_reference, d_hidden.dtype)[: len(d_hidden)])
        d_weight += matmul(turned, self.hidden_t, None, False, self.use_reference, d_hidden.dtype)

    def _cast(self, x: Tensor, dtype: torch.dtype) -> Any:
        return quantize(
            x,
            compute_amax(x, self.rowwise, True, self.use_reference),
            dtype,
            self.rowwise,
            self.use_reference,
            transposed=True,
        )


def chunked_cross_entropy(
    output: ModelOutput,
    labels: Tensor,
    chunk_loss: ChunkLossFn | None = None,
    products: Callable[[Tensor, Tensor | None], HeadGemm] = DenseHeadGemm,
    logits_bytes: int = MAX_LOGITS_BYTES,
) -> Tensor:
    """Sum of -log softmax(logits)[label] over labels that count; the logits exist only a chunk at a time, and each
    tensor-parallel rank has only its own words' logits."""
    hidden = output.hidden_for_head().flatten(0, -2)
    size = loss_chunk_tokens(hidden.shape[0], output.weight.shape[0], logits_bytes)
    return _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden,
        output.weight,
        output.bias,
        labels.flatten(),
        output,
        chunk_loss or torch_chunk_loss,
        products,
        size,
        torch.is_grad_enabled(),
    )


def make_head_loss(
    kernels: Kernels, compiler: CompileFn | None, fp8: Fp8Options | None, logits_bytes: int
) -> Callable[[ModelOutput, Tensor], Tensor]:
    """`cross_entropy` as a device does it best; in fp8 where asked."""
    products: Callable[..., HeadGemm] = DenseHeadGemm
    if fp8:
        products = partial(Fp8HeadGemm, how=fp8, plain=not kernels.has_fp8_matmul)
    chunk_loss = select_chunk_loss(kernels, compiler)
    return partial(chunked_cross_entropy, chunk_loss=chunk_loss, products=products, logits_bytes=logits_bytes)


def select_chunk_loss(kernels: Kernels, compiler: CompileFn | None) -> ChunkLossFn:
    """One kernel where the device has it and a rank has all words; else plain torch, its softmax compiled if asked."""
    plain = partial(torch_chunk_loss, softmax=compiler(softmax_) if compiler else softmax_)
    fused = kernels.cross_entropy_
    if fused is None:
        return plain

    def chunk_loss(logits: Tensor, labels: Tensor, output: ModelOutput) -> Tensor:
        return fused(logits, labels, IGNORE_INDEX).sum() if output.tp.size == 1 else plain(logits, labels, output)

    return chunk_loss


def softmax_(logits: Tensor, counts: Tensor, picked: Tensor, tp: TensorAxis) -> Tensor:
    """Overwrite each row with its softmax (zeros where `counts` is false); gives the row's loss, with `picked` the
    label's logit (0 on ranks that do not hold it). The one part of the loss with many passes over the logits, and so
    the one worth compiling."""
    x = logits.float()  # fp32 logits themselves, or one fp32 copy
    most = tp.group.all_reduce_max(x.amax(-1, keepdim=True))
    total, label = tp.group.all_reduce_sum(torch.stack((x.sub_(most).exp_().sum(-1, keepdim=True), picked))).unbind()
    x.mul_(counts / total)
    if x is not logits:
        logits.copy_(x)
    return torch.where(counts, total.log() + most - label, 0.0)


def torch_chunk_loss(logits: Tensor, labels: Tensor, output: ModelOutput, softmax: SoftmaxFn = softmax_) -> Tensor:
    counts = (labels != IGNORE_INDEX)[:, None]
    target = torch.where(counts, labels[:, None], 0)
    here = counts
    if output.tp.size > 1:
        assert output.vocab_start is not None
        assert output.vocab_size is not None
        target = target - output.vocab_start
        here = counts & (target >= 0) & (target < logits.shape[1])
        if output.vocab_size % output.tp.size:  # the last ranks have rows of padding
            word = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device) + output.vocab_start
            logits.masked_fill_(word >= output.vocab_size, -torch.inf)
    target = torch.where(here, target, 0)  # int32, as labels are: indices of 64 bits are slow on some devices
    picked = torch.where(here, logits.gather(1, target).float(), 0.0)
    loss = softmax(logits, counts, picked, output.tp)
    logits.scatter_(1, target, logits.gather(1, target) - here.to(logits.dtype))
    return loss.sum()


def pad_rows(x: Tensor, count: int) -> Tensor:
    """With so many rows of zeros after the last."""
    return torch.cat((x, x.new_zeros(count, *x.shape[1:])))


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Gradients are made in the forward pass, chunk by chunk of tokens. One buffer of logits serves all chunks."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        output: ModelOutput,
        chunk_loss: ChunkLossFn,
        products: Callable[[Tensor, Tensor | None], HeadGemm],
        size: int,
        train: bool,
    ) -> Tensor:
        tokens, vocab = hidden.shape[0], weight.shape[0]
        # GPUs are slow with matrices of odd sizes, and in fp8 refuse them: words are added that no softmax sees.
        gap = -vocab % SIZE_MULTIPLE
        if gap:
            weight, bias = pad_rows(weight, gap), None if bias is None else pad_rows(bias, gap)
        head = products(weight, bias)
        buffer = hidden.new_empty(size, vocab + gap)
        loss = torch.zeros((), device=hidden.device)
        # Summed over chunks in fp32: many bf16 sums would lose the small ones.
        d_hidden = torch.empty_like(hidden) if train else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if train else None
        d_bias = torch.zeros_like(bias, dtype=torch.float32) if train and bias is not None else None
        for start in range(0, tokens, size):
            h, y = hidden[start : start + size], labels[start : start + size]
            logits = buffer[: len(h)]
            head.logits(h, logits)
            loss += chunk_loss(logits[:, :vocab], y, output)
            if gap:
                logits[:, vocab:].zero_()
            if d_hidden is not None and d_weight is not None:
                head.backward(logits, h, d_hidden[start : start + size], d_weight)
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
            None,
        )
