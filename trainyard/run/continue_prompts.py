"""Continues prompts with the model that is being trained, at any layout, through the forward pass of evaluation.

Each new token takes one forward pass over rows of data.seq_len tokens, as evaluation runs them: the shapes, and so the
compiled graphs, are the same. What follows a row's last token is padding, which a causal model does not see. There is
no KV cache; `trainyard generate` has one.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trainyard.config.data_schema import DataSection
from trainyard.config.schema import SamplesSection
from trainyard.core.batch import Batch
from trainyard.core.constants import IGNORE_INDEX
from trainyard.core.counter_rng import key64
from trainyard.inference.sampling import choose_tokens
from trainyard.models import ModelOutput
from trainyard.parallel.mesh import Mesh
from trainyard.parallel.process_group import Group
from trainyard.train.micro_batches.runner import MicroBatchRunner


@torch.no_grad()
def continue_prompts(
    runner: MicroBatchRunner,
    options: SamplesSection,
    data: DataSection,
    prompts: Sequence[Sequence[int]],
    end_id: int | None,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[list[int]] | None:
    """The new tokens of each prompt, up to samples.max_new_tokens of them, `end_id` (included) or a row of data.seq_len
    tokens; None if `should_stop`, which is asked before every forward pass.

    All ranks call this and return the same tokens. Data-parallel ranks repeat each other's work.
    """
    # A pipeline schedule runs as many micro batches as a training step, no more and no fewer.
    capacity = runner.micro_batch * runner.mesh.layout.micro_batches if runner.pipeline else len(prompts)
    results: list[list[int]] = []
    with runner.eval_mode():
        for first in range(0, len(prompts), capacity):
            group = prompts[first : first + capacity]
            rows = _Rows(options.seed, data, group, first, -(-capacity // runner.micro_batch) * runner.micro_batch)
            for _ in range(options.max_new_tokens):
                if rows.all_finished:
                    break
                if should_stop():
                    return None
                rows.append(_next_tokens(runner, options, rows), end_id)
            results += rows.new_tokens
    return results


class _Rows:
    """Prompts in rows of data.seq_len tokens, each with its own length. Rows without a prompt fill up micro batches."""

    def __init__(
        self, seed: int, data: DataSection, prompts: Sequence[Sequence[int]], first: int, num_rows: int
    ) -> None:
        """`first` is the index of the first prompt among all prompts; the index is part of a prompt's random key."""
        self.separates_documents = data.separates_documents
        self.tokens = torch.zeros(num_rows, data.seq_len, dtype=torch.int32)
        for row, prompt in zip(self.tokens, prompts, strict=False):
            row[: len(prompt)] = torch.tensor(prompt, dtype=torch.int32)
        self.lengths = [len(prompt) for prompt in prompts]
        self.new_tokens: list[list[int]] = [[] for _ in prompts]
        self.finished = [False for _ in prompts]
        self.seeds = torch.tensor([key64(seed, "samples", first + row) for row in range(num_rows)])

    @property
    def all_finished(self) -> bool:
        return all(self.finished)

    def append(self, tokens: list[int], end_id: int | None) -> None:
        """Add one token to each row that is not finished."""
        for row, token in enumerate(tokens[: len(self.lengths)]):
            if not self.finished[row]:
                self.tokens[row, self.lengths[row]] = token
                self.lengths[row] += 1
                self.new_tokens[row].append(token)
                self.finished[row] = token == end_id or self.lengths[row] == self.tokens.shape[1]

    def positions(self) -> Tensor:
        """[rows] index of each row's next token."""
        return torch.tensor(self.lengths + [1] * (len(self.tokens) - len(self.lengths)))

    def batch(self) -> Batch:
        """A batch with the fields of a training batch. Only the last token of a row has a label, which marks it."""
        position = torch.arange(self.tokens.shape[1], dtype=torch.int32).expand(self.tokens.shape)
        is_last = position == (self.positions() - 1)[:, None]
        batch: Batch = {
            "tokens": self.tokens,
            "labels": torch.where(is_last, 0, IGNORE_INDEX).int(),
            "sample_ids": torch.arange(len(self.tokens), dtype=torch.int32),
        }
        if self.separates_documents:
            batch |= {"document_ids": torch.zeros_like(self.tokens), "position_ids": position.contiguous()}
        return batch


def _next_tokens(runner: MicroBatchRunner, options: SamplesSection, rows: _Rows) -> list[int]:
    """The next token of each row: one forward pass."""
    device, mesh = runner.device, runner.mesh
    chosen = torch.zeros(len(rows.tokens), dtype=torch.int32, device=device.torch_device)
    seeds, positions = device.to_device(rows.seeds), device.to_device(rows.positions())

    def choose(output: ModelOutput, micro: Batch) -> Tensor:
        index = micro["sample_ids"].long()
        logits = last_logits(output, micro["labels"], mesh.cp)
        constants = (options.temperature, options.top_k, options.top_p)
        temperature, top_k, top_p = (torch.full_like(logits[:, 0], value) for value in constants)
        chosen[index] = choose_tokens(logits, temperature, top_k.int(), top_p, seeds[index], positions[index])
        return logits.new_zeros(())

    rng_key = torch.zeros(2, dtype=torch.int32, device=device.torch_device)
    runner(runner.to_device(rows.batch()), rng_key, choose, backward=False)
    # The last stage has the tokens. One rank decides, should ranks differ in a rounding error.
    tokens: list[int] = mesh.world.all_reduce_sum(chosen if _decides(mesh) else torch.zeros_like(chosen)).tolist()
    return tokens


def last_logits(output: ModelOutput, labels: Tensor, cp: Group) -> Tensor:
    """[B, V] fp32 logits at the token of each row that has a label, which one context-parallel rank holds."""
    is_last = labels != IGNORE_INDEX
    row = torch.arange(len(labels), device=labels.device)
    hidden = output.hidden[row, is_last.int().argmax(1)]
    hidden = cp.all_reduce_sum(torch.where(is_last.any(1)[:, None], hidden, 0.0))  # zeros from all ranks but one
    return output.logits_of(hidden).float()


def _decides(mesh: Mesh) -> bool:
    """True on one rank of the last pipeline stage."""
    coords, last_stage = mesh.coords, len(mesh.layout.stages) - 1
    is_last = coords["pp"] == mesh.layout.stage_owner(last_stage)
    return is_last and coords["dp"] == coords["cp"] == coords["tp"] == 0
