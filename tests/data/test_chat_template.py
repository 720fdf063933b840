"""Chat templates render what transformers' apply_chat_template renders."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Fast
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from trainyard.core.errors import UserError
from trainyard.data.text.chat_template import DEFAULT_STOP, ChatTemplate

LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% set system = false %}"
    "{% endif %}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if loop.index0 == 0 and system %}{% set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + "
    "message['content'] %}{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + content | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
CHATML = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- generation %}
    {{- message.content }}
    {%- endgeneration %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
BLOCKS = """{# trim_blocks and lstrip_blocks #}
{% for message in messages %}
  {% if message.role == 'tool' %}{% continue %}{% endif %}
  {% if loop.index > 3 %}
    {% break %}
  {% endif %}
<{{ message.role }}> {{ message | tojson }} {{ message | tojson(indent=2) }}
{% endfor %}
{% set ns = namespace(count=0) %}{% for message in messages %}{% set ns.count = ns.count + 1 %}{% endfor %}
{{ ns.count }} {{ strftime_now('%Y') }} {{ tools is none }} {{ documents is none }} {{ dict(a=1).a }}
{{ unk_token }}|{{ pad_token is defined }}|{{ undefined_name }}|
"""
CHAT = [
    {"role": "system", "content": "Say <b>\"naïve\"</b> & '日本'"},
    {"role": "user", "content": "  Hello {{ bos_token }}\n"},
    {"role": "assistant", "content": "Hi 🙂"},
    {"role": "user", "content": "Bye"},
]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


@pytest.fixture
def reference() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Fast(models.BPE()), **TOKENS)


@pytest.mark.parametrize("template", [LLAMA2, CHATML, BLOCKS], ids=["llama2", "chatml", "blocks"])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("messages", [CHAT, CHAT[1:], CHAT[1:2]], ids=["system", "turns", "one"])
def test_templates_render_as_in_transformers(
    template: str, add_generation_prompt: bool, messages: list[dict[str, str]], reference: PreTrainedTokenizerFast
) -> None:
    expected = reference.apply_chat_template(
        messages, chat_template=template, add_generation_prompt=add_generation_prompt, tokenize=False
    )
    assert ChatTemplate(template, TOKENS).render(messages, add_generation_prompt) == expected


TOOLS = """
{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}
{%- for message in messages %}<{{ message.role }}>
    {%- for call in message.tool_calls or [] %}
        {{- call.function.name }}({{ call.function.arguments | tojson }})
    {%- endfor %}
    {{- message.content }}{{ message.tool_call_id }}
{%- endfor %}"""


def test_tools_render_as_in_transformers(reference: PreTrainedTokenizerFast) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "weather", "description": "é", "parameters": parameters}}]
    call = {"type": "function", "id": "1", "function": {"name": "weather", "arguments": {"city": "<Paris>"}}}
    messages = [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "no", "tool_call_id": "1"},
    ]
    expected = reference.apply_chat_template(messages, tools=tools, chat_template=TOOLS, tokenize=False)
    assert ChatTemplate(TOOLS, TOKENS).render(messages, tools=tools) == expected
    assert 'weather({"city": "<Paris>"})' in expected
    assert ChatTemplate(TOOLS).renders_tools
    assert not any(ChatTemplate(template).renders_tools for template in (None, LLAMA2, CHATML))


@pytest.mark.parametrize("where", ["tokenizer_config.json", "chat_template.jinja", "named"])
def test_template_of_a_directory_that_transformers_saved(
    where: str, tmp_path: Path, reference: PreTrainedTokenizerFast
) -> None:
    reference.chat_template = {"default": CHATML, "tool_use": "no"} if where == "named" else LLAMA2
    reference.save_pretrained(tmp_path, save_jinja_files=where == "chat_template.jinja")
    assert (tmp_path / "chat_template.jinja").exists() == (where == "chat_template.jinja")
    template = ChatTemplate.from_files({file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()})
    assert template.render(CHAT) == reference.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert template.stop == ()


def test_special_tokens_of_older_files_are_objects() -> None:
    config = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": None, "chat_template": "{{ bos_token }}!"}
    template = ChatTemplate.from_files({"tokenizer_config.json": json.dumps(config).encode()})
    assert template.render(CHAT) == "<s>!"
    assert template.special_tokens == {"bos_token": "<s>"}


def test_default_template_is_one_line_per_message() -> None:
    template = ChatTemplate.from_files({})
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    assert template.render(messages) == "system: Be brief.\nuser: 2 + 2?\nassistant:"
    assert template.render(messages, add_generation_prompt=False) == "system: Be brief.\nuser: 2 + 2?\n"
    assert template.stop == DEFAULT_STOP


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must\nalternate') }}", "chat template: roles must alternate"),
        ("{{ messages[7].content.x }}", "chat template: .*no element 7"),
        ("{{ 1 / 0 }}", "chat template: division by zero"),
        ("{{ ''.__class__.__mro__ }}", "chat template: access to attribute '__class__' .* unsafe"),
        ("{{ messages.append(1) }}", "chat template: .* .append. .* unsafe"),
        ("{% set ns = namespace(__class__=1) %}", "chat template: .* private attribute"),
    ],
)
def test_a_template_that_refuses_its_messages_is_a_user_error(template: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        ChatTemplate(template).render(CHAT)


def test_invalid_jinja_and_json_are_user_errors() -> None:
    with pytest.raises(UserError, match=r"chat template: not valid Jinja: .*endfor"):
        ChatTemplate("{% for x in messages %}")
    with pytest.raises(UserError, match=r"tokenizer_config.json: not valid JSON"):
        ChatTemplate.from_files({"tokenizer_config.json": b"{"})
