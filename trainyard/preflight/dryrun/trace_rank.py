"""Trace of the first steps of one rank, without weights, data or other ranks."""

from collections.abc import Iterator
from typing import Any

from trainyard.config.schema import Config
from trainyard.devices import MetaDevice
from trainyard.preflight.dryrun.dry_run import dry_run
from trainyard.preflight.dryrun.meta_ops import TraceAborted
from trainyard.preflight.dryrun.op_trace import OpRecorder, RankTrace
from trainyard.train.evaluate import evaluate
from trainyard.train.optim.lr_schedule import learning_rate
from trainyard.train.trainer import Trainer


def trace_rank(
    config: Config, rank: int, world_size: int, device: MetaDevice, steps: int, with_evaluation: bool
) -> RankTrace:
    """Trace `steps` training steps of `rank` and, if there is validation data, two batches of evaluation. During the
    trace this process is that rank."""
    with dry_run(config, rank, world_size, device) as trainer:
        trace = RankTrace(rank, trainer.mesh.coords["pp"])
        recorder = OpRecorder(trace, trainer.mesh, device.torch_device)
        hooks = list(_forward_hooks(trainer, recorder))
        for model in trainer.models:
            model.train()
        try:
            with recorder, recorder.record_prints():
                for step in range(1, steps + 1):
                    batch = trainer.loader.batch(step - 1, trainer.batch_slice)
                    with recorder.phase(f"step {step}"):
                        trainer.train_step(batch, step, learning_rate(config, step))
                if with_evaluation and trainer.validation_loaders:
                    batches = trainer.validation_loaders[""].one_epoch(trainer.batch_slice)
                    parts = trainer.runner, trainer.loss_fn, trainer.metrics, batches
                    with recorder.phase("evaluation"):
                        evaluate(*parts, max_batches=2)
        except TraceAborted as error:
            trace.abort_reason = str(error)
        finally:
            for hook in hooks:
                hook.remove()
    return trace


def _forward_hooks(trainer: Trainer, recorder: OpRecorder) -> Iterator[Any]:
    """Hooks that tell the recorder where each forward pass of a model begins and ends."""
    for index, model in enumerate(trainer.models):
        yield model.register_forward_pre_hook(lambda *_: recorder.begin_forward())
        yield model.register_forward_hook(lambda *_, index=index: recorder.end_forward(index))
