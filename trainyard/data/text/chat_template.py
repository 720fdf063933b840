"""Chat templates: the text that a list of messages becomes.

A checkpoint brings its template as Jinja in `chat_template.jinja` or in `tokenizer_config.json`. It is rendered as
transformers' `apply_chat_template` does, in a sandbox: the template is code of whoever made the checkpoint. Training,
`generate` and `serve` render with this file, so a model answers to the text that it was trained on.

A second, marked rendering tells where each message is in the text. It is the same template with marks: private
characters that it writes where the body of a loop over the messages begins and ends, where the content of a message
begins, and around `{% generation %}`. Without the marks it must equal the text, so an offset in it is one in the text.
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from trainyard.core.errors import UserError, one_line
from trainyard.data.text.tokenizer import read_json

DEFAULT_TEMPLATE = """\
{% for message in messages %}
{{ message.role }}: {{ message.content }}
{% endfor %}
{% if add_generation_prompt %}assistant:{% endif %}"""
"""One line "role: content" per message, for checkpoints without a template."""
CHATML = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{{ eos_token }}
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""OpenAI's ChatML, whose turns end with the end-of-text token: that of data.tokenizer=bytes."""
DEFAULT_STOP = ("\nuser:", "\nsystem:")
"""Stop strings with the default template: a model without chat training writes the next turn, too."""
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Entries of tokenizer_config.json that templates can use."""

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Names of what an assistant thought. As in transformers, templates find it under the first two."""
FIRST_MARK, LAST_MARK = 0x100000, 0x10FFFD
"""Characters for private use (plane 16). Three for each message: its start, its end, the start of its content."""
GENERATION_START, GENERATION_END = LAST_MARK - 1, LAST_MARK
MAX_MESSAGES = (GENERATION_START - FIRST_MARK) // 3
GENERATION_TAG = re.compile(r"{%-?\s*generation\s*-?%}")
MARK = re.compile(f"[{chr(FIRST_MARK)}-{chr(LAST_MARK)}]")

Message = Mapping[str, Any]
"""`role`, `content` and optionally `name`, `tool_calls` and `tool_call_id`."""


class MarkedText(NamedTuple):
    """A rendering, and where its messages are: offsets of characters."""

    text: str
    turns: dict[int, tuple[int, int]]
    """What the template wrote for each message, by its index. Messages that it skips have no turn."""
    content_starts: dict[int, int]
    """The first character of the content of a message, where the template writes it."""
    generated: list[tuple[int, int]]
    """What is in `{% generation %}`."""


class ChatTemplate:
    """Renders messages as the prompt of a model."""

    def __init__(self, template: str | None = None, special_tokens: Mapping[str, str] | None = None) -> None:
        """Raises UserError if the template is not valid Jinja. None: DEFAULT_TEMPLATE."""
        self.is_default = template is None
        self.special_tokens = dict(special_tokens or {})
        environment, self.text = _environment(), DEFAULT_TEMPLATE if template is None else template
        try:
            self._template = environment.from_string(self.text)
            tree = environment.parse(self.text)
            self.renders_tools = "tools" in find_undeclared_variables(tree)
            self.marks_generation = bool(GENERATION_TAG.search(self.text))
        except jinja2.TemplateError as error:
            raise UserError(f"chat template: not valid Jinja: {one_line(error)}") from None

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> "ChatTemplate":
        """The template among the files of a checkpoint, by name; the default one if there is none."""
        config = read_json(files, "tokenizer_config.json")
        template: Any = config.get("chat_template")
        if isinstance(template, list):  # named templates
            named = (entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default")
            template = next(named, {}).get("template")
        if "chat_template.jinja" in files:
            template = files["chat_template.jinja"].decode(errors="replace")
        if template is not None and not isinstance(template, str):
            raise UserError("tokenizer_config.json: chat_template is not text")
        tokens = {**read_json(files, "special_tokens_map.json"), **config}
        special = {name: text for name in SPECIAL_TOKENS if (text := _token_text(tokens.get(name))) is not None}
        return cls(template, special)

    @property
    def stop(self) -> tuple[str, ...]:
        """Stop strings that every chat needs."""
        return DEFAULT_STOP if self.is_default else ()

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        now: datetime | None = None,
    ) -> str:
        """The prompt for `messages`. `tools`: functions that the model may call, as JSON schemas. `now` is the time
        for templates that write the date. Raises UserError if the template refuses the messages."""
        return self._render(self._template, list(map(_plain, messages)), add_generation_prompt, tools, now)

    def render_marked(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        now: datetime | None = None,
    ) -> MarkedText:
        """The same text, with the offsets of its messages."""
        if len(messages) > MAX_MESSAGES:
            raise UserError(f"chat template: the conversation has {len(messages)} of at most {MAX_MESSAGES} messages")
        text = self.render(messages, add_generation_prompt, tools, now)
        if MARK.search(text):
            raise UserError("chat template: the text has a character of Unicode's plane 16, which is for private use")
        for marks_content in (True, False):  # templates that compare or cut contents may stumble over the marks in them
            plain = list(map(_plain, messages))
            if marks_content:
                plain = [_with_content_mark(message, index) for index, message in enumerate(plain)]
            try:
                marked = self._render(self._marked_template, plain, add_generation_prompt, tools, now)
            except UserError:
                continue
            if MARK.sub("", marked) == text:
                return _read_marks(marked, text)
        raise UserError("chat template: it does not show where a message begins: it changes the text of its loop")

    @cached_property
    def generation_prompt(self) -> str:
        """What the template writes before an answer; empty if it writes nothing, or does not tell."""
        for probe in ([{"role": "user", "content": "x"}], [{"role": "system", "content": "x"}] * 2):
            try:
                without, marked = self.render(probe, False), self.render_marked(probe, True)
            except UserError:
                continue
            if marked.text.startswith(without):
                return marked.text.removeprefix(without)
            # Templates such as Phi-3's end a conversation without it by another token.
            return marked.text[max(end for _, end in marked.turns.values()) :] if marked.turns else ""
        return ""

    @cached_property
    def _marked_template(self) -> jinja2.Template:
        environment = _environment(marks=True)
        tree = environment.parse(self.text)
        for loop in tree.find_all(nodes.For):
            if isinstance(loop.target, nodes.Name):
                name = loop.target.name
                loop.body = [_mark_call("start", name), *loop.body, _mark_call("end", name)]
        tree.set_environment(environment)
        return environment.from_string(tree)

    def _render(
        self,
        template: jinja2.Template,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        now: datetime | None,
    ) -> str:
        numbers = {id(message): number for number, message in enumerate(messages)}

        def mark(value: Any, kind: int) -> str:
            number = numbers.get(id(value))
            return "" if number is None else chr(FIRST_MARK + 3 * number + kind)

        time: Any = {} if now is None else {"strftime_now": now.strftime}
        try:
            return template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                mark_message=mark,
                **time,
                **self.special_tokens,
            )
        except Exception as error:  # the template is code of the checkpoint and can raise anything
            raise UserError(f"chat template: {one_line(error)}") from None


def _plain(message: Message) -> dict[str, Any]:
    """The message as templates read it: reasoning under the names that they know, as transformers gives it."""
    reasoning = next((message[key] for key in REASONING_KEYS if message.get(key) is not None), None)
    if reasoning is None:
        return dict(message)
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _with_content_mark(message: dict[str, Any], number: int) -> dict[str, Any]:
    """The message with a mark after the white space at the start of its content, so that trimming finds it there."""

    def marked(text: str) -> str:
        start = len(text) - len(text.lstrip())
        return text[:start] + chr(FIRST_MARK + 3 * number + 2) + text[start:] if text.strip() else text

    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": marked(content)}
    if isinstance(content, list) and content and isinstance(text := _text_of_part(content[0]), str):
        return {**message, "content": [{**content[0], "text": marked(text)}, *content[1:]]}
    return message


def _text_of_part(part: Any) -> Any:
    return part.get("text") if isinstance(part, dict) else None


def _read_marks(marked: str, text: str) -> MarkedText:
    """Offsets in the text without the marks."""
    turns: dict[int, tuple[int, int]] = {}
    content_starts: dict[int, int] = {}
    generated: list[tuple[int, int]] = []
    open_turn, open_tag = (-1, 0), 0
    for count, match in enumerate(MARK.finditer(marked)):
        code, offset = ord(match[0]), match.start() - count
        number, kind = divmod(code - FIRST_MARK, 3)
        if code == GENERATION_START:
            open_tag = offset
        elif code == GENERATION_END:
            generated.append((open_tag, offset))
        elif kind == 2:
            content_starts.setdefault(number, offset)
        else:  # a start ends the turn before it, whose loop body was left by `continue`
            if open_turn[0] >= 0 and offset > open_turn[1]:  # other loops over the messages write nothing
                turns[open_turn[0]] = (open_turn[1], offset)
            open_turn = (number if kind == 0 else -1, offset)
    if open_turn[0] >= 0 and len(text) > open_turn[1]:
        turns[open_turn[0]] = (open_turn[1], len(text))
    return MarkedText(text, turns, content_starts, generated)


def _token_text(token: Any) -> str | None:
    """A special token is a string or, in older files, an AddedToken with `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


class _GenerationTag(Extension):
    """`{% generation %}` marks what the assistant wrote. It changes nothing in the text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> Any:
        marks = getattr(self.environment, "marks", False)
        return f"{chr(GENERATION_START)}{caller()}{chr(GENERATION_END)}" if marks else caller()


def _mark_call(kind: str, name: str) -> nodes.Output:
    """`{{ mark_message(NAME, KIND) }}`: a mark if the variable is a message, otherwise nothing."""
    arguments: list[nodes.Expr] = [nodes.Name(name, "load"), nodes.Const(int(kind == "end"))]
    return nodes.Output([nodes.Call(nodes.Name("mark_message", "load"), arguments, [], None, None)])


class _TemplateNamespace(Namespace):
    """`namespace()` without private attributes, which lead out of the sandbox."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, attributes = args[0], dict(*args[1:], **kwargs)
        for name in attributes:
            _refuse_private(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


class _TemplateDict:
    """`dict()` and `dict.fromkeys()`, without the other attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot have the private attribute {name!r}")


def _environment(marks: bool = False) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.extend(marks=marks)
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda format: datetime.now().strftime(format),
        "dict": _TemplateDict(),
        "namespace": _TemplateNamespace,
    }
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own filter escapes HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
