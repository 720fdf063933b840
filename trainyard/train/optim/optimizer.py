"""AdamW and LAMB over flat memory, on one rank or on this rank's share of the model.

All parameters of a rank are views of one buffer, and so are gradients: clipping, update and the copy to the compute
dtype are then few long passes over memory instead of many short ones. Master weights in fp32 and the two moments are
flat too; under ZeRO they, and the sums of gradients, cover this rank's shard only. Parameters with weight decay (as the
blueprint says) come first.

A step whose gradient norm or loss is not finite changes nothing; that is decided on the device, without asking the
host.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from trainyard.compat import fused_adamw_, fuses_adamw
from trainyard.compile.compile_blocks import Compiler
from trainyard.config.schema import Config
from trainyard.core.counter_rng import key32
from trainyard.devices import Device
from trainyard.kernels.reference import Kernels
from trainyard.models import Stack, Values, assign
from trainyard.models.blueprint import Blueprint, layer
from trainyard.parallel.flat_buffer import Flat, GradientExchange, WeightExchange
from trainyard.parallel.mesh import Mesh
from trainyard.parallel.process_group import Group
from trainyard.train.optim.replicated_params import Shares
from trainyard.train.optim.stochastic_rounding import Piece, pieces
from trainyard.train.optim.update_rules import adamw_, adamw_rounded_, moments, round_to_bf16

if TYPE_CHECKING:  # torch's fully_shard takes a second to import, for those who use it
    from trainyard.parallel.fsdp import Backed

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Optimizer:
    def __init__(
        self,
        models: Sequence[Stack],
        blueprint: Blueprint,
        values: Values,
        config: Config,
        device: Device,
        mesh: Mesh,
        kernels: Kernels | None = None,
        compiler: Compiler | None = None,
    ) -> None:
        """`models` are this rank's stages of the pipeline; a parameter that two of them have is one."""
        self.config, self.precision, self.seed = config.optimizer, config.precision, config.train.seed
        self.models, self.mesh = models, mesh
        self.zero = config.layout.zero if mesh.data.size > 1 else 0
        self.rounding = self.precision.kind == "bf16_sr"
        found = {name: tuple(parameter.shape) for model in models for name, parameter in model.named_parameters()}
        self.names = sorted(found, key=lambda name: not blueprint.row(name).decay)
        decayed = sum(blueprint.row(name).decay for name in self.names)
        shards = mesh.data.size if self.zero else 1
        self.number = mesh.data.rank if self.zero else 0
        travel = DTYPES[self.precision.travel]
        bucket = config.layout.bucket * 2**20 // travel.itemsize
        self.flat = Flat([(name, found[name]) for name in self.names], decayed, shards, bucket)
        handle = device.handle
        compute = self.compute = DTYPES[self.precision.compute]
        gradients = DTYPES[self.precision.accumulate]

        def row(size: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=handle)

        size, shard_size = self.flat.size, self.flat.shard_size
        self.first, self.second = row(shard_size, torch.float32), row(shard_size, torch.float32)
        kept = torch.bfloat16 if self.rounding else torch.float32
        if self.zero < 2:
            self.weights = row(size, compute)
            alone = shards == 1 and kept == compute
            self.master = self.weights if alone else row(shard_size, kept)
            self.gradients = row(size, gradients)
            self.sums = self.gradients if shards == 1 else row(shard_size, gradients)
        else:
            self.master = self.weights = row(shard_size, kept)
            self.gradients = self.sums = row(shard_size, kept)
        for name in self.names:
            value = values(name)
            rows = self.flat.rows(name, self.number)
            self.view(self.master, name).copy_(value[rows.start : rows.stop])
            if self.zero < 2:
                self.flat.view(self.weights, name).copy_(value)
        self.shares = Shares(self.flat, blueprint, mesh, self.number, config.layout.sequence_parallel, handle)
        self.gradient_exchange: GradientExchange | None = None
        self.weight_exchange: WeightExchange | None = None
        self.parameters: dict[str, nn.Parameter] = {}
        """Those whose gradients are views of `gradients`."""
        self.sharded: list[Backed] = []
        kernels = kernels or Kernels()
        if self.zero < 2:
            # A compiler, and a schedule that takes backward apart, want gradients as tensors; and so do the products
            # of sequence parallelism and of fp8, which are not plain ones.
            direct = (
                kernels.fills_sinks
                and compiler is None
                and config.layout.schedule == "1f1b"
                and not (mesh.tp.size > 1 and config.layout.sequence_parallel)
                and self.precision.kind != "fp8"
            )
            self._own_memory(blueprint, travel, kernels.sinks if direct else None)
        else:
            from trainyard.parallel import fsdp

            for model in models:
                device_mesh = fsdp.shard(model, mesh.data, device, compute, travel, self.zero == 3)

                def place(name: str, device_mesh: DeviceMesh = device_mesh) -> Tensor:
                    return fsdp.described(self.view(self.master, name), found[name], device_mesh)

                parameters = assign(model, place)
                memory = {name: (self.view(self.master, name), self.view(self.sums, name)) for name in parameters}
                self.sharded.append(fsdp.Backed(parameters, memory, device_mesh))
        self.fence: Callable[[], None] | None = None
        """Called once before the next update: somebody is copying the state as it is."""
        self.updates = torch.zeros((), device=handle)
        """Updates made (skipped steps do not count), for the moments' bias correction."""
        self.skipped = torch.zeros(2, dtype=torch.int32, device=handle)
        """Steps skipped in all, and in a row."""
        self.bad_norms = torch.zeros(len(self.names), device=handle)
        """Norms of each gradient at the last step that was skipped."""
        self.pieces: dict[str, list[Piece]] = {}
        if self.rounding:
            share = (blueprint, mesh.tp, self.flat, self.number)
            self.pieces = {name: pieces(self.master, name, *share) for name in self.names}
        self._fused, self._fused_rounded = kernels.adamw_, kernels.adamw_rounded_
        self.compiled = compiler is not None
        self._adamw: Callable[..., None] = compiler(adamw_) if compiler else adamw_
        self._rounded: Callable[..., None] = compiler(adamw_rounded_, dynamic=True) if compiler else adamw_rounded_

    def view(self, row: Tensor, name: str) -> Tensor:
        """This rank's shard of a parameter (all of it without ZeRO) in master, first, second or sums."""
        return self.flat.shard(row, name, self.number)

    def clear(self, times: int = 1) -> None:
        """Before a step in which each gradient arrives `times` times."""
        self.gradients.zero_()
        if self.gradient_exchange:
            self.gradient_exchange.expect(times)

    def settle(self) -> None:
        """Make sure that the model's weights are the newest (they may still be on their way from other ranks)."""
        if self.weight_exchange:
            self.weight_exchange.settle()

    def spread(self) -> None:
        """The master weights were set from outside: bring them to where the model computes with them."""
        if self.zero == 0 and self.weights is not self.master:
            self.weights.copy_(self.master)
        if self.weight_exchange:
            self.weight_exchange.start(self.master)
            self.settle()
        for backed in self.sharded:
            backed.refresh()

    def weight_norm(self) -> Tensor:
        return self.shares.norm(self.shares.squares(self.master))

    def collect(self) -> None:
        """After the last backward pass: gradients of all ranks, summed, in `sums`."""
        # A schedule that takes the weights' gradients apart adds them itself, in the weights' dtype, past our hooks.
        for name, parameter in self.parameters.items():
            if parameter.grad is not None and parameter.grad.dtype != self.gradients.dtype:
                self.flat.view(self.gradients, name).add_(parameter.grad)
                parameter.grad = None
        for backed in self.sharded:
            backed.collect()
        if self.gradient_exchange:
            self.gradient_exchange.finish()
        self.shares.sum(self.sums)

    @torch.no_grad()
    def step(self, lr: Tensor, scale: Tensor, loss: Tensor, number: int) -> Tensor:
        """One update. Gradients are multiplied by `scale` and clipped first. Returns the norm before clipping."""
        self.settle()
        if self.fence:
            self.fence()
            self.fence = None
        squares = self.shares.squares(self.sums)
        norm = self.shares.norm(squares) * scale
        ok = norm.isfinite() & loss.isfinite()
        self.updates += ok
        bad = (~ok).int()
        self.skipped = torch.stack((self.skipped[0] + bad, (self.skipped[1] + 1) * bad))
        self.bad_norms = torch.where(ok, self.bad_norms, squares)
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
            scalars = _scalars(lr, scale, correct, ok)
            for name in self.names:
                self._round(name, lr, scale, correct, ok, scalars, key)
        else:
            self._flat(lr, scale, correct, ok)
        if self.weight_exchange:
            self.weight_exchange.start(self.master)
        for backed in self.sharded:
            backed.refresh()
        return norm

    def bad(self) -> list[str]:
        """Parameters whose gradient was not finite at the last skipped step (asks the device)."""
        return [
            name for name, norm in zip(self.names, self.bad_norms.tolist(), strict=True) if not abs(norm) < float("inf")
        ]

    def _own_memory(self, blueprint: Blueprint, travel: torch.dtype, sinks: dict[Tensor, Tensor] | None) -> None:
        """Parameters are views of the flat buffers; other ranks' gradients and weights come by exchange."""
        data: Group = self.mesh.data
        if data.size > 1:
            self.gradient_exchange = GradientExchange(self.flat, data, self.gradients, self.sums, travel)
        made: dict[str, nn.Parameter] = {}
        for model in self.models:
            # `.data`: autograd must not take weights of later blocks, which land while earlier ones run, for a change.
            made |= assign(model, lambda name: self.flat.view(self.weights, name).data, made)
        self.parameters = made
        for name in self.names:
            arrived = partial(self.gradient_exchange.arrived, name) if self.gradient_exchange else None
            total = self.flat.view(self.gradients, name)
            accumulate_into(made[name], total, arrived)
            if sinks is not None:  # for those operations that know of them: autograd then gets nothing to add
                sinks[made[name]] = total
        if self.zero:

            def used(name: str) -> tuple[str, ...]:
                place, number = blueprint.row(name).place, layer(name)
                return (str(number),) if number is not None else ("first", "last") if place == "both" else (place,)

            self.weight_exchange = WeightExchange(self.flat, data, self.weights, used)
            for model in self.models:
                model.before = self.weight_exchange.need

    def _flat(self, lr: Tensor, scale: Tensor, correct: Tensor, ok: Tensor) -> None:
        c = self.config
        copied = self.zero == 0 and self.weights is not self.master
        flats = (self.weights if copied else self.master, self.master, self.sums, self.first, self.second)
        for span, decay in ((slice(self.flat.split), c.weight_decay), (slice(self.flat.split, None), 0.0)):
            row = [flat[span] for flat in flats]
            betas = c.beta1, c.beta2
            if not len(row[0]):
                continue
            if self._fused:
                self._fused(*row, _scalars(lr, scale, correct, ok), decay, *betas, c.eps)
                continue
            weight, master, gradient, first, second = row
            # torch's own kernel is one pass too, but knows neither bf16 gradients nor the copy to bf16 weights.
            if fuses_adamw(master) and self.sums.dtype == torch.float32 and not (self.compiled and copied):
                fused_adamw_(master, gradient, first, second, self.updates, lr, scale, ok, decay, betas, c.eps)
                if copied:
                    weight.copy_(master)
            else:
                self._adamw(weight, master, gradient, first, second, lr, scale, correct, ok, decay, *betas, c.eps)

    def _decay(self, name: str) -> float:
        return self.config.weight_decay if self.flat.spans[name].at < self.flat.split else 0.0

    def _round(
        self, name: str, lr: Tensor, scale: Tensor, correct: Tensor, ok: Tensor, scalars: Tensor, key: Tensor
    ) -> None:
        c = self.config
        for piece in self.pieces[name]:
            at, count = piece.weight.storage_offset(), piece.weight.numel()
            flats = (self.sums, self.first, self.second)
            rest = (flat[at : at + count].view_as(piece.weight) for flat in flats)
            where, constants = (piece.site, piece.column), (self._decay(name), c.beta1, c.beta2, c.eps)
            if self._fused_rounded:
                self._fused_rounded(piece.weight, key, piece.row, *where, *rest, scalars, *constants)
            else:
                self._rounded(piece.weight, piece.rows(key), *where, *rest, lr, scale, correct, ok, *constants)

    def _lamb(self, lr: Tensor, scale: Tensor, correct: Tensor, ok: Tensor, key: Tensor | None) -> None:
        """Each matrix moves by lr times its own norm (weights without decay: plain Adam)."""
        c = self.config
        direction = torch.zeros_like(self.first)
        olds = self.master.float()
        for name in self.names:
            gradient, first, second, update = (
                self.view(flat, name) for flat in (self.sums, self.first, self.second, direction)
            )
            new_first, new_second, adam = moments(gradient, first, second, scale, correct, c.beta1, c.beta2, c.eps)
            update.copy_(adam + self._decay(name) * self.view(olds, name))
            first.copy_(torch.where(ok, new_first, first))
            second.copy_(torch.where(ok, new_second, second))
        # A matrix may be spread over ranks; its norm is that of the whole.
        norms, lengths = self.shares.squares(olds).sqrt(), self.shares.squares(direction).sqrt()
        ratios = torch.where((norms > 0) & (lengths > 0), norms / lengths, 1.0)
        ratios = ratios.clamp(max=1.0) if c.trust_clip else ratios
        for number, name in enumerate(self.names):
            old, update = self.view(olds, name), self.view(direction, name)
            ratio = ratios[number] if self._decay(name) else 1.0
            new = torch.where(ok, old - lr * ratio * update, old)
            if key is None:
                self.view(self.master, name).copy_(new)
                continue
            flat_new = new.reshape(-1)
            for piece in self.pieces[name]:
                at = piece.weight.storage_offset() - self.flat.spans[name].at
                values = flat_new[at : at + piece.weight.numel()].view_as(piece.weight)
                rounded = round_to_bf16(values, piece.rows(key), piece.site, piece.column)
                piece.weight.copy_(torch.where(ok, rounded, piece.weight))
        if self.zero == 0 and self.weights is not self.master:
            self.weights.copy_(self.master)


def _scalars(lr: Tensor, scale: Tensor, correct: Tensor, ok: Tensor) -> Tensor:
    return torch.cat((torch.stack((lr, scale)), correct, ok.float()[None]))


def accumulate_into(parameter: nn.Parameter, total: Tensor, arrived: Callable[[], None] | None) -> None:
    """Let backward add this parameter's gradient to `total`, in total's dtype, and tell when it has."""
    same = parameter.dtype == total.dtype
    if same:
        parameter.grad = total
        if arrived is None:
            return

    def add(parameter: Tensor) -> None:
        if not same and parameter.grad is not None:
            total.add_(parameter.grad)
            parameter.grad = None
        if arrived:
            arrived()

    parameter.register_post_accumulate_grad_hook(add)  # type: ignore[no-untyped-call]
