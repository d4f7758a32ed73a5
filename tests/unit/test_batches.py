# SPDX-License-Identifier: Apache-2.0
"""The order of samples over any grid, the loader's processes, and what a rank moves to its device."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import Dataset

from megatron.training.data import row_files, text_files
from megatron.training.data.batches import KEYS, micro_batches, shard_batch, take_waited
from megatron.training.data.chat_template import Chat, ChatTemplate, read_chats
from megatron.training.data.encoding import Settings, encode
from megatron.training.data.row_files import array_rows
from megatron.training.data.samples.mock_data import MockDataset
from megatron.training.data.sources import columnar
from megatron.training.data.text_files import Reader, unit_of
from megatron.training.data.tokenizer import build_tokenizer
from megatron.training.refusal import Refusal
from megatron.training.settings.config import Config, DataConfig
from tests.chats import TEMPLATES, make_tokenizer, strip_marks
from tests.patience import patience
from tests.properties import examples
from tests.token_files import batches_of
from tools import preprocess_data


class Numbers(Dataset):
    """A data set in which all tokens of sample i are i."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        tokens = torch.full((4,), i)
        return {"tokens": tokens, "labels": tokens + 1, "loss_mask": torch.ones(4), "position_ids": torch.arange(4)}


def numbers(size, *, consumed=0, micro=1, rank=0, ranks=1, take=None, **options):
    """The samples of a rank, as a list for each micro-batch."""
    sizes = {"micro_batch_size": micro, "data_parallel_rank": rank, "data_parallel_size": ranks}
    batches = micro_batches(Numbers(size), consumed_samples=consumed, **sizes, **options)
    return [batch["tokens"][:, 0].tolist() for batch in itertools.islice(batches, take)]


@examples(60)
@given(data=st.data(), kind=st.sampled_from(["single", "cyclic"]))
def test_global_batches_do_not_depend_on_the_grid(data, kind):
    """A step takes the next G samples of one order, for any ranks and micro-batches, with constant or growing G."""
    ranks, micro, rounds = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    accumulation = data.draw(st.lists(st.integers(1, 4), min_size=rounds, max_size=rounds))
    consumed = data.draw(st.integers(0, 30))
    steps = [m * micro * ranks for m in accumulation]
    size = consumed + sum(steps) + data.draw(st.integers(0, 5))
    if kind == "cyclic":
        size = data.draw(st.integers(1, size))
    options = {"consumed": consumed, "dataloader_type": kind, "seed": 5}
    plain = [i for (i,) in numbers(size, take=sum(steps), **options)]
    if kind == "single":
        assert plain == list(range(consumed, consumed + sum(steps)))
    streams = [
        iter(numbers(size, micro=micro, rank=r, ranks=ranks, take=sum(accumulation), **options)) for r in range(ranks)
    ]
    start = 0
    for count, step in zip(accumulation, steps):
        batch = [sample for _ in range(count) for stream in streams for sample in next(stream)]
        assert batch == plain[start : start + step]
        start += step


def test_the_end_of_the_data():
    assert numbers(11, micro=2, rank=1, ranks=2) == [[2, 3], [6, 7]]
    assert numbers(8, consumed=4, micro=2, rank=0, ranks=2) == [[4, 5]]
    assert numbers(8, consumed=8) == []
    with pytest.raises(Refusal, match="9 samples were consumed"):
        numbers(8, consumed=9)
    options = {"consumed_samples": 8, "micro_batch_size": 2, "data_parallel_size": 3, "drop_last": False}
    by_rank = [list(micro_batches(Numbers(11), data_parallel_rank=rank, **options)) for rank in range(3)]
    masks = [batch["loss_mask"][:, 0].tolist() for (batch,) in by_rank]
    assert masks == [[1, 1], [1, 0], [0, 0]]
    assert [by_rank[0][0]["tokens"][:, 0].tolist(), by_rank[1][0]["tokens"][0, 0].item()] == [[8, 9], 10]


def test_cyclic_epochs_are_shuffled_anew():
    drawn = [i for (i,) in numbers(10, take=30, dataloader_type="cyclic", seed=3)]
    epochs = [drawn[i : i + 10] for i in (0, 10, 20)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs) and len(set(map(tuple, epochs))) == 3
    assert [i for (i,) in numbers(10, take=17, consumed=13, dataloader_type="cyclic", seed=3)] == drawn[13:]


def test_workers_and_resume():
    """Worker processes and a start in the middle do not change the samples or PyTorch's random state."""
    config = Config(data=DataConfig(seq_length=16))
    train = MockDataset(config, build_tokenizer(DataConfig(tokenizer_type="NullTokenizer"), 1000), 0, 43)
    options = {"micro_batch_size": 2, "data_parallel_rank": 1, "data_parallel_size": 2}
    state = torch.get_rng_state()
    plain = list(micro_batches(train, consumed_samples=0, **options))
    for workers, consumed in [(2, 0), (0, 12), (1, 12)]:
        resumed = list(micro_batches(train, consumed_samples=consumed, num_workers=workers, **options))
        assert len(resumed) == len(plain) - consumed // 4
        for one, other in zip(resumed, plain[consumed // 4 :]):
            assert all(torch.equal(one[key], other[key]) for key in one) and set(one) == {*KEYS, "numbers"}
    assert torch.equal(torch.get_rng_state(), state)
    numbers = list(micro_batches(train, consumed_samples=12, numbers_only=True, **options))
    assert [batch["numbers"].tolist() for batch in numbers] == [batch["numbers"].tolist() for batch in plain[3:]]
    assert set(numbers[0]) == {"numbers"} and numbers[0]["numbers"].tolist() == [14, 15]


def test_a_sigterm_to_the_group_leaves_the_loader_alive():
    """The trainer saves on SIGTERM, so its data must not end before that."""

    def trainer(channel):
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, lambda *_: None)
        batches = batches_of(Numbers(10**6), num_workers=2)
        first = [next(batches)["tokens"][0, 0].item() for _ in range(2)]  # one of each worker, so both have started
        os.killpg(0, signal.SIGTERM)
        time.sleep(0.2)
        channel.send(first + [next(batches)["tokens"][0, 0].item() for _ in range(100)])

    parent_end, child_end = multiprocessing.Pipe()
    context = multiprocessing.get_context("fork")
    process = context.Process(target=trainer, args=(child_end,), daemon=False)
    process.start()
    child_end.close()
    assert parent_end.poll(60) and parent_end.recv() == list(range(102))
    process.join(patience(60))
    assert process.exitcode == 0


@examples(40)
@given(data=st.data())
def test_shard_batch(data):
    rows, length = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 24))
    chosen = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=length, unique=True))
    batch = {
        "tokens": torch.randint(100, (rows, length)),
        "labels": torch.randint(100, (rows, length)),
        "loss_mask": torch.rand(rows, length),
    }
    local = shard_batch(batch, SimpleNamespace(positions=torch.tensor(chosen)), "cpu")
    for key, tensor in batch.items():
        assert torch.equal(local[key], tensor[:, chosen])
    assert local["position_ids"].tolist() == [chosen] * rows and local["position_ids"].dtype == torch.int64
    assert set(local) == {*KEYS, "position_ids"}
    assert "labels" not in shard_batch({"tokens": batch["tokens"]}, SimpleNamespace(positions=torch.tensor([0])), "cpu")


# Rows of JSON arrays and of Parquet, published formats of rows, and templates that omit something.


BYTES = Settings((("tokenizer_type", "ByteLevelTokenizer"),), None, "uint16", ("text",), False, 0)
ROWS = [
    {"text": "größer"},
    {"text": 'a "b" \\ [1, {}]', "n": 1.5, "more": {"a": [None]}},
    {"text": "\n\n"},
    {"text": "z"},
]
ASKED, ANSWERED = {"role": "user", "content": "what?"}, {"role": "assistant", "content": "that"}


def write_parquet(path: Path, rows: list[dict[str, Any]], **options: Any) -> str:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, **options)
    return str(path)


def texts(path: str) -> list[str]:
    result = encode(BYTES, list(Reader([path], ("text",))))
    assert not result.bad
    ends = [sum(result.lengths["text"][: n + 1]) for n in range(len(result.lengths["text"]))]
    return [
        bytes(part.tolist()).decode() for part in map(result.tokens["text"].__getitem__, map(slice, [0, *ends], ends))
    ]


# ---- files


@pytest.mark.parametrize("form", ["array", "indented", "gz", "bom", "parquet"])
def test_rows_are_read_from_arrays_and_parquet(tmp_path: Path, form: str) -> None:
    path = tmp_path / "rows.json"
    text = json.dumps(ROWS, indent=2 if form == "indented" else None, ensure_ascii=form == "gz").encode()
    if form == "parquet":
        path = Path(write_parquet(tmp_path / "rows.bin", ROWS, row_group_size=2))  # recognized by its content
    elif form == "gz":
        path = tmp_path / "rows.json.gz"
        path.write_bytes(gzip.compress(text))
    else:
        path.write_bytes(b"\xef\xbb\xbf" + text if form == "bom" else text)
    assert texts(str(path)) == ["größer", 'a "b" \\ [1, {}]', "z"]  # blank texts are not documents
    records = list(Reader([str(path)]))
    assert [record.where() for record in records] == [f"{path}, row {n}" for n in (1, 2, 3, 4)]
    assert unit_of(str(path)) == "row"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda part: st.lists(part, max_size=3) | st.dictionaries(st.text(max_size=3), part, max_size=3),
    max_leaves=6,
)


@examples(60)
@example([0.0, -1.5e-300, 2], 1)
@given(st.lists(VALUES, max_size=5), st.integers(1, 9))
def test_an_array_is_cut_where_its_elements_end(values: list[Any], part: int) -> None:
    """Parts may end anywhere: within a literal, an escape or a character of several bytes."""
    whole, row_files.PART = row_files.PART, part
    try:
        for ascii_only in (True, False):
            stream = io.BytesIO(json.dumps(values, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass"))
            expected = [repr(value) for value in values]
            assert [repr(json.loads(row)) for _, row in array_rows(stream, 1000)] == expected
    finally:
        row_files.PART = whole


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[{"text": "a"}, {"text": ]', "element 2 of its JSON array is not JSON: Expecting value"),
        ('[{"text": "a"}, {"text": "b', "element 2 of its JSON array is not JSON: Unterminated string"),
        ('[{"text": "a"}', "after element 1 of its JSON array the file ends"),
        ('[{"text": "a"} {"text": "b"}]', "after element 1 of its JSON array '{' follows"),
        ('[{"text": "a"}]\n[{"text": "b"}]', "it continues after the end of its JSON array"),
        ("[" * 5000, "is nested too deep"),
        ("[]", 'no document with text under the key "text"'),
    ],
)
def test_input_that_is_no_array_of_documents_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    assert f"{path}" in (message := refused(tmp_path, path)) or "--input" in message
    assert expected in message


def test_an_element_that_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "LONGEST", 1000)
    monkeypatch.setattr(row_files, "PART", 100)
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"text": "a" * 9000}]))
    assert "more than 1,000 characters: split it" in refused(tmp_path, path)


def refused(folder: Path, path: Path | str, *more: str) -> str:
    args = ["--input", str(path), "--output-prefix", str(folder / "out"), "--tokenizer-type", "ByteLevelTokenizer"]
    with pytest.raises(Refusal) as refusal:
        preprocess_data.preprocess(preprocess_data.build_parser().parse_args([*args, "--workers", "1", *more]))
    assert not list(folder.glob("out*"))
    return str(refusal.value)


@pytest.mark.parametrize("head", row_files.OTHERS)
def test_files_of_other_formats_are_named(tmp_path: Path, head: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(head + bytes(100))
    assert refused(tmp_path, path) == f"--input {path}: {row_files.OTHERS[head]}"


def test_parquet_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1" + bytes(100))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pyarrow", None)
        assert refused(tmp_path, path) == f"--input {path}: Parquet needs the package pyarrow: {columnar.PYARROW}"
    pytest.importorskip("pyarrow")
    assert f"--input {path}: cannot be read: " in refused(tmp_path, path)
    write_parquet(path, [{"body": "a"}])
    message = refused(tmp_path, path)
    assert f'{path}, row 1: no key "text"; it has "body": name keys with --json-keys' in message


def test_parquet_is_read_in_bounded_memory(tmp_path: Path) -> None:
    """Four row groups of 16 MiB, decompressed, of which Arrow holds some batches of rows at a time."""
    pyarrow = pytest.importorskip("pyarrow")
    rows = [{"text": chr(97 + n % 26) * (1 << 18), "other": n} for n in range(256)]
    path = write_parquet(tmp_path / "rows.parquet", rows, row_group_size=64, use_dictionary=False)
    del rows
    before, most, count = pyarrow.total_allocated_bytes(), 0, 0
    for record in Reader([path], ("text",)):
        most, count = max(most, pyarrow.total_allocated_bytes() - before), count + 1
        assert json.loads(record.content) == {"text": chr(97 + (count - 1) % 26) * (1 << 18)}
    assert count == 256 and most < 32 << 20, f"{most / 2**20:.0f} MiB"


# ---- forms


SHARED = {"conversations": [{"from": "system", "value": "be brief"}, {"from": "human", "value": "what?"},
                            {"from": "gpt", "value": "that"}]}  # fmt: skip
FORMS = {
    "ShareGPT": (SHARED, [{"role": "system", "content": "be brief"}, ASKED, ANSWERED]),
    "Alpaca": ({"instruction": "what?", "input": "", "output": "that"}, [ASKED, ANSWERED]),
    "Alpaca with input": (
        {"instruction": "add", "input": "1, 2", "output": "3", "history": [["what?", "that"]]},
        [ASKED, ANSWERED, {"role": "user", "content": "add\n\n1, 2"}, {"role": "assistant", "content": "3"}],
    ),
    "prompt and completion": ({"prompt": "what?", "completion": "that"}, [ASKED, ANSWERED]),
    "prompt and completion as messages": ({"prompt": [ASKED], "completion": [ANSWERED]}, [ASKED, ANSWERED]),
    "messages in ShareGPT's words": ({"messages": SHARED["conversations"][1:]}, [ASKED, ANSWERED]),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("file", ["lines", "array", "parquet"])
def test_published_forms_are_conversations(tmp_path: Path, form: str, file: str) -> None:
    row, expected = FORMS[form]
    path = tmp_path / f"rows.{file}"
    if file == "parquet":
        write_parquet(path, [row, row])
    else:
        path.write_text(json.dumps([row, row]) if file == "array" else f"{json.dumps(row)}\n \n{json.dumps(row)}\n")
    one, two = read_chats(str(path), "--data-path")
    assert one.messages == two.messages == expected
    assert two.where == f"{path}, {'line 3' if file == 'lines' else 'row 2'}"


def test_parquet_omits_fields_that_only_other_rows_have(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "sum"}}]}
    rows = [{"messages": [ASKED, call, {"role": "tool", "content": "3"}, ANSWERED]}, {"messages": [ASKED, ANSWERED]}]
    chats = list(read_chats(write_parquet(tmp_path / "rows.parquet", rows), "--data-path"))
    assert [chat.messages for chat in chats] == [row["messages"] for row in rows]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"text": "a"}, "tools/preprocess_data.py tokenizes"),
        ({"chosen": [], "rejected": []}, "rename chosen to messages"),
        ({"question": "a", "answer": "b"}, 'rename the row\'s "question", "answer"'),
        ({"instruction": "a", "output": None}, 'its "instruction", "input", "output" or "history" is not text'),
        ({"prompt": "a", "completion": [ANSWERED]}, "must be two texts or two lists of messages"),
        ({"conversations": [{"from": "bot", "value": "a"}]}, "message 1: from 'bot' is none of human, user, gpt"),
        ({"conversations": [{"from": "function_call", "value": "{}"}]}, "message 1: a function_call: write it as"),
        ({"conversations": []}, "its conversations are []"),
    ],
)
def test_rows_without_a_conversation_say_what_to_do(tmp_path: Path, row: dict[str, Any], expected: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(Refusal) as refusal:
        list(read_chats(str(path), "--data-path"))
    assert str(refusal.value).startswith(f"{path}, line 1") and expected in str(refusal.value)


@pytest.mark.parametrize("form", ["ShareGPT", "Alpaca", "prompt and completion"])
def test_preprocessing_says_what_conversations_are(tmp_path: Path, form: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(FORMS[form][0]))
    message = refused(tmp_path, path)
    assert (
        f'line 1: no key "text"; the row has the format {form}, which pretrain_gpt.py --sft reads directly' in message
    )


# ---- templates that omit something


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = make_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    data = DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))
    return build_tokenizer(data, None).transformers


TOOLS = [{"type": "function", "function": {"name": "sum", "parameters": {}}}]
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "sum", "arguments": {"a": 1}}}]}
CALLS = [ASKED, CALL, {"role": "tool", "content": "3"}, ANSWERED]
PLAIN = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ CONTENT }}<|im_end|>\n{% endfor %}" \
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"  # fmt: skip
SHOWS_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + PLAIN


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize(
    ("template", "messages", "tools", "expected"),
    [
        (PLAIN.replace("CONTENT", "m['content']"), [ASKED, ANSWERED], TOOLS, 'shows nothing of "tools"'),
        (SHOWS_TOOLS.replace("CONTENT", "m['content'] or ''"), CALLS, TOOLS, 'shows nothing of "tool_calls"'),
        (SHOWS_TOOLS.replace("CONTENT", "m.get('content')"), CALLS, None, 'prints None for "content": null with'),
        (SHOWS_TOOLS.replace("CONTENT", "m['content'] + ''"), CALLS, None, 'on "content": null with "tool_calls"'),
        (TEMPLATES["llama3"], CALLS, None, 'message 2: the chat template '),
    ],
)  # fmt: skip
def test_a_template_that_leaves_something_out_is_refused(
    tokenizer: Any, template: str, messages: list[Any], tools: Any, expected: str, marked: bool
) -> None:
    if marked:
        template = template.replace("{{ m['content']", "{% generation %}{% endgeneration %}{{ m['content']")
    with pytest.raises(Refusal) as refusal:
        ChatTemplate(tokenizer, template, "x")(Chat("f, line 3", messages, tools))
    assert expected in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize("marked", [True, False])
def test_a_template_that_shows_all_is_accepted(tokenizer: Any, marked: bool) -> None:
    template = TEMPLATES["chatml"] if marked else strip_marks(TEMPLATES["chatml"])
    rendered = ChatTemplate(tokenizer, template, "x")(Chat("f, line 3", CALLS, TOOLS))
    assert "<call>sum</call>" in tokenizer.decode(rendered.ids[rendered.spoken])


@pytest.mark.parametrize("workers", [0, 1])
def test_waiting_for_a_slow_dataset_is_counted(workers: int) -> None:
    class Slow(Dataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
            time.sleep(0.05)
            return {"tokens": torch.arange(8), "labels": torch.arange(8), "loss_mask": torch.ones(8)}

    batches = batches_of(Slow(), num_workers=workers)
    next(batches)
    assert take_waited([batches, None]) >= 0.05 and take_waited(batches) == 0 == take_waited(None)
    if workers:
        time.sleep(0.5)  # the process reads ahead
        next(batches)
        assert take_waited(batches) < 0.05
    assert len(list(batches)) == 3 - bool(workers)
