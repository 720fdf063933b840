"""Continues a list of prompts and returns the texts in the order of the prompts."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from trainyard.inference.load import InferenceModel
from trainyard.inference.requests import FinishReason, Request, SamplingOptions
from trainyard.inference.text.text_stream import TextStream


@dataclass(frozen=True)
class Prompt:
    index: int
    text: str
    """Empty for a prompt of token ids."""
    tokens: list[int]


@dataclass
class Completion:
    prompt: Prompt
    stream: TextStream | None
    """None without a tokenizer."""
    tokens: list[int] = field(default_factory=list)
    """New tokens, with the one that ended the text."""
    text: str = ""
    finish_reason: FinishReason | None = None


def generate_texts(
    model: InferenceModel,
    prompts: Sequence[Prompt],
    sampling: SamplingOptions,
    stop: tuple[str, ...] = (),
    on_text: Callable[[str], None] | None = None,
) -> Iterator[Completion]:
    """Continue prompts, many at a time. `on_text` gets the text of a single prompt as it is generated.

    Without a tokenizer, the text is the list of token ids. All tensor-parallel ranks call this and get the same texts.
    """
    completions: dict[int, Completion] = {}
    for prompt in prompts:
        stream = TextStream(model.tokenizer, stop, prompt.tokens) if model.tokenizer else None
        completions[prompt.index] = Completion(prompt, stream)
        model.scheduler.add(Request(prompt.index, prompt.tokens, sampling))
    order = iter([prompt.index for prompt in prompts])
    following = next(order, None)
    while model.scheduler.has_work:
        for event in model.scheduler.step():
            completion = completions[event.request_id]
            if completion.finish_reason:
                continue  # a stop string ended it, and this token was in flight
            completion.tokens.append(event.token)
            completion.finish_reason = event.finish_reason
            new = _new_text(completion, event.token, event.token in sampling.end_ids)
            if completion.stream and completion.stream.stopped:
                completion.finish_reason = "stop"
                model.scheduler.cancel(event.request_id)
            completion.text += new
            if on_text and new:
                on_text(new)
        while following is not None and completions[following].finish_reason:
            yield completions.pop(following)
            following = next(order, None)


def _new_text(completion: Completion, token: int, is_end: bool) -> str:
    stream, finished = completion.stream, completion.finish_reason is not None
    if stream is None:
        return ("" if len(completion.tokens) == 1 else " ") + str(token)
    new = "" if is_end else stream.push(token)
    return new + (stream.finish() if finished and not stream.stopped else "")
