"""The Trainer takes the steps of a run. What a run does besides (checkpoints, logs, evaluation, ...) is done by its
parts (parts.py) and by the user's callbacks.

from trainyard import Trainer, load
Trainer(load("tiny-llama"), loss=my_loss, metrics={"accuracy": accuracy}).run()
"""

import time
from functools import partial
from pathlib import Path

import torch

from trainyard.config.load import dump
from trainyard.core.atomic_files import atomic_write_text
from trainyard.run.checkpointing.directory_owner import lock_directories
from trainyard.run.model_files import check_run_export, export_weights, run_model_files
from trainyard.run.parts import build_parts
from trainyard.run.records import RunSummary, check_weights, step_record, too_many_skipped
from trainyard.run.reference import prepare_reference
from trainyard.run.rollouts.rollout_loader import prepare_rollouts
from trainyard.run.setup import TrainSetup
from trainyard.run.shutdown import quiet_garbage_collector
from trainyard.run.training_texts import write_training_texts
from trainyard.train.evaluate import evaluate_sets
from trainyard.train.optim.gather_full import gather_full_parameter
from trainyard.train.optim.lr_schedule import learning_rate
from trainyard.train.status import StepStatus
from trainyard.train.step import StepResult


class Trainer(TrainSetup):
    """One rank of a training run."""

    def run(self) -> RunSummary:
        """Train until config.train.steps or a signal, and write the run directory."""
        config, is_leader = self.config, self.mesh.layout_rank == 0
        if config.checkpoint.export_hf:  # before anything is written
            check_run_export(config.model)
        lock = partial(lock_directories, config.checkpoint, config.log, self.continued_run, self.lost_run)
        self.run_directory = self.mesh.broadcast_object(lock, self.device)
        self.directory = directory = self.run_directory.path
        with self.run_directory:
            if is_leader:
                weights_from = config.checkpoint.weights_from
                self.model_files = run_model_files(config.data, config.model, weights_from, self.resumed)
                atomic_write_text(directory / "config.yaml", dump(config))
                write_training_texts(directory, config, self.loader)
            prepare_reference(self, directory)
            self.batch_source = prepare_rollouts(self) or self.loader
            closing_parts, start = build_parts(self), time.perf_counter()
            with self.stop_signal.handle_signals(), closing_parts:
                for part in self.parts:
                    part.open()
                with quiet_garbage_collector():
                    exported = self._train()
        return RunSummary(
            directory=directory,
            steps=self.completed_steps,
            first_loss=self.losses[0] if self.losses else None,
            last_loss=self.losses[-1] if self.losses else None,
            seconds=time.perf_counter() - start,
            skipped_steps=int(self.optimizer.guard.skip_counts[0]),
            last_step_skipped=bool(self.optimizer.guard.skip_counts[1]),
            interrupted=self.should_stop(),
            exported_weights=exported,
            last_checkpoint=self.last_checkpoint,
            evaluation=self.last_evaluation,
        )

    def _train(self) -> Path | None:
        """The run from its first event to its last. Returns the directory of the exported weights."""
        error: BaseException | None = None
        try:
            self.notify("on_start")
            for part in self.parts:
                part.begin_run(self)
            self._train_steps()
            self.notify("on_last_step")
            with self.spans("save"):
                for part in self.parts:
                    part.finish()
            if not self.config.checkpoint.export_hf:
                return None
            check_weights(float(self.optimizer.weight_norm()), self.completed_steps)
            model, files = self.config.model, self.model_files
            weights_from = self.config.checkpoint.weights_from
            return export_weights(self.run_directory.path, model, weights_from, self.optimizer, self.context, files)
        except BaseException as problem:
            error = problem
            raise
        finally:
            self.optimizer.wait_for_weights()  # under ZeRO-1 they may still be in flight, also after an error
            for part in reversed(self.parts):
                part.end_run(self, error)
            self.notify("on_end")

    def _train_steps(self) -> None:
        """Take the steps that are left.

        On devices with a queue, the results of a step are read only after the next step is queued, so the device never
        waits for the host.
        """
        parts, unread, log_due = self.parts, None, True
        for model in self.models:
            model.train()
        self.throughput.start(self.completed_steps)
        steps = self.config.train.steps
        batches = self.batch_source.prefetch(self.completed_steps, steps, self.batch_slice, self.runner.stage_batch)
        while self.completed_steps < steps and not self.should_stop():
            step = self.completed_steps + 1
            log_due = self._log_due(step)
            for part in parts:
                part.begin_step(step, log_due)
            with self.spans("data wait"):
                batch = next(batches)
            status = StepStatus()
            for part in parts:
                status = part.add_status(step, status)
            # All ranks stop after the step whose all-reduce carries the request, even if only one got the signal.
            status = status._replace(stop_requested=float(self.stop_signal.requested))
            result = self.train_step(batch, step, learning_rate(self.config, step), status)
            self.device.flush()
            self.completed_steps = step
            self.notify("on_step", step)
            if unread is not None:
                self._handle_status(unread)
            unread = result
            if self.device.synchronous or log_due:
                self._handle_status(result, log_due)
                unread = None
            for part in reversed(parts):  # as contexts nest: the spans of a step end before its profile is written
                part.end_step(step)
            if log_due:
                self._log(result)
                self.throughput.start(step)  # logging, evaluation and text samples are no part of the next step
            for part in reversed(parts):  # the deadline saver lets go of the step before the savers start
                part.complete_step(step)
        batches.close()
        if not log_due:  # a signal ended the run: log the last step too
            self._log(result)

    def _log_due(self, step: int) -> bool:
        intervals = (self.config.log.every, self.config.evaluate.every, self.config.samples.every)
        return step in (1, self.config.train.steps) or any(every and step % every == 0 for every in intervals)

    def _handle_status(self, result: StepResult, log_due: bool = False) -> None:
        """Act on the reduced status of a step. Raises RunStopped after too many skipped steps in a row."""
        status = result.read_status()
        self.stop_requested = self.stop_requested or bool(status.flags.stop_requested)
        too_many = status.skipped_in_a_row >= self.config.train.max_skipped_steps
        for part in self.parts:
            part.handle_status(result.step, status, log_due and not too_many)
        if too_many:
            raise too_many_skipped(result, self.config.train.max_skipped_steps, self.optimizer, self.mesh)

    def _log(self, result: StepResult) -> None:
        """Make the record of a step and hand it to the callbacks, which may evaluate and make text samples."""
        result.read_status()  # waits for the step, which the throughput includes
        self.optimizer.wait_for_weights()  # callbacks may read the weights
        batch, is_first = self.config.train.global_batch, not self.last_record
        consumed = {
            "consumed_samples": result.step * batch,
            "consumed_tokens": self.throughput.count_tokens(result.step),
        }
        progress = consumed | self.throughput.read(result.step)
        models = self.models if self.config.model.num_experts else ()
        with self.spans("log"):
            record = step_record(result, progress, batch, self.optimizer, self.context, models, is_first)
        self.last_record = record
        for part in self.parts:
            part.add_metrics(result, record)
        self.losses.append(record["loss"])
        self.notify("on_log", record)

    def evaluate(self) -> dict[str, float]:
        """Run the user's evaluation function, or compute loss, perplexity and metrics on the validation samples.
        Results of one of evaluate.sets are called NAME/loss and so on."""
        if self.evaluation_fn:
            return self.evaluation_fn(self)
        batches = {name: loader.one_epoch(self.batch_slice) for name, loader in self.validation_loaders.items()}
        limit = self.config.evaluate.batches
        return evaluate_sets(self.runner, self.loss_fn, self.metrics, batches, limit, self.poll_stop)

    def full_parameter(self, name: str) -> torch.Tensor:
        """A full parameter in the highest precision available. All ranks must ask, in the same order."""
        return gather_full_parameter(self.optimizer.state, self.blueprint, self.mesh, name)

    def should_stop(self) -> bool:
        """True if a signal asked for the end of the run; the step in progress is finished first. With several ranks,
        true if any of them was asked, as all learned with the last step."""
        return self.stop_signal.requested if self.layout.world_size == 1 else self.stop_requested

    def poll_stop(self) -> bool:
        """Between evaluation batches and tokens of text samples: True if any rank was asked to stop."""
        self.notify("on_evaluation_batch")
        # A collective: a rank that left an evaluation alone would leave the others waiting in the next batch.
        requested = torch.tensor(float(self.stop_signal.requested), device=self.device.torch_device)
        self.stop_requested = self.stop_requested or bool(self.mesh.world.all_reduce_max(requested))
        return self.stop_requested
