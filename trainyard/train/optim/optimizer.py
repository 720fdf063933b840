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

from trainyard.compat import fused_adamw_, has_fused_adamw
from trainyard.compile.compile_blocks import CompileFn
from trainyard.config.schema import Config
from trainyard.core.counter_rng import key32
from trainyard.devices import Device
from trainyard.kernels.reference import Kernels
from trainyard.models import ParameterValues, TransformerStage, assign_parameters
from trainyard.models.blueprint import Blueprint, layer_index
from trainyard.parallel.flat_buffer import FlatBuffer, GradientReducer, WeightGatherer
from trainyard.parallel.mesh import Mesh
from trainyard.parallel.process_group import Group
from trainyard.train.decisions import fuses_wgrad, zero_stage
from trainyard.train.optim.replicated_params import ReplicaSync
from trainyard.train.optim.stochastic_rounding import RoundingRange, rounding_ranges
from trainyard.train.optim.update_rules import (
    adam_moments,
    adamw_,
    adamw_stochastic_rounding_,
    stochastic_round_to_bf16,
)

if TYPE_CHECKING:  # torch's fully_shard takes a second to import, for those who use it
    from trainyard.parallel.fsdp import FsdpState

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Optimizer:
    def __init__(
        self,
        models: Sequence[TransformerStage],
        blueprint: Blueprint,
        values: ParameterValues,
        config: Config,
        device: Device,
        mesh: Mesh,
        kernels: Kernels | None = None,
        compiler: CompileFn | None = None,
    ) -> None:
        """`models` are this rank's stages of the pipeline; a parameter that two of them have is one."""
        self.config, self.precision, self.seed = config.optimizer, config.precision, config.train.seed
        self.models, self.mesh = models, mesh
        self.zero_stage = zero_stage(config, mesh.dp_cp.size)
        self.stochastic_rounding = self.precision.kind == "bf16_sr"
        found = {name: tuple(parameter.shape) for model in models for name, parameter in model.named_parameters()}
        self.names = sorted(found, key=lambda name: not blueprint.spec(name).weight_decay)
        decayed = sum(blueprint.spec(name).weight_decay for name in self.names)
        shards = mesh.dp_cp.size if self.zero_stage else 1
        self.shard_index = mesh.dp_cp.rank if self.zero_stage else 0
        travel = DTYPES[self.precision.grad_reduce_dtype]
        bucket = config.layout.bucket_mib * 2**20 // travel.itemsize
        self.flat = FlatBuffer([(name, found[name]) for name in self.names], decayed, shards, bucket)
        handle = device.torch_device
        compute = self.compute_dtype = DTYPES[self.precision.compute_dtype]
        gradients = DTYPES[self.precision.grad_accum_dtype]

        def row(size: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=handle)

        size, shard_size = self.flat.size, self.flat.shard_size
        self.exp_avg, self.exp_avg_sq = row(shard_size, torch.float32), row(shard_size, torch.float32)
        kept = torch.bfloat16 if self.stochastic_rounding else torch.float32
        if self.zero_stage < 2:
            self.weights = row(size, compute)
            alone = shards == 1 and kept == compute
            self.master_weights = self.weights if alone else row(shard_size, kept)
            self.gradients = row(size, gradients)
            self.reduced_grads = self.gradients if shards == 1 else row(shard_size, gradients)
        else:
            self.master_weights = self.weights = row(shard_size, kept)
            self.gradients = self.reduced_grads = row(shard_size, kept)
        for name in self.names:
            value = values(name)
            rows = self.flat.shard_row_range(name, self.shard_index)
            self.shard_view(self.master_weights, name).copy_(value[rows.start : rows.stop])
            if self.zero_stage < 2:
                self.flat.view(self.weights, name).copy_(value)
        self.replica_sync = ReplicaSync(
            self.flat, blueprint, mesh, self.shard_index, config.layout.sequence_parallel, handle
        )
        self.gradient_exchange: GradientReducer | None = None
        self.weight_exchange: WeightGatherer | None = None
        self.parameters: dict[str, nn.Parameter] = {}
        """Those whose gradients are views of `gradients`."""
        self.fsdp_states: list[FsdpState] = []
        kernels = kernels or Kernels()
        if self.zero_stage < 2:
            direct = fuses_wgrad(config, mesh.layout, kernels.fused_wgrad, compiler is not None)
            self._own_memory(blueprint, travel, kernels.wgrad_buffers if direct else None)
        else:
            from trainyard.parallel import fsdp

            for model in models:
                device_mesh = fsdp.apply_fsdp(model, mesh.dp_cp, device, compute, travel, self.zero_stage == 3)

                def place(name: str, device_mesh: DeviceMesh = device_mesh) -> Tensor:
                    return fsdp.as_dtensor(self.shard_view(self.master_weights, name), found[name], device_mesh)

                parameters = assign_parameters(model, place)
                memory = {
                    name: (self.shard_view(self.master_weights, name), self.shard_view(self.reduced_grads, name))
                    for name in parameters
                }
                self.fsdp_states.append(fsdp.FsdpState(parameters, memory, device_mesh))
        self.fence: Callable[[], None] | None = None
        """Called once before the next update: somebody is copying the state as it is."""
        self.update_count = torch.zeros((), device=handle)
        """Updates made (skipped steps do not count), for the moments' bias correction."""
        self.skip_counts = torch.zeros(2, dtype=torch.int32, device=handle)
        """Steps skipped in all, and in a row."""
        self.skipped_grad_norms = torch.zeros(len(self.names), device=handle)
        """Norms of each gradient at the last step that was skipped."""
        self.rounding_ranges: dict[str, list[RoundingRange]] = {}
        if self.stochastic_rounding:
            share = (blueprint, mesh.tp, self.flat, self.shard_index)
            self.rounding_ranges = {name: rounding_ranges(self.master_weights, name, *share) for name in self.names}
        self._fused, self._fused_rounded = kernels.adamw_, kernels.adamw_stochastic_rounding_
        self.compiled = compiler is not None
        self._adamw: Callable[..., None] = compiler(adamw_) if compiler else adamw_
        self._rounded: Callable[..., None] = (
            compiler(adamw_stochastic_rounding_, dynamic=True) if compiler else adamw_stochastic_rounding_
        )

    def shard_view(self, buffer: Tensor, name: str) -> Tensor:
        """This rank's shard of a parameter (all of it without ZeRO) in master, first, second or sums."""
        return self.flat.shard_view(buffer, name, self.shard_index)

    def zero_grad(self, micro_batches: int = 1) -> None:
        """Before a step in which each gradient arrives `times` times."""
        self.gradients.zero_()
        if self.gradient_exchange:
            self.gradient_exchange.begin_step(micro_batches)

    def wait_for_weights(self) -> None:
        """Make sure that the model's weights are the newest (they may still be on their way from other ranks)."""
        if self.weight_exchange:
            self.weight_exchange.wait_all()

    def publish_weights(self) -> None:
        """The master weights were set from outside: bring them to where the model computes with them."""
        if self.zero_stage == 0 and self.weights is not self.master_weights:
            self.weights.copy_(self.master_weights)
        if self.weight_exchange:
            self.weight_exchange.start(self.master_weights)
            self.wait_for_weights()
        for backed in self.fsdp_states:
            backed.sync_uneven_shards()

    def weight_norm(self) -> Tensor:
        return self.replica_sync.global_norm(self.replica_sync.squared_norms(self.master_weights))

    def reduce_gradients(self) -> None:
        """After the last backward pass: gradients of all ranks, summed, in `sums`."""
        # A schedule that takes the weights' gradients apart adds them itself, in the weights' dtype, past our hooks.
        for name, parameter in self.parameters.items():
            if parameter.grad is not None and parameter.grad.dtype != self.gradients.dtype:
                self.flat.view(self.gradients, name).add_(parameter.grad)
                parameter.grad = None
        for backed in self.fsdp_states:
            backed.accumulate_gradients()
        if self.gradient_exchange:
            self.gradient_exchange.finish()
        self.replica_sync.sum_gradients(self.reduced_grads)

    @torch.no_grad()
    def step(self, lr: Tensor, grad_scale: Tensor, loss: Tensor, step: int) -> Tensor:
        """One update. Gradients are multiplied by `scale` and clipped first. Returns the norm before clipping."""
        self.wait_for_weights()
        if self.fence:
            self.fence()
            self.fence = None
        squares = self.replica_sync.squared_norms(self.reduced_grads)
        norm = self.replica_sync.global_norm(squares) * grad_scale
        ok = norm.isfinite() & loss.isfinite()
        self.update_count += ok
        bad = (~ok).int()
        self.skip_counts = torch.stack((self.skip_counts[0] + bad, (self.skip_counts[1] + 1) * bad))
        self.skipped_grad_norms = torch.where(ok, self.skipped_grad_norms, squares)
        if self.config.max_grad_norm:
            grad_scale = grad_scale * (self.config.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        beta1, beta2 = self.config.beta1, self.config.beta2
        correct = torch.stack((1 - beta1**self.update_count, 1 - beta2**self.update_count)).clamp(min=1e-30)
        key = None
        if self.stochastic_rounding:
            key = torch.tensor(key32(self.seed, "rounding", step), dtype=torch.int32).to(lr.device)
        if self.config.kind == "lamb":
            self._lamb(lr, grad_scale, correct, ok, key)
        elif key is not None:
            scalars = _scalars(lr, grad_scale, correct, ok)
            for name in self.names:
                self._round(name, lr, grad_scale, correct, ok, scalars, key)
        else:
            self._flat(lr, grad_scale, correct, ok)
        if self.weight_exchange:
            self.weight_exchange.start(self.master_weights)
        for backed in self.fsdp_states:
            backed.sync_uneven_shards()
        return norm

    def nonfinite_names(self) -> list[str]:
        """Parameters whose gradient was not finite at the last skipped step (asks the device)."""
        return [
            name
            for name, norm in zip(self.names, self.skipped_grad_norms.tolist(), strict=True)
            if not abs(norm) < float("inf")
        ]

    def _own_memory(self, blueprint: Blueprint, travel: torch.dtype, sinks: dict[Tensor, Tensor] | None) -> None:
        """Parameters are views of the flat buffers; other ranks' gradients and weights come by exchange."""
        data: Group = self.mesh.dp_cp
        if data.size > 1:
            self.gradient_exchange = GradientReducer(self.flat, data, self.gradients, self.reduced_grads, travel)
        made: dict[str, nn.Parameter] = {}
        for model in self.models:
            # `.data`: autograd must not take weights of later blocks, which land while earlier ones run, for a change.
            made |= assign_parameters(model, lambda name: self.flat.view(self.weights, name).data, made)
        self.parameters = made
        for name in self.names:
            arrived = partial(self.gradient_exchange.on_grad_ready, name) if self.gradient_exchange else None
            total = self.flat.view(self.gradients, name)
            accumulate_into(made[name], total, arrived)
            if sinks is not None:  # for those operations that know of them: autograd then gets nothing to add
                sinks[made[name]] = total
        if self.zero_stage:

            def used(name: str) -> tuple[str, ...]:
                place, number = blueprint.spec(name).pipeline_stage, layer_index(name)
                return (str(number),) if number is not None else ("first", "last") if place == "both" else (place,)

            self.weight_exchange = WeightGatherer(self.flat, data, self.weights, used)
            for model in self.models:
                model.pre_layer_hook = self.weight_exchange.wait_for

    def _flat(self, lr: Tensor, scale: Tensor, correct: Tensor, ok: Tensor) -> None:
        c = self.config
        copied = self.zero_stage == 0 and self.weights is not self.master_weights
        flats = (
            self.weights if copied else self.master_weights,
            self.master_weights,
            self.reduced_grads,
            self.exp_avg,
            self.exp_avg_sq,
        )
        for span, decay in (
            (slice(self.flat.shard_decay_end), c.weight_decay),
            (slice(self.flat.shard_decay_end, None), 0.0),
        ):
            row = [flat[span] for flat in flats]
            betas = c.beta1, c.beta2
            if not len(row[0]):
                continue
            if self._fused:
                self._fused(*row, _scalars(lr, scale, correct, ok), decay, *betas, c.eps)
                continue
            weight, master, gradient, first, second = row
            # torch's own kernel is one pass too, but knows neither bf16 gradients nor the copy to bf16 weights.
            if has_fused_adamw(master) and self.reduced_grads.dtype == torch.float32 and not (self.compiled and copied):
                fused_adamw_(master, gradient, first, second, self.update_count, lr, scale, ok, decay, betas, c.eps)
                if copied:
                    weight.copy_(master)
            else:
                self._adamw(weight, master, gradient, first, second, lr, scale, correct, ok, decay, *betas, c.eps)

    def _decay(self, name: str) -> float:
        return self.config.weight_decay if self.flat.spans[name].shard_start < self.flat.shard_decay_end else 0.0

    def _round(
        self, name: str, lr: Tensor, scale: Tensor, correct: Tensor, ok: Tensor, scalars: Tensor, key: Tensor
    ) -> None:
        c = self.config
        for piece in self.rounding_ranges[name]:
            at, count = piece.weight.storage_offset(), piece.weight.numel()
            flats = (self.reduced_grads, self.exp_avg, self.exp_avg_sq)
            rest = (flat[at : at + count].view_as(piece.weight) for flat in flats)
            where, constants = (piece.site, piece.column_ids), (self._decay(name), c.beta1, c.beta2, c.eps)
            if self._fused_rounded:
                self._fused_rounded(piece.weight, key, piece.row_ids, *where, *rest, scalars, *constants)
            else:
                self._rounded(piece.weight, piece.row_bits(key), *where, *rest, lr, scale, correct, ok, *constants)

    def _lamb(self, lr: Tensor, scale: Tensor, correct: Tensor, ok: Tensor, key: Tensor | None) -> None:
        """Each matrix moves by lr times its own norm (weights without decay: plain Adam)."""
        c = self.config
        direction = torch.zeros_like(self.exp_avg)
        olds = self.master_weights.float()
        for name in self.names:
            gradient, first, second, update = (
                self.shard_view(flat, name) for flat in (self.reduced_grads, self.exp_avg, self.exp_avg_sq, direction)
            )
            new_first, new_second, adam = adam_moments(gradient, first, second, scale, correct, c.beta1, c.beta2, c.eps)
            update.copy_(adam + self._decay(name) * self.shard_view(olds, name))
            first.copy_(torch.where(ok, new_first, first))
            second.copy_(torch.where(ok, new_second, second))
        # A matrix may be spread over ranks; its norm is that of the whole.
        norms, lengths = self.replica_sync.squared_norms(olds).sqrt(), self.replica_sync.squared_norms(direction).sqrt()
        ratios = torch.where((norms > 0) & (lengths > 0), norms / lengths, 1.0)
        ratios = ratios.clamp(max=1.0) if c.trust_clip else ratios
        for number, name in enumerate(self.names):
            old, update = self.shard_view(olds, name), self.shard_view(direction, name)
            ratio = ratios[number] if self._decay(name) else 1.0
            new = torch.where(ok, old - lr * ratio * update, old)
            if key is None:
                self.shard_view(self.master_weights, name).copy_(new)
                continue
            flat_new = new.reshape(-1)
            for piece in self.rounding_ranges[name]:
                at = piece.weight.storage_offset() - self.flat.spans[name].shard_start
                values = flat_new[at : at + piece.weight.numel()].view_as(piece.weight)
                rounded = stochastic_round_to_bf16(values, piece.row_bits(key), piece.site, piece.column_ids)
                piece.weight.copy_(torch.where(ok, rounded, piece.weight))
        if self.zero_stage == 0 and self.weights is not self.master_weights:
            self.weights.copy_(self.master_weights)


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
