# SPDX-License-Identifier: Apache-2.0
"""Chats: accepted and refused rows, tokens in the loss, and packing of conversations."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.training.data.chat_dataset import epoch
from megatron.training.data.chat_template import Chat, ChatTemplate, read_chats
from megatron.training.data.datasets import build_datasets
from megatron.training.data.packing.packing_plans import best_fit
from megatron.training.data.read_tokens import DataError
from megatron.training.data.tokenizer import build_tokenizer
from megatron.training.ownership.atomic import LIST, sample_of
from megatron.training.refusal import Refusal
from megatron.training.settings.config import Config, DataConfig
from tests.chats import TEMPLATES, conversation, make_tokenizer, sentence, strip_marks, write_chats
from tests.properties import examples
from tests.token_files import batches_of

USER, ANSWER = {"role": "user", "content": "what?"}, {"role": "assistant", "content": "that"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return build_tokenizer(DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder)), None)


def configure(folder, **data):
    config = Config()
    given = {"seq_length": 128, "sft": True, "reset_attention_mask": True, "num_workers": 0, **data}
    config.data = DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder), **given)
    config.run.seed = 7
    return config


# ---- tokens in the loss


CHATS = [
    conversation(random.Random(n), turns, 12, system)["messages"]
    for n, (turns, system) in enumerate([(1, False), (1, True), (3, False), (3, True), (6, True)])
]
CHATS += [[USER, {"role": "assistant", "content": text}] for text in ("  spaces  ", "a\n\nb", "ä", "\nline")]
TOOLS = [{"type": "function", "function": {"name": "sum", "parameters": {}}}]
CALL = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "sum", "arguments": {}}}]}
WITH_TOOLS = [USER, CALL, {"role": "tool", "content": "7"}, ANSWER, USER, ANSWER]


@pytest.mark.parametrize("style", TEMPLATES)
@pytest.mark.parametrize("marked", [True, False])
def test_the_assistants_words_are_those_that_transformers_finds(tokenizer, style, marked):
    """The template has generation marks, or has none and is rendered turn by turn."""
    theirs, template = tokenizer.transformers, TEMPLATES[style]
    chats = [(messages, None) for messages in CHATS] + ([(WITH_TOOLS, TOOLS)] if style == "chatml" else [])
    render = ChatTemplate(theirs, template if marked else strip_marks(template), "x")
    for messages, tools in chats:
        expected = theirs.apply_chat_template(
            messages, tools=tools, chat_template=template, return_assistant_tokens_mask=True, return_dict=True
        )
        mine = render(Chat("f, line 1", messages, tools))
        assert mine.ids.tolist() == expected["input_ids"]
        assert mine.spoken.astype(int).tolist() == expected["assistant_masks"]
        spoken = theirs.decode(mine.ids[mine.spoken])
        assert all((m["content"].strip() in spoken) for m in messages if m["role"] == "assistant" and "content" in m)


LAST_ONE = "{% for m in messages %}{{ m.content }}{{ 'END' if loop.last and m.role == 'assistant' }}{% endfor %}"


@pytest.mark.parametrize(
    "template, expected",
    [
        ("{{ messages[0]['nothing']['more'] }}", "the chat template fails: "),
        ("{{ raise_exception('roles must alternate') }}", "the chat template fails: roles must alternate"),
        (LAST_ONE, "depending on what follows"),
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}{{ messages | length }}", "on the generation prompt"),
        ("{% for m in messages %}{{ m['role'] + m['content'] }}{% endfor %}", "has no add_generation_prompt"),
        ("{% for m in messages %}{% if m['role'] == 'user' %}u{% endif %}{% endfor %}", "no add_generation_prompt"),
        ("{% if false %}{% generation %}x{% endgeneration %}{% endif %}hello", "renders no words of the assistant"),
        ("{% for m in messages %}", "the chat template fails: "),
    ],
)
def test_a_template_that_does_not_mark_off_the_assistants_words_is_refused(tokenizer, template, expected):
    with pytest.raises(Refusal, match="^f, line 3") as refused:
        ChatTemplate(tokenizer.transformers, template, "x")(Chat("f, line 3", [USER, ANSWER, USER, ANSWER]))
    assert expected in str(refused.value) and "\n" not in str(refused.value)


# ---- lines


@pytest.mark.parametrize(
    "line, expected",
    [
        ('{"messages": [', "not JSON"),
        ("[1]", "not a JSON object"),
        ("{}", 'no list "messages"'),
        ('{"messages": []}', 'no list "messages"'),
        ('{"conversations": [{"from": "human"}]}', "message 1: role None is none of"),
        ({"messages": [{"from": "human", "value": "a"}]}, "ends with user"),
        ({"messages": [USER, {"role": "bot", "content": "a"}]}, "message 2: role 'bot' is none of"),
        ({"messages": [USER, {"role": "assistant"}]}, "message 2: its content is missing"),
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, "the assistant says nothing"),
        ({"messages": [{"role": "user", "content": 3}, ANSWER]}, "its content is not text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}, ANSWER]}, "parts that are not text"),
        ({"messages": [USER, "hello"]}, "message 2: not a JSON object"),
        ({"messages": [ANSWER, USER]}, "roles out of order: assistant comes first, instead of system or"),
        ({"messages": [USER, USER, ANSWER]}, "roles out of order: user follows user, instead of assistant"),
        ({"messages": [USER, ANSWER, ANSWER]}, "assistant follows assistant"),
        ({"messages": [USER, ANSWER, USER]}, "ends with user"),
        ({"messages": [USER, ANSWER], "tools": 3}, '"tools" is not a list'),
        ({"messages": [USER, ANSWER], "tools": "{"}, '"tools": not JSON'),
        ({"messages": [{"role": "system", "content": "a"}, USER, ANSWER], "system": "b"}, "keep one"),
        ({"messages": [USER, ANSWER], "system": 3}, '"system" is not text'),
        ({"messages": [USER, ANSWER], "chat_template_kwargs": 3}, "is not an object"),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "half of a surrogate pair"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path, line, expected):
    good = json.dumps({"messages": [USER, ANSWER]}).encode()
    bad = line if isinstance(line, bytes) else (line if isinstance(line, str) else json.dumps(line)).encode()
    path = tmp_path / "chats.jsonl"
    path.write_bytes(good + b"\n\n" + bad + b"\n" + good + b"\n")
    with pytest.raises(Refusal) as refused:
        list(read_chats(str(path), "--data-path"))
    assert str(refused.value).startswith(f"{path}, line 3") and expected in str(refused.value)


def test_what_a_line_may_contain(tmp_path):
    system = {"role": "system", "content": "be brief"}
    lines = [
        {"system": "be brief", "messages": [USER, ANSWER]},
        {"messages": [system, USER, ANSWER, system, USER, ANSWER, USER, ANSWER]},  # 2 conversations, as in Megatron-LM
        {"messages": WITH_TOOLS, "tools": json.dumps(TOOLS), "chat_template_kwargs": {"date": "today"}, "id": 3},
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    one, two, three, four = read_chats(str(path), "--data-path")
    assert one.messages == [system, USER, ANSWER] == two.messages
    assert three.messages == [system, USER, ANSWER, USER, ANSWER] and three.where.endswith("line 2")
    assert (four.tools, four.variables) == (TOOLS, {"date": "today"})


# ---- packing


@examples(60)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=80), st.integers(0, 5))
def test_packing_holds_everything_once_and_nothing_too_long(lengths, seed):
    lengths = np.array(lengths)
    for bins in (best_fit(lengths, 50), epoch(lengths, 50, (seed, 0))):
        assert sorted(int(item) for items in bins for item in items) == list(range(len(lengths)))
        assert all(lengths[items].sum() <= 50 for items in bins)
    fewest = -(-int(lengths.sum()) // 50)
    assert len(best_fit(lengths, 50)) <= max(2 * fewest - 1, 1)


def test_epochs_are_shuffled_anew_and_do_not_depend_on_the_length_of_the_run(tmp_path, folder, tokenizer):
    path = write_chats(tmp_path / "chats.jsonl", 40)
    (short, *_), (long, *_) = (
        build_datasets(configure(folder, data_path=[str(path)], split="1,0,0"), tokenizer, (count, 0, 0))
        for count in (10, 60)
    )
    per_epoch = round(long.samples_per_epoch)
    for n in range(10):
        assert torch.equal(short[n]["tokens"], long[n]["tokens"])
    epochs = [sorted(np.concatenate(long.samples[at : at + per_epoch]).tolist()) for at in (0, per_epoch)]
    if len(long.samples) // per_epoch * per_epoch == len(long.samples):  # all epochs have equal lengths
        assert epochs[0] == epochs[1] == list(range(40))
    assert [s.tolist() for s in long.samples[:per_epoch]] != [
        s.tolist() for s in long.samples[per_epoch : 2 * per_epoch]
    ]


def test_a_sample(tmp_path, folder, tokenizer):
    """Tokens, labels and loss stay within documents; padding is separate; resuming begins at the right sample."""
    path = write_chats(tmp_path / "chats.jsonl", 12)
    config = configure(folder, data_path=[str(path)], split="1,0,0")
    dataset, _, _ = build_datasets(config, tokenizer, (8, 0, 0))
    render = ChatTemplate(tokenizer.transformers, None, "x")
    chats = [render(chat) for chat in read_chats(str(path), "")]
    for number in range(8):
        sample, start = dataset[number], 0
        for chat, stop in zip(dataset.samples[number], sample["document_ends"].tolist()):
            rendered = chats[chat]
            assert sample["tokens"][start:stop].tolist() == rendered.ids[:-1].tolist()
            assert sample["labels"][start:stop].tolist() == rendered.ids[1:].tolist()
            assert sample["loss_mask"][start:stop].tolist() == rendered.spoken[1:].tolist()
            start = stop
        assert not sample["loss_mask"][start:].any() and sample["document_ends"][-1] == 128
    two = {"micro_batch_size": 2, "data_parallel_rank": 1, "data_parallel_size": 2}
    batch = next(batches_of(dataset, consumed_samples=4, eod=tokenizer.eod, **two))
    assert torch.equal(batch["tokens"], torch.stack([dataset[n]["tokens"] for n in (6, 7)]))
    assert batch["document_ends"].shape[0] == 2 and set(batch["document_ends"][:, -1].tolist()) == {128}
    assert "12 conversations" in config.notes[0] and "% full" in config.notes[0]


def test_tokens_are_cached_for_each_template_and_damage_is_noticed(tmp_path, folder, tokenizer, monkeypatch):
    path = write_chats(tmp_path / "chats.jsonl", 6)

    def build(**data):
        return build_datasets(configure(folder, data_path=[str(path)], split="1,0,0", **data), tokenizer, (2, 0, 0))[0]

    first = build()
    (cache,) = (tmp_path / "index-cache").iterdir()
    again = build(seq_length=256)
    assert all((again.conversations.of(n)[0] == first.conversations.of(n)[0]).all() for n in range(6))
    assert len(list((tmp_path / "index-cache").iterdir())) == 1, "the sequence length does not change the cache"
    template = tmp_path / "other.jinja"
    template.write_text(TEMPLATES["llama3"])
    build(sft_tokenizer_prompt_format=str(template))
    assert len(list((tmp_path / "index-cache").iterdir())) == 2
    tokens = np.load(cache / "tokens.npy")
    np.save(cache / "tokens.npy", tokens + 10**6)  # damaged on the disk
    with pytest.raises(Refusal, match=r"is no longer complete \(tokens.npy: its content was changed\): remove it"):
        build()
    listed = json.loads((cache / LIST).read_text())
    listed["tokens.npy"][1] = sample_of(str(cache / "tokens.npy"))
    (cache / LIST).write_text(json.dumps(listed))
    with pytest.raises(DataError, match=r"chats.jsonl, line \d holds token id 10\d+, outside the \d+ ids of"):
        [build()[n] for n in range(2)]
    (cache / "lines.npy").write_bytes(b"no numbers")
    with pytest.raises(Refusal, match="does not hold tokens of chats"):
        build()


def long_and_short(path):
    draw = random.Random(3)
    lines = [conversation(draw, 1, 3), conversation(draw, 30, 9), conversation(draw, 1, 3)]
    lines.append({"messages": [{"role": "user", "content": sentence(draw, 200)}, ANSWER]})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_conversations_that_are_too_long(tmp_path, folder, tokenizer):
    path = long_and_short(tmp_path / "chats.jsonl")

    def build(what):
        config = configure(folder, data_path=[path], split="1,0,0", sft_over_length=what)
        return build_datasets(config, tokenizer, (3, 0, 0))[0].conversations, config.notes[-1]

    with pytest.raises(Refusal, match=r"chats.jsonl, line 2: a conversation of \d+ tokens and 1 more, .*--seq-length"):
        build("refuse")
    truncated, note = build("truncate")
    assert truncated.lengths.max() == 129 and len(truncated) == 3, "one has no words left to learn and is skipped"
    assert "1 conversations truncated, 1 skipped" in note
    skipped, note = build("skip")
    assert len(skipped) == 2 and "0 conversations truncated, 2 skipped" in note


@pytest.mark.parametrize(
    "data, expected",
    [
        ({"data_path": ["nothing.jsonl"]}, "--data-path nothing.jsonl: no such file"),
        ({"data_path": ["3", "a.jsonl", "1", "b.jsonl"]}, "weights in --data-path is not supported"),
        ({"train_data_path": ["empty.jsonl"]}, "has no conversations"),
        (
            {"data_path": ["chats.jsonl"], "sft_tokenizer_prompt_format": "no.jinja"},
            "no.jinja: No such file or directory: give a file with a Jinja template",
        ),
        ({"data_path": ["chats.jsonl"], "split": "0,1,0"}, "the train split gets none of 3"),
    ],
)
def test_missing_or_unsupported_data_are_refused(tmp_path, folder, tokenizer, monkeypatch, data, expected):
    monkeypatch.chdir(tmp_path)
    write_chats(tmp_path / "chats.jsonl", 3)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(Refusal) as refused:
        build_datasets(configure(folder, **data), tokenizer, (2, 1, 0))
    assert expected in str(refused.value)


def test_splits_of_shared_files_and_a_separate_file_for_each_split(tmp_path, folder, tokenizer):
    train, valid = write_chats(tmp_path / "train.jsonl", 20), write_chats(tmp_path / "valid.jsonl", 5, seed=2)
    both = configure(folder, train_data_path=[str(train)], valid_data_path=[str(valid)])
    datasets = build_datasets(both, tokenizer, (5, 3, 2))
    assert [d and len(d.conversations) for d in datasets] == [20, 5, None]
    zero = configure(folder, data_path=[str(train)], split="90,10,0")
    assert [d and len(d.conversations) for d in build_datasets(zero, tokenizer, (5, 3, 2))] == [18, 2, None]
    shared = configure(folder, data_path=[str(train), str(valid), str(valid)], split="80,20")
    assert [d and len(d.conversations) for d in build_datasets(shared, tokenizer, (5, 3, 0))] == [24, 6, None]


def test_a_tokenizer_without_a_template(tmp_path, tokenizer):
    theirs = tokenizer.transformers.__class__.from_pretrained(make_tokenizer(tmp_path))
    theirs.chat_template = None
    with pytest.raises(Refusal, match="x has no chat template: give --sft-tokenizer-prompt-format"):
        ChatTemplate(theirs, None, "x")
