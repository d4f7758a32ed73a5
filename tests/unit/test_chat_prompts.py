# SPDX-License-Identifier: Apache-2.0
"""Chats as prompts (tools/generate.py --chat) and as a preview (tools/preprocess_data.py --preview)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.inference import chat
from megatron.inference.chat import Conversation, Stream, Template, converse, read_tools
from megatron.inference.generate import Answer, Counts, Request
from megatron.inference.prompts import read_prompts
from megatron.training.data.tokenizer import Tokenizer, build_tokenizer
from megatron.training.refusal import Refusal
from megatron.training.settings.config import Config, DataConfig
from tests.chats import make_tokenizer
from tools import preprocess_data

ASKED = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what is a tile?"}]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return build_tokenizer(DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder)), None)


def test_conversations_are_prompts(tokenizer, tmp_path):
    file = tmp_path / "p.jsonl"
    rows = [{"messages": ASKED, "tools": TOOLS}, {"prompt": "what is a tile?"}, {"tokens": [5, 6]}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    theirs = tokenizer.transformers
    wanted = theirs.apply_chat_template(ASKED, tools=TOOLS, add_generation_prompt=True, return_dict=False)
    first, second, third = read_prompts([], file, tokenizer, len(theirs), chat=True)
    assert (first.tokens, first.messages, third.tokens) == (tuple(wanted), ASKED, (5, 6))
    assert second.tokens == tuple(theirs.apply_chat_template(ASKED[1:], add_generation_prompt=True, return_dict=False))
    plain = read_prompts([], file, tokenizer, len(theirs))  # without --chat a text is a text
    assert plain[0].tokens == first.tokens and plain[1].text == "what is a tile?"
    assert Template(tokenizer).turn_end() == {theirs.convert_tokens_to_ids("<|im_end|>")}


@pytest.mark.parametrize(
    "row, message",
    [
        ({"messages": [*ASKED, {"role": "assistant", "content": "a"}]}, "the conversation ends with assistant: end it"),
        ({"messages": ASKED + ASKED}, "2 conversations"),
        ({"messages": [{"role": "user", "content": None}]}, "its content is missing"),
        ({"messages": []}, 'no list "messages"'),
    ],
)
def test_what_is_no_prompt(tokenizer, tmp_path, row, message):
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps(row))
    with pytest.raises(Refusal, match=message):
        read_prompts([], file, tokenizer, 400)


def test_chats_need_a_template(tmp_path):
    null = build_tokenizer(DataConfig(tokenizer_type="NullTokenizer"), 99)
    with pytest.raises(Refusal, match="--chat needs a tokenizer of Hugging Face"):
        read_prompts(["1 2"], None, null, 99, chat=True)


def test_tools_of_a_file_are_rendered(tokenizer, tmp_path):
    file = tmp_path / "tools.json"
    file.write_text(json.dumps(TOOLS))
    (asked,) = read_prompts(["how many?"], None, tokenizer, 400, True, read_tools(file))
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"messages": [{"role": "user", "content": "how many?"}], "tools": TOOLS}))
    assert asked.tokens == read_prompts([], rows, tokenizer, 400)[0].tokens
    for text, message in (("{}", "is not a list"), ("[", "--tools .*tools.json: ")):
        file.write_text(text)
        with pytest.raises(Refusal, match=message):
            read_tools(file)


def test_a_conversation_line_by_line(tokenizer, monkeypatch, capsys):
    """Each line is answered after all that was said before; /clear forgets it."""
    lines = iter(["what is a tile?\n", "\n", "and two?\n", "/clear\n", "12\n", ""])
    asked: list[str] = []

    def generate(_, prompts, request, seen):
        asked.append(tokenizer.detokenize(prompts[0]))
        answer = Answer(0)
        for token in [*tokenizer.tokenize("it meets äöü"), 3]:
            answer.tokens.append(token)
            answer.stopped = token == 3
            seen(answer)
        return [answer], Counts()

    monkeypatch.setattr(chat, "generate", generate)
    monkeypatch.setattr(chat.dist, "broadcast_object_list", lambda *_, **__: None)
    config = Config()
    config.model.position_embedding_type = "rope"
    how = Conversation(config, Template(tokenizer), tokenizer, Request(8), lambda: next(lines))
    last = converse(None, how, True)
    assert [text.count("it meets") for text in asked] == [0, 1, 0] and "and two?" in asked[1]
    assert [message["content"] for message in last] == ["12", "it meets äöü"]
    assert capsys.readouterr().out == "it meets äöü\n" * 3


def test_a_stream_prints_each_text_once(tokenizer, capsys):
    stream = Stream(tokenizer, True)
    ids = tokenizer.tokenize("ä ö ü 数字")
    for count in range(1, len(ids) + 1):
        stream(Answer(0, ids[:count]))
    stream.finish("ä ö ü 数字")
    assert capsys.readouterr().out == "ä ö ü 数字\n"


def test_a_preview_marks_what_is_trained(folder, tmp_path, capsys):
    words = ["--preview", "2", "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder)]
    chats = tmp_path / "chats.jsonl"
    answer = {"role": "assistant", "content": "Two blocks"}
    chats.write_text("".join(json.dumps({"messages": [*ASKED, answer]}) + "\n" for _ in range(3)))
    preprocess_data.main(["--input", str(chats), *words])
    out = capsys.readouterr().out
    assert out.count("[[Two blocks<|im_end|>]]") == 2 and f"{chats}, line 2: " in out and "line 3" not in out
    (tmp_path / "a.txt").write_text("a tile")
    preprocess_data.main(["--input", str(tmp_path / "a.txt"), *words, "--append-eod"])
    assert "[[a tile<|end|>]]" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "chats.jsonl"]
    with pytest.raises(SystemExit):
        preprocess_data.main(["--input", str(chats), *words[2:]])
    assert "--output-prefix PREFIX" in capsys.readouterr().err
