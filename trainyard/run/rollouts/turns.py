"""Completions as text or messages, and the tool that answers them."""

from collections.abc import Callable
from typing import Any

from trainyard.core.errors import UserError
from trainyard.core.user_code import call_function, describe_object
from trainyard.data.loading.prompt_samples import PromptSamples
from trainyard.data.text.chat_encoder import RENDERED_AT
from trainyard.data.text.tokenizer import Tokenizer
from trainyard.run.rollouts.rollout import Rollout

Tool = Callable[[str], str | None]
Message = dict[str, Any]
EXAMPLE: list[Message] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}]
"""Stands for a conversation: what follows an answer does not depend on it."""


class Turns:
    """What the tokens of a completion say, after a prompt of `prompts`."""

    def __init__(self, prompts: PromptSamples, tokenizer: Tokenizer, tool: Tool | None) -> None:
        self.prompts, self.tokenizer, self.tool = prompts, tokenizer, tool

    def text(self, tokens: list[int]) -> str:
        """Tokens as text, without those that end a turn."""
        known = [t for t in tokens if t < self.tokenizer.vocab_size and t not in self.prompts.end_ids]
        return self.tokenizer.decode(known)

    def completion(self, completion: Rollout) -> str | list[Message]:
        """What follows the prompt: text, or messages if the prompt is messages."""
        length = len(self.prompts.tokens[completion.prompt])
        if isinstance(self.prompts.prompts[completion.prompt], str):
            return self.text(completion.tokens[length:])
        answers = iter(completion.answers)  # without what the template writes around them
        return [
            {"role": "assistant", "content": self.text(tokens)}
            if sampled
            else {"role": "tool", "content": next(answers)}
            for sampled, tokens in _runs(completion, length)
        ]

    def after_turn(self, completion: Rollout, turn: list[int]) -> list[int] | None:
        """The tokens between a turn that ended and the next one: the answer of the tool, in the prompt's form. None: it
        has no answer."""
        assert self.tool
        answer = call_function(self.tool, "rollout.tool", self.text(turn))
        if answer is None:
            return None
        if not isinstance(answer, str):
            raise UserError(f"rollout.tool: returned {describe_object(answer)}; expected text or None")
        completion.answers.append(answer)
        encoder = self.prompts.encoder
        is_text = isinstance(self.prompts.prompts[completion.prompt], str)
        text = answer if is_text else self._rendered(answer, turn[-1])
        # With the end of the turn before it, since some tokenizers begin a text with another token.
        end = encoder.fast.id_to_token(turn[-1]) or ""
        tokens: list[int] = encoder.fast.encode(end + text, add_special_tokens=False).ids
        if tokens[:1] == turn[-1:]:
            return tokens[1:]
        return [*encoder.fast.encode(text, add_special_tokens=False).ids]

    def _rendered(self, answer: str, end_id: int) -> str:
        """What the template writes after the end of a turn if the tool answers it, up to the next turn of the model."""
        template, end = self.prompts.encoder.template, self.prompts.encoder.fast.id_to_token(end_id) or ""
        before = template.render(EXAMPLE, False, None, RENDERED_AT)
        after = template.render([*EXAMPLE, {"role": "tool", "content": answer}], True, None, RENDERED_AT)
        place = before.rfind(end)
        if not end or place < 0 or not after.startswith(before):
            raise UserError("rollout.tool: the chat template does not write an answer of a tool after an earlier turn")
        return after[place + len(end) :]


def _runs(completion: Rollout, start: int) -> list[tuple[bool, list[int]]]:
    """Adjacent tokens of the model, or of the tool, from `start` on."""
    runs: list[tuple[bool, list[int]]] = []
    for token, sampled in zip(completion.tokens[start:], completion.sampled[start:], strict=True):
        if not runs or runs[-1][0] != sampled:
            runs.append((sampled, []))
        runs[-1][1].append(token)
    return runs
