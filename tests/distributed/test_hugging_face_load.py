# SPDX-License-Identifier: Apache-2.0
"""``--load`` of a Hugging Face folder: the first loss is transformers' own, on any grid, without a conversion."""

from __future__ import annotations

import json
import math
import os
import shlex
from functools import cache
from pathlib import Path
from statistics import mean

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from benchmarks.families import END, PAGE, RESULTS, START, good, read, table
from megatron.training.arguments.parser import parse
from megatron.training.families import architectures
from tests.distributed.flags import P2, R2, SP, U2, ZERO1, ZERO3, fpdt
from tests.distributed.training_runs import make_job, train_job
from tests.families import FAMILIES, outcome
from tests.hugging_face import loss_of, save_model
from tests.pairs import full_but
from tests.program import run_forked, run_ranks
from tools import convert_hf

SIZES = {"hidden_size": 64, "vocab_size": 301}
LLAMA_SIZES = SIZES | {
    "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
GQA = "--group-query-attention --num-query-groups 2 --ffn-hidden-size 96"
KINDS = {
    "llama": (LLAMA_SIZES, GQA),
    "qwen2": (LLAMA_SIZES, f"{GQA} --add-qkv-bias"),
    "qwen3": (LLAMA_SIZES | {"head_dim": 16}, f"{GQA} --qk-layernorm --kv-channels 16"),
    "olmo2": (LLAMA_SIZES, f"{GQA} --reordered-norm --qk-layernorm-all-heads"),
    "gpt2": (SIZES | {"n_embd": 64, "n_layer": 4, "n_head": 8, "n_positions": 64, "eos_token_id": 2}, ""),
    "gpt_neox": (
        LLAMA_SIZES | {"rotary_pct": 0.5},
        "--position-embedding-type rope --rotary-percent 0.5 --parallel-residual --ffn-hidden-size 96 "
        "--no-bias-gelu-fusion --untie-embeddings-and-output-weights",
    ),
    "bloom": (SIZES | {"n_layer": 4, "n_head": 8}, "--position-embedding-type alibi --embed-layernorm"),
}
GPTS = ("bloom", "gpt2", "gpt_neox")
COMMON = "--attention-dropout 0 --hidden-dropout 0 --make-vocab-size-divisible-by 1 --vocab-size 300 --load"
GRIDS = {
    "one process": (1, ""),
    "TP 2 x U 2": (4, f"{SP} {U2}"),
    "PP 2, ZeRO 1": (2, f"{P2} {ZERO1}"),
    "R 2, ZeRO 3": (2, f"{R2} {ZERO3}"),
    "TP 2, FPDT": (2, f"{SP} {fpdt(32)}"),
}
CASES = [
    *(pytest.param("llama", grid, marks=pytest.mark.full if grid == "PP 2, ZeRO 1" else ()) for grid in GRIDS),
    pytest.param("qwen2", "one process", marks=pytest.mark.full),
    ("qwen3", "TP 2 x U 2"),
    pytest.param("olmo2", "TP 2 x U 2", marks=pytest.mark.full),
    ("gpt2", "TP 2 x U 2"),
    pytest.param("gpt_neox", "PP 2, ZeRO 1", marks=pytest.mark.full),
    ("bloom", "one process"),
    pytest.param("bloom", "TP 2 x U 2", marks=pytest.mark.full),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One folder per kind, made when it is first needed."""
    return cache(lambda kind: save_model(tmp_path_factory.mktemp(kind), kind, KINDS[kind][0]))


def first_loss(flags: str, llama: bool) -> tuple[float, int, list[tuple[torch.Tensor, torch.Tensor]]]:
    """The first loss, the iteration at the start, and on one process the batch."""
    from megatron.training.job import batches_for

    job = make_job(flags, llama)
    batches = batches_for(job, job.datasets[0], 0, 0) if torch.distributed.get_world_size() == 1 else iter(())
    read = [(batch["tokens"], batch["labels"]) for batch, _ in zip(batches, range(job.batch_sizes.get()))]
    return train_job(job, 1)[0][0], job.progress.iteration - 1, read


def flags_of(kind: str, folder: Path, grid: str = "") -> str:
    return f"{KINDS[kind][1]} {grid} {COMMON} {shlex.quote(str(folder))}"


@pytest.fixture(scope="module")
def transformers_loss(pool, folders, shared):
    """transformers' loss on the first batch."""

    def computed(kind: str) -> float:
        read = pool.run(first_loss, 1, flags_of(kind, folders(kind)), kind not in GPTS)[0][2]
        model = AutoModelForCausalLM.from_pretrained(folders(kind), attn_implementation="eager")
        return mean(loss_of(model, *batch) for batch in read)

    return lambda kind: shared(("hugging face's loss", kind), lambda: computed(kind))


@pytest.mark.parametrize("kind, grid", CASES)
@pytest.mark.usual(0, 2, 6)
def test_the_first_loss_is_that_of_transformers(pool, folders, transformers_loss, kind, grid):
    world, flags = GRIDS[grid]
    loss, first, _ = pool.run(first_loss, world, flags_of(kind, folders(kind), flags), kind not in GPTS)[0]
    assert loss == pytest.approx(transformers_loss(kind), rel=1e-5) and first == 0
    assert abs(transformers_loss(kind) - math.log(301)) > 0.05  # the loss of an untrained model


def refusal(pool, flags: str) -> str:
    with pytest.raises(Exception) as raised:
        pool.run(first_loss, 1, flags, True)
    return next(line for line in str(raised.value).splitlines() if line.startswith("megatron.training.refusal.Refusal"))


def test_refusals(pool, folders, tmp_path):
    folder = folders("llama")
    wide = flags_of("llama", folder).replace("size 96", "size 128")
    assert "is of another model: --ffn-hidden-size 96 in the checkpoint, 128 in this run" in refusal(pool, wide)
    other = tmp_path / "other"
    other.mkdir()
    config = json.loads((folder / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"model_type": "t5"}))
    known = ", ".join(architectures.FAMILIES).rpartition(", ")[0]
    assert f"model_type 't5' is not supported: only {known}" in refusal(pool, flags_of("llama", other))
    (other / "config.json").write_text(json.dumps(config))
    assert "only the safetensors format is supported" in refusal(pool, flags_of("llama", other))
    weights = {}
    for file in folder.glob("*.safetensors"):
        weights |= load_file(file)
    weights.pop("model.norm.weight")
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    assert "1 tensors that config.json requires are missing: model.norm.weight" in refusal(
        pool, flags_of("llama", other)
    )
    assert "a vocabulary of" in refusal(pool, flags_of("llama", folder).replace("--vocab-size 300", "--vocab-size 310"))


def test_a_folder_that_we_have_written_is_compared(pool, folders, tmp_path):
    ours, folder = tmp_path / "ours", tmp_path / "folder"
    assert convert_hf.main(["--from-hf", str(folders("llama")), "--to", str(ours)]) == 0
    assert convert_hf.main(["--from", str(ours), "--to-hf", str(folder)]) == 0
    pool.run(first_loss, 1, flags_of("llama", folder), True)
    file = sorted(folder.glob("*.safetensors"))[1]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1 << 6  # the exponent of the last number
    file.write_bytes(data)
    for flags in (
        flags_of("llama", folder),
        f"{flags_of('llama', tmp_path / 'none')} --pretrained-checkpoint {folder}",
    ):
        message = refusal(pool, flags)
        assert f"checkpoint {folder} is damaged: {file} is not what was written (its CRC-32 differs)" in message


def test_the_model_from_config_json(folders):
    from megatron.training.checkpoint.arguments_of import shape_of

    words = "--seq-length 64 --micro-batch-size 1 --train-iters 1 --lr 1 --mock-data --vocab-size 300".split()
    config = parse([*words, "--load", str(folders("bloom")), "--use-checkpoint-args"], None, 1, shape_of)
    assert (config.model.num_layers, config.model.embed_layernorm) == (4, True)
    assert config.model.position_embedding_type == "alibi"


# Decoder families of transformers: parity or a correct refusal, as docs/use/hugging-face.md lists.


TABLE = PAGE.read_text()
ROWS = {family: (row["outcome"], row.get("why")) for family, row in read(RESULTS).items()}
SAME_VERSION = pytest.mark.skipif(
    f"transformers {transformers.__version__}," not in TABLE, reason="the page is about another version of transformers"
)
# afmoe takes a view of attention's output, and gemma3 has its sizes under text_config. The others are refused, each
# for another reason.
USUAL = ("afmoe", "gemma3", "roberta", "marian", "doge", "rwkv", "llama4_text", "blt")


@SAME_VERSION
@pytest.mark.parametrize("family", full_but(ROWS, *USUAL))
def test_the_table_is_correct(pool, family):
    expected, why = ROWS[family]
    ulysses, ring = (2, 2) if expected == "parity" else (1, 1)
    result = pool.run(outcome, ulysses * ring, family, ulysses, ring, timeout=120)[0]
    assert result["outcome"] == expected and good(result), result
    if expected == "refused":
        assert result["why"] == why


@SAME_VERSION
def test_every_family_is_in_the_table_and_none_is_wrong():
    assert tuple(ROWS) == FAMILIES
    assert {result for result, _ in ROWS.values()} <= {"parity", "refused", "not buildable"}
    without_versions = table(read(RESULTS), FAMILIES).partition(":")[2]
    assert without_versions + END in TABLE.partition(START)[2]


def test_a_new_family_appears_as_not_tried():
    output = table({"llama": {"outcome": "parity", "error": 1e-6}}, ("llama", "llama9"))
    assert "2 families, 1 parity, 1 not tried." in output
    assert "| parity | llama |" in output and "| not tried | llama9 |" in output


def test_a_large_error_is_shown():
    assert "| parity | llama (2.0e-05) |" in table({"llama": {"outcome": "parity", "error": 2e-5}}, ("llama",))


@pytest.mark.parametrize("one", [{"outcome": "refused", "true": False}, {"outcome": "refused"}, {"outcome": "crash"}])
def test_what_is_wrong_stands_out(one):
    assert f"| **{one['outcome']}**: so | llama |" in table({"llama": one | {"why": "so"}}, ("llama",))


# The Hugging Face examples (own loop, Trainer), each compared with one process.


EXAMPLES = Path(__file__).parents[2] / "examples" / "huggingface"


@pytest.mark.parametrize("options", ["--steps 2", pytest.param("--fpdt-chunk-size 64", marks=pytest.mark.full)])
def test_a_users_own_loop(options):
    ranks = run_ranks(EXAMPLES / "finetune.py", [*options.split(), "--seq-length", "128"], os.environ, 4)
    assert [rank.returncode for rank in ranks] == [0] * 4, ranks[0].stderr  # not 0 if losses differ
    assert "Ulysses 2 x Ring 2" in ranks[0].stdout and "largest difference" in ranks[0].stdout


@pytest.fixture(scope="module")
def steps(long_runs):
    return 20 if long_runs else 10


@pytest.fixture(scope="module")
def alone(tmp_path_factory, steps):
    """The losses of transformers' Trainer without this package."""
    pytest.importorskip("accelerate", reason="accelerate is not installed, which transformers.Trainer needs")
    file = tmp_path_factory.mktemp("alone") / "losses.json"
    done = run_forked(EXAMPLES / "trainer.py", ["--steps", str(steps), "--json", str(file)], os.environ)
    assert not done.returncode, done.stderr
    return json.loads(file.read_text())


@pytest.mark.parametrize("options", ["", pytest.param("--ring 1 --micro-batch 2", marks=pytest.mark.full)])
@pytest.mark.lab
def test_steps_of_trainer_and_an_evaluation(alone, tmp_path, steps, options):
    argv = [*options.split(), "--steps", str(steps), "--json", str(tmp_path / "losses.json")]
    ranks = run_ranks(EXAMPLES / "trainer.py", argv, os.environ, 4)
    assert [rank.returncode for rank in ranks] == [0] * 4, ranks[0].stderr
    losses = json.loads((tmp_path / "losses.json").read_text())
    assert len(losses) == steps + 1 and losses == pytest.approx(alone, rel=1e-6)
    assert losses[-1] < losses[0] - 0.1
