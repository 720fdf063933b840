"""The requests of the API. Fields of OpenAI's API that this server cannot honor accept only their neutral value."""

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

MAX_STOP_LENGTH = 256
"""Characters of a stop string."""
MAX_CHOICES = 128
"""Choices of one request: prompts times n."""
DEFAULT_MAX_TOKENS = 16
"""New tokens of a completion, as in OpenAI's API. A chat has no limit but the length of the cache."""

ANY_OBJECT = '{"type": "object"}'


def _require_unicode(text: str) -> str:
    """JSON strings can have lone surrogates, which no tokenizer encodes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("lone_surrogate", "must be valid Unicode, without lone surrogates") from None
    return text


Text = Annotated[str, AfterValidator(_require_unicode)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
TokenCount = Annotated[int, Field(ge=1, lt=1 << 31)]
StopString = Annotated[Text, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
Prompts = Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]
TokenPrompts = Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_CHOICES)]


class NeutralField:
    """Type of a field that is not supported: null, or one of `values`, which ask for nothing."""

    def __init__(self, *values: Any) -> None:
        self.values = (None, *values)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"enum": list(self.values), "description": "Not supported."}

    def _check(self, value: Any) -> Any:
        # 0 == False, but they are different values in JSON.
        if not any(
            value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in self.values
        ):
            raise PydanticCustomError("not_supported", "this server does not support it; leave it out")
        return value


class ApiModel(BaseModel):
    """Values of other types are refused, not converted; so are unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid")


class StreamOptions(ApiModel):
    include_usage: bool = False
    """Send the number of tokens in a last chunk without choices."""
    include_obfuscation: Annotated[Any, NeutralField(False)] = None


class JsonSchema(ApiModel):
    name: Text = ""
    """Ignored, as are description and strict: every answer is JSON of the schema."""
    description: Text | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(ApiModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @property
    def schema_text(self) -> str | None:
        """The JSON schema of the answer; None: any text."""
        if self.type == "json_schema":
            return json.dumps(self.json_schema.schema_) if self.json_schema else ""
        return ANY_OBJECT if self.type == "json_object" else None


class GenerationFields(ApiModel):
    """What completions and chats have in common."""

    model: str | None = None
    """Default: the model that is served."""
    max_tokens: TokenCount | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """0: the most likely token. Default: 1."""
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    """Extension. Sample among this many of the most likely tokens; 0: all."""
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    """The same seed gives the same tokens. Default: a new one per request."""
    stop: StopString | Annotated[list[StopString], Field(max_length=4)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    """Ignored."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    """Extension, as in vLLM and transformers. Default: 1."""
    response_format: ResponseFormat | None = None
    logit_bias: Annotated[Any, NeutralField({})] = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def answer_schema(self) -> tuple[str, str | None]:
        """The JSON schema of the answer, after the field that asks for it; None: any text."""
        return "response_format", self.response_format.schema_text if self.response_format else None

    @property
    def requested_tokens(self) -> int | None:
        """New tokens per choice that the request asks for."""
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Most likely tokens to report with each token; None: no logprobs at all."""
        raise NotImplementedError


class CompletionRequest(GenerationFields):
    prompt: Text | Prompts | TokenIds | TokenPrompts
    """An empty string starts a new document."""
    echo: bool | None = None
    """Repeat the prompt before the text."""
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    suffix: Annotated[Any, NeutralField()] = None
    best_of: Annotated[Any, NeutralField(1)] = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one, each as text or as tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        items: list[Any] = list(self.prompt)
        return [items] if isinstance(items[0], int) else items

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


class DetokenizeRequest(ApiModel):
    model: str | None = None
    tokens: list[TokenId]
