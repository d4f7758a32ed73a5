# SPDX-License-Identifier: Apache-2.0
"""The readers of data and of settings, each with valid files and a function that changes them."""

from __future__ import annotations

import gzip
import importlib
import importlib.util
import io
import json
import shlex
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import numpy as np

from megatron.inference.load import Saved, read_saved
from megatron.inference.prompts import read_prompts
from megatron.simulator.cost.nccl_tests import read_runs
from megatron.simulator.machines.machine_file import read_machine
from megatron.simulator.planner.request import packed
from megatron.simulator.planner.run_cost import interrupted, read_prices, read_rates
from megatron.training.arguments.data_paths import weighted_groups
from megatron.training.arguments.parser import parse
from megatron.training.checkpoint.megatron_lm.checked import fitting
from megatron.training.data import chat_dataset, text_files
from megatron.training.data import index_files as data_files
from megatron.training.data.chat_template import read_chats
from megatron.training.data.encoding import Settings, encode
from megatron.training.data.packing.length_mixtures import read_mixture
from megatron.training.data.sources import columnar, partitions, token_files
from megatron.training.data.sources.answer_pairs import read_pairs
from megatron.training.data.tokenizer import build_tokenizer
from megatron.training.evaluation.haystack import read_ids
from megatron.training.json_file import read_json
from megatron.training.model.attention_rule import sparse_pattern
from megatron.training.ownership.atomic import LIST, sample_of
from megatron.training.refusal import Refusal, Refusals
from megatron.training.report import memory_picture
from megatron.training.settings.config import AttentionConfig, DataConfig, ModelConfig
from tests.fuzz import mutations
from tests.fuzz.checkpoint_readers import LLAMA
from tests.fuzz.harness import Reader
from tools import compare_trace, plot_run, trace_alignment
from tools.launch_command import launch, slurm
from tools.launch_redirect import elsewhere
from tools.merged_trace import merged
from tools.profiled_trace import measured

ROOT = Path(__file__).resolve().parents[2]
BYTES = build_tokenizer(DataConfig(tokenizer_type="ByteLevelTokenizer"), None)
MIB = 1 << 20


# Changes of texts.

WORDS = [
    "-1", "0", "1e400", "nan", "inf", "9" * 5000, "²", "\ud800", "\x1b[2J", "\u202e", "'", '"', "$(id)", "`id`",
    "${x", "$((", "<<E", "\\", "#", "=", ":", ",", "../..", "/dev/zero", "%s", "{", "}", "[", "]", "<",
    "</script>", "1.2.3", "1:0", "0:2", "\x00", "\r", "\u2028", "x" * 3000,
]  # fmt: skip


def text(random: Random, data: bytes) -> bytes:
    """Replace, repeat, exchange, remove and insert words and lines of a text."""
    if random.random() < 0.2:
        return mutations.any_bytes(random, data)
    lines = [line.split(" ") for line in data.decode("utf-8", "replace").split("\n")]
    for _ in range(random.choice([1, 1, 2, 4, 16])):
        at = random.randrange(len(lines))
        line, kind = lines[at], random.randrange(7)
        if kind <= 2:
            line[random.randrange(len(line))] = (random.choice(WORDS) * random.choice([1, 1, 1, 50]))[:5000]
        elif kind == 3:
            line.insert(random.randrange(len(line) + 1), random.choice(WORDS))
        elif kind == 4 and len(line) < 50:
            lines[at] = line * random.choice([2, 100])
        elif kind == 5 and len(lines) > 1:
            del lines[at]
        else:
            lines.insert(at, random.choice(lines))
    return "\n".join(" ".join(line) for line in lines).encode("utf-8", "surrogatepass")[:20_000]


def json_lines(random: Random, data: bytes) -> bytes:
    """Change one line of a JSON Lines file as JSON, or the complete file as text."""
    if random.random() < 0.3:
        return text(random, data)
    lines = data.splitlines()
    at = random.choice([number for number, line in enumerate(lines) if line])
    lines[at] = mutations.json_text(random, lines[at])
    return b"\n".join(lines)


def array_text(random: Random, data: bytes) -> bytes:
    """Change a JSON array as JSON, or as text."""
    return text(random, data) if random.random() < 0.4 else mutations.json_text(random, data)


def parquet() -> list[bytes]:
    """Two Parquet files with the same rows: one without compression, one with snappy."""
    import pyarrow
    from pyarrow import parquet

    table, result = pyarrow.Table.from_pylist([{"text": "abc", "n": [1]}, {"text": "", "n": None}] * 9), []
    for compression in ("none", "snappy"):
        stream = io.BytesIO()
        parquet.write_table(table, stream, compression=compression, row_group_size=5)
        result.append(stream.getvalue())
    return result


def arrow() -> list[bytes]:
    """Arrow files of both formats, without compression and with it."""
    import pyarrow
    import pyarrow.ipc

    table, result = pyarrow.Table.from_pylist([{"text": "abc", "n": [1], "b": b"x"}, {"text": "", "n": None}] * 9), []
    for make in (pyarrow.ipc.new_file, pyarrow.ipc.new_stream):
        for compression in (None, "zstd"):
            stream = io.BytesIO()
            with make(stream, table.schema, options=pyarrow.ipc.IpcWriteOptions(compression=compression)) as writer:
                writer.write_table(table, max_chunksize=5)
            result.append(stream.getvalue())
    return result


def archives() -> list[bytes]:
    """Archives in each format of Python, with long names."""
    result = []
    for kind in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w", format=kind) as archive:
            for name, content in (("a/0.txt", b"abc"), ("a/0.json", b'{"n": 1}'), ("a/0.jpg", b"x" * 600),
                                  ("b" * 90 + "/" + "c" * 60 + ".txt", b"d")):  # fmt: skip
                member = tarfile.TarInfo(name)
                member.size = len(content)
                if kind == tarfile.PAX_FORMAT:
                    member.pax_headers = {"size": str(len(content)), "mtime": "1.5"}
                archive.addfile(member, io.BytesIO(content))
        result.append(stream.getvalue()[: 15 * 512])
    return result


def archive(random: Random, data: bytes) -> bytes:
    """Change bytes of an archive; most often with headers whose checksums are right again."""
    blocks = bytearray(mutations.any_bytes(random, data))
    for at in range(0, len(blocks) - 511, 512) if random.random() < 0.7 else ():
        if blocks[at + 257 : at + 262] == b"ustar":
            blocks[at + 148 : at + 156] = b" " * 8
            blocks[at + 148 : at + 156] = b"%06o\0 " % sum(blocks[at : at + 512])
    return bytes(blocks)


def packed_lines(random: Random, data: bytes) -> bytes:
    """A .gz with changed content or changed bytes, or a decompression bomb."""
    kind = random.randrange(4)
    if kind == 0:
        return mutations.any_bytes(random, data)
    if kind == 1:
        return gzip.compress(random.choice([b"[", b"x", b'{"a":']) * (2 * MIB))
    return gzip.compress(json_lines(random, gzip.decompress(data)), 1)


def bare_json(random: Random, data: bytes) -> bytes:
    return mutations.json_text(random, data)


# Token files.


@cache
def corpus() -> dict[str, bytes]:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    with tempfile.TemporaryDirectory() as folder:
        builder = IndexedDatasetBuilder(f"{folder}/c.bin", dtype=np.uint16)
        for length in (5, 0, 17, 40):
            builder.add_document(np.arange(length) % 99, [length])
        builder.finalize(f"{folder}/c.idx")
        return {name: Path(folder, name).read_bytes() for name in ("c.bin", "c.idx")}


def index(random: Random, data: bytes) -> bytes:
    """Replace counts, lengths and pointers of an index; sometimes, also resize the file to fit its counts."""
    if random.random() < 0.2:
        return mutations.any_bytes(random, data)
    magic, version, code, sequences, documents = data_files.HEADER.unpack_from(data)
    body = bytearray(data[data_files.HEADER.size :])
    for _ in range(random.choice([1, 1, 2, 3])):
        kind, number = random.randrange(6), random.choice(mutations.INTEGERS) & (2**64 - 1)
        if kind == 0:
            sequences = random.choice([number, sequences + 2, sequences - 2, 0])
        elif kind == 1:
            documents = random.choice([number, documents + 3, documents - 3, 0])
        elif kind == 2:
            code = random.choice([0, 4, 5, 6, 7, 255])
        elif body:
            size = random.choice([4, 8])
            at = random.randrange(0, len(body), size)
            body[at : at + size] = number.to_bytes(8, "little")[:size]
    if random.random() < 0.5:  # a size that agrees with the counts, if possible
        body = (body * 50)[: min(12 * sequences + 8 * documents, 10_000)]
    return data_files.HEADER.pack(magic, version, code, sequences % 2**64, documents % 2**64) + bytes(body)


def read_index(folder: Path) -> list[Any]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    file = data_files.open_prefix("c", "--data-path")
    data_files.check_order(file, "--data-path")
    data_files.check_token_ids(file, 99, "a tokenizer")
    data_files.check_share(file, (0.0, 0.5), 1, "train", "--data-path")
    dataset = IndexedDataset("c")
    return [dataset[number].sum() for number in range(len(dataset))]


def array(value: np.ndarray, **options: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, value, **options)
    return file.getvalue()


HEADERS = [
    "{'descr': '<i8', 'fortran_order': False, 'shape': (9223372036854775807,)}",
    "{'descr': '|O', 'shape': (3,)}", "{'descr': '<i8', 'fortran_order': False, 'shape': (1099511627776,)}",
    "(" * 3000, "{'descr': [[[", "__import__", "{'descr': '<i8', 'fortran_order': False, 'shape': (-1,)}",
    "{'descr': '<M8[9]', 'fortran_order': 1, 'shape': ()}",
    "{'descr': ('a', '<i8'), 'fortran_order': False, 'shape': (3,)}", "-" * 5000, "9**9**9",
    "{'descr': None, "   "'fortran_order': False, 'shape': (True,)}",
    "{'descr': '|O', 'fortran_order': False, 'shape': (1,)}",
]  # fmt: skip


def numbers(random: Random, data: bytes) -> bytes:
    """A .npy with another header, with pickled objects, an archive, or random bytes."""
    kind = random.randrange(6)
    if kind == 0:
        return mutations.any_bytes(random, data)
    if kind == 1:
        header = random.choice(HEADERS).encode()
        return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + data[80:]
    if kind == 2:
        return random.choice([b"\x80\x04", b""]) + mutations.hostile(random) + b"."
    if kind == 3:
        file = io.BytesIO()
        np.savez(file, a=np.arange(3))
        return mutations.any_bytes(random, file.getvalue()) if random.random() < 0.5 else file.getvalue()
    if kind == 4:
        kinds = ["<f4", "<i2", "?", "<c8", "S3", "<U2", "O", "<M8[s]", "<i4,<i4"]
        return array(np.zeros(random.choice([0, 3, (2, 2), ()]), random.choice(kinds)), allow_pickle=True)
    return array(np.array([random.choice(mutations.INTEGERS) % 2**63 for _ in range(random.randrange(5))], np.int64))


CHATS = {
    "tokens.npy": array(np.arange(9, dtype=np.int32)),
    "spoken.npy": array(np.arange(9) % 2 > 0),
    "starts.npy": array(np.array([0, 4, 9])),
    "lines.npy": array(np.array([1, 2])),
}


def listed(read: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Return a function that updates a folder's list of files (ownership/atomic.py) and then calls ``read`` on it."""

    def of_listed(folder: Path) -> Any:
        files = {path.name: (path.stat().st_size, sample_of(str(path))) for path in folder.glob("*.npy")}
        (folder / LIST).write_text(json.dumps(files))
        return read(folder)

    return of_listed


def read_cache(folder: Path) -> None:
    data_files.check_cache(str(folder))
    for path in folder.glob("*.npy"):  # as in megatron-core
        np.load(path, mmap_mode="r", allow_pickle=True).sum()


# Settings.


def parsed(words: str) -> Any:
    """Return the notes about a command line; of several refusals, raise only the last."""
    try:
        return parse(words.split(), None, 1).notes
    except Refusals as refusals:
        raise Refusal(refusals.lines[-1]) from None


SMALL = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
SMALL += "--micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 100"
DEEPSPEED = {
    "train_batch_size": 1,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 1.0,
    "steps_per_print": 10,
    "zero_optimization": {"stage": 1, "overlap_comm": True, "offload_optimizer": {"device": "none"}},
    "fp16": {"enabled": False, "loss_scale": 0, "initial_scale_power": 12, "hysteresis": 2},
    "bf16": {"enabled": False},
    "data_types": {"grad_accum_dtype": "fp32"},
    "communication_data_type": "fp32",
    "curriculum_learning": {"enabled": False},
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
    "compression_training": {"a": {"enabled": False}},
}
GROWING = {
    "enabled": True,
    "curriculum_type": "seqlen",
    "min_difficulty": 8,
    "max_difficulty": 32,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 900, "difficulty_step": 8},
}


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def machines() -> list[bytes]:
    folder = ROOT / "megatron" / "simulator" / "machines"
    own = {"extends": "H100-80G", "name": "mine", "link": {"bandwidth": 4e11, "latency": 1e-6}, "gpus": 4,
           "collectives": {"generation": "hopper", "post": 1e-6}, "sources": {"link": "measured"}}  # fmt: skip
    return [(folder / "H100-80G.json").read_bytes(), as_json(own)]


def blend(flag: str) -> Any:
    return lambda folder: data_files.parse_blends(DataConfig(**{flag: "file"}))


SETTINGS = {"attention.attention_mask": "window", "attention.window_size": [9, 0], "data.vocab_file": "a",
            "attention.sparse_stride": 8, "data.tokenizer_type": "NullTokenizer", "model.vocab_size": 99}  # fmt: skip


def read_settings(folder: Path) -> None:
    result = read_json(folder / "file")  # in place of an unpickled object
    for section in (AttentionConfig, DataConfig, ModelConfig):
        prefix = section.__name__.removesuffix("Config").lower() + "."
        names = {name.removeprefix(prefix): name for name in SETTINGS if name.startswith(prefix)}
        known = {ours: result[name] for ours, name in names.items() if isinstance(result, dict) and name in result}
        fitting(known, "folder", section)


def plain_json(random: Random, data: bytes) -> bytes:
    """Change JSON so that it stays valid, because it stands for an object that is not read from text."""
    while True:
        try:
            return json.dumps(json.loads(mutations.json_text(random, data))).encode()
        except (ValueError, RecursionError):
            continue


def hugging_face(folder: Path) -> Saved:
    (folder / "model.safetensors").write_bytes(b"")
    return read_saved(folder, folder)


# Traces, logs and profiles.


def traced() -> bytes:
    """A small trace of a dry run."""
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_sort_index", "pid": 0, "args": {"sort_index": 0}}]
    for at, name in enumerate(("forward", "gemm", "all_reduce", "backward", "gemm", "optimizer")):
        kind = "phase" if name in trace_alignment.PHASES else "gemm" if name == "gemm" else "dp"
        events.append({"ph": "X", "name": name, "cat": kind, "pid": 0, "tid": 0, "ts": 10.0 * at, "dur": 9.0})
    events += [{"ph": end, "id": 1, "cat": "flow", "name": "a", "pid": 0, "tid": 0, "ts": 1.0} for end in "sf"]
    return as_json({"traceEvents": events, "otherData": {"simulated": True}})


def profiled() -> list[bytes]:
    folder = ROOT / "tests" / "unit" / "data" / "traces"
    result = [path.read_bytes() for path in sorted(folder.glob("*.json"))]
    return [*result, gzip.compress(result[0], mtime=0)]


def trace(random: Random, data: bytes) -> bytes:
    """A trace changed as JSON, compressed or not; or a decompression bomb."""
    if data[:2] == b"\x1f\x8b":
        if random.random() < 0.3:
            return gzip.compress(random.choice([b" ", b"["]) * (40 * MIB))
        return gzip.compress(mutations.json_text(random, gzip.decompress(data)), 1, mtime=0)
    return mutations.json_text(random, data)


def in_line(action: Any) -> Any:
    """Return ``action`` as a function that raises the one-line errors of tools as Refusals."""

    def read(folder: Path) -> Any:
        try:
            return action(folder)
        except Refusal:
            raise
        except (trace_alignment.NoTrace, ValueError, OSError) as error:
            if isinstance(error, ValueError) and type(error) not in (ValueError, trace_alignment.NoTrace):
                raise
            raise Refusal(str(error)) from None

    return read


def compared(predicted: str, real: str) -> Any:
    def read(folder: Path) -> Any:
        dry, run = trace_alignment.read(folder / predicted), trace_alignment.read(folder / real)
        if not trace_alignment.is_predicted(dry):
            raise trace_alignment.NoTrace("is no dry run's")
        ours = trace_alignment.predicted(dry, 0)
        known = {x.name: x.kind for x in ours if x.kind not in trace_alignment.KINDS} | {"aten::mm": "gemm"}
        result = trace_alignment.compare(ours, measured(run, known))
        compare_trace._table(result, 0)
        return json.dumps([merged(dry, [(0, run)]), result.rows(), result.differences()]) and None

    return read


ROW = {"iteration": 1, "lm_loss": 5.5, "tokens": 64, "iteration_ms": 3.5, "tokens_per_second": 9.5, "mfu": 0.4,
       "device_peak_bytes": 4096, "validation_loss": 5.0}  # fmt: skip
PROFILE = {
    "rank": 0, "iteration": 3, "device": "cpu", "seconds": 2.5,
    "kinds": ["parameters", "gradients", "optimizer", "activations", "temporary", "host"],
    "phases": [["forward", 0.0], ["backward", 1.0], ["optimizer", 2.0]],
    "start": {"parameters": 10, "gradients": 0, "optimizer": 0, "activations": 0, "temporary": 0, "host": 0},
    "events": [[0.5, 3, 100], [1.5, 3, -100], [2.1, 2, 7]],
}  # fmt: skip


def profile(folder: Path) -> None:
    result = memory_picture.read(folder / "file")
    memory_picture.peak_of(result)
    seconds, sizes = memory_picture.series(result)
    for by in ("time", "events"):
        memory_picture._positions(result, seconds, by)


def logged(folder: Path) -> None:
    plot_run.summary(rows := plot_run.read_rows(folder / "file"))
    plot_run.smooth([row["lm_loss"] for row in rows])


def tables() -> list[bytes]:
    folder = ROOT / "examples" / "reproduce" / "published" / "nccl_tests"
    return [(folder / name).read_bytes() for name in ("a100_8.txt", "h100_16.txt", "h100_8.txt")]


def documents_text() -> list[bytes]:
    return [b"100\n2000\n30\n", corpus()["c.idx"]]


# Scripts.

SCRIPT = b"""#!/bin/bash
#SBATCH --nodes 4
#SBATCH --ntasks-per-node=2 --gres=gpu:4
export N=$(nvidia-smi -L | wc -l)
cat <<E > config.json
{"a": "$N"}
E
if [[ $N > 3 ]]; then echo yes >> "log $N"; fi
torchrun --nproc_per_node 8 --nnodes 1:2 pretrain_gpt.py --num-layers 2 --tensor-model-parallel-size 2 &> out
srun -n 16 --ntasks-per-node=8 python pretrain_gpt.py --num-layers=2
"""


def script(folder: Path) -> None:
    result = (folder / "file").read_text(errors="replace")
    slurm(result)
    try:
        elsewhere(result, "script.sh")
    except ValueError as error:  # the shell that runs the filter prints the error and ends
        raise Refusal(str(error)) from None
    for line in result.splitlines():
        try:
            words = shlex.split(line)
        except ValueError:
            words = line.split()
        launch(words, 3)


# Texts.


@contextmanager
def limited(module: ModuleType, **limits: int) -> Iterator[None]:
    """Set limits of a module, in its capitals, for a while."""
    before = {name: getattr(module, name) for name in limits}
    vars(module).update(limits)
    try:
        yield
    finally:
        vars(module).update(before)


def encoded(name: str) -> Any:
    def read(folder: Path) -> None:
        settings = Settings((("tokenizer_type", "ByteLevelTokenizer"),), None, "uint16", ("text",), True, 0)
        with limited(text_files, LONGEST=MIB), limited(columnar, MEMORY=192 * MIB, SECONDS=3):
            records = list(text_files.Reader([str(folder / name)]))
            if (result := encode(settings, records)).bad:
                raise Refusal(result.bad[0])

    return read


def saved_folder(folder: Path) -> None:
    for path in text_files.expand([str(folder)]):
        assert Path(path).parent == folder


def manifests(folder: Path) -> None:
    token_files.read_manifest(str(folder / "file"))


def parts(folder: Path) -> None:
    totals = partitions.Totals()
    for content in partitions.read_parts(str(folder)):
        totals.include(partitions.Totals(**content["totals"]))


FILES = {end: {"bytes": 9, "sha256": "0" * 64} for end in ("bin", "idx")}
TOKENS = {"form": 1, "documents": 2, "tokens": 9, "dtype": "uint16", **FILES}
TOTALS = {"documents": {"text": 2}, "tokens": {"text": 9}, "text_bytes": 9, "empty": 0, "filtered": 0, "bad": 0,
          "messages": []}  # fmt: skip
MANIFEST = {"identity": "x", "part": 0, "of": 1, "keys": ["text"], "totals": TOTALS, "metadata": False, "prefix": "p"}
MIXTURE = b"sources:\n  - path: a\n    weight: 2\n    repeat: {8K: 2, 64K: 0.5}\n  - path: b\n"
STATE = {"_data_files": [{"filename": "data-0.arrow"}], "_indices_data_files": None, "_split": "train"}
LINES = b'{"text": "abc", "n": 12}\n\n{"text": "d\\u00e9 \\ud83d\\ude00", "meta": {"a": [1, 2, {"b": null}]}}\n'
CHAT = b"""{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "tools": "[]", "n":1}
{"system": "s", "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "assistant", \
"content": null, "tool_calls": [{"function": {"name": "f"}}]}, {"role": "tool", "content": "1"}, \
{"role": "assistant", "content": "c"}], "chat_template_kwargs": {"think": true}}
"""
PAIRS = b"""{"prompt": "a", "chosen": "b", "rejected": "c", "n": 1}
{"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}], "chosen": [{"role": "assistant", \
"content": "b"}], "rejected": [{"role": "assistant", "content": "c"}]}
{"chosen": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "rejected": \
[{"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}], "tools": "[]"}
"""
HAS_PYARROW = importlib.util.find_spec("pyarrow") is not None
for _name in ("pyarrow", "pyarrow.ipc", "pyarrow.parquet") * HAS_PYARROW:  # which columnar.py imports late
    importlib.import_module(_name)
ARRAY = b'[{"text": "abc", "n": [1, -2.5e3, null]},\n {"text": "d\\u00e9 \\ud83d\\ude00"}, {"text": " "}]\n'
FORMS = b"""{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "id": 7, "score": 0.5}
{"instruction": "a", "input": "b", "output": "c", "history": [["d", "e"]]}
{"prompt": "a", "completion": "b"}
"""
FASTA = b">chr1 a\nACGTN\nacgu\n>chr2\nNNNN\n"
PROMPTS = b'{"prompt": "abc"}\n{"tokens": [1, 2, 3]}\n{"text": "x"}\n'
PER_SPLIT = {"train": ["1", "a", "2", "b"], "valid": "c", "test": None}
GENERATION = {"eos_token_id": [1, 2], "torch_dtype": "bfloat16"}
FAILURES = {"gpu_hours_per_failure": 50000.0, "restart_minutes": 5, "save_seconds": 0, "source": "a paper"}
PRICES = {"currency": "USD", "gpu_hour": {"H100-80G": 2.5}}
SPARSE = [[0], [0, 1], [1, 2], [0, 3]]


def run_with_failures(folder: Path) -> None:
    from megatron.formulas.strategy import Shape

    shape = Shape(layers=2, hidden=64, ffn=128, heads=4, kv_heads=4, head_dim=16, vocab=100)
    interrupted(1e6, 64, 8, shape, read_rates(folder / "file"))


def reader(name: str, seeds: Any, change: Any, read: Any, file: str = "file", **options: Any) -> Reader:
    return Reader(name, file, lambda: [seeds] if isinstance(seeds, bytes) else list(seeds()), change, read, **options)


READERS = [
    reader("index", lambda: [corpus()["c.idx"]], index, read_index, "c.idx", other_files={"c.bin": corpus()["c.bin"]}),
    reader("index_cache", lambda: [array(np.arange(9))], numbers, listed(read_cache), "a.npy"),
    reader(
        "chat_cache", lambda: [CHATS["starts.npy"]], numbers,
        listed(lambda folder: chat_dataset.read_store("chats", str(folder)).lengths()),
        "starts.npy", other_files={name: data for name, data in CHATS.items() if name != "starts.npy"},
    ),
    reader("data_args_path", b"1 a 2.5 b\n3 c\n", text, blend("data_args_path")),
    reader("data_file_list", b"1 a.bin x\n2.5 b.bin y\n", text, blend("data_file_list")),
    reader("per_split_data", as_json(PER_SPLIT), bare_json, blend("per_split_data_args_path")),
    reader(
        "weighted_paths", b'"TRAIN: 1 0:0.5 a, 2 0.5:1 b"\n', text,
        lambda folder: weighted_groups(DataConfig(train_weighted_split_paths_path="file"), "train"),
    ),
    reader(
        "deepspeed", lambda: [as_json(DEEPSPEED), as_json({"bf16": {"enabled": True}, "curriculum_learning": GROWING})],
        bare_json, lambda folder: parsed(f"{SMALL} --deepspeed --deepspeed_config file"),
    ),
    reader("machine", machines, bare_json, lambda folder: read_machine(Path("machine.json")), "machine.json"),
    reader("prices", as_json(PRICES), bare_json, lambda folder: read_prices(folder / "file")),
    reader("failures", as_json(FAILURES), bare_json, run_with_failures),
    reader("document_lengths", documents_text, text, lambda folder: packed.__wrapped__("file", 64)),
    reader("nccl_log", tables, text, lambda folder: read_runs(folder / "file")),
    reader("predicted_trace", lambda: [traced()], bare_json, in_line(compared("file", "real.json")),
           other_files={"real.json": profiled()[0]}),
    reader("measured_trace", profiled, trace, in_line(compared("dry.json", "file")),
           other_files={"dry.json": traced()}),
    reader("log_jsonl", lambda: [(as_json(ROW) + b"\n") * 3], json_lines, in_line(logged)),
    reader("memory_profile", as_json(PROFILE), bare_json, in_line(profile)),
    reader("script", SCRIPT, text, script),
    reader("json_lines", LINES, json_lines, encoded("text.jsonl"), "text.jsonl"),
    reader("json_array", ARRAY, array_text, encoded("text.json"), "text.json"),
    *([reader("parquet", parquet, mutations.any_bytes, encoded("text.parquet"), "text.parquet")] * HAS_PYARROW),
    *([reader("arrow", arrow, mutations.any_bytes, encoded("text.arrow"), "text.arrow")] * HAS_PYARROW),
    reader("webdataset", archives, archive, encoded("text.tar"), "text.tar"),
    reader("saved_folder", as_json(STATE), bare_json, saved_folder, "state.json", other_files={"data-0.arrow": b""}),
    reader("mixture", MIXTURE, text, lambda folder: read_mixture(str(folder / "file"))),
    reader("token_manifest", as_json(TOKENS), bare_json, manifests),
    reader("part_manifest", as_json(MANIFEST), bare_json, parts, "00000-of-00001.json",
           other_files={"00000-of-00001_text_document.json": json.dumps(TOKENS).encode()}),
    reader("forms", FORMS, json_lines, lambda folder: list(read_chats("chats.jsonl", "--data-path")), "chats.jsonl"),
    reader("packed_lines", lambda: [gzip.compress(LINES, mtime=0)], packed_lines, encoded("text.jsonl.gz"),
           "text.jsonl.gz"),
    reader("plain_text", b"a text\nof two lines\n", text, encoded("text.txt"), "text.txt"),
    reader("fasta", FASTA, text, encoded("genome.fa"), "genome.fa"),
    reader("chats", CHAT, json_lines, lambda folder: list(read_chats("chats.jsonl", "--data-path")), "chats.jsonl"),
    reader("pairs", PAIRS, json_lines, lambda folder: list(read_pairs("pairs.jsonl", "--data-path")), "pairs.jsonl"),
    reader("prompts", PROMPTS, json_lines, lambda folder: read_prompts([], folder / "p.jsonl", BYTES, 257), "p.jsonl"),
    reader("haystack", b"some text\nto hide in\n", text, lambda folder: read_ids(BYTES, "file", "--eval-haystack")),
    reader(
        "sparse_pattern", as_json(SPARSE), bare_json,
        lambda folder: sparse_pattern(AttentionConfig(sparse_pattern="file", sparse_block_size=8), 32),
    ),
    reader("generation_config", as_json(GENERATION), bare_json, hugging_face, "generation_config.json",
           other_files={"config.json": as_json({**LLAMA, "eos_token_id": 2, "torch_dtype": "float16"})}),
    reader("saved_settings", as_json(SETTINGS), plain_json, read_settings),
]  # fmt: skip
