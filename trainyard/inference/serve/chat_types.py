"""The requests of chats: messages, and the tools that a model may call."""

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from trainyard.inference.serve.api_types import ApiModel, GenerationFields, NeutralField, Text, TokenCount
from trainyard.inference.text.tool_calls import call_schema


def _require_json_object(text: str) -> str:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise PydanticCustomError("json_object", "must be a JSON object, as a string")
    return text


class TextPart(ApiModel):
    type: Literal["text"]
    text: Text


TextParts = Annotated[list[TextPart], Field(min_length=1)]


class FunctionDefinition(ApiModel):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema."""
    strict: bool | None = None


class Tool(ApiModel):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(ApiModel):
    name: Text


class NamedTool(ApiModel):
    type: Literal["function"]
    function: FunctionName


class FunctionCall(ApiModel):
    name: Text
    arguments: Annotated[Text, AfterValidator(_require_json_object)]


class MessageToolCall(ApiModel):
    id: Text | None = None
    type: Literal["function"] = "function"
    function: FunctionCall

    def for_template(self) -> dict[str, Any]:
        """As vLLM: templates write the arguments as JSON themselves."""
        function = {"name": self.function.name, "arguments": json.loads(self.function.arguments)}
        return {"type": self.type, "function": function} | ({"id": self.id} if self.id is not None else {})


class ChatMessage(ApiModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_calls: list[MessageToolCall] | None = None
    """Of an assistant, which then needs no content."""
    tool_call_id: Text | None = None
    """Of a tool: the call that it answers."""
    content: Annotated[Text | TextParts | None, Field(validate_default=True)] = None
    name: Text | None = None
    refusal: Annotated[Any, NeutralField()] = None
    annotations: Annotated[Any, NeutralField([])] = None
    audio: Annotated[Any, NeutralField()] = None
    function_call: Annotated[Any, NeutralField()] = None

    @field_validator("content")
    @classmethod
    def _require_content(cls, content: Any, info: ValidationInfo) -> Any:
        if content is None and not info.data.get("tool_calls"):
            raise PydanticCustomError("missing", "this field is required")
        return content

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it: a developer is what they call system, parts are one text."""
        role = "system" if self.role == "developer" else self.role
        content = "\n".join(part.text for part in self.content) if isinstance(self.content, list) else self.content
        message: dict[str, Any] = {"role": role, "content": content or ""}
        for name in ("name", "tool_call_id"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return message


class TokenizeRequest(ApiModel):
    """vLLM's `prompt` or `messages`, or llama.cpp's `content`."""

    model: str | None = None
    prompt: Text | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    content: Text | None = None
    add_special: bool = False
    """The same as add_special_tokens, for `content`."""
    add_special_tokens: bool = True
    """With the tokens that a completion's prompt gets, such as <s>. A chat template has them itself."""
    add_generation_prompt: bool = True
    """With what begins the answer to `messages`."""
    tools: list[Tool] | None = None
    return_token_strs: bool | None = None


class ChatCompletionRequest(GenerationFields):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Needs logprobs."""
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    """required, or a function: the answer is a call. Default: auto, the model decides."""
    parallel_tool_calls: bool | None = None
    """False: at most one call."""
    functions: Annotated[Any, NeutralField([])] = None
    function_call: Annotated[Any, NeutralField("none")] = None
    modalities: Annotated[Any, NeutralField(["text"])] = None
    audio: Annotated[Any, NeutralField()] = None
    prediction: Annotated[Any, NeutralField()] = None
    reasoning_effort: Annotated[Any, NeutralField("none")] = None
    verbosity: Annotated[Any, NeutralField()] = None
    web_search_options: Annotated[Any, NeutralField()] = None
    service_tier: Annotated[Any, NeutralField("auto", "default")] = None
    store: Annotated[Any, NeutralField(False)] = None
    metadata: dict[str, str] | None = None
    """Ignored."""
    prompt_cache_key: str | None = None
    """Ignored."""
    safety_identifier: str | None = None
    """Ignored."""

    @field_validator("tool_choice")
    @classmethod
    def _require_tools(cls, choice: Any, info: ValidationInfo) -> Any:
        names = {tool.function.name for tool in info.data.get("tools") or ()}
        if (choice == "required" and not names) or (
            isinstance(choice, NamedTool) and choice.function.name not in names
        ):
            raise PydanticCustomError("no_such_tool", "there is no such function among the tools")
        return choice

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """Tools that the model may call, as templates expect them."""
        return [] if self.tool_choice == "none" else [tool.model_dump(exclude_none=True) for tool in self.tools or ()]

    @property
    def answer_schema(self) -> tuple[str, str | None]:
        if isinstance(self.tool_choice, NamedTool) or self.tool_choice == "required":
            wanted = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
            functions = [tool["function"] for tool in self.offered_tools]
            return "tool_choice", call_schema([each for each in functions if wanted in (None, each["name"])])
        return super().answer_schema

    @property
    def requested_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
