"""AdamW and LAMB over flat memory.

All parameters of a rank are views of one buffer, and so are gradients, fp32 master weights and the two moments:
clipping, update and the copy to the compute dtype are then few long passes over memory instead of many short ones.
Parameters with weight decay (as the blueprint says) come first in the buffer.

A step whose gradient norm or loss is not finite changes nothing; that is decided on the device, without asking the
host.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from trainyard.compat import foreach_norm, fused_adamw_
from trainyard.config.schema import OptimizerSection, PrecisionSection
from trainyard.models import Values, assign
from trainyard.models.blueprint import Blueprint
from trainyard.random import key32, row32
from trainyard.train.compile import Compiler
from trainyard.train.updates import adamw_, adamw_rounded_, moments, round_to_bf16

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ALIGN = 64
"""Elements: views start at multiples of 128 bytes or more."""


class Piece(NamedTuple):
    """A stretch of a parameter with global row and column numbers: what stochastic rounding draws by."""

    weight: Tensor
    """[rows, columns] view."""
    site: Tensor
    row: Tensor
    column: Tensor


class Optimizer:
    def __init__(
        self,
        model: nn.Module,
        blueprint: Blueprint,
        values: Values,
        config: OptimizerSection,
        precision: PrecisionSection,
        device: torch.device,
        seed: int = 0,
        compiler: Compiler | None = None,
    ) -> None:
        self.config = config
        self.seed = seed
        self.rounding = precision.kind == "bf16_sr"
        names = [name for name, _ in model.named_parameters()]
        self.names = sorted(names, key=lambda name: not blueprint.row(name).decay)
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self.spans: dict[str, tuple[int, torch.Size]] = {}
        size = decayed = 0
        for name in self.names:
            self.spans[name] = (size, shapes[name])
            size += -(-shapes[name].numel() // ALIGN) * ALIGN
            decayed = size if blueprint.row(name).decay else decayed
        self.decayed = decayed
        weight_dtype = torch.float32 if precision.kind == "fp32" else torch.bfloat16
        gradient_dtype = DTYPES[precision.accumulate]

        def buffer(dtype: torch.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.weights = buffer(weight_dtype)
        self.master = buffer(torch.float32) if precision.kind == "bf16" else self.weights
        self.first, self.second = buffer(torch.float32), buffer(torch.float32)
        self.gradients = buffer(gradient_dtype)
        self.gradient_views = [self.view(self.gradients, name) for name in self.names]
        for name in self.names:
            value = values(name)
            self.view(self.master, name).copy_(value)
            self.view(self.weights, name).copy_(value)
        parameters = assign(model, lambda name: self.view(self.weights, name))
        for name in self.names:
            _accumulate_into(parameters[name], self.view(self.gradients, name))
        self.updates = torch.zeros((), device=device)
        """Updates made (skipped steps do not count), for the moments' bias correction."""
        self.skipped = torch.zeros(2, dtype=torch.int32, device=device)
        """Steps skipped in all, and in a row."""
        self.bad_norms = torch.zeros(len(self.names), device=device)
        """Norms of each gradient at the last step that was skipped."""
        self.pieces = (
            {name: list(self._pieces(blueprint, name, device)) for name in self.names} if self.rounding else {}
        )
        self.compiled = compiler is not None
        self._adamw: Callable[..., None] = compiler(adamw_) if compiler else adamw_
        self._rounded: Callable[..., None] = compiler(adamw_rounded_, dynamic=True) if compiler else adamw_rounded_

    def view(self, flat: Tensor, name: str) -> Tensor:
        start, shape = self.spans[name]
        return flat[start : start + shape.numel()].view(shape)

    def clear(self) -> None:
        self.gradients.zero_()

    def weight_norm(self) -> Tensor:
        return torch.linalg.vector_norm(self.master, dtype=torch.float32)

    @torch.no_grad()
    def step(self, lr: Tensor, scale: Tensor, loss: Tensor, number: int) -> Tensor:
        """One update. Gradients are multiplied by `scale` and clipped first. Returns the norm before clipping."""
        norms = foreach_norm(self.gradient_views)
        norm = torch.linalg.vector_norm(norms) * scale
        ok = norm.isfinite() & loss.isfinite()
        self.updates += ok
        bad = (~ok).int()
        self.skipped = torch.stack((self.skipped[0] + bad, (self.skipped[1] + 1) * bad))
        self.bad_norms = torch.where(ok, self.bad_norms, norms)
        if self.config.clip:
            scale = scale * (self.config.clip / (norm + 1e-6)).clamp(max=1.0)
        beta1, beta2 = self.config.beta1, self.config.beta2
        correct = torch.stack((1 - beta1**self.updates, 1 - beta2**self.updates)).clamp(min=1e-30)
        key = None
        if self.rounding:
            key = torch.tensor(key32(self.seed, "rounding", number), dtype=torch.int32).to(lr.device)
        if self.config.kind == "lamb":
            self._lamb(lr, scale, correct, ok, key)
        elif key is not None:
            for name in self.names:
                self._round(name, lr, scale, correct, ok, key)
        else:
            self._flat(lr, scale, correct, ok)
        return norm

    def bad(self) -> list[str]:
        """Parameters whose gradient was not finite at the last skipped step (asks the device)."""
        return [
            name for name, norm in zip(self.names, self.bad_norms.tolist(), strict=True) if not abs(norm) < float("inf")
        ]

    def _flat(self, lr: Tensor, scale: Tensor, correct: Tensor, ok: Tensor) -> None:
        c = self.config
        copied = self.weights is not self.master
        flats = (self.weights, self.master, self.gradients, self.first, self.second)
        for span, decay in ((slice(self.decayed), c.weight_decay), (slice(self.decayed, None), 0.0)):
            weight, master, gradient, first, second = (flat[span] for flat in flats)
            betas = c.beta1, c.beta2
            if not len(master):
                continue
            # torch's own kernel is one pass too, but knows neither bf16 gradients nor the copy to bf16 weights.
            if self.gradients.dtype == torch.float32 and not (self.compiled and copied):
                fused_adamw_(master, gradient, first, second, self.updates, lr, scale, ok, decay, betas, c.eps)
                if copied:
                    weight.copy_(master)
            else:
                self._adamw(weight, master, gradient, first, second, lr, scale, correct, ok, decay, *betas, c.eps)

    def _round(self, name: str, lr: Tensor, scale: Tensor, correct: Tensor, ok: Tensor, key: Tensor) -> None:
        c, (start, _) = self.config, self.spans[name]
        decay = c.weight_decay if start < self.decayed else 0.0
        for piece in self.pieces[name]:
            at, count = piece.weight.storage_offset(), piece.weight.numel()
            flats = (self.gradients, self.first, self.second)
            rest = (flat[at : at + count].view_as(piece.weight) for flat in flats)
            draw = (_rows(piece, key), piece.site, piece.column)
            self._rounded(piece.weight, *draw, *rest, lr, scale, correct, ok, decay, c.beta1, c.beta2, c.eps)

    def _lamb(self, lr: Tensor, scale: Tensor, correct: Tensor, ok: Tensor, key: Tensor | None) -> None:
        """Each matrix moves by lr times its own norm (weights without decay: plain Adam)."""
        c = self.config
        for name in self.names:
            weight, master, gradient, first, second = (
                self.view(flat, name) for flat in (self.weights, self.master, self.gradients, self.first, self.second)
            )
            new_first, new_second, update = moments(gradient, first, second, scale, correct, c.beta1, c.beta2, c.eps)
            old = master.float()
            if self.spans[name][0] < self.decayed:
                update = update + c.weight_decay * old
                norm, length = torch.linalg.vector_norm(old), torch.linalg.vector_norm(update)
                ratio = torch.where((norm > 0) & (length > 0), norm / length, 1.0)
                update = update * (ratio.clamp(max=1.0) if c.trust_clip else ratio)
            new = torch.where(ok, old - lr * update, old)
            first.copy_(torch.where(ok, new_first, first))
            second.copy_(torch.where(ok, new_second, second))
            if key is not None:
                for piece in self.pieces[name]:
                    at = piece.weight.storage_offset() - weight.storage_offset()
                    values = new.flatten()[at : at + piece.weight.numel()].view_as(piece.weight)
                    rounded = round_to_bf16(values, _rows(piece, key), piece.site, piece.column)
                    piece.weight.copy_(torch.where(ok, rounded, piece.weight))
            else:
                master.copy_(new)
                weight.copy_(new)

    def _pieces(self, blueprint: Blueprint, name: str, device: torch.device) -> list[Piece]:
        start, _ = self.spans[name]
        out = []
        for held in blueprint.slices(name):
            shape = [*held.shape]
            shape[held.dim] = held.stop - held.start
            rows = shape[0] if len(shape) > 1 else 1
            count = torch.Size(shape).numel()
            site = torch.tensor(key32("rounding", held.name)[0], dtype=torch.int32, device=device)
            by_row = held.dim == 0 and len(shape) > 1
            view = self.weights[start : start + count].view(rows, -1)
            row, column = (torch.arange(n, dtype=torch.int32, device=device) for n in view.shape)
            row, column = row + (held.start if by_row else 0), column + (0 if by_row else held.start)
            out.append(Piece(view, site, row, column))
            start += count
        return out


def _rows(piece: Piece, key: Tensor) -> tuple[Tensor, Tensor]:
    first, second = row32(key, piece.row, torch.zeros_like(piece.row))
    return first[:, None], second[:, None]


def _accumulate_into(parameter: nn.Parameter, total: Tensor) -> None:
    """Let backward add this parameter's gradient to `total`, in total's dtype."""
    if parameter.dtype == total.dtype:
        parameter.grad = total
        return

    def add(parameter: Tensor) -> None:
        assert parameter.grad is not None
        total.add_(parameter.grad)
        parameter.grad = None

    parameter.register_post_accumulate_grad_hook(add)  # type: ignore[no-untyped-call]
