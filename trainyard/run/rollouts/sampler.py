"""Writes completions with the weights that train: an inference engine whose parameters are those of the trainer.

Nothing is copied and no other process runs, so the engine has each update as soon as it is made. Only the cache of keys
and values is its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from trainyard.inference.build_engine import EngineShape, build_engine
from trainyard.inference.requests import Request, SamplingOptions
from trainyard.inference.scheduler import RequestScheduler
from trainyard.run.rollouts.rollout import Rollout
from trainyard.run.setup import TrainSetup

AfterTurn = Callable[[Rollout, list[int]], list[int] | None]
"""(completion so far, tokens of the turn that ended) to the tokens of the tool, after which the model continues; None:
the completion is complete."""


class RolloutSampler:
    """The engine of one rank; tensor-parallel ranks take the same steps."""

    def __init__(self, run: TrainSetup, end_ids: frozenset[int], most: int) -> None:
        """`most` completions at a time are never exceeded."""
        config = run.config
        state = run.optimizer.state
        self.config, self.end_ids = config, end_ids
        shape = EngineShape(min(most, config.rollout.max_batch), config.data.seq_len, state.compute_dtype)

        def missing(name: str) -> Tensor:
            raise AssertionError(name)

        self.engine = build_engine(
            config.model,
            run.device,
            run.mesh.tp,
            shape,
            missing,
            existing=dict(run.model.named_parameters()),
            stored=state.stored,
            fused_kernels=config.device.kernels == "fused",
            batch_invariant=config.device.batch_invariant,
        )

    def options(self, greedy: bool) -> SamplingOptions:
        rollout = self.config.rollout
        chosen = SamplingOptions(
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            max_new_tokens=rollout.max_new_tokens,
            end_ids=self.end_ids,
            reports_choices=True,
        )
        return replace(chosen, temperature=0.0) if greedy else chosen

    def complete(
        self,
        prompts: Sequence[tuple[int, list[int]]],
        seeds: Sequence[int],
        after_turn: AfterTurn | None,
        greedy: bool,
        on_end: Callable[[], None],
    ) -> list[Rollout]:
        """A completion of each (index, tokens) of `prompts`, after which `on_end` is called. The seed of a prompt
        decides, and not its neighbors."""
        # A new scheduler knows no prefix: the cache has what older weights computed.
        scheduler = RequestScheduler(self.engine, self.config.model.vocab)
        options, rollout = self.options(greedy), self.config.rollout
        completions = [
            Rollout(index, [*tokens], [0.0] * len(tokens), [False] * len(tokens)) for index, tokens in prompts
        ]
        turns: list[list[int]] = [[] for _ in prompts]
        num_turns = [1] * len(prompts)

        def ask(number: int) -> None:
            scheduler.add(Request(number, [*completions[number].tokens], replace(options, seed=seeds[number])))

        for number in range(len(prompts)):
            ask(number)
        while scheduler.has_work:
            for event in scheduler.step():
                completion, turn = completions[event.request_id], turns[event.request_id]
                assert event.logprob is not None
                turn.append(event.token)
                completion.tokens.append(event.token)
                completion.log_probs.append(event.logprob)
                completion.sampled.append(True)
                if not event.finish_reason:
                    continue
                completion.finished = event.finish_reason == "stop"
                goes_on = after_turn and completion.finished and num_turns[event.request_id] < rollout.max_turns
                answer = after_turn(completion, turn) if after_turn and goes_on else None
                if answer is None:
                    on_end()
                elif len(completion.tokens) + len(answer) >= self.config.data.seq_len:
                    completion.finished = False
                    completion.answers.pop()
                    on_end()
                else:
                    completion.tokens += answer
                    completion.log_probs += [0.0] * len(answer)
                    completion.sampled += [False] * len(answer)
                    turn.clear()
                    num_turns[event.request_id] += 1
                    ask(event.request_id)
        return completions
