"""Completions of prompts, with what their rewards say.

Data-parallel ranks write some of the completions each, and all of them know all. The noise of each token is a function
of the completion and its position.
"""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from trainyard.core.errors import UserError
from trainyard.core.user_code import import_function
from trainyard.data.loading.dataset import CombinedDataset, Dataset
from trainyard.data.loading.prompt_samples import PromptSamples
from trainyard.data.loading.text_stream import tokenizer_spec
from trainyard.data.text.tokenizer import load_tokenizer
from trainyard.run.rollouts.rewards import RewardFunctions
from trainyard.run.rollouts.rollout import Rollout
from trainyard.run.rollouts.sampler import RolloutSampler
from trainyard.run.rollouts.turns import Turns
from trainyard.run.setup import TrainSetup

LOG_INTERVAL_S = 5.0
logger = logging.getLogger(__name__)


class PromptCompleter:
    """The model of a run with its tool and its rewards."""

    def __init__(self, run: TrainSetup, count: int) -> None:
        """`count` is how many completions are written at a time, over all ranks."""
        config = run.config
        self.run = run
        self.tool = import_function(config.rollout.tool, "rollout.tool") if config.rollout.tool else None
        self.tokenizer = load_tokenizer(tokenizer_spec(config.data, config.model.new_tokens))
        prompts, _ = _locate(run.loader.dataset, 0)
        self.rewards = RewardFunctions(config.rollout.rewards, config.rollout.weights)
        self.sampler = RolloutSampler(run, prompts.end_ids, -(-count // run.layout.dp))

    def complete(
        self, dataset: Dataset, indices: Sequence[int], seeds: Sequence[int], greedy: bool = False
    ) -> list[Rollout]:
        """A completion of each of these prompts, with its rewards. Each data-parallel rank writes some of them."""
        run, dp = self.run, self.run.layout.dp
        rank, count = run.mesh.coords["dp"], len(indices)
        own = range(rank * count // dp, (rank + 1) * count // dp)
        turns = self.turns(dataset)
        places = [_locate(dataset, indices[row])[1] for row in own]
        asked = [(place, turns.prompts.tokens[place]) for place in places]
        after_turn = partial(self._after_turn, turns) if self.tool else None
        with run.spans("rollout"):
            log = _log_progress(len(own))
            found = self.sampler.complete(asked, [seeds[row] for row in own], after_turn, greedy, log)
        if run.mesh.tp.rank == 0:  # a judge is slow, costs money, or is not deterministic
            with run.spans("reward"):
                self._judge(turns, found)
        every_rank = run.mesh.all_gather_object(found if run.mesh.tp.rank == 0 else [])
        return [each for part in every_rank for each in part]

    def _after_turn(self, turns: Turns, completion: Rollout, turn: list[int]) -> list[int] | None:
        """What the tool says on the first tensor-parallel rank. Another call might answer something else."""
        tp, longest = self.run.mesh.tp, self.run.config.data.seq_len
        answer = turns.after_turn(completion, turn) if tp.rank == 0 else None
        if tp.size == 1:
            return answer
        message = torch.zeros(1 + longest, dtype=torch.int32)  # 1 more than the number of tokens, and these
        if answer is not None:
            known = answer[:longest]
            message[: 1 + len(known)] = torch.tensor([1 + len(known), *known], dtype=torch.int32)
        count, *tokens = tp.all_reduce_sum(message.to(self.run.device.torch_device)).tolist()
        if count and tp.rank:
            completion.answers.append("")
        return tokens[: count - 1] if count else None

    def turns(self, dataset: Dataset) -> Turns:
        return Turns(_locate(dataset, 0)[0], self.tokenizer, self.tool)

    def _judge(self, turns: Turns, completions: Sequence[Rollout]) -> None:
        """Ask for the rewards of these completions."""
        if not completions:
            return
        prompts = turns.prompts
        rewards = self.rewards(
            [prompts.prompts[each.prompt] for each in completions],
            [turns.completion(each) for each in completions],
            [each.tokens[len(prompts.tokens[each.prompt]) :] for each in completions],
            [prompts.records[each.prompt] for each in completions],
        )
        for each, values in zip(completions, rewards, strict=True):
            each.rewards = values


def _log_progress(total: int) -> Callable[[], None]:
    """A function to call after each of `total` completions, which logs now and then how many there are."""
    logged, done = time.monotonic(), 0

    def ended() -> None:
        nonlocal logged, done
        done += 1
        if time.monotonic() - logged > LOG_INTERVAL_S:
            logged = time.monotonic()
            logger.info("rollouts: %s of %s completions", done, total)

    return ended


def _locate(dataset: Dataset, index: int) -> tuple[PromptSamples, int]:
    """The prompts that an index of a dataset, which may be a part or a blend of others, belongs to."""
    while isinstance(dataset, CombinedDataset):
        numbers, indices = dataset.find(np.array([index], np.int64))
        dataset, index = dataset.datasets[int(numbers[0])], int(indices[0])
    if not isinstance(dataset, PromptSamples):
        raise UserError("data.source: its samples have no prompts; nearest: prompts")
    return dataset, index
