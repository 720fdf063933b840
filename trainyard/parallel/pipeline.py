"""Pipeline stages under torch's schedules: which stage runs which micro batch when, and who sends what to whom."""

from collections.abc import Sequence
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
from trainyard.core.errors import UserError
from trainyard.parallel.layout import Layout, Stage
from trainyard.parallel.mesh import Mesh

MANY: dict[str, Any] = {
    "1f1b": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}


class Pipeline:
    """Runs a rank's stages. A stage's module takes (activations, **micro batch) and gives activations; the last one
    gives its part of the loss, as one number."""

    def __init__(
        self,
        modules: Sequence[tuple[Stage, nn.Module]],
        mesh: Mesh,
        schedule: str,
        tokens: Tensor,
        activations: Tensor,
        device: torch.device,
    ) -> None:
        """`tokens` and `activations`: what the first and the other stages are given for a micro batch (shapes only)."""
        layout: Layout = mesh.layout
        loss = torch.empty(1, device="meta", requires_grad=True)
        stages: list[Any] = [
            PipelineStage(
                module,
                stage.number,
                len(layout.stages),
                device,
                input_args=tokens if stage.first else activations,
                output_args=loss if stage.last else activations,
                group=mesh.pp.handle,
            )
            for stage, module in modules
        ]
        count = layout.micro_batches
        self.first = any(stage.first for stage, _ in modules)
        self.last = any(stage.last for stage, _ in modules)
        self.schedule: Any
        if schedule != "1f1b" and not compat.splits_backward():
            raise UserError(
                f"layout.schedule={schedule}: this torch cannot take our backward pass apart, 2.13 and newer can; "
                "nearest: 1f1b"
            )
        if schedule == "1f1b" and layout.vpp == 1:
            # With fewer micro batches than stages 1F1B has no steady state left: all forwards, then all backwards.
            single = Schedule1F1B if count >= layout.pp else ScheduleGPipe
            self.schedule = single(stages[0], count, _total, scale_grads=False)
        else:
            self.schedule = MANY[schedule](stages, count, _total, scale_grads=False)

    def run(self, batch: dict[str, Tensor], backward: bool) -> None:
        """All micro batches of a batch, forward and (if asked for) backward."""
        arguments = (batch["tokens"],) if self.first else ()
        target = batch["sample"] if self.last else None  # only its rows are counted
        if backward:
            self.schedule.step(*arguments, target=target, return_outputs=False, **batch)
        else:
            self.schedule.eval(*arguments, target=target, **batch)


def _total(part: Tensor, target: Tensor) -> Tensor:
    return part.sum()
