"""If this fails, chat models learn the wrong turns, or other text than users will send.
Conversations and completions, against ``apply_chat_template`` of transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from tests.train.data.chats import (
    ANSWER,
    BOS,
    TEMPLATES,
    TURNS,
    USER,
    chat_tokenizer,
    data_of,
    says,
    tokenizer_folder,
    without_blocks,
    write_lines,
)
from train.config import ConfigError, DataConfig
from train.data.corpus import find_files, read_documents
from train.data.encoder import DocumentEncoder, Encoded
from train.text import chat
from train.text.chat import ChatTemplate

CONVERSATIONS = {
    "one turn": TURNS[:2],
    "two turns": TURNS,
    "the user has the last word": TURNS[:3],
    "an empty answer": [TURNS[0], says("assistant", "")],
    "lines and a space": [says("user", "a\n\nb "), says("assistant", "x\n  y\n\n")],
}
SYSTEM = [says("system", "Be brief."), *TURNS]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return chat_tokenizer()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tokenizer_folder(tmp_path)


def encoded(data: DataConfig, *records: dict) -> list[Encoded]:
    """The records as documents of a ``.jsonl``."""
    path = write_lines(Path(data.tokenizer).parent / "data.jsonl", [*records])
    (file,) = find_files(replace(data, path=str(path)))
    documents = list(read_documents(file))
    encoder = DocumentEncoder(Tokenizer.from_file(data.tokenizer), data)
    return encoder.documents(documents)


def theirs(tokenizer: Tokenizer, name: str, messages: list, tools: object = None) -> tuple:
    """Tokens and mask of transformers."""
    eos, template = TEMPLATES[name]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=eos)
    whole = fast.apply_chat_template(
        messages,
        tools=tools,
        chat_template=template,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    return whole["input_ids"], whole["assistant_masks"]


@pytest.mark.parametrize("blocks", [True, False], ids=["blocks", "prefixes"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_tokens_and_loss_are_those_of_transformers(tokenizer, folder, name, blocks):
    """Equal, also where the template does not show the assistant's text."""
    template = TEMPLATES[name][1] if blocks else without_blocks(TEMPLATES[name][1])
    assert ("generation %}" in template) == blocks
    conversations = {**CONVERSATIONS, **({} if name == "gemma" else {"system": SYSTEM})}
    data = data_of(folder, name, template)
    found = encoded(data, *({"messages": messages} for messages in conversations.values()))
    for messages, one in zip(conversations.values(), found, strict=True):
        ids, mask = theirs(tokenizer, name, messages)
        assert one.ids == ids
        assert one.loss.astype(int).tolist() == mask
        answers = [m["content"] for m in messages if m["role"] == "assistant"]
        learned = tokenizer.decode(np.array(ids)[one.loss].tolist(), skip_special_tokens=False)
        ends = [a.strip() if name in ("llama3", "gemma") else a for a in answers]
        assert learned == "".join(answer + TEMPLATES[name][0] for answer in ends)
        assert one.n_bytes == len(learned.encode())


def test_tools_and_other_roles_are_rendered(tokenizer, folder):
    """Calls of the assistant have loss, the results of tools have none."""
    call = {"type": "function", "function": {"name": "ring", "arguments": {"ä": [1, "<&>"]}}}
    messages = [
        *(SYSTEM[0], TURNS[0]),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        says("tool", "12", name="ring"),
        TURNS[1],
    ]
    tools = [{"type": "function", "function": {"name": "ring", "description": "It's <a> ring"}}]
    ids, mask = theirs(tokenizer, "chatml", messages, tools)
    for blocks in (True, False):
        template = TEMPLATES["chatml"][1]
        data = data_of(folder, "chatml", template if blocks else without_blocks(template))
        for given in (tools, json.dumps(tools)):
            (one,) = encoded(data, {"messages": messages, "tools": given})
            assert one.ids == ids
            assert one.loss.astype(int).tolist() == mask


@pytest.mark.parametrize("name", ["chatml", "gemma"])
def test_parts_of_text_are_one_text(tokenizer, folder, name):
    """For a template that takes parts and one that does not."""
    parts = [{"type": "text", "text": USER[:9]}, {"type": "text", "text": USER[9:]}]
    data = data_of(folder, name)
    one, other = encoded(
        data, {"messages": TURNS[:2]}, {"messages": [says("user", parts), TURNS[1]]}
    )
    assert one.ids == other.ids


def test_a_template_that_takes_parts_gets_them():
    template = (
        "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
    )
    messages = [says("user", [{"type": "text", "text": part} for part in "ab"])]
    blocks = "{% generation %}{% endgeneration %}"
    assert ChatTemplate(template + blocks, {}).render({"messages": messages}).text == "[a][b]"


@pytest.mark.parametrize("blocks", [True, False], ids=["blocks", "prefixes"])
def test_a_special_token_in_a_message_is_text(tokenizer, folder, blocks):
    """The reference is the same text in parts; with ``ids`` it is the token, as in transformers."""
    template = TEMPLATES["chatml"][1] if blocks else without_blocks(TEMPLATES["chatml"][1])
    messages = [
        says("user", f"λ <|im_end|> {USER}"),
        says("assistant", "I write </s> and <|im_end|>."),
    ]
    (one,) = encoded(data_of(folder, "chatml", template), {"messages": messages})
    assert tokenizer.decode(one.ids, skip_special_tokens=False) == (
        f"<|im_start|>user\nλ <|im_end|> {USER}<|im_end|>\n"
        "<|im_start|>assistant\nI write </s> and <|im_end|>.<|im_end|>\n"
    )
    end, stop = (tokenizer.token_to_id(token) for token in ("<|im_end|>", "</s>"))
    assert (one.ids.count(end), one.ids.count(stop)) == (2, 0)
    learned = tokenizer.decode(np.array(one.ids)[one.loss].tolist(), skip_special_tokens=False)
    assert learned == "I write </s> and <|im_end|>.<|im_end|>"
    assert one.n_bytes == len(learned)
    (one,) = encoded(data_of(folder, "chatml", special_tokens="ids"), {"messages": messages})
    assert one.ids == theirs(tokenizer, "chatml", messages)[0]


def test_a_completion_follows_its_prompt(tokenizer, folder):
    """Of texts each is encoded alone; of messages, the prompt has no loss, assistants or not."""
    data = data_of(folder, "chatml", format="completion")
    end, start = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id(BOS)
    of = lambda text: tokenizer.encode(text, add_special_tokens=False).ids  # noqa: E731
    text, chat = encoded(
        data,
        {"prompt": "every token of", "completion": " a λ"},
        {"prompt": TURNS[:3], "completion": TURNS[3:]},
    )
    assert text.ids == [start, *of("every token of"), *of(" a λ"), end]
    assert text.loss.tolist() == [False] * (1 + len(of("every token of"))) + [True] * (
        1 + len(of(" a λ"))
    )
    assert text.n_bytes == 5
    for blocks in (True, False):
        template = TEMPLATES["chatml"][1]
        template = template if blocks else without_blocks(template)
        data = data_of(folder, "chatml", template, format="completion")
        (chat,) = encoded(data, {"prompt": TURNS[:3], "completion": TURNS[3:]})
        assert chat.ids == theirs(tokenizer, "chatml", TURNS)[0]
        assert np.array(chat.ids)[chat.loss].tolist() == [*of("So."), end]


def test_a_block_may_begin_before_the_answer_of_a_completion():
    """The template writes the header of an answer inside the block; the prompt ends after it."""
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}<a>{{ m.content }}"
        "</a>{% endgeneration %}{% else %}<u>{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<a>{% endif %}"
    )
    question, answer = ({"role": r, "content": r[0]} for r in ("user", "assistant"))
    rendered = ChatTemplate(template, {}).render({"prompt": [question], "completion": [answer]})
    assert [rendered.text[a:b] for a, b in rendered.spans] == ["a</a>"]
    whole = ChatTemplate(template, {}).render({"messages": [question, answer]})
    assert [whole.text[a:b] for a, b in whole.spans] == ["<a>a</a>"]


def test_globals_and_filters_are_those_of_transformers(tokenizer, monkeypatch):
    """But for the date: a text has the same tokens on every day."""
    assert (
        ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}).render({"messages": TURNS}).text
        == "26 Jul 2024"
    )
    monkeypatch.setattr(chat, "DATE", datetime.now())
    template = (
        "{% for n in [1, 2, 3] %}{% if n == 2 %}{% continue %}{% endif %}{{ n }}{% endfor %}\n"
        "    {% if true %}\n{{ strftime_now('%Y') }}{{ {'b': 'ä<'} | tojson(indent=1) }}\n"
        "    {% endif %}\n{{ bos_token }}{{ undefined_name }}{{ messages | length }}"
        "{% generation %}{% endgeneration %}"
    )
    special = {"bos_token": BOS}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    expected = fast.apply_chat_template(TURNS, chat_template=template, tokenize=False)
    assert ChatTemplate(template, special).render({"messages": TURNS}).text == expected
    with pytest.raises(ConfigError, match=r"refuses it: .*unsafe"):
        ChatTemplate("{{ messages.append(1) }}", special).render({"messages": TURNS})


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}", r"the chat template is not valid: .*end of template"),
        ("{{ raise_exception('roles must alternate') }}", r"data\.jsonl:1: .*roles must alternate"),
        ("{{ messages | length }}: {{ messages[0].content }}", r"no end of its first 1 messages"),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", r"has no data\.eos_token=</s>"),
        (None, r"has no chat template in its folder .*data\.chat_template=PATH"),
    ],
)
def test_a_template_that_shows_no_answer_is_refused(folder, template, message):
    data = data_of(folder, "mistral", template)
    if template is None:
        (folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match=message):
        encoded(data, {"messages": TURNS[:2]})


def test_an_answer_that_a_template_omits_has_no_loss(folder):
    """It has no text that could end with EOS, and no token of its neighbours is its own."""
    template = "{% for m in messages %}{% if m.content %}{{ m.content }}</s>{% endif %}{% endfor %}"
    data = data_of(folder, "mistral", template)
    messages = [*TURNS[:3], says("assistant", "")]
    one, without = encoded(data, {"messages": messages}, {"messages": [TURNS[0], messages[-1]]})
    assert one.n_bytes == len(f"{ANSWER}</s>".encode())
    assert not without.loss.any()
    assert without.n_bytes == 0
    assert ChatTemplate(template, {}).render({"messages": messages[-1:]}).spans == []


def test_without_eos_no_answer_needs_an_end(folder):
    data = data_of(folder, "mistral", "{% for m in messages %}{{ m.content }}\n{% endfor %}")
    (one,) = encoded(replace(data, eos_token="none"), {"messages": TURNS[:2]})
    assert one.n_bytes == len(f"{ANSWER}\n".encode())


@pytest.mark.parametrize(
    ("data_format", "record", "message"),
    [
        ("chat", {"text": "a"}, r"data\.format=chat reads the fields messages; .*:1 has: text"),
        ("chat", {"prompt": "a", "completion": "b"}, r"nearest valid: data\.format=completion"),
        ("chat", [1], r"has: list"),
        ("chat", {"messages": []}, r"messages must be a list of messages"),
        ("chat", {"messages": [{"role": "user", "content": 1}]}, r"number 1 is \{"),
        ("chat", {"messages": [{"from": "user", "value": "a"}]}, r"number 1 is \{\"from\""),
        ("chat", {"messages": [says("user", [{"type": "image"}])]}, r"number 1 is .*image"),
        ("chat", {"messages": TURNS, "tools": "[{"}, r":1: tools is not JSON"),
        ("chat", {"messages": TURNS, "chat_template_kwargs": "[1]"}, r":1: chat_.* be an object"),
        ("chat", {"messages": TURNS, "chat_template_kwargs": 1}, r"be an object; it is 1"),
        ("chat", {"messages": [says("user", "a\ufdd0")]}, r"is not text: it has one of U\+FDD0"),
        ("completion", {"prompt": "a"}, r"prompt and completion; .*:1 has: prompt"),
        ("completion", {"prompt": "a", "completion": [says("assistant", "b")]}, r"prompt must be"),
        ("text", {"messages": TURNS}, r"text_field=text: .*: messages \(.*data\.format=chat"),
    ],
)
def test_fields_of_another_format_are_named(folder, data_format, record, message):
    with pytest.raises(ConfigError, match=message):
        encoded(data_of(folder, "chatml", format=data_format), record)


def test_the_template_is_found_as_transformers_finds_it(folder, tokenizer):
    data = data_of(folder, "chatml")
    expected = [one.ids for one in encoded(data, {"messages": TURNS})]
    template = TEMPLATES["chatml"][1]
    (folder / "chat_template.jinja").unlink()
    several = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": template}]
    for stored in (template, several):
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": stored}))
        assert [one.ids for one in encoded(data, {"messages": TURNS})] == expected
    settings = {"chat_template": [{"name": "rag", "template": template}]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=r"has the chat templates rag and no default"):
        encoded(data, {"messages": TURNS})
    for content in ("{", "[]", '{"chat_template": [{"template": "x"}]}'):
        (folder / "tokenizer_config.json").write_text(content)
        with pytest.raises(ConfigError, match=r"_config\.json: .*data\.chat_template=PATH"):
            encoded(data, {"messages": TURNS})
    (folder / "chat_template.jinja").write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja: .*data\.chat_template=PATH"):
        encoded(data, {"messages": TURNS})
    (folder / "other.jinja").write_text(template)
    data.chat_template = str(folder / "other.jinja")
    assert [one.ids for one in encoded(data, {"messages": TURNS})] == expected
