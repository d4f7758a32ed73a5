# SPDX-License-Identifier: Apache-2.0
"""A log that can no longer be written is reported once; training and other logs continue."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megatron.core.fusions.fused_bias_gelu import bias_gelu
from torch.nn import functional

from megatron.context_parallel.layout.grid import Axis, Grid
from megatron.training.arguments.parser import parse
from megatron.training.families.named import shape, vocabulary
from megatron.training.features import bad_batches
from megatron.training.model.core_config import transformer_config
from megatron.training.refusal import Refusal
from megatron.training.report import memory_profile, reporter
from megatron.training.report.memory_picture import DEVICE_KINDS, KINDS
from megatron.training.settings.config import ModelConfig
from megatron.training.settings.models import derive_shape
from tests.distributed.flags import LLAMA, RUN, SHAPE
from tests.unit.closed_forms import count_parameters
from tests.unit.test_refusals import GOOD, MOCK

STEPS = 40


def run(flags: str, between=lambda: None) -> None:
    """Log the steps of a run; ``between`` is called before the first step."""
    config = parse(f"{GOOD} {MOCK} --log-interval 100 {flags}".split(), world_size=1)
    reports = reporter.Reporter(config, active=True, first_iteration=0, last_iteration=STEPS)
    between()
    for iteration in range(1, STEPS + 1):
        row = {"iteration": iteration, "lm_loss": 1.0, "grad_norm": 1.0, "iteration_ms": 1.0, "tokens": 64}
        reports.step(row, learning_rate=1.0, loss_scale=1.0, extra={})
    reports.close()


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 16 KiB."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(folder)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"only root can mount a small disk: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> None:
    with pytest.raises(OSError), open(folder / "rest", "wb", buffering=0) as file:
        while file.write(bytes(1024)):
            pass


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")  # its thread must not raise
def test_a_full_disk_under_tensorboard_ends_only_that_log(tiny_disk, tmp_path, capfd):
    log = tmp_path / "log.jsonl"
    run(f"--tensorboard-dir {tiny_disk}/board --log-jsonl {log}", lambda: fill(tiny_disk))
    output = capfd.readouterr()
    assert output.out.count("WARNING: --tensorboard-dir: No space left on device; going on without it") == 1
    assert "Traceback" not in output.err and "Exception" not in output.err
    assert [json.loads(line)["iteration"] for line in log.open()] == list(range(1, STEPS + 1))


@pytest.mark.parametrize("where", ["init", "log", "finish"])
def test_weights_and_biases_may_fail_at_any_time(where, tmp_path, monkeypatch, capsys):
    calls = []

    def called(name: str):
        def call(*_: object, **__: object) -> SimpleNamespace:
            calls.append(name)
            if name == where and len(calls) > 5 * (name == "log"):
                raise RuntimeError("the server\ndoes not answer")
            return SimpleNamespace(log=called("log"), finish=called("finish"))

        return call

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=called("init")))
    run(f"--wandb-project p --tensorboard-dir {tmp_path}/board --log-jsonl {tmp_path}/log.jsonl")
    message = "WARNING: --wandb-project: the server does not answer; going on without it"
    assert capsys.readouterr().out.count(message) == 1
    assert calls.count("log") == {"init": 0, "log": 5, "finish": STEPS}[where]
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == STEPS and list((tmp_path / "board").iterdir())


def test_a_log_that_fails_at_its_end_is_reported(tmp_path, capsys, monkeypatch):
    from torch.utils.tensorboard import SummaryWriter

    def fail(writer: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(SummaryWriter, "close", fail)
    run(f"--tensorboard-dir {tmp_path}")
    assert "WARNING: --tensorboard-dir: Input/output error; going on without it" in capsys.readouterr().out


def test_without_disk_space_pictures_and_batches_are_missing_and_the_run_continues(tiny_disk, monkeypatch):
    monkeypatch.setattr(memory_profile.dist, "get_rank", lambda: 0)
    profile = {
        "start": dict.fromkeys(KINDS, 0),
        "kinds": list(DEVICE_KINDS),
        "events": [[second, 0, 2**20] for second in range(9)],
        "phases": [["forward", 0.0]],
        "seconds": 9.0,
    }
    line = memory_profile.write_profile(str(tiny_disk), 2, profile, "cpu")  # the disk has space for the JSON file only
    assert line == f" WARNING: --profile-memory {tiny_disk}: No space left on device; going on without it"
    assert (tiny_disk / "memory_rank0.json").stat().st_size
    fill(tiny_disk)
    batch = {"tokens": torch.ones((64, 1024))}
    monkeypatch.setattr("megatron.training.data.batches.micro_batches", lambda *_, **__: iter([batch]))
    settings = SimpleNamespace(
        logging=SimpleNamespace(log_jsonl=str(tiny_disk / "log.jsonl")),
        data=SimpleNamespace(dataloader_type="single"),
        run=SimpleNamespace(seed=1),
    )
    job = SimpleNamespace(
        config=settings,
        progress=SimpleNamespace(iteration=3, consumed_train_samples=8),
        batch_sizes=SimpleNamespace(get_current_running_global_batch_size=lambda: 64),
        datasets=[None],
    )
    result = SimpleNamespace(bad="the loss is nan", lm_loss=math.nan, grad_norm=1.0)
    assert "No space left on device" in bad_batches.write_batch(job, result)


# megatron-core accepts the configuration that we build, with and without a GPU.


GPT = "--hidden-dropout 0 --attention-dropout 0"
PP = "--pipeline-model-parallel-size 2"


@pytest.mark.parametrize(
    "flags, llama, world",
    [
        ("", True, 1),
        ("--hidden-dropout 0 --attention-dropout 0", False, 1),
        ("--hidden-dropout 0 --attention-dropout 0 --disable-bias-linear --squared-relu", False, 1),
        ("--hidden-dropout 0 --attention-dropout 0 --disable-bias-linear", False, 1),
        (f"{PP} --num-virtual-stages-per-pipeline-rank 2 --micro-batch-size 1", True, 2),
        (f"{PP} --bf16 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1", True, 2),
        ("--tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity selective --fp16", True, 2),
    ],
)
def test_core_accepts_the_configuration(flags, llama, world):
    config = parse(f"{SHAPE} {RUN} {flags}".split(), LLAMA if llama else None, world)
    parallel = config.parallel
    grid = Grid(tensor=Axis(parallel.tensor_model_parallel_size), pipeline=Axis(parallel.pipeline_model_parallel_size))
    for on_gpu in (False, True):
        core = transformer_config(config, grid, on_gpu=on_gpu)
        assert core.num_layers == 4
        assert not (core.batch_p2p_comm and core.overlap_p2p_comm)


def by_fused_kernel(x):
    return bias_gelu(torch.zeros_like(x), x)


@pytest.mark.parametrize(
    "flags, same, other",
    [
        ("", by_fused_kernel, functional.gelu),  # Megatron-LM's default
        ("--no-bias-gelu-fusion", functional.gelu, by_fused_kernel),
        ("--disable-bias-linear", functional.gelu, by_fused_kernel),  # switches the fused kernel off in Megatron-LM
        ("--no-bias-gelu-fusion --openai-gelu", by_fused_kernel, functional.gelu),
        ("--swiglu --no-bias-gelu-fusion", functional.silu, functional.gelu),
    ],
)
def test_the_activation_is_megatrons(flags, same, other):
    config = parse(f"{SHAPE} {RUN} {GPT} {flags}".split(), None, 1)
    x = torch.linspace(-6, 6, 1001, dtype=torch.float64)
    activation = transformer_config(config, Grid(), on_gpu=False).activation_func
    with torch.compiler.set_stance("force_eager"):  # core compiles its kernel; only the formula matters here
        same_x, other_x = same(x), other(x)
    assert torch.allclose(activation(x), same_x, rtol=0, atol=2e-8)  # the fused kernel has 8 digits of sqrt(2 / pi)
    assert (activation(x) - other_x).abs().max() > 1e-4


# Named shapes and parameter counts.


PUBLISHED = {
    "gpt-2.7b": 2.7e9,
    "gpt-6.7b": 6.7e9,
    "gpt-13b": 13e9,
    "gpt-30b": 30e9,
    "llama2-7b": 6.738e9,
    "llama3-8b": 8.030e9,
    "llama3-70b": 70.55e9,
    "llama3-405b": 405.85e9,
    "genslm-25b": 25e9,
    "genslm-33b": 33e9,
}


@pytest.mark.parametrize(("name", "size"), PUBLISHED.items())
def test_published_sizes(name: str, size: float):
    model = ModelConfig(**shape(name))
    near = 0.001 if name.startswith("llama") else 0.05
    assert count_parameters(model, vocabulary(name)) == pytest.approx(size, rel=near)


@pytest.mark.parametrize("name", PUBLISHED)
def test_shapes_are_consistent_settings(name: str):
    settings = shape(name)
    assert set(settings) <= {field.name for field in fields(ModelConfig)}
    model = derive_shape(ModelConfig(**settings))
    assert model.hidden_size == model.num_attention_heads * model.kv_channels
    assert model.kv_channels % 8 == 0 and model.num_attention_heads % model.num_query_groups == 0
    assert model.attention_dropout == 0


def test_llama3_8b_to_the_last_parameter():
    assert count_parameters(ModelConfig(**shape("llama3-8b")), 128256) == 8030261248


def test_unknown_names_are_refused():
    with pytest.raises(Refusal, match="--model gpt-4: not a known shape; did you mean gpt2.*hf:DIR"):
        shape("gpt-4")


SMALL = ModelConfig(num_layers=3, hidden_size=64, num_attention_heads=4, max_position_embeddings=32)
LLAMA_MODEL = {
    "swiglu": True,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
    "group_query_attention": True,
    "num_query_groups": 2,
}


@pytest.mark.parametrize(
    ("changes", "parameters"),
    [  # parameters of megatron-core's GPTModel with these settings and 128 rows of vocabulary
        ({}, 160320),
        (LLAMA_MODEL, 127424),
        (
            {"add_bias_linear": False, "add_qkv_bias": True, "qk_layernorm": True, "kv_channels": 24, "swiglu": True},
            159744,
        ),
        ({"swiglu": True}, 135744),
        ({"embed_layernorm": True}, 160320 + 2 * 64),
    ],
)
def test_counts_agree_with_megatron_core(changes: dict, parameters: int):
    assert count_parameters(replace(SMALL, **changes), 128) == parameters


@pytest.mark.parametrize(
    ("changes", "derived"),
    [
        ({}, (16, 256, 4)),
        ({"swiglu": True}, (16, 128, 4)),  # 8 * 64 / 3 = 170.7, down to a multiple of 64
        ({"hidden_size": 4096, "swiglu": True, "num_attention_heads": 32}, (128, 10880, 32)),
        ({"ffn_hidden_size": 100, "kv_channels": 8}, (8, 100, 4)),
        ({"group_query_attention": True, "num_query_groups": 2}, (16, 256, 2)),
        ({"group_query_attention": True}, (16, 256, 1)),
    ],
)
def test_derived_shapes(changes: dict, derived: tuple[int, int, int]):
    model = derive_shape(replace(SMALL, **changes))
    assert (model.kv_channels, model.ffn_hidden_size, model.num_query_groups) == derived


def test_a_log_is_continued_without_touching_other_files(tmp_path):
    """Rows that are not steps are dropped; a device stays one."""
    (tmp_path / "log.jsonl.partial").write_text("mine")
    rows = [b'{"iteration": 1}\n', b'{"iteration": "2"}\n', b'{"iteration": NaN}\n', b"\xff\n", b"[" * 10_000 + b"\n"]
    (log := tmp_path / "log.jsonl").write_bytes(b"".join([*rows, b'{"iteration": 2}\n', b'{"iteration": 3}\n']))
    reporter._open_for_rows(str(log), 2).close()
    assert log.read_bytes() == b'{"iteration": 1}\n{"iteration": 2}\n'
    assert {path.name: path.read_text() for path in tmp_path.iterdir() if path != log} == {"log.jsonl.partial": "mine"}
    reporter._open_for_rows("/dev/null", 2).close()
    assert Path("/dev/null").is_char_device()
