"""Text samples: every samples.every steps, the model continues the prompts of samples.prompts."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tokenizers import Tokenizer as Fast

from trainyard.checkpoint.checkpoint import Checkpoint
from trainyard.config.data_schema import DataSection
from trainyard.config.schema import SamplesSection
from trainyard.core.errors import UserError
from trainyard.core.quantities import counted
from trainyard.data.loading.text_stream import tokenizer_spec
from trainyard.data.text.tokenizer import FastTokenizer, Tokenizer, document_end_id, load_tokenizer
from trainyard.devices import Device
from trainyard.families import ModelConfig
from trainyard.metrics.span_recorder import SpanRecorder
from trainyard.parallel.mesh import Mesh
from trainyard.run.callbacks import Part, TrainerView
from trainyard.run.continue_prompts import continue_prompts
from trainyard.run.model_files import run_model_files
from trainyard.run.run_log import RunLog, lacks_text_samples
from trainyard.train.micro_batches.runner import MicroBatchRunner


class TextPrompts:
    """The prompts of a run. Rank 0 has the tokenizer; all ranks have the tokens."""

    def __init__(
        self, prompts: Sequence[str], seq_len: int, make_tokenizer: Callable[[], Tokenizer], mesh: Mesh, device: Device
    ) -> None:
        """Raises UserError on all ranks if the tokenizer is not known or a prompt does not fit."""
        self.prompts, self.seq_len, self.make_tokenizer = prompts, seq_len, make_tokenizer
        self.tokenizer: Tokenizer
        self.tokens: list[list[int]]
        """Tokens of each prompt."""
        self.end_id: int | None
        self.tokens, self.end_id = mesh.broadcast_object(self._encode, device)

    def _encode(self) -> tuple[list[list[int]], int | None]:
        self.tokenizer = self.make_tokenizer()
        return [self._encode_prompt(prompt) for prompt in self.prompts], self.tokenizer.end_id

    def _encode_prompt(self, prompt: str) -> list[int]:
        """The tokens of a prompt; of an empty one, the token that ends a document, after which the next one starts."""
        tokens: list[int] = self.tokenizer.encode([prompt])[0].tolist() or [document_end_id(self.tokenizer)]
        if len(tokens) >= self.seq_len:
            raise UserError(
                f"samples.prompts: {prompt[:40]!r} has {counted(len(tokens), 'token')}, and "
                f"data.seq_len={self.seq_len} leaves no room "
                f"for a new one; nearest: a prompt of {self.seq_len - 1} tokens"
            )
        return tokens

    def records(self, step: int, new_tokens: list[list[int]]) -> list[dict[str, Any]]:
        """What samples.jsonl says about each prompt: step, prompt, text and tokens."""
        return [
            {"step": step, "prompt": prompt, "text": self._decode(tokens, new), "tokens": new}
            for prompt, tokens, new in zip(self.prompts, self.tokens, new_tokens, strict=True)
        ]

    def _decode(self, prompt: list[int], new: list[int]) -> str:
        """The text of new tokens. They are decoded after their prompt, since the first one may begin with a space."""
        end_id, size = self.tokenizer.end_id, self.tokenizer.vocab_size
        known = [token for token in new if token < size and token != end_id]  # model.vocab may be larger
        before, text = self.tokenizer.decode(prompt), self.tokenizer.decode(prompt + known)
        return text.removeprefix(before) if text.startswith(before) else self.tokenizer.decode(known)


def prompt_tokenizer(
    samples: SamplesSection, data: DataSection, model: ModelConfig, weights_from: str | None, resumed: Checkpoint | None
) -> Tokenizer:
    """The tokenizer of samples.prompts: samples.tokenizer, that of the data section, or that of the checkpoint from
    which the run resumes or starts."""
    named = samples.tokenizer
    if named or data.has_flag("makes_tokens") or data.tokenizer != "bytes":
        spec = tokenizer_spec(data, model.new_tokens)
        tokenizer = load_tokenizer(spec._replace(name=named) if named else spec)
    elif file := run_model_files(data, model, weights_from, resumed).get("tokenizer.json"):
        tokenizer = FastTokenizer(Fast.from_buffer(file), data.end_of_text, "tokenizer.json of the checkpoint")
    else:  # bytes is the default of data.tokenizer, and says nothing about tokens that were made elsewhere
        raise UserError(
            f"samples.every={samples.every}: the tokenizer of data.source={data.source} is not known; set "
            "data.tokenizer to the path of its tokenizer.json (or samples.tokenizer=bytes)"
        )
    if tokenizer.vocab_size > model.vocab:
        raise UserError(
            f"model.vocab={model.vocab}: the tokenizer for samples.prompts has {tokenizer.vocab_size} tokens; "
            f"nearest: {tokenizer.vocab_size}"
        )
    return tokenizer


class TextSamples(Part):
    """Makes the text samples of a run. All ranks take part; the first one decodes."""

    def __init__(
        self,
        prompts: TextPrompts,
        runner: MicroBatchRunner,
        poll_stop: Callable[[], bool],
        spans: SpanRecorder,
        run_log: RunLog | None,
    ) -> None:
        """`poll_stop` is asked before every token, on all ranks. `run_log` is on the first rank."""
        self.prompts, self.runner = prompts, runner
        self.poll_stop, self.spans, self.run_log = poll_stop, spans, run_log

    def begin_run(self, trainer: TrainerView) -> None:
        """Make those that a signal prevented after the step from which the run resumes."""
        mesh, device = self.runner.mesh, self.runner.device
        if mesh.broadcast_object(partial(lacks_text_samples, self.run_log), device):
            self._sample_if_due(trainer, trainer.completed_steps)

    def on_log(self, trainer: TrainerView, record: dict[str, Any]) -> None:
        self._sample_if_due(trainer, record["step"])

    def _sample_if_due(self, trainer: TrainerView, step: int) -> None:
        config = trainer.config
        is_due = step % config.samples.every == 0 or step == config.train.steps
        if not is_due or trainer.should_stop():
            return
        with self.spans("samples"):
            tokens, end_id = self.prompts.tokens, self.prompts.end_id
            new_tokens = continue_prompts(self.runner, config.samples, config.data, tokens, end_id, self.poll_stop)
        if new_tokens is None:  # a signal; the resumed run samples again
            return
        make_records = partial(self.prompts.records, step, new_tokens)
        trainer.notify("on_samples", self.runner.mesh.broadcast_object(make_records, self.runner.device))
