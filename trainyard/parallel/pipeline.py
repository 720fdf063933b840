"""Pipeline parallelism: runs a rank's stages with torch's pipeline schedules."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from trainyard import compat
from trainyard.core.batch import Batch, batch_tensors
from trainyard.core.errors import UserError
from trainyard.parallel.mesh import Mesh

MULTI_STAGE_SCHEDULES: dict[str, Any] = {
    "1f1b": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}
STAGE_ACTIONS = {
    "forward_one_chunk": "forward",
    "backward_one_chunk": "backward",
    "backward_weight_one_chunk": "backward of weights",
}
"""The methods of a stage that compute a micro batch, and the spans in which they do."""
FORWARD_ACTIONS = ("FORWARD", "SEND_F", "RECV_F", "UNSHARD", "RESHARD")
"""The actions of a schedule that a pass without backward needs."""


class Pipeline:
    """Runs a rank's stages. A stage's module takes (activations, **micro batch) and returns activations; the module of
    the last stage returns its part of the loss, a scalar."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        mesh: Mesh,
        tokens: Tensor,
        activations: Tensor,
        device: torch.device,
        span: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
    ) -> None:
        """`modules` are this rank's stages. `tokens` and `activations` are example inputs of the first stage and of the
        others (only shapes matter). `span` makes the context in which a stage computes a micro batch."""
        layout, specs = mesh.layout, mesh.layout.stages_on(mesh.coords["pp"])
        schedule = layout.pipeline_schedule
        loss = torch.empty(1, device="meta", requires_grad=True)
        stages: list[Any] = [
            PipelineStage(
                module,
                spec.index,
                len(layout.stages),
                device,
                input_args=tokens if spec.is_first else activations,
                output_args=loss if spec.is_last else activations,
                group=mesh.pp.handle,
            )
            for spec, module in zip(specs, modules, strict=True)
        ]
        for stage in stages:
            _add_spans(stage, span)
        count = layout.micro_batches
        self.has_first_stage = any(spec.is_first for spec in specs)
        self.has_last_stage = any(spec.is_last for spec in specs)
        self.schedule: Any
        if schedule != "1f1b" and not compat.supports_zero_bubble():
            raise UserError(
                f"layout.pipeline_schedule={schedule}: needs torch 2.13 or newer, which can split the backward pass; "
                "nearest: 1f1b"
            )
        if schedule == "1f1b" and layout.vpp == 1:
            # With fewer micro batches than stages, 1F1B has no steady state: run all forwards, then all backwards.
            single = Schedule1F1B if count >= layout.pp else ScheduleGPipe
            self.schedule = single(stages[0], count, _sum_loss, scale_grads=False)
        else:
            self.schedule = MULTI_STAGE_SCHEDULES[schedule](stages, count, _sum_loss, scale_grads=False)

    def run(self, batch: Batch, backward: bool) -> None:
        """Run all micro batches of a batch, forward and optionally backward."""
        arguments = (batch["tokens"],) if self.has_first_stage else ()
        target = batch["sample_ids"] if self.has_last_stage else None  # the schedule only counts its rows
        if backward:
            self.schedule.step(*arguments, target=target, return_outputs=False, **batch_tensors(batch))
        else:
            with _forward_actions_only(self.schedule):
                self.schedule.eval(*arguments, target=target, **batch_tensors(batch))


def _add_spans(stage: Any, span: Callable[[str], AbstractContextManager[None]]) -> None:
    """Replace the methods of a stage by ones that run in a span. What a rank does between them is to wait for the
    stages of other ranks."""

    def in_span(method: Callable[..., Any], name: str) -> Callable[..., Any]:
        @wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            with span(name):
                return method(*args, **kwargs)

        return run

    for method_name, span_name in STAGE_ACTIONS.items():
        setattr(stage, method_name, in_span(getattr(stage, method_name), span_name))


@contextmanager
def _forward_actions_only(schedule: Any) -> Iterator[None]:
    """Leave the backward actions out of a V-shaped schedule, whose `eval` (torch 2.13) otherwise fails: it passes
    gradients, which do not exist, between the two stages of a rank."""
    if not isinstance(schedule, ScheduleZBVZeroBubble):
        yield
        return
    all_actions: dict[int, list[Any]] = schedule.pipeline_order_with_comms
    schedule.pipeline_order_with_comms = {
        rank: [action for action in actions if action.computation_type.name in FORWARD_ACTIONS]
        for rank, actions in all_actions.items()
    }
    try:
        yield
    finally:
        schedule.pipeline_order_with_comms = all_actions


def _sum_loss(part: Tensor, target: Tensor) -> Tensor:
    return part.sum()
