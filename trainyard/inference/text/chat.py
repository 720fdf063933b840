"""Chat templates: the text that a list of messages becomes.

A checkpoint brings its template as Jinja in `chat_template.jinja` or in `tokenizer_config.json`. It is rendered as
transformers' `apply_chat_template` does, in a sandbox: the template is code of whoever made the checkpoint.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from trainyard.core.errors import UserError, one_line
from trainyard.inference.text.tokenizer_files import read_json

DEFAULT_TEMPLATE = """\
{% for message in messages %}
{{ message.role }}: {{ message.content }}
{% endfor %}
{% if add_generation_prompt %}assistant:{% endif %}"""
"""One line "role: content" per message, for checkpoints without a template."""
DEFAULT_STOP = ("\nuser:", "\nsystem:")
"""Stop strings with the default template: a model without chat training writes the next turn, too."""
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Entries of tokenizer_config.json that templates can use."""

Message = Mapping[str, Any]
"""`role`, `content` and optionally `name`, `tool_calls` and `tool_call_id`."""


class ChatTemplate:
    """Renders messages as the prompt of a model."""

    def __init__(self, template: str | None = None, special_tokens: Mapping[str, str] | None = None) -> None:
        """Raises UserError if the template is not valid Jinja. None: DEFAULT_TEMPLATE."""
        self.is_default = template is None
        self.special_tokens = dict(special_tokens or {})
        environment, text = _environment(), DEFAULT_TEMPLATE if template is None else template
        try:
            self._template = environment.from_string(text)
            self.renders_tools = "tools" in find_undeclared_variables(environment.parse(text))
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
    ) -> str:
        """The prompt for `messages`. `tools`: functions that the model may call, as JSON schemas. Raises UserError if
        the template refuses them."""
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.special_tokens,
            )
        except Exception as error:  # the template is code of the checkpoint and can raise anything
            raise UserError(f"chat template: {one_line(error)}") from None


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
        return caller()


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


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
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
