# SPDX-License-Identifier: Apache-2.0
"""``cp.certify`` reports planted errors with their module, and reports nothing for correct programs."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import Tensor, nn
from transformers import AutoConfig

import megatron.context_parallel as cp
from benchmarks.certify import matrix
from megatron import certifying
from megatron.certifying.bisecting import bisect
from megatron.certifying.comparing import compare
from megatron.certifying.recording import GRADIENT, measure, record
from tests.planted import ENDS, ERRORS, Planted, visible
from tools import certify

ROOT = Path(__file__).parents[2]
RIGHT = {
    "contiguous": Planted(layout="contiguous"),
    "striped, 4 ranks": Planted(layout="striped"),
    "bf16": Planted(dtype="bfloat16"),
    "autocast to bf16, adam": Planted(autocast=True, optimizer="adam"),
    "float64": Planted(dtype="float64"),
    "no window": Planted(window=1000),
    "no documents": Planted(documents=False, says_positions=True),
    "tied": Planted(tied=True),
    "frozen": Planted(frozen=True),
    "uneven micro-batches": Planted(micro_batches=3),
    "adam": Planted(optimizer="adam", layout="contiguous"),
    "zigzag, 4 ranks": Planted(),
}
USUAL = ("bf16", "striped, 4 ranks", "uneven micro-batches")


@pytest.fixture(scope="module")
def reference(pool):
    return pool.run(measure, 1, Planted(), {"ranks": 1}, True)[0]


@pytest.mark.parametrize("error", ERRORS)
def test_a_planted_error_is_found_and_placed(pool, reference, error: str) -> None:
    kind, module = ERRORS[error]
    recorded = pool.run(record, 2, Planted(error), {"ranks": 2}, True)
    wrong = [one for one in compare(reference, recorded) if not one.right]
    assert wrong
    place = bisect(reference, recorded, wrong)
    assert (place.kind, place.modules) == (kind, (module,)), place


@pytest.mark.parametrize("name", [n if n in USUAL else pytest.param(n, marks=pytest.mark.full) for n in RIGHT])
@pytest.mark.usual(0)
def test_a_right_program_is_not_accused(pool, name: str) -> None:
    grid = 4 if name.endswith("4 ranks") else 2
    certificate = cp.certify(RIGHT[name], [grid], run=pool.run)
    assert certificate.right, str(certificate)


@pytest.mark.parametrize(
    "error, module",
    [
        pytest.param("", "", marks=pytest.mark.full),
        ("leak across documents", "blocks.0"),
        pytest.param("window off by one", "", marks=pytest.mark.full),
    ],
)
@pytest.mark.lab
def test_who_sees_whom(pool, error: str, module: str) -> None:
    """Two layers of a window of 8 see 14 tokens back; after a leak, the forbidden tokens that are seen are reported."""
    program = Planted(error, layout="contiguous")
    allowed = functools.partial(visible, program)
    certificate = cp.certify(program, [2], mask=allowed, layers=2, edges=ENDS, sees=True, run=pool.run)
    seen = certificate.grids[0].seen
    assert {16, 17, 23, 24, 29, 30, 47} <= {one.token for one in seen}
    assert all(one.right for one in seen) == certificate.right == (not error)
    if error == "leak across documents":
        leaks = [one for one in seen if one.leaks]
        assert [one for one in leaks if one.token == 29][0].leaks[0] == 30
        assert all(one.module.startswith(module) for one in leaks) and not [one for one in seen if one.missing]
    if error == "window off by one":
        assert [one for one in seen if one.missing] and not [one for one in seen if one.leaks]


def test_a_gradient_that_is_zero_but_for_rounding_is_not_accused(pool) -> None:
    """Without RoPE a bias of keys adds one number to all scores of a query, which the softmax ignores."""
    reference = pool.run(measure, 1, Planted(rope=False), {"ranks": 1}, samples=2)[0]
    noise = reference.noise[GRADIENT, "blocks.0.attention.k.bias"]
    assert noise > 0.1 > 100 * reference.noise[GRADIENT, "blocks.0.attention.q.bias"]


CELLS = [("ours, Ring", "dense"), ("PyTorch", "GQA, 1 KV head"), ("PyTorch", "packed documents")]


@pytest.mark.parametrize("system, case", CELLS)
@pytest.mark.usual(2)
def test_a_cell_of_the_table_of_libraries(pool, system: str, case: str) -> None:
    cell = matrix.judged(system, case, {}, pool.run)
    if case == "packed documents":
        assert cell["verdict"] == "refuses" and "attn_bias" in cell["message"], cell  # the mask
    else:
        assert cell["verdict"] == "equal" and 0 < cell["error"] < 1e-5, cell


COMMAND = (
    "torchrun --nproc-per-node 16 pretrain_llama.py --model llama3-8b --seq-length 131072 --micro-batch-size 1 "
    "--global-batch-size 8 --train-iters 100 --lr 1e-4 --mock-data --vocab-size 128256"
)


@pytest.mark.full
@pytest.mark.parametrize(
    "flags",
    [
        "--tensor-model-parallel-size 2 --sequence-parallel --ring-parallel-size 4 --zero-stage 1 --bf16",
        "--ulysses-parallel-size 4 --pipeline-model-parallel-size 4",
        "--ulysses-parallel-size 4 --zero-stage 3 --fpdt --fpdt-chunk-size 32768",
        "--ring-parallel-size 8 --attention-mask window --window-size 4095,0 --attention-dropout 0.1 "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ],
)
def test_a_training_command_is_right(pool, capsys: pytest.CaptureFixture, flags: str) -> None:
    grid = [] if "--bf16" not in flags else ["--grid", "tensor=2,ring=2"]
    code = certify.main([*grid, *COMMAND.split(), *flags.split()], run=pool.run)
    text = "".join(capsys.readouterr())
    assert code == 0 and "RIGHT: " in text, text


@pytest.mark.full
@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral", "gemma2"])
def test_a_model_of_transformers_is_right(
    pool, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tool makes a model small even if its config.json has the sizes of a large one."""
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    code = certify.main([str(tmp_path)], run=pool.run)
    text = "".join(capsys.readouterr())
    assert code == 0 and "RIGHT: " in text, text


PROGRAM = """
import torch
import torch.distributed as dist


def step(ranks):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    x = torch.randn(1, 16, 8, generator=torch.Generator().manual_seed(1)).chunk(ranks, 1)[dist.get_rank()]
    loss = model(x).square().sum()
    loss.backward()
    loss = loss.detach()
    dist.all_reduce(loss)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    return model, loss
"""


@pytest.mark.full
def test_a_function_of_a_file_in_new_processes(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A correct program, one without a reduction, and one that raises an error, which is shown with its traceback."""
    words = ["--grid", "ranks=2", "--picture", str(tmp_path / "picture.png"), f"{tmp_path}/program.py:step"]
    for text, code, message in (
        (PROGRAM, 0, "RIGHT: "),
        (PROGRAM.replace("parameter.grad)", "parameter.grad) if parameter.dim() > 1 else None"), 1, "reduction"),
        (PROGRAM.replace("return model", "return models"), 2, "NameError"),
    ):
        (tmp_path / "program.py").write_text(text)
        assert certify.main(words) == code
        assert message in "".join(capsys.readouterr())
    assert (tmp_path / "picture.png").stat().st_size > 5000


def step(ranks: int, scale: float = 1.0) -> tuple[nn.Module, Tensor]:
    """A model on a part of a batch, whose gradients are summed."""
    torch.manual_seed(1)
    model, x = nn.Linear(4, 3), torch.randn(8, 4)
    loss = scale * model(x.chunk(ranks)[dist.get_rank() % ranks]).square().sum()
    loss.backward()
    for each in (loss := loss.detach(), model.weight.grad, model.bias.grad):
        dist.all_reduce(each)
    return model, loss


def twice(ranks: int) -> tuple[nn.Module, Tensor]:
    return step(ranks, 2.0 if ranks > 1 else 1.0)


def test_a_program_as_an_assertion(pool) -> None:
    assert certifying.same_as_one_process(step, 2, run=pool.run).right
    with pytest.raises(AssertionError, match=r"(?s)not the same as one.*gradient weight.*2 times the right one"):
        certifying.same_as_one_process(twice, {"ranks": 2}, run=pool.run)
    with pytest.raises(ValueError, match="put it at the top of its file"):
        certifying.same_as_one_process(lambda ranks: None, 2)


@pytest.mark.lab
def test_the_action(tmp_path: Path) -> None:
    """Its second step; the first one installs."""
    script = yaml.safe_load((ROOT / "action.yml").read_text())["runs"]["steps"][1]["run"]
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "GRIDS": "ranks=2 ranks=4"}
    for name, code in (("step", 0), ("twice", 1), ("nothing", 2)):
        done = subprocess.run(["bash", "-c", script], cwd=ROOT, env=env | {"PROGRAM": f"{__file__}:{name}"})
        assert done.returncode == code
