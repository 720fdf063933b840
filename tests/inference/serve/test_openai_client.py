"""OpenAI's own client works unchanged: completions, chats, streams, stop strings, logprobs, errors."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.inference.serve.conftest import HTTP, RunningServer, StartServer, running_server
from tests.inference.serve.fake_scheduler import END, FakeScheduler, fake_text

CHATML = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
USER: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def client(served: RunningServer) -> openai.OpenAI:
    return served.client()


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "trainyard"
    with pytest.raises(openai.NotFoundError, match="'nope': this server has only 'tiny'"):
        client.models.retrieve("nope")


def test_completion(client: openai.OpenAI) -> None:
    found = client.completions.create(model="tiny", prompt="Hello", max_tokens=20, temperature=0)
    assert found.choices[0].text == fake_text("Hello", 20)
    assert found.choices[0].finish_reason == "length"
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens) == (5, 20, 25)
    assert found.id.startswith("cmpl-")
    assert len(client.completions.create(model="tiny", prompt="Hello").choices[0].text) == 16  # as OpenAI's default


@pytest.mark.parametrize("prompt", [["Hello", "Bye"], [list(b"Hello"), list(b"Bye")]], ids=["texts", "tokens"])
def test_several_prompts_with_several_choices(client: openai.OpenAI, prompt: list[str]) -> None:
    found = client.completions.create(model="tiny", prompt=prompt, max_tokens=8, n=2, seed=5)
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    texts = [choice.text for choice in found.choices]
    assert texts[::2] == [fake_text("Hello", 8, seed=5), fake_text("Bye", 8, seed=5)]
    assert len(set(texts)) == 4
    assert found.usage is not None
    assert found.usage.prompt_tokens == 8
    streamed = ["", "", "", ""]
    for chunk in client.completions.create(model="tiny", prompt=prompt, max_tokens=8, n=2, seed=5, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts


def test_token_ids_are_one_prompt_and_an_empty_text_starts_a_document(served: RunningServer) -> None:
    client = served.client()
    found = client.completions.create(model="tiny", prompt=list(b"Hello"), max_tokens=8, temperature=0)
    assert found.choices[0].text == fake_text("Hello", 8)
    empty = client.completions.create(model="tiny", prompt="", max_tokens=1)
    assert empty.usage is not None
    assert empty.usage.prompt_tokens == 1
    tokens = client.completions.create(model="tiny", prompt=[END], max_tokens=9, temperature=0)
    assert (
        tokens.choices[0].text
        == client.completions.create(model="tiny", prompt="", max_tokens=9, temperature=0).choices[0].text
    )


def test_seeds(client: openai.OpenAI) -> None:
    def text(**options: float) -> str:
        return client.completions.create(model="tiny", prompt="x", **options).choices[0].text  # type: ignore[call-overload,no-any-return]

    assert text(seed=1) == text(seed=1) != text(seed=2)
    assert text() != text()
    assert text(temperature=0) == text(temperature=0, seed=3) == text(top_p=0)
    assert text(seed=-(2**63)) == text(seed=-(2**63))


def test_options_reach_the_scheduler(served: RunningServer) -> None:
    fields = {"temperature": 0.5, "top_p": 0.25, "seed": 7, "max_tokens": 3, "logprobs": 4}
    fields |= {"presence_penalty": 0.5, "frequency_penalty": -1, "extra_body": {"top_k": 9, "repetition_penalty": 1.5}}
    served.client().completions.create(model="tiny", prompt="x", **fields)  # type: ignore[call-overload]
    options = served.scheduler.options[-1]
    assert (options.temperature, options.top_p, options.top_k, options.seed) == (0.5, 0.25, 9, 7)
    assert (options.presence_penalty, options.frequency_penalty, options.repetition_penalty) == (0.5, -1, 1.5)
    assert (options.max_new_tokens, options.num_logprobs, options.end_ids) == (3, 4, {END})


class Animal(pydantic.BaseModel):
    name: str
    legs: int


def test_schemas_reach_the_scheduler(served: RunningServer) -> None:
    script: list[ChatCompletionMessageParam] = [{"role": "user", "content": 'say:{"name": "cat", "legs": 4}'}]
    client = served.client()
    found = client.chat.completions.parse(model="tiny", messages=script, response_format=Animal, stop="\n")
    assert found.choices[0].message.parsed == Animal(name="cat", legs=4)
    schema = json.loads(served.scheduler.options[-1].json_schema or "")
    assert (schema["required"], schema["additionalProperties"]) == (["name", "legs"], False)
    client.chat.completions.create(model="tiny", messages=USER, max_tokens=1, response_format={"type": "json_object"})
    assert served.scheduler.options[-1].json_schema == '{"type": "object"}'
    client.chat.completions.create(model="tiny", messages=USER, max_tokens=1, response_format={"type": "text"})
    assert served.scheduler.options[-1].json_schema is None


WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
TOOL_TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}{% for message in messages %}"
    "<{{ message.role }}>{% for call in message.tool_calls or [] %}{{ call.function.arguments.city }}?{% endfor %}"
    "{{ message.content }}{% endfor %}"
)


@pytest.fixture(scope="module")
def tool_server() -> Iterator[RunningServer]:
    with running_server(template=TOOL_TEMPLATE) as running:
        yield running


def test_tool_calls(tool_server: RunningServer) -> None:
    """A call in the format of the model becomes one of OpenAI's API, and its result goes back to the model."""
    client, script = (
        tool_server.client(),
        'say:Let me see. <tool_call>{"name": "weather", "arguments": {"city": "Rom"}}',
    )
    asked: list[Any] = [{"role": "user", "content": script + "</tool_call>"}]
    answer = client.chat.completions.create(model="tiny", messages=asked, tools=[WEATHER]).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content == "Let me see."
    (call,) = answer.message.tool_calls or ()
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Rom"})
    result = {"role": "tool", "tool_call_id": call.id, "content": "say:sun"}
    history = [*asked, answer.message.to_dict(), result]
    following = client.chat.completions.create(model="tiny", messages=history, tools=[WEATHER]).choices[0]
    assert (following.message.content, following.finish_reason) == ("sun", "stop")
    assert following.message.tool_calls is None
    url = tool_server.url.removesuffix("/v1") + "/tokenize"
    tokens = HTTP.post(url, json={"messages": history, "tools": [WEATHER]}).json()["tokens"]
    assert bytes(tokens).decode() == f"[weather]<user>{asked[0]['content']}<assistant>Rom?Let me see.<tool>say:sun"
    ignored = client.chat.completions.create(model="tiny", messages=asked, tools=[WEATHER], tool_choice="none").choices[
        0
    ]
    assert ignored.message.tool_calls is None
    assert "<tool_call>" in str(ignored.message.content)


def test_streamed_tool_calls(tool_server: RunningServer) -> None:
    script: list[Any] = [{"role": "user", "content": 'say:{"name": "weather", "parameters": {"city": "Rom"}}'}]
    with tool_server.client().chat.completions.stream(model="tiny", messages=script, tools=[WEATHER]) as stream:
        answer = stream.get_final_completion().choices[0]
    assert answer.finish_reason == "tool_calls"
    assert not answer.message.content
    (call,) = answer.message.tool_calls or ()
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Rom"})


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_tool_that_must_be_called(tool_server: RunningServer, choice: Any) -> None:
    tool_server.client().chat.completions.create(
        model="tiny", messages=USER, tools=[WEATHER], tool_choice=choice, max_tokens=1
    )
    schema = json.loads(tool_server.scheduler.options[-1].json_schema or "")
    jsonschema_rs.validate(schema, {"name": "weather", "arguments": {"city": "Rom"}})
    assert not jsonschema_rs.is_valid(schema, {"name": "other", "arguments": {}})


@pytest.mark.parametrize("stream", [False, True])
def test_echo(client: openai.OpenAI, stream: bool) -> None:
    found = client.completions.create(model="tiny", prompt=["say:é", "say:b"], echo=True, stream=stream)
    texts = ["", ""]
    for answer in found if stream else [found]:
        for choice in answer.choices:  # type: ignore[union-attr]
            texts[choice.index] += choice.text
    assert texts == ["say:éé", "say:bb"]


def test_stream_is_the_text_in_pieces_that_are_whole_characters(client: openai.OpenAI) -> None:
    options = {"include_usage": True}
    chunks = list(client.completions.create(model="tiny", prompt="say:né🙂!", stream=True, stream_options=options))  # type: ignore[call-overload]
    assert [chunk.choices[0].text for chunk in chunks[:-1]] == ["n", "é", "🙂", "!", ""]
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * 4 + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 9  # with the end token
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "text"), [("\n\n", "one\ntwo"), (["thr", "wo\n"], "one\nt"), (["five"], "one\ntwo\n\nthree, fiv")]
)
def test_stop_strings_span_tokens_and_are_not_returned(
    client: openai.OpenAI, stream: bool, stop: str | list[str], text: str
) -> None:
    prompt = "say:one\ntwo\n\nthree, fiv"
    found = client.completions.create(model="tiny", prompt=prompt, stop=stop, max_tokens=99, stream=stream, logprobs=1)
    choices = [answer.choices[0] for answer in (found if stream else [found])]  # type: ignore[union-attr]
    assert "".join(choice.text for choice in choices) == text
    assert choices[-1].finish_reason == "stop"
    tokens = [token for choice in choices if choice.logprobs for token in choice.logprobs.tokens or []]
    assert "".join(tokens) == text  # without the tokens of the stop string


def test_a_stop_string_ends_the_sequence_in_the_scheduler(start_server: StartServer) -> None:
    running = start_server(scheduler=FakeScheduler(step_s=0.005))
    text = fake_text("x", 400)
    stop = text[4:7]
    found = running.client().completions.create(model="tiny", prompt="x", stop=stop, max_tokens=400, temperature=0)
    assert found.choices[0].text == text[: text.index(stop)]
    running.wait_until_idle()
    assert running.scheduler.cancelled == [0]
    assert running.worker.metrics.generated_tokens < 50


def test_completion_logprobs(client: openai.OpenAI) -> None:
    found = client.completions.create(model="tiny", prompt="say:aé", logprobs=2).choices[0].logprobs
    assert found is not None
    assert found.tokens == ["a", "token_id:195", "token_id:169"]
    assert found.token_logprobs == [-1.0, -1.0, -1.0]
    assert found.text_offset == [0, 1, 1]
    assert found.top_logprobs is not None
    assert found.top_logprobs[0] == {"a": -1.0, "b": -2.0}
    none = client.completions.create(model="tiny", prompt="say:a", logprobs=0).choices[0].logprobs
    assert none is not None
    assert none.top_logprobs == [{"a": -1.0}]
    assert client.completions.create(model="tiny", prompt="say:a").choices[0].logprobs is None


def test_logprobs_that_json_does_not_have(start_server: StartServer) -> None:
    """A model that diverged gives NaN; its answer is still JSON."""
    scheduler = FakeScheduler()
    client = start_server(scheduler=scheduler).client()
    for scheduler.logprob in (float("nan"), float("-inf")):
        found = client.completions.create(model="tiny", prompt="say:a", logprobs=1).choices[0].logprobs
        assert found is not None
        assert found.token_logprobs == [-9999.0]


def test_chat_with_the_default_template(client: openai.OpenAI) -> None:
    messages: list[ChatCompletionMessageParam] = [{"role": "developer", "content": "Be brief."}, *USER]
    found = client.chat.completions.create(model="tiny", messages=messages, max_tokens=12, temperature=0)
    assert found.choices[0].message.role == "assistant"
    assert found.choices[0].message.content == fake_text("system: Be brief.\nuser: Hello\nassistant:", 12)
    assert found.choices[0].finish_reason == "length"
    assert found.id.startswith("chatcmpl-")


@pytest.fixture(scope="module")
def chat(served: RunningServer) -> openai.OpenAI:
    from tests.inference.serve.conftest import running_server

    with running_server(template=CHATML) as running:
        yield running.client()  # type: ignore[misc]


def test_chat_with_the_template_of_the_checkpoint(chat: openai.OpenAI) -> None:
    parts: list[ChatCompletionMessageParam] = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
    ]
    found = chat.chat.completions.create(model="tiny", messages=parts, max_completion_tokens=10, temperature=0, n=2)
    text = fake_text("<system>S<user>one\ntwo<assistant>", 10)
    assert [choice.message.content for choice in found.choices] == [text, text]
    # The answer of one turn can be sent back in the next one.
    again = [*parts, found.choices[0].message.to_dict(), *USER]
    following = chat.chat.completions.create(model="tiny", messages=again, max_tokens=5, temperature=0)  # type: ignore[arg-type]
    prompt = f"<system>S<user>one\ntwo<assistant>{text}<user>Hello<assistant>"
    assert following.choices[0].message.content == fake_text(prompt, 5)


def test_chat_without_max_tokens_uses_the_rest_of_the_cache(chat: openai.OpenAI) -> None:
    found = chat.chat.completions.create(model="tiny", messages=USER)
    assert found.usage is not None
    assert found.usage.total_tokens == 512
    assert found.choices[0].finish_reason == "length"


def test_chat_stream_with_logprobs_and_usage(chat: openai.OpenAI) -> None:
    chunks = list(
        chat.chat.completions.create(
            model="tiny",
            messages=USER,
            max_tokens=6,
            seed=3,
            stream=True,
            logprobs=True,
            top_logprobs=2,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == fake_text("<user>Hello<assistant>", 6, seed=3)
    entries = [
        entry for chunk in chunks[:-1] if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content or []
    ]
    assert "".join(entry.token for entry in entries) == text
    assert entries[0].bytes == list(text[0].encode())
    assert [top.logprob for top in entries[0].top_logprobs] == [-1.0, -2.0]
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 6


def test_errors_are_the_clients_own_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-4", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as unsupported:
        client.chat.completions.create(model="tiny", messages=USER, logit_bias={"5": 1})
    assert unsupported.value.param == "logit_bias"
    assert unsupported.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match=r"max_tokens=510 .* prompt of 5 tokens are 515 .* 512"):
        client.completions.create(model="tiny", prompt="Hello", max_tokens=510)
    with pytest.raises(openai.BadRequestError, match="prompt has 600 characters; the longest sequence is 512"):
        client.completions.create(model="tiny", prompt="x" * 600, stream=True)
    with pytest.raises(openai.BadRequestError, match="token 300: the vocabulary has 257"):
        client.completions.create(model="tiny", prompt=[1, 300], stream=True)
