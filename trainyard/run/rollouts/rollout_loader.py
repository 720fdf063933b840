"""The batches of a run that trains on completions which it writes itself.

A batch of rollouts is a function of the weights, the seed and its first step: prompts are those of the loader's order,
and completions are a function of prompts and seeds (prompt_completer.py). A checkpoint between two updates on the same
rollouts has these; all others are written again.
"""

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainyard.checkpoint.checkpoint import Checkpoint
from trainyard.core.batch import Batch
from trainyard.core.counter_rng import key64
from trainyard.core.errors import UserError
from trainyard.data.loading.loader import BatchLoader
from trainyard.models import ModelOutput
from trainyard.run.frozen_weights import FrozenWeights
from trainyard.run.rollouts.prompt_completer import PromptCompleter
from trainyard.run.rollouts.rollout import Rollout, RolloutBatch
from trainyard.run.setup import TrainSetup
from trainyard.train.policy_loss import PolicyLoss

T = TypeVar("T")


class RolloutLoader:
    """Takes the place of the loader of a run: `prefetch` writes the completions when their first step begins."""

    def __init__(self, run: TrainSetup) -> None:
        config = run.config
        assert isinstance(run.loss_fn, PolicyLoss)
        self.run, self.loss = run, run.loss_fn
        self.rollout, self.group = config.rollout, config.rollout.completions
        self.steps_per_batch = self.rollout.updates * self.rollout.epochs
        self.count = config.train.global_batch * self.rollout.updates
        """Completions of a batch of rollouts."""
        self.loader = BatchLoader(run.loader.dataset, self.count // self.group, config.train.seed, run.loader.shuffle)
        self.completer = PromptCompleter(run, self.count)
        self.written: RolloutBatch | None = None
        """The last batch of rollouts."""
        if run.resumed and run.completed_steps % self.steps_per_batch:
            self.written = self._restore(run.resumed)
        self.frozen = FrozenWeights(run) if self.loss.kl else None

    def prefetch(
        self, first_step: int, end_step: int, sample_slice: slice, prepare: Callable[[Batch], T]
    ) -> Generator[T, None, None]:
        """`prepare(batch)` for steps `first_step` to `end_step`. A batch of rollouts is written when its first one is
        asked for, with the weights of that moment."""
        batch, seq_len = self.run.config.train.global_batch, self.run.config.data.seq_len
        sample_ids = np.arange(batch, dtype=np.int64)[sample_slice]
        for step in range(first_step, end_step):
            update = step % self.steps_per_batch
            if update == 0:
                self.written = self._write(step)
            assert self.written is not None
            rows = update % self.rollout.updates * batch + sample_ids
            yield prepare(self.written.batch(rows, sample_ids, seq_len))

    def sample_indices(self, step: int) -> NDArray[np.int64]:
        """The prompts of the samples of a step of the last batch of rollouts."""
        batch = self.run.config.train.global_batch
        first, end = self.written.steps.tolist() if self.written else (0, 0)
        if self.written is None or not first <= step < end:
            return np.zeros(0, np.int64)
        return self.written.prompts[(step - first) % self.rollout.updates * batch :][:batch]

    def evaluate(self, run: TrainSetup) -> dict[str, float]:
        """Mean rewards of the most likely completion of each prompt that is held out, up to evaluate.batches x
        train.global_batch of them."""
        run.optimizer.wait_for_weights()
        results: dict[str, float] = {}
        for name, loader in run.validation_loaders.items():
            count = len(loader.dataset)
            if limit := run.config.evaluate.batches:
                count = min(count, limit * run.config.train.global_batch)
            found = self.completer.complete(loader.dataset, [*range(count)], [0] * count, greedy=True)
            columns = {"rewards/total": [self.completer.rewards.total(each.rewards) for each in found]}
            for place, reward in enumerate(self.loss.stat_names[1:-1]):
                columns[reward] = [each.rewards[place] for each in found]
            columns["completions/finished"] = [float(each.finished) for each in found]
            columns["completions/length"] = [float(sum(each.sampled)) for each in found]
            prefix = f"{name}/" if name else ""
            known = {column: [v for v in values if not math.isnan(v)] for column, values in columns.items()}
            results |= {prefix + column: sum(values) / len(values) for column, values in known.items() if values}
        return results

    def _write(self, step: int) -> RolloutBatch:
        """The rollouts of the steps from `step` on: completions, rewards and advantages."""
        run, seed = self.run, self.run.config.train.seed
        run.optimizer.wait_for_weights()
        groups: list[list[Rollout]] = []
        equal: list[list[Rollout]] = []
        needed = self.count // self.group
        for attempt in range(self.rollout.rounds):
            first = step // self.steps_per_batch * self.rollout.rounds + attempt
            prompts = self.loader.sample_indices(first)[: needed - len(groups)].tolist()
            rows = [index for index in prompts for _ in range(self.group)]
            seeds = [key64(seed, "rollout", first, row) for row in range(len(rows))]
            found = self.completer.complete(run.loader.dataset, rows, seeds)
            for start in range(0, len(found), self.group):
                group = found[start : start + self.group]
                differ = len({self.completer.rewards.total(each.rewards) for each in group}) > 1
                (groups if differ or self.rollout.rounds == 1 else equal).append(group)
            if len(groups) == needed:
                break
        groups += equal[: needed - len(groups)]
        completions = [each for group in groups for each in group]
        totals = np.array([self.completer.rewards.total(each.rewards) for each in completions], np.float32)
        rollouts = RolloutBatch.join(completions, totals, (step, step + self.steps_per_batch))
        if self.frozen:
            with run.spans("rollout"):
                self._add_reference(rollouts, self.frozen)
            if not self.loss.penalizes_tokens:
                divergence = (rollouts.log_probs - rollouts.reference_log_probs) * rollouts.sampled
                totals = totals - self.loss.kl * divergence.sum(1)
        rollouts.advantages = self.loss.advantages(torch.from_numpy(totals).view(-1, self.group)).flatten().numpy()
        self._notify(step, groups[0], rollouts)
        return rollouts

    @torch.no_grad()
    def _add_reference(self, rollouts: RolloutBatch, frozen: FrozenWeights) -> None:
        """What the weights of step 0 give each token. Each data-parallel rank computes its part of the rows."""
        run, found = self.run, list[Tensor]()
        size = self.count // run.layout.dp
        rows = np.arange(self.count, dtype=np.int64)[run.mesh.coords["dp"] * size :][:size]
        batch = rollouts.batch(rows, rows - rows[0], run.config.data.seq_len)

        def collect(output: ModelOutput, micro: Batch) -> Tensor:
            losses = self.loss.head_loss(output.at_temperature(self.loss.temperature), micro["labels"], per_token=True)
            found.append(-losses)
            return losses.sum()

        rng_key = torch.zeros(2, dtype=torch.int32, device=run.device.torch_device)
        with frozen.in_place(), run.runner.eval_mode():
            run.runner(run.runner.to_device(batch), rng_key, collect, backward=False)
            own = torch.cat(found).float().cpu().numpy()
        every_rank = run.mesh.all_gather_object(own if run.mesh.tp.rank == 0 else None)
        log_probs = np.concatenate([part for part in every_rank if part is not None])
        width = rollouts.tokens.shape[1]
        rollouts.reference_log_probs[:, 1:] = log_probs[:, : width - 1] * rollouts.sampled[:, 1:]

    def rank_tensors(self, completed_steps: int) -> Mapping[str, Tensor]:
        """The rollouts that the next step trains on, too, in the file of the first rank."""
        if self.run.mesh.layout_rank or completed_steps % self.steps_per_batch == 0:
            return {}
        assert self.written is not None
        return self.written.tensors()

    def _restore(self, checkpoint: Checkpoint) -> RolloutBatch:
        """The rollouts of a checkpoint between two of their updates."""
        run, step = self.run, self.run.completed_steps

        def read() -> RolloutBatch | None:
            with checkpoint:
                tensors, _ = checkpoint.rank_extras(0) or ({}, {})
                return RolloutBatch.from_tensors(tensors)

        found = run.mesh.broadcast_object(read, run.device)
        count, length = self.count, self.steps_per_batch
        first, end = step - step % length, step - step % length + length
        if found is None or (len(found.tokens), found.steps.tolist()) != (count, [first, end]):
            raise UserError(
                f"{checkpoint.storage}: lacks the {count} rollouts of steps {first + 1} to {end}, of which step {step} "
                f"is done; nearest: a checkpoint of a step that is a multiple of {length}, or rollout.updates and "
                "rollout.epochs as they were"
            )
        return found

    def _notify(self, step: int, group: Sequence[Rollout], rollouts: RolloutBatch) -> None:
        """Tell callbacks about the completions of the first prompt, if one of the steps is logged."""
        every, turns = self.run.config.log.every, self.completer.turns(self.run.loader.dataset)
        steps = range(step + 1, step + 1 + self.steps_per_batch)
        if step and not any(each % every == 0 for each in steps):
            return
        names = [name.removeprefix("rewards/") for name in self.loss.stat_names[1:-1]]
        records: list[dict[str, Any]] = []
        for place, each in enumerate(group):
            length = len(turns.prompts.tokens[each.prompt])
            rewards = dict(zip(names, each.rewards, strict=True))
            records.append(
                {
                    "step": step + 1,
                    "group": 0,
                    "prompt": turns.text(each.tokens[:length]),
                    "completion": turns.text(each.tokens[length:]),
                    "rewards": {name: None if math.isnan(value) else value for name, value in rewards.items()},
                    "reward": float(rollouts.stats[place, 0]),
                    "advantage": float(rollouts.advantages[place]),
                    "tokens": sum(each.sampled),
                    "finished": each.finished,
                }
            )
        self.run.notify("on_rollouts", records)


def prepare_rollouts(run: TrainSetup) -> RolloutLoader | None:
    """What makes the batches of a run on rollouts; None for other runs."""
    if not isinstance(run.loss_fn, PolicyLoss):
        return None
    run.runner.add_reference = None
    loader = RolloutLoader(run)
    if not run.evaluation_fn and run.validation_loaders:
        run.evaluation_fn = loader.evaluate
    return loader
