"""Conversations and completions: a record of ``.jsonl`` or ``.parquet`` -> text, and what has loss.

A Jinja template renders a conversation, as in transformers. What the assistant writes has loss, and
so has EOS after it: the template's ``{% generation %}`` blocks. Without them, the class renders the
messages before an answer with the generation prompt, and what follows up to its end has loss.
"""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import Any, NamedTuple

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from train.config import ConfigError, DataConfig
from train.paths import expand
from train.sections.data import CHAT, COMPLETION

FIELDS = {CHAT: ("messages",), COMPLETION: ("prompt", "completion")}
OPTIONAL = ("tools", "chat_template_kwargs")
REASONING = ("reasoning_content", "thinking", "reasoning")  # one field by three names
TEMPLATE, SETTINGS = "chat_template.jinja", "tokenizer_config.json"
ASSISTANT = "assistant"
DATE = datetime(2024, 7, 26)  # of templates that write one: a text has the same tokens on every day
BLOCK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# Markers in a rendered text: START and STOP enclose what has loss, and HIDDEN splits the name of a
# special token that is ordinary text. Unicode reserves all three as noncharacters.
START, STOP, HIDDEN = "\ufdd0", "\ufdd1", "\ufdd2"
MESSAGES = 'a list of messages, each {"role": ..., "content": a text or a list of parts of text}'


class Rendered(NamedTuple):
    """A text, and the ranges ``[start, stop)`` of its characters that have loss."""

    text: str
    spans: list[tuple[int, int]]


def record_text(record: Any, data_format: str, key: str, position: str) -> str:
    """The fields of a record that ``data_format`` reads, as JSON.

    Raises ``ConfigError`` with the config ``key`` of the format and the record's ``position`` if
    a field is missing or is not what it must be.
    """
    given = record if isinstance(record, dict) else {}
    wanted = FIELDS[data_format]
    if any(given.get(field) is None for field in wanted):
        found = ", ".join(record) if isinstance(record, dict) else type(record).__name__
        raise ConfigError(
            f"{key}={data_format} reads the fields {' and '.join(wanted)}; {position} has: {found}"
            f"{other_formats(key, given)}"
        )
    fields = {name: given[name] for name in (*wanted, *OPTIONAL) if given.get(name) is not None}
    if data_format == CHAT or not all(isinstance(given[name], str) for name in wanted):
        fields |= {name: _messages(given[name], f"{position}: {name}") for name in wanted}
    for name in OPTIONAL:  # a column of a .parquet may hold them as JSON
        if isinstance(fields.get(name), str):
            try:
                fields[name] = json.loads(fields[name])
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{position}: {name} is not JSON: {error}") from None
    if not isinstance(variables := fields.get("chat_template_kwargs", {}), dict):
        shown = _shown(variables)
        raise ConfigError(f"{position}: chat_template_kwargs must be an object; it is {shown}")
    text = json.dumps(fields, ensure_ascii=False, default=str)
    if any(mark in text for mark in (START, STOP, HIDDEN)):
        raise ConfigError(f"{position} is not text: it has one of U+FDD0 to U+FDD2")
    return text


def other_formats(key: str, found: Any) -> str:
    """A clause with the formats that read a record, or a table, with the fields ``found``."""
    names = {*found} if isinstance(found, dict | list) else set()
    able = [name for name, wanted in FIELDS.items() if {*wanted} <= names]
    return "".join(f"; nearest valid: {key}={name}" for name in able)


def _messages(value: Any, where: str) -> list[dict[str, Any]]:
    """Checked messages, in the form that transformers gives to templates."""
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{where} must be {MESSAGES}; it is {_shown(value)}")
    messages = []
    for number, given in enumerate(value, start=1):
        message = given if isinstance(given, dict) else {}
        message = {key: entry for key, entry in message.items() if entry is not None}
        content = message.get("content", "")
        parts = content if isinstance(content, list) else [{"text": content}]
        if not isinstance(message.get("role"), str) or not all(
            isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts
        ):
            raise ConfigError(f"{where} must be {MESSAGES}; number {number} is {_shown(given)}")
        for reasoning in [message[name] for name in REASONING if name in message][:1]:
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        messages.append(message)
    return messages


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 100 else f"{text[:100]}..."


def read_template(data: DataConfig) -> str | None:
    """The template of ``data.chat_template``, or else that in the tokenizer's folder, if any.

    Raises ``ConfigError`` if it cannot be read, or if the folder has several and no default.
    """
    if data.chat_template is not None:
        try:
            return expand("data.chat_template", data.chat_template).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"data.chat_template cannot be read: {error}") from None
    if data.tokenizer is None:
        return None
    folder = expand("data.tokenizer", data.tokenizer).parent
    path = folder / TEMPLATE
    try:
        if path.is_file():
            return path.read_text("utf-8")
        path = folder / SETTINGS
        found = json.loads(path.read_text("utf-8")).get("chat_template") if path.is_file() else None
        if not isinstance(found, list):
            return found
        named = {entry["name"]: entry["template"] for entry in found}
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: the chat template cannot be read ({error!r}); repair the file, or give "
            f"another with data.chat_template=PATH"
        ) from None
    if "default" not in named:
        raise ConfigError(
            f"{path} has the chat templates {', '.join(named)} and no default; give the file of "
            f"one with data.chat_template=PATH"
        )
    return named["default"]


class _Generation(Extension):
    """``{% generation %}`` puts its content between ``START`` and ``STOP``."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_within"), [], [], body).set_lineno(line)

    def _within(self, caller: Any) -> str:
        return f"{START}{caller()}{STOP}"


class ChatTemplate:
    """The template ``source`` with the names of its ``special`` tokens, such as ``bos_token``.

    Raises ``ConfigError`` if ``source`` is no template of Jinja.
    """

    def __init__(self, source: str, special: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_raise, strftime_now=DATE.strftime)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ConfigError(f"the chat template is not valid: {error}") from None
        self._special = special
        self._has_blocks = BLOCK.search(source) is not None
        # A template that takes parts writes the text of one, and not the list as Python shows it.
        probe = [{"role": "user", "content": [{"type": "text", "text": "probe"}]}]
        try:
            shown = self._text(probe, {})
        except ConfigError:
            shown = ""
        self._takes_parts = "probe" in shown and "'text'" not in shown

    def render(self, record: dict[str, Any]) -> Rendered:
        """Render a record of ``record_text``: ``messages``, or a ``prompt`` and its ``completion``.

        Only messages of the assistant have loss, and none of the prompt. Raises ``ConfigError`` if
        the template refuses the record, or if it does not show where messages begin and end.
        """
        prompt = record.get("prompt", [])
        messages = record.get("messages") or [*prompt, *record["completion"]]
        messages = messages if self._takes_parts else [_with_one_text(m) for m in messages]
        variables = {"tools": record.get("tools"), **record.get("chat_template_kwargs", {})}
        marked = self._text(messages, variables)
        whole = marked.replace(START, "").replace(STOP, "")

        def end(count: int, answer: bool) -> int:
            """Where the first messages end in the text, with the prompt of an answer."""
            prefix = self._text(messages[:count], variables, add_generation_prompt=answer)
            prefix = prefix.replace(START, "").replace(STOP, "")
            if not whole.startswith(prefix):
                raise ConfigError(
                    f"the chat template shows no end of its first {count} messages: alone they are "
                    f"not rendered as in the whole conversation; give data.chat_template=PATH with "
                    f"{{% generation %}} blocks around what the assistant writes"
                )
            return len(prefix)

        if self._has_blocks:
            begin = end(len(prompt), True) if prompt else 0
            spans = [(max(start, begin), stop) for start, stop in _blocks(marked)]
        else:
            numbers = range(len(prompt), len(messages))
            answers = [number for number in numbers if messages[number]["role"] == ASSISTANT]
            spans = [(end(number, True), end(number + 1, False)) for number in answers]
            spans = [(start, start + len(self._answer(whole[start:stop]))) for start, stop in spans]
        return Rendered(whole, [(start, stop) for start, stop in spans if start < stop])

    def _answer(self, text: str) -> str:
        """An answer without the space after its end: the model writes nothing after EOS."""
        eos = self._special.get("eos_token")
        return text.rstrip() if eos and text.rstrip().endswith(eos) else text

    def _text(
        self,
        messages: list[dict[str, Any]],
        variables: dict[str, Any],
        add_generation_prompt: bool = False,
    ) -> str:
        given = {"documents": None, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(messages=messages, **given | self._special | variables)
        except Exception as error:  # code of the template's author
            raise ConfigError(f"the chat template refuses it: {error}") from None


def _blocks(marked: str) -> list[tuple[int, int]]:
    """The ranges between ``START`` and ``STOP``, in the text without them."""
    spans, length = [], 0
    for number, part in enumerate(re.split(f"[{START}{STOP}]", marked)):
        if number % 2:
            spans.append((length, length + len(part)))
        length += len(part)
    return spans


def _with_one_text(message: dict[str, Any]) -> dict[str, Any]:
    """The message with one text as its content, for a template that takes no parts."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return message | {"content": "".join(part["text"] for part in content)}


def _raise(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """``tojson`` of transformers; that of Jinja escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
