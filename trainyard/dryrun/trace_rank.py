"""The first steps of one rank, followed without weights, data or other ranks."""

from collections.abc import Iterator
from typing import Any

from trainyard.config.schema import Config
from trainyard.devices import Nowhere
from trainyard.dryrun.dry_run import rehearsal
from trainyard.dryrun.meta_ops import Halt
from trainyard.dryrun.op_trace import Recorder, Trace
from trainyard.train.checkpointing.saver import Words
from trainyard.train.evaluate import evaluate
from trainyard.train.lr_schedule import rate
from trainyard.train.trainer import Trainer


def follow(config: Config, rank: int, ranks: int, device: Nowhere, steps: int, evaluates: bool) -> Trace:
    """What `rank` does in its first steps, and in two batches of evaluation where samples are held out. This process
    becomes that rank for a while."""
    with rehearsal(config, rank, ranks, device) as trainer:
        out = Trace(rank, trainer.mesh.place["pp"])
        recorder = Recorder(out, trainer.mesh, device.handle)
        hooks = list(_marked(trainer, recorder))
        for model in trainer.models:
            model.train()
        try:
            with recorder:
                for number in range(1, steps + 1):
                    batch = trainer.loader.batch(number - 1, trainer.rows)
                    with recorder.phase(f"step {number}"):
                        trainer.step(batch, number, rate(config, number), (0.0, *Words()))
                if evaluates and trainer.held_out:
                    batches = trainer.held_out.once(trainer.rows)
                    parts = trainer.forward, trainer.loss, trainer.metrics, batches, trainer.device, trainer.mesh
                    with recorder.phase("evaluation"):
                        evaluate(*parts, most=2)
        except Halt as halt:
            out.halted = str(halt)
        finally:
            for hook in hooks:
                hook.remove()
    return out


def _marked(trainer: Trainer, recorder: Recorder) -> Iterator[Any]:
    """Tell the recorder where each forward pass of a model begins and ends."""
    for number, model in enumerate(trainer.models):
        yield model.register_forward_pre_hook(lambda *_: recorder.begin())
        yield model.register_forward_hook(lambda *_, number=number: recorder.end(number))
