"""The first steps of one rank, followed without weights, data or other ranks."""

from collections.abc import Iterator
from typing import Any

from trainyard.config.schema import Config
from trainyard.devices import MetaDevice
from trainyard.dryrun.dry_run import dry_run
from trainyard.dryrun.meta_ops import TraceAborted
from trainyard.dryrun.op_trace import OpRecorder, RankTrace
from trainyard.train.checkpointing.saver import SaveStatus
from trainyard.train.evaluate import evaluate
from trainyard.train.lr_schedule import learning_rate
from trainyard.train.trainer import Trainer


def trace_rank(
    config: Config, rank: int, world_size: int, device: MetaDevice, steps: int, with_evaluation: bool
) -> RankTrace:
    """What `rank` does in its first steps, and in two batches of evaluation where samples are held out. This process
    becomes that rank for a while."""
    with dry_run(config, rank, world_size, device) as trainer:
        out = RankTrace(rank, trainer.mesh.coords["pp"])
        recorder = OpRecorder(out, trainer.mesh, device.torch_device)
        hooks = list(_forward_hooks(trainer, recorder))
        for model in trainer.models:
            model.train()
        try:
            with recorder:
                for number in range(1, steps + 1):
                    batch = trainer.loader.batch(number - 1, trainer.batch_slice)
                    with recorder.phase(f"step {number}"):
                        trainer.train_step(batch, number, learning_rate(config, number), (0.0, *SaveStatus()))
                if with_evaluation and trainer.validation_loader:
                    batches = trainer.validation_loader.one_epoch(trainer.batch_slice)
                    parts = trainer.runner, trainer.loss_fn, trainer.metrics, batches, trainer.device, trainer.mesh
                    with recorder.phase("evaluation"):
                        evaluate(*parts, max_batches=2)
        except TraceAborted as halt:
            out.abort_reason = str(halt)
        finally:
            for hook in hooks:
                hook.remove()
    return out


def _forward_hooks(trainer: Trainer, recorder: OpRecorder) -> Iterator[Any]:
    """Tell the recorder where each forward pass of a model begins and ends."""
    for number, model in enumerate(trainer.models):
        yield model.register_forward_pre_hook(lambda *_: recorder.begin_forward())
        yield model.register_forward_hook(lambda *_, number=number: recorder.end_forward(number))
