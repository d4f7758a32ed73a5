# SPDX-License-Identifier: Apache-2.0
"""Generates bad inputs of programs: broken files, and the command lines that read them."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron.training.arguments.parser import settings, spellings
from tests.distributed.test_program import PROGRAM, ROOT
from tests.program import run_forked

SHAPE = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
RUN = "--micro-batch-size 1 --train-iters 1 --lr 1e-3 --eval-iters 0 --num-workers 0 --device cpu"
MOCK = "--mock-data --tokenizer-type NullTokenizer --vocab-size 100"
GOOD = f"{SHAPE} {RUN} {MOCK}"
TOOLS = ROOT / "tools"


@dataclass(frozen=True)
class Case:
    """One program and its flags."""

    name: str
    program: Path
    flags: list[str]


# --- ways to break a file

BREAKS: dict[str, Callable[[bytes, random.Random], bytes | None]] = {
    "missing": lambda data, draw: None,
    "empty": lambda data, draw: b"",
    "truncated": lambda data, draw: data[: draw.randint(1, max(1, len(data) // 2))],
    "binary": lambda data, draw: draw.randbytes(max(64, min(len(data), 4096))),
    "of other words": lambda data, draw: draw.choice([b"null", b"[]", b"12", b'"x"', b"[[[", b"{}", b"\n\n"]),
    "of zeros": lambda data, draw: bytes(len(data) or 16),
}


def broken(source: Path, folder: Path, file: str, how: str, draw: random.Random) -> Path:
    """A copy of ``source`` (a file, or a folder with ``file``) with one file broken."""
    target = folder / source.name
    folder.mkdir(parents=True)
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copytree(source.parent, folder, dirs_exist_ok=True)
    path = target / file if source.is_dir() else folder / file
    if how == "a folder":
        path.unlink()
        path.mkdir()
        return target
    data = BREAKS[how](path.read_bytes(), draw)
    path.unlink()
    if data is not None:
        path.write_bytes(data)
    return target


# --- valid inputs, each in a separate folder


def make_good(folder: Path) -> None:
    """A valid input of each kind."""
    from tests.unit.test_genome import make

    for kind in (
        "SentencePieceTokenizer",
        "HuggingFaceTokenizer",
        "GPT2BPETokenizer",
        "TikTokenizer",
        "TokenizerFromFile",
    ):
        (folder / kind).mkdir(parents=True)
        make(kind, folder / kind)
    data = folder / "data"
    data.mkdir()
    builder = IndexedDatasetBuilder(str(data / "corpus.bin"), dtype=np.uint16)
    draw = np.random.default_rng(0)
    for _ in range(20):
        text = draw.integers(0, 100, 50)
        builder.add_document(text, [len(text)])
    builder.finalize(str(data / "corpus.idx"))
    run = [*GOOD.split(), "--save", str(folder / "checkpoints" / "c"), "--log-jsonl", str(folder / "log" / "log.jsonl")]
    done = run_forked(PROGRAM, run, {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    done = run_forked(
        TOOLS / "convert_hf.py",
        ["--from", str(folder / "checkpoints" / "c"), "--to-hf", str(folder / "hf" / "model")],
        {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    (folder / "deepspeed").mkdir()
    (folder / "deepspeed" / "ds.json").write_text(
        json.dumps({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}, "gradient_clipping": 1.0})
    )
    (folder / "machine").mkdir()
    shutil.copy(ROOT / "megatron" / "simulator" / "machines" / "H100-80G.json", folder / "machine" / "gpu.json")
    (folder / "weighted").mkdir()
    (folder / "weighted" / "paths.txt").write_text(f'"TRAIN: 1 0:1 {data}/corpus"')
    (folder / "text").mkdir()
    (folder / "text" / "text.jsonl").write_text('{"text": "abc"}\n' * 9)


# --- cases


TOKENIZED = f"{SHAPE} {RUN} --mock-data --tokenizer-type"
READ = f"{SHAPE} {RUN} --tokenizer-type NullTokenizer --vocab-size 100"
BPE = f"{TOKENIZED} GPT2BPETokenizer --vocab-file {{folder}}/vocab.json --merge-file {{folder}}/merges.txt"
EVERY_BREAK = (*BREAKS, "a folder")
ANY_TEXT = {"empty", "truncated", "of other words", "of zeros"}

# (what is copied, the file to break, the program, its flags, the changes that break nothing)
FILES: tuple[tuple[str, str, Path, str, set[str]], ...] = (
    ("SentencePieceTokenizer/sp.model", "sp.model", PROGRAM,
     f"{TOKENIZED} SentencePieceTokenizer --tokenizer-model {{path}}", set()),
    ("SentencePieceTokenizer/sp.model", "sp.model", PROGRAM,
     f"{TOKENIZED} Llama2Tokenizer --tokenizer-model {{path}}", set()),
    ("HuggingFaceTokenizer/hf", "tokenizer.json", PROGRAM,
     f"{TOKENIZED} HuggingFaceTokenizer --tokenizer-model {{path}}", set()),
    ("GPT2BPETokenizer/vocab.json", "vocab.json", PROGRAM, BPE, set()),
    ("GPT2BPETokenizer/vocab.json", "merges.txt", PROGRAM, BPE, ANY_TEXT),
    ("TikTokenizer/tik.json", "tik.json", PROGRAM, f"{TOKENIZED} TikTokenizer --tokenizer-model {{path}}", set()),
    ("TokenizerFromFile/tokenizer.json", "tokenizer.json", PROGRAM,
     f"{TOKENIZED} TokenizerFromFile --tokenizer-model {{path}}", set()),
    ("data/corpus.bin", "corpus.bin", PROGRAM, f"{READ} --data-path {{folder}}/corpus", {"binary", "of zeros"}),
    ("data/corpus.idx", "corpus.idx", PROGRAM, f"{READ} --data-path {{folder}}/corpus", set()),
    ("weighted/paths.txt", "paths.txt", PROGRAM, f"{READ} --train-weighted-split-paths-path {{path}}", set()),
    ("hf/model", "config.json", PROGRAM, f"--model hf:{{path}} --seq-length 32 {RUN} {MOCK}", set()),
    ("hf/model", "config.json", TOOLS / "convert_hf.py", "--from-hf {path} --to {folder}/new", set()),
    ("hf/model", "model.safetensors", TOOLS / "convert_hf.py", "--from-hf {path} --to {folder}/new", set()),
    ("deepspeed/ds.json", "ds.json", PROGRAM, f"{GOOD} --deepspeed --deepspeed_config {{path}}", set()),
    ("machine/gpu.json", "gpu.json", PROGRAM, f"{GOOD} --dry-run --world-size 1 --gpu {{path}}", set()),
    ("machine/gpu.json", "gpu.json", TOOLS / "plan.py",
     "--model llama3-8b --gpus 8 --seq-length 4096 --gpu {path}", set()),
    ("log/log.jsonl", "log.jsonl", TOOLS / "plot_run.py", "{path} --output {folder}/new.png", set()),
    ("log/log.jsonl", "log.jsonl", TOOLS / "plot_memory.py", "{path} --output {folder}/new.png", set()),
    ("text/text.jsonl", "text.jsonl", TOOLS / "preprocess_data.py",
     "--input {path} --output-prefix {folder}/new --tokenizer-type ByteLevelTokenizer --workers 1", {"empty"}),
    ("text/text.jsonl", "text.jsonl", TOOLS / "train_tokenizer.py",
     "--input {path} --model-prefix {folder}/new", set()),
    ("text/text.jsonl", "text.jsonl", TOOLS / "check_script.py", "{path}", set()),
)  # fmt: skip


def of_files(good: Path, work: Path, draw: random.Random) -> Iterator[Case]:
    """Every file that is read, with every change."""
    for number, (source, file, program, flags, harmless) in enumerate(FILES):
        for how in EVERY_BREAK:
            if how not in harmless:
                path = broken(good / source, work / f"{number}-{how.replace(' ', '-')}", file, how, draw)
                given = flags.format(path=path, folder=path.parent).split()
                yield Case(f"{file} {how}, read by {program.name}", program, given)


MAY_BE_NEGATIVE = ("--eval-iters", "--local-rank")  # -1 means no validation, and a process without a number


def of_values(draw: random.Random) -> Iterator[Case]:
    """Each flag with a value that it cannot have."""
    for _, _, field in settings():
        flag, kind = spellings(field)[0], str(field.type)
        if field.metadata.get("choices"):
            bad = ["bogus", ""]
        elif "int" in kind or "float" in kind:
            bad = ["x", "nan", "", "1e400", "-7"] + [str(10**25)] * ("int" in kind)
            if flag in MAY_BE_NEGATIVE:
                bad.remove("-7")
        elif kind.startswith("bool"):
            bad = ["maybe"]
        else:
            continue
        yield Case(f"{flag} {(value := draw.choice(bad))!r}", PROGRAM, [*GOOD.split(), flag, value])


def of_unknown_flags(draw: random.Random) -> Iterator[Case]:
    names = [spellings(field)[0] for _, _, field in settings()]
    for name in draw.sample(names, 40):
        at = draw.randrange(3, len(name))
        mangled = draw.choice([name[:at] + name[at + 1 :] + "q", name + "s-", name[:at] + "0" + name[at:]])
        yield Case(f"unknown {mangled}", PROGRAM, [*GOOD.split(), mangled])


CONFLICTS = """--bf16 --fp16
--zero-stage 0 --use-distributed-optimizer
--zero-stage 3 --overlap-param-gather --pipeline-model-parallel-size 2
--ulysses-parallel-size 2 --context-parallel-size 1
--train-samples 8
--train-tokens 0
--global-batch-size 3 --micro-batch-size 2
--rampup-batch-size 1 3 7
--recompute-activations --recompute-granularity full
--recompute-granularity full
--data-path somewhere
--train-data-path somewhere
--lr-warmup-iters 4 --lr-warmup-fraction 0.1
--lr-decay-style WSD
--save-retain-interval 3
--keep-best-checkpoints 1
--save-interval 2 --eval-interval 3 --keep-best-checkpoints 1
--non-persistent-save-interval 1 --non-persistent-ckpt-type local
--non-persistent-save-interval 1 --non-persistent-ckpt-type global
--load nowhere --exit-on-missing-checkpoint
--load nowhere --ckpt-step 3
--finetune
--elastic
--elastic-grids bogus
--skip-bad-batches 2 --fp16
--rollback-on-bad-batch
--attention-mask window
--num-query-groups 3 --group-query-attention
--hidden-size 33
--kv-channels 0
--use-checkpoint-args
--universal-checkpoint
--deepspeed_config nowhere.json
--model nothing
--model hf:
--dry-run --world-size 0
--dry-run --gpu nothing
--gpu h100
--log-jsonl /dev/null/log
--tensorboard-dir /dev/null/board
--save /dev/null/c
--profile-memory /dev/null/p
--mask-function nowhere.py:f
--fp8-format hybrid
--sequence-parallel --tensor-model-parallel-size 3
--swiglu --squared-relu
--vocab-size 0
--make-vocab-size-divisible-by 0
--init-method-std nan
--vocab-size 99999999999
--distributed-timeout-minutes 9999999999
--save-interval 2 --skip-bad-batches 1 --no-check-for-nan-in-loss-and-grad
--skip-bad-batches 1 --spike-factor 0.5""".splitlines()
TOOL_LINES = """plan.py --model nothing --gpus 8 --gpu h100
plan.py --model llama3-8b --gpus x --gpu h100
plan.py --model llama3-8b --gpus 0 --gpu h100
plan.py --model llama3-8b --gpus 8 --gpu nothing --seq-length 4096
plan.py --model llama3-8b --gpus 8 --gpu h100 --seq-length -1
plan.py --model llama3-8b --gpus 8 --gpu h100 --seq-length 4096 --global-batch 0
plan.py --model llama3-8b --gpus 8 --gpu h100 --seq-length 4096 --tensor 3 --ulysses 5
memory.py --model nothing
memory.py --params x
memory.py --params 7B --seq-length x
memory.py --params 7B --gpus 0
memory.py --params 7B --gpus 2 --tensor 3
memory.py --params 7B --gpu nothing
memory.py --params -7B
plot_tiles.py --output /dev/null/x.png
plot_tiles.py --ring 0 --output x.png
plot_tiles.py --seq-length 7 --ring 4 --output x.png
plot_tiles.py --mask bogus --output x.png
traffic.py --gpus 0 -- --num-layers 2
traffic.py --gpus 2 --rank 5 -- --num-layers 2
traffic.py -- --bogus
collect_text.py --input nowhere --output x.jsonl
collect_text.py --input . --output /dev/null/x
convert_hf.py
convert_hf.py --from-hf nowhere --to x
convert_hf.py --from nowhere --to-hf x
convert_hf.py --from nowhere --to x
convert_checkpoint.py --from nowhere --to x
preprocess_data.py --input nowhere --output-prefix x --tokenizer-type ByteLevelTokenizer
preprocess_data.py --input . --output-prefix x --tokenizer-type ByteLevelTokenizer
preprocess_data.py --input nowhere --output-prefix x
preprocess_data.py --input nowhere --output-prefix x --tokenizer-type bogus
train_tokenizer.py --input nowhere --model-prefix x
train_tokenizer.py --input . --model-prefix /dev/null/x
measure_hardware.py --output /dev/null/x.json --quick
measure_hardware.py --output x.json --processes 0
measure_hardware.py --output x.json --gemm-sizes 0
check_script.py nowhere.sh
check_script.py .
plot_run.py nowhere.jsonl
plot_run.py .
plot_tiles.py --seq-length 0 --output x.png
plot_tiles.py --ring 4 --output .
measure_mask_threshold.py --seq-lengths 0 --device cpu
measure_mask_threshold.py --heads 0 --device cpu
measure_mask_threshold.py --device cuda
memory.py --params nan
memory.py --params 1e400
memory.py --model llama3-8b --json /dev/null/x
plan.py --model llama3-8b --gpus 8 --gpu H100-80G --seq-length nan
convert_hf.py --from-hf /dev/null --to x
train_tokenizer.py --input nowhere --model-prefix x --vocab-size 0
collect_text.py --input /nowhere --output x.jsonl
plot_memory.py nowhere.json
plot_memory.py .""".splitlines()


def of_contradictions() -> Iterator[Case]:
    """Settings that contradict each other, and invalid arguments of tools."""
    for line in CONFLICTS:
        yield Case(line, PROGRAM, f"{GOOD} {line}".split())
    for line in TOOL_LINES:
        tool, *flags = line.split()
        yield Case(line, TOOLS / tool, flags)


def all_cases(good: Path, work: Path, seed: int) -> list[Case]:
    """All cases. Files to break are copied from ``good`` (see :func:`make_good`) to ``work``."""
    draw = random.Random(seed)
    return [*of_contradictions(), *of_unknown_flags(draw), *of_values(draw), *of_files(good, work, draw)]
