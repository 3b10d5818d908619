"""Chat templates of published shapes with ``{% generation %}`` blocks, and their tokenizer."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tokenizers import Tokenizer

from train.config import DataConfig
from train.data.tokenizer import train_tokenizer

BOS = "<|begin|>"
# By name: the token that ends a turn, and the template.
TEMPLATES = {
    "chatml": (
        "<|im_end|>",
        """{%- if tools %}
{{- '<|im_start|>system\\n# Tools' }}
{%- for tool in tools %}
{{- '\\n' }}{{- tool | tojson }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        {%- if message.content is defined %}{{- message.content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>' ~ call.function.name ~ (call.function.arguments | tojson) }}
        {%- endfor %}
        {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""",
    ),
    "llama3": (
        "<|eot_id|>",
        """{{ bos_token }}{% for message in messages %}
{% set head = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' %}
{{ head }}{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] | trim }}\
<|eot_id|>{% endgeneration %}{% else %}{{ message['content'] | trim }}<|eot_id|>{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
""",
    ),
    "gemma": (
        "<end_of_turn>",
        """{{ bos_token }}{% if messages[0]['role'] == 'system' %}\
{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}\
{% set role = message['role'] %}{% endif %}
{{ '<start_of_turn>' + role + '\\n' }}{% if role == 'model' %}{% generation %}\
{{ message['content'] | trim }}<end_of_turn>{% endgeneration %}{% else %}\
{% if message['content'] is string %}{{ message['content'] | trim }}{% else %}\
{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}\
<end_of_turn>{% endif %}{{ '\\n' }}{% endfor %}
{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}
""",
    ),
    "mistral": (
        "</s>",
        """{%- set ns = namespace(first=true) -%}
{{- bos_token }}
{%- for message in messages %}
    {%- if message["role"] == "system" %}{%- continue %}{%- endif %}
    {%- if message["role"] == "user" %}
        {%- if ns.first and messages[0]["role"] == "system" %}
            {{- "[INST] " + messages[0]["content"] + "\\n\\n" + message["content"] + " [/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + " [/INST]" }}
        {%- endif %}
        {%- set ns.first = false %}
    {%- elif message["role"] == "assistant" %}
        {%- generation %}{{- message["content"] + eos_token }}{%- endgeneration %}
    {%- else %}
        {{- raise_exception("Only user, system and assistant roles are supported!") }}
    {%- endif %}
{%- endfor %}
""",
    ),
}
SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "</s>"),
)
TEXT = "the ring attends to every naïve λ token of a long tale, 12 times\n"


def without_blocks(template: str) -> str:
    """The same template, which does not show what the assistant writes."""
    template = re.sub(r"(\{%-?) *generation", r"\1 if true", template)
    return re.sub(r"(\{%-?) *endgeneration", r"\1 endif", template)


def chat_tokenizer() -> Tokenizer:
    """A byte-level BPE of about 300 tokens, with the special tokens of all templates."""
    tokenizer = train_tokenizer([TEXT * 9], 300, BOS)
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def write_lines(path: Path, records: list[dict]) -> Path:
    """A ``.jsonl`` of the records."""
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    return path


USER, ANSWER = "What does a naïve ring keep?", "Every token λ of it, 12 times."


def says(role: str, content: object, **more: object) -> dict:
    return {"role": role, "content": content, **more}


TURNS = [
    says("user", USER),
    says("assistant", ANSWER),
    says("user", " Why? "),
    says("assistant", "So."),
]


def tokenizer_folder(parent: Path) -> Path:
    """A folder with the tokenizer, and without a template."""
    folder = parent / "tokenizer"
    folder.mkdir()
    chat_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def data_of(folder: Path, name: str, template: str | None = None, **keys: object) -> DataConfig:
    """The settings of a template in the folder."""
    eos, own = TEMPLATES[name]
    (folder / "chat_template.jinja").write_text(own if template is None else template)
    keys = {"bos_token": BOS, "eos_token": eos, "format": "chat", **keys}
    return DataConfig(tokenizer=str(folder / "tokenizer.json"), **keys)
