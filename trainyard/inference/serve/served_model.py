"""The models of a server, one for each adapter besides the model alone: prompts become sequences for the scheduler,
tokens become texts."""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from trainyard.core.errors import UserError
from trainyard.core.quantities import counted
from trainyard.core.user_code import nearest_name
from trainyard.data.text.tokenizer import Tokenizer
from trainyard.inference.requests import SamplingOptions
from trainyard.inference.serve.api_types import MAX_CHOICES, GenerationFields
from trainyard.inference.serve.chat_types import ChatMessage, TokenizeRequest
from trainyard.inference.serve.errors import ApiError
from trainyard.inference.serve.worker import SchedulerWorker
from trainyard.inference.text.text_stream import REPLACEMENT

if TYPE_CHECKING:  # tests serve without a model, and without torch
    from trainyard.inference.load import InferenceModel

SEED_STEP = 0x9E3779B97F4A7C15
"""Distance of the seeds of a request's choices: that of a later choice is nobody's first."""
SEED_MASK = (1 << 63) - 1
SHORT_TEXT = 2000
"""Characters that are encoded in the event loop; longer texts would delay the other requests."""


class ServedModel:
    def __init__(
        self, name: str, model: "InferenceModel", tokenizer: Tokenizer, worker: SchedulerWorker, adapter: int = 0
    ) -> None:
        """`adapter`: the number of the one that requests for this name use; 0: the model alone."""
        self.adapter = adapter
        self.name, self.tokenizer, self.worker, self.max_seq_len = name, tokenizer, worker, model.max_seq_len
        self.chat_template, self.end_ids, self._schemas = model.chat_template, model.end_ids, model.scheduler.schemas
        end_id = min(self.end_ids, default=None) if tokenizer.end_id is None else tokenizer.end_id
        self._document_start = [] if end_id is None else [end_id]
        self._encode_prompt = model.encode_prompt
        """Adds what the model expects before every text; a chat template has that itself."""
        self.created = int(time.time())
        self.max_characters = self.max_seq_len * tokenizer.max_token_length
        self.token_texts = TokenTexts(tokenizer)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    async def encode_prompt(self, text: str) -> list[int]:
        """Tokens of a prompt. An empty one is the beginning of a document, which follows an end token."""
        return await self._encode(self._encode_prompt, text, "prompt") or self._document_start

    async def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        add_generation_prompt: bool = True,
        tools: Sequence[dict[str, Any]] = (),
    ) -> list[int]:
        if tools and not self.chat_template.renders_tools:
            message = "tools: the chat template of this checkpoint does not show them to the model; leave them out"
            raise ApiError(400, message, "tools", "unsupported_parameter")
        rendered = [message.for_template() for message in messages]
        try:
            text = self.chat_template.render(rendered, add_generation_prompt, list(tools) or None)
        except UserError as error:
            raise ApiError(400, str(error), "messages") from None
        return await self._encode(self._encode_plain, text, "messages") or self._document_start

    async def tokenize(self, fields: TokenizeRequest) -> list[int]:
        if [fields.prompt, fields.messages, fields.content].count(None) != 2:
            raise ApiError(400, "prompt: give one of prompt, messages and content", "prompt", "invalid_value")
        if fields.messages:
            tools = [tool.model_dump(exclude_none=True) for tool in fields.tools or ()]
            return await self.encode_chat(fields.messages, fields.add_generation_prompt, tools)
        adds_special = fields.add_special if fields.prompt is None else fields.add_special_tokens
        encode = self._encode_prompt if adds_special else self._encode_plain
        return await self._encode(encode, fields.prompt or fields.content or "", "prompt")

    def detokenize(self, tokens: list[int]) -> str:
        if (unknown := max(tokens, default=0)) >= self.tokenizer.vocab_size:
            message = f"token {unknown} is not in the vocabulary of {self.tokenizer.vocab_size}"
            raise ApiError(400, message, "tokens", "invalid_value")
        return self.tokenizer.decode(tokens)

    async def _encode(self, encode: Callable[[str], list[int]], text: str, param: str) -> list[int]:
        if len(text) > self.max_characters:  # known without encoding it, which takes seconds
            message = (
                f"the prompt has {counted(len(text), 'character')}; the longest sequence is {self.max_seq_len} tokens, "
                f"which have at most {self.max_characters}"
            )
            raise ApiError(400, message, param, "context_length_exceeded")
        if len(text) <= SHORT_TEXT:
            return encode(text)
        return await asyncio.get_running_loop().run_in_executor(self._executor, encode, text)

    def _encode_plain(self, text: str) -> list[int]:
        tokens: list[int] = self.tokenizer.encode([text])[0].tolist()
        return tokens

    async def response_schema(self, fields: GenerationFields) -> str | None:
        """The JSON schema of the answers, compiled before the scheduler needs it: that can take long. Raises ApiError
        if it is refused."""
        param, schema = fields.answer_schema
        if schema is None:
            return None
        try:
            if self._schemas is None:
                raise UserError("this server does not support it; leave it out")
            await asyncio.get_running_loop().run_in_executor(self._executor, self._schemas.start, schema)
        except UserError as error:
            raise ApiError(400, f"{param}: {error}", param, "invalid_value") from None
        return schema

    def sequences(
        self,
        fields: GenerationFields,
        prompts: list[list[int]],
        default_tokens: int | None,
        json_schema: str | None = None,
    ) -> list[tuple[list[int], SamplingOptions]]:
        """What the scheduler continues: n sequences per prompt. `default_tokens` None: as many as the cache holds."""
        count = fields.n or 1
        if len(prompts) * count > MAX_CHOICES:
            total = counted(len(prompts) * count, "choice")
            message = f"{counted(len(prompts), 'prompt')} with n={count}: {total}; the limit is {MAX_CHOICES}"
            raise ApiError(400, message, "n")
        return [
            (prompt, self._options(fields, self._new_tokens(fields, len(prompt), default_tokens), choice, json_schema))
            for prompt in prompts
            for choice in range(count)
        ]

    def _new_tokens(self, fields: GenerationFields, prompt_length: int, default_tokens: int | None) -> int:
        room, wanted = self.max_seq_len - prompt_length, fields.requested_tokens
        if room < 1:
            message = (
                f"the prompt has {counted(prompt_length, 'token')}; the longest sequence is "
                f"{self.max_seq_len} tokens, prompt and "
                f"new tokens together"
            )
            raise ApiError(400, message, "messages" if default_tokens is None else "prompt", "context_length_exceeded")
        if wanted is not None and wanted > room:
            message = (
                f"max_tokens={wanted} and a prompt of {prompt_length} tokens are {prompt_length + wanted} tokens; the "
                f"longest sequence is {self.max_seq_len}"
            )
            raise ApiError(400, message, "max_tokens", "context_length_exceeded")
        return min(room, default_tokens or room) if wanted is None else wanted

    def _options(self, fields: GenerationFields, new_tokens: int, choice: int, schema: str | None) -> SamplingOptions:
        seed = secrets.randbits(63) if fields.seed is None else fields.seed + choice * SEED_STEP
        temperature = 1.0 if fields.temperature is None else fields.temperature
        top_p, top_k = 1.0 if fields.top_p is None else fields.top_p, fields.top_k or 0
        return SamplingOptions(
            temperature=temperature if top_p > 0 else 0.0,
            top_p=top_p if top_p > 0 else 1.0,
            top_k=top_k if top_k < self.tokenizer.vocab_size else 0,
            seed=seed & SEED_MASK,
            presence_penalty=fields.presence_penalty or 0.0,
            frequency_penalty=fields.frequency_penalty or 0.0,
            repetition_penalty=fields.repetition_penalty or 1.0,
            max_new_tokens=new_tokens,
            end_ids=self.end_ids,
            num_logprobs=fields.num_logprobs,
            json_schema=schema,
        )


def find_model(models: Sequence[ServedModel], name: str | None) -> ServedModel:
    """The model of this name; without one, the first. Raises ApiError if there is none."""
    if found := next((model for model in models if name in (None, model.name)), None):
        return found
    names = [model.name for model in models]
    known = f"only {names[0]!r}" if len(names) == 1 else ", ".join(map(repr, names)) + nearest_name(str(name), names)
    raise ApiError(404, f"model {name!r}: this server has {known}", "model", "model_not_found")


class TokenTexts:
    """The text of single tokens, as it is inside a text: SentencePiece drops the space of a first token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._before = tokenizer.encode(["a"])[0].tolist()
        self._before_text = tokenizer.decode(self._before)
        self._texts: dict[int, str] = {}

    def text(self, token: int) -> str:
        """Text of a token; `token_id:N` for one that is only a part of a character, or nothing."""
        if token not in self._texts:
            text = self._tokenizer.decode([*self._before, token])
            known = text.startswith(self._before_text)
            text = text[len(self._before_text) :] if known else self._tokenizer.decode([token])
            self._texts[token] = f"token_id:{token}" if not text or REPLACEMENT in text else text
        return self._texts[token]

    def utf8(self, token: int) -> list[int] | None:
        text = self.text(token)
        return None if text == f"token_id:{token}" else list(text.encode())
