# ruff: noqa: E501 - templates as they are written
"""Chat templates with the structures of those that published models have, and tokenizers with their special tokens."""

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers


class Family(NamedTuple):
    template: str
    specials: tuple[str, ...]
    """Special tokens: BOS or nothing first, EOS second."""
    end: str
    """What ends an answer."""
    before: str = ""
    """Text of the template between its header and the content, which the model writes."""
    sentencepiece: bool = False
    system: bool = True
    tools: bool = False
    thinks: bool = False
    generation: bool = False


IM = ("", "<|im_end|>", "<|im_start|>", "<|endoftext|>")
INST = (
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[TOOL_CALLS]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
)
LLAMA3_IDS = ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>")
DEEPSEEK = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁outputs▁begin｜>",
    "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>",
    "<｜tool▁outputs▁end｜>",
)

CHATML = """\
{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
CHATML_GENERATION = """\
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
GENERATION_WITHOUT_END = CHATML_GENERATION.replace(
    "+ '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}", "}}{% endgeneration %}{{ '<|im_end|>\\n' }}"
)
LLAMA2 = """\
{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}\
{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}\
{% set system_message = false %}{% endif %}{% for message in loop_messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if loop.index0 == 0 and system_message != false %}\
{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}\
{% else %}{% set content = message['content'] %}{% endif %}\
{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}\
{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""
LLAMA3 = """\
{% set loop_messages = messages %}{% for message in loop_messages %}\
{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' %}\
{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
LLAMA31 = """\
{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nCutting Knowledge Date: December 2023\\nToday Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}{%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("one tool-call at once!") }}{%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}" }}
        {{- "<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
QWEN_TOOLS = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}{%- else %}{{- 'You are helpful.' }}{%- endif %}
    {{- "\\n\\n# Tools\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}DEFAULT_SYSTEM{%- endif %}
{%- endif %}
"""
QWEN25 = (
    QWEN_TOOLS.replace("DEFAULT_SYSTEM", "{{- '<|im_start|>system\\nYou are Qwen.<|im_end|>\\n' }}")
    + """\
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
)
QWEN3 = (
    QWEN_TOOLS.replace("DEFAULT_SYSTEM", "")
    + """\
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}{%- else %}{%- set content = '' %}{%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
                {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
                {{- '<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}{{- tool_call.arguments }}{%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
)
MISTRAL_V1 = """\
{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}\
{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"""
MISTRAL_V3 = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}{%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace() %}{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("After the optional system message, conversation roles must alternate") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}{%- for tool in tools %}{{- tool | tojson }}{%- if not loop.last %}{{- ", " }}{%- endif %}{%- endfor %}{{- "][/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {{- tool_call.function|tojson }}{%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content|string + "}[/TOOL_RESULTS]" }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported") }}
    {%- endif %}
{%- endfor %}
"""
MISTRAL_TEKKEN = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {{- '[SYSTEM_PROMPT]' + messages[0]['content'] + '[/SYSTEM_PROMPT]' }}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- for message in loop_messages %}
    {%- if message['role'] == 'user' %}
        {%- if message['content'] is string %}{{- '[INST]' + message['content'] + '[/INST]' }}
        {%- else %}{{- '[INST]' }}{%- for block in message['content'] %}{{- block['text'] }}{%- endfor %}{{- '[/INST]' }}{%- endif %}
    {%- elif message['role'] == 'assistant' %}
        {%- if message['content'] is string %}{{- message['content'] + eos_token }}
        {%- else %}{{- message['content'][0]['text'] + eos_token }}{%- endif %}
    {%- endif %}
{%- endfor %}"""
GEMMA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}\
{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}\
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"""
GEMMA3 = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}{%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}{%- set first_user_prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}{%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}{%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception("Conversation roles must alternate") }}{%- endif -%}
    {%- if (message['role'] == 'assistant') -%}{%- set role = "model" -%}{%- else -%}{%- set role = message['role'] -%}{%- endif -%}
    {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}{%- if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}{%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{'<start_of_turn>model\\n'}}{%- endif -%}
"""
PHI3 = """\
{% for message in messages %}{% if message['role'] == 'system' %}{{'<|system|>\\n' + message['content'] + '<|end|>\\n'}}\
{% elif message['role'] == 'user' %}{{'<|user|>\\n' + message['content'] + '<|end|>\\n'}}\
{% elif message['role'] == 'assistant' %}{{'<|assistant|>\\n' + message['content'] + '<|end|>\\n'}}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""
PHI3_FIRST = """\
{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') %}\
{{'<|user|>' + '\\n' + message['content'] + '<|end|>' + '\\n' + '<|assistant|>' + '\\n'}}\
{% elif (message['role'] == 'assistant') %}{{message['content'] + '<|end|>' + '\\n'}}{% endif %}{% endfor %}"""
PHI4 = """\
{% for message in messages %}{% if (message['role'] == 'system') %}{{'<|im_start|>system<|im_sep|>' + message['content'] + '<|im_end|>'}}\
{% elif (message['role'] == 'user') %}{{'<|im_start|>user<|im_sep|>' + message['content'] + '<|im_end|>'}}\
{% elif (message['role'] == 'assistant') %}{{'<|im_start|>assistant<|im_sep|>' + message['content'] + '<|im_end|>'}}{% endif %}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"""
ZEPHYR = """\
{% for message in messages %}\n{% if message['role'] == 'user' %}\n{{ '<|user|>\\n' + message['content'] + eos_token }}\n\
{% elif message['role'] == 'system' %}\n{{ '<|system|>\\n' + message['content'] + eos_token }}\n\
{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\\n'  + message['content'] + eos_token }}\n{% endif %}\n\
{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"""
VICUNA = """\
{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + ' ' }}{% set messages = messages[1:] %}{% endif %}\
{% for message in messages %}{% if message['role'] == 'user' %}{{ 'USER: ' + message['content'] + ' ' }}\
{% else %}{{ 'ASSISTANT: ' + message['content'] + eos_token }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""
COMMAND_R = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}\
{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}\
{% if system_message != false %}{{ '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' + system_message + '<|END_OF_TURN_TOKEN|>' }}{% endif %}\
{% for message in loop_messages %}{% set content = message['content'] %}{% if message['role'] == 'user' %}\
{{ '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + content.strip() + '<|END_OF_TURN_TOKEN|>' }}\
{% elif message['role'] == 'assistant' %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>'  + content.strip() + '<|END_OF_TURN_TOKEN|>' }}\
{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"""
DEEPSEEK_V2 = """\
{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\\n\\n' }}\
{% elif message['role'] == 'assistant' %}{{ 'Assistant: ' + message['content'] + eos_token }}\
{% elif message['role'] == 'system' %}{{ message['content'] + '\\n\\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""
DEEPSEEK_V3 = """\
{% set ns = namespace(is_first=false, is_tool=false, is_output_first=true, system_prompt='') %}\
{%- for message in messages %}{%- if message['role'] == 'system' %}{% set ns.system_prompt = message['content'] %}{%- endif %}{%- endfor %}\
{{bos_token}}{{ns.system_prompt}}{%- for message in messages %}{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}\
{{'<｜User｜>' + message['content']}}{%- endif %}\
{%- if message['role'] == 'assistant' and message['tool_calls'] %}{%- set ns.is_tool = false -%}\
{{'<｜Assistant｜><｜tool▁calls▁begin｜>'}}{%- for tool in message['tool_calls'] %}\
{{'<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + tool['function']['name'] + '\\n' + tool['function']['arguments'] | tojson + '<｜tool▁call▁end｜>'}}\
{%- endfor %}{{'<｜tool▁calls▁end｜><｜end▁of▁sentence｜>'}}{%- endif %}\
{%- if message['role'] == 'assistant' and not message['tool_calls'] %}{%- if ns.is_tool %}\
{{'<｜tool▁outputs▁end｜>' + message['content'] + '<｜end▁of▁sentence｜>'}}{%- set ns.is_tool = false -%}\
{%- else %}{% set content = message['content'] %}THINK{{'<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>'}}{%- endif %}{%- endif %}\
{%- if message['role'] == 'tool' %}{%- set ns.is_tool = true -%}{%- if ns.is_output_first %}\
{{'<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>'}}{%- set ns.is_output_first = false %}\
{%- else %}{{'\\n<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>'}}{%- endif %}{%- endif %}{%- endfor -%}\
{% if ns.is_tool %}{{'<｜tool▁outputs▁end｜>'}}{% endif %}{% if add_generation_prompt and not ns.is_tool %}{{'<｜Assistant｜>PROMPT'}}{% endif %}"""
DEEPSEEK_R1 = DEEPSEEK_V3.replace(
    "THINK", "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
).replace("PROMPT", "<think>\\n")
DEEPSEEK_V3 = DEEPSEEK_V3.replace("THINK", "").replace("PROMPT", "")
FALCON3 = """\
{% for message in messages %}{% if message['role'] == 'system' %}{{ '<|system|>\\n' + message['content'] + '\\n' }}\
{% elif message['role'] == 'user' %}{{ '<|user|>\\n' + message['content'] + '\\n' }}{% elif message['role'] == 'assistant' %}\
{% if not loop.last %}{{ '<|assistant|>\\n'  + message['content'] + eos_token + '\\n' }}\
{% else %}{{ '<|assistant|>\\n'  + message['content'] + eos_token }}{% endif %}{% endif %}\
{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}{% endfor %}"""
OLMO2 = "{{ bos_token }}" + FALCON3
STABLELM = """\
{% for message in messages %}{% if message['role'] == 'system' %}{{ '<|system|>\\n' + message['content'] | trim + eos_token + '\\n' }}\
{% else %}{{ '<|' + message['role'] + '|>\\n' + message['content'] | trim + eos_token + '\\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""
GRANITE = """\
{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set system_message = "You are Granite." %}{%- set loop_messages = messages %}{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system_message + '<|end_of_text|>\\n' }}
{%- for message in loop_messages %}
    {{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] + '<|end_of_text|>\\n' }}
    {%- if loop.last and add_generation_prompt %}{{- '<|start_of_role|>assistant' }}{{- '<|end_of_role|>' }}{%- endif %}
{%- endfor %}"""
SMOLLM2 = """\
{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}\
{{ '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM<|im_end|>\\n' }}{% endif %}\
{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
SMOLLM3 = """\
{%- if messages[0].role == "system" -%}{%- set system_message = messages[0].content -%}{%- set loop_messages = messages[1:] -%}
{%- else -%}{%- set system_message = "" -%}{%- set loop_messages = messages -%}{%- endif -%}
{{- "<|im_start|>system\\n" -}}{{- "Knowledge Cutoff: June 2025\\n" -}}{{- system_message.rstrip() -}}{{- "<|im_end|>\\n" -}}
{%- for message in loop_messages -%}
    {%- set content = message.content if message.content is string else "" -%}
    {%- if message.role == "user" -%}
        {{ "<|im_start|>" + message.role + "\\n"  + content + "<|im_end|>\\n" }}
    {%- elif message.role == "assistant" -%}
        {% generation %}{{ "<|im_start|>assistant\\n" + content.lstrip("\\n") + "<|im_end|>\\n" }}{% endgeneration %}
    {%- elif message.role == "tool" -%}
        {{ "<|im_start|>user\\n"  + content + "<|im_end|>\\n" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ "<|im_start|>assistant\\n" }}{%- endif -%}"""
GLM4 = """\
[gMASK]<sop>{% for item in messages %}{% if item['tools'] is defined %}{{ '<|system|>\\n' }}{{ item['tools'] | tojson }}{% endif %}\
{% if item['content'] %}{{ '<|' + item['role'] + '|>\\n' + item['content'] }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""
INTERNLM2 = "{{ bos_token }}" + CHATML
TULU = """\
{% for message in messages %}{% if message['role'] == 'user' %}{{ '<|user|>\\n' + message['content'] + '\\n' }}\
{% elif message['role'] == 'system' %}{{ '<|system|>\\n' + message['content'] + '\\n' }}\
{% elif message['role'] == 'assistant' %}{% if not loop.last %}{{ '<|assistant|>\\n'  + message['content'] + eos_token + '\\n' }}\
{% else %}{{ '<|assistant|>\\n'  + message['content'] + eos_token }}{% endif %}{% endif %}\
{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}{% endfor %}"""
MACRO = """\
{%- macro turn(role, text) -%}{{ '<|im_start|>' ~ role ~ '\\n' ~ text ~ '<|im_end|>\\n' }}{%- endmacro -%}
{%- for m in messages if m.role != 'tool' -%}{{ turn(m.role, m.content) }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""

END_OF_TURN = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
FAMILIES = {
    "chatml": Family(CHATML, IM, "<|im_end|>"),
    "chatml-generation": Family(CHATML_GENERATION, IM, "<|im_end|>", generation=True),
    "generation-without-end": Family(GENERATION_WITHOUT_END, IM, "<|im_end|>", generation=True),
    "llama2": Family(LLAMA2, ("<s>", "</s>"), " </s>", sentencepiece=True),
    "llama3": Family(LLAMA3, LLAMA3_IDS, "<|eot_id|>"),
    "llama3.1": Family(LLAMA31, LLAMA3_IDS, "<|eot_id|>", tools=True),
    "qwen2.5": Family(QWEN25, IM, "<|im_end|>", tools=True),
    "qwen3": Family(QWEN3, IM, "<|im_end|>", before="<think>\n\n</think>\n\n", tools=True, thinks=True),
    "mistral-v1": Family(MISTRAL_V1, ("<s>", "</s>"), "</s>", sentencepiece=True, system=False),
    "mistral-v3": Family(MISTRAL_V3, INST, "</s>", sentencepiece=True, tools=True),
    "mistral-tekken": Family(MISTRAL_TEKKEN, INST, "</s>"),
    "gemma": Family(GEMMA, END_OF_TURN, "<end_of_turn>", sentencepiece=True, system=False),
    "gemma3": Family(GEMMA3, END_OF_TURN, "<end_of_turn>", sentencepiece=True),
    "phi3": Family(PHI3, ("<s>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), "<|end|>"),
    "phi3-first": Family(
        PHI3_FIRST,
        ("<s>", "<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"),
        "<|end|>",
        sentencepiece=True,
        system=False,
    ),
    "phi4": Family(PHI4, ("", "<|im_end|>", "<|im_start|>", "<|im_sep|>"), "<|im_end|>"),
    "zephyr": Family(ZEPHYR, ("<s>", "</s>"), "</s>", sentencepiece=True),
    "vicuna": Family(VICUNA, ("<s>", "</s>"), "</s>", sentencepiece=True),
    "command-r": Family(
        COMMAND_R,
        (
            "<BOS_TOKEN>",
            "<|END_OF_TURN_TOKEN|>",
            "<|START_OF_TURN_TOKEN|>",
            "<|USER_TOKEN|>",
            "<|CHATBOT_TOKEN|>",
            "<|SYSTEM_TOKEN|>",
        ),
        "<|END_OF_TURN_TOKEN|>",
    ),
    "deepseek-v2": Family(DEEPSEEK_V2, DEEPSEEK, "<｜end▁of▁sentence｜>"),
    "deepseek-v3": Family(DEEPSEEK_V3, DEEPSEEK, "<｜end▁of▁sentence｜>", tools=True),
    "deepseek-r1": Family(DEEPSEEK_R1, DEEPSEEK, "<｜end▁of▁sentence｜>", tools=True, thinks=True),
    "falcon3": Family(FALCON3, ("", "<|endoftext|>"), "<|endoftext|>"),
    "olmo2": Family(OLMO2, ("<|endoftext|>", "<|endoftext|>"), "<|endoftext|>"),
    "stablelm": Family(STABLELM, ("", "<|endoftext|>"), "<|endoftext|>"),
    "granite": Family(GRANITE, ("", "<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"), "<|end_of_text|>"),
    "smollm2": Family(SMOLLM2, IM, "<|im_end|>"),
    "smollm3": Family(SMOLLM3, IM, "<|im_end|>", before="<|im_start|>assistant\n", generation=True),
    "glm4": Family(
        GLM4, ("", "<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"), "<|user|>"
    ),
    "yi": Family(CHATML, IM, "<|im_end|>", sentencepiece=True),
    "internlm2": Family(INTERNLM2, ("<s>", "</s>", "<|im_start|>", "<|im_end|>"), "<|im_end|>", sentencepiece=True),
    "tulu": Family(TULU, ("<s>", "</s>"), "</s>", sentencepiece=True),
    "macro": Family(MACRO, IM, "<|im_end|>"),
}
CORPUS = [
    "Hello, how are you? I am fine.\n\n\n What is 12 + 30?  the answer is: yes, 'no'; user assistant system tool "
] * 8


@cache
def chat_tokenizer(specials: tuple[str, ...], sentencepiece: bool = False) -> Fast:
    """A small BPE with merges that also cross from a header into the text, as white space does in real ones."""
    if sentencepiece:
        fast = Fast(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        fast.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        first = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
        fast.pre_tokenizer = pre_tokenizers.Split(
            "▁", "merged_with_next"
        )  # SentencePiece learns no pieces across words
        fast.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, special_tokens=first, show_progress=False))
        data = json.loads(fast.to_str())  # the bytes are no special tokens
        data["added_tokens"], data["pre_tokenizer"] = data["added_tokens"][:1], None
        fast = Fast.from_str(json.dumps(data))
    else:
        fast = Fast(models.BPE())
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        fast.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
        fast.train_from_iterator(CORPUS, trainer)
    fast.add_special_tokens([token for token in dict.fromkeys(specials) if token])
    if specials[0]:
        bos = fast.token_to_id(specials[0])
        fast.post_processor = processors.TemplateProcessing(f"{specials[0]} $A", None, [(specials[0], bos)])
    return fast


def write_tokenizer(directory: Path, family: Family) -> Path:
    """The files of a tokenizer, with its template."""
    chat_tokenizer(family.specials, family.sentencepiece).save(str(directory / "tokenizer.json"))
    config = {"eos_token": family.specials[1], "chat_template": family.template}
    config |= {"bos_token": family.specials[0]} if family.specials[0] else {}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory
