# SPDX-License-Identifier: Apache-2.0
"""certify and scripts that return nothing: their model is found, their losses are read from what they print."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.certifying.__main__ import main
from megatron.certifying.certificate import certify
from megatron.certifying.of_file import program_of
from megatron.certifying.processes_of_program import _needs_gpu, _refusal
from megatron.certifying.recording import record
from megatron.certifying.scripts.printed import Printed, captured
from megatron.certifying.scripts.script import Script, filled

SCRIPT = """
import argparse, json, logging, os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 1)

    def forward(self, x):
        return self.last(self.first(x).tanh()).square().mean()

def report(how, step, loss):
    if how == "json":
        print(json.dumps({"step": step, "train_loss": loss}))
    elif how == "logging":
        logging.getLogger("train").warning("step %d train_loss=%.4f", step, loss)
    elif how == "file":
        with open(os.environ["LOGDIR"] + ".jsonl", "a") as file:
            print(json.dumps({"step": step, "train_loss": loss}), file=file)
    elif how == "csv":
        with open(os.environ["LOGDIR"] + ".csv", "a") as file:
            print(step, loss, sep=",", file=file)
    elif how == "wandb":
        import wandb
        wandb.init(project="nothing")
        wandb.log({"name": "run", "train_loss": torch.tensor(loss, dtype=torch.float64)})
    elif how == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter
        SummaryWriter(os.environ["LOGDIR"]).add_scalar("train_loss", loss, step)

def main():
    options = argparse.ArgumentParser()
    options.add_argument("--rows", type=int)
    options.add_argument("--report", default="json")
    args = options.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    inner = Net()
    model = DistributedDataParallel(inner) if dist.get_world_size() > 1 else inner
    data = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(1000):
        first = (step * dist.get_world_size() + dist.get_rank()) * args.rows
        loss = MODEL(data[first : first + args.rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            report(args.report, step, float(total / dist.get_world_size()))
    dist.destroy_process_group()

if __name__ == "__main__":
    logging.basicConfig()
    main()
"""
RIGHT, WRONG = SCRIPT.replace("MODEL", "model"), SCRIPT.replace("MODEL", "inner")  # wrong: gradients are not reduced


@pytest.mark.parametrize("how", ["json", "logging", "tensorboard", "wandb", "file", "csv"])
def test_a_script_is_certified_by_what_it_prints(pool, tmp_path: Path, monkeypatch, how: str) -> None:
    if how in ("tensorboard", "wandb"):
        pytest.importorskip(how)
    path = tmp_path / "train.py"
    path.write_text(RIGHT.replace('os.environ["LOGDIR"]', repr(str(tmp_path / "logs"))))
    program = Script(str(path), ("--rows", "{8/ranks}", "--report", how))
    earlier = {"file": ("logs.jsonl", '{"train_loss": 3.0}\n'), "csv": ("logs.csv", "step,train_loss\n0,3.0\n")}
    file = None
    if how in earlier:
        file = str(tmp_path / earlier[how][0])
        Path(file).write_text(earlier[how][1])
    certificate = certify(program, [2], loss="train_loss", loss_file=file, run=pool.run)
    kinds = [one.key[0] for one in certificate.grids[0].compared]
    assert certificate.right and kinds.count("loss") == 1, str(certificate)
    assert kinds.count("gradient") == kinds.count("update") == 4, str(certificate)


def test_an_error_in_a_script_is_placed(pool, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(WRONG)
    certificate = certify(Script(str(path), ("--rows", "{8/ranks}")), [2], run=pool.run)
    place = certificate.grids[0].place
    assert place is not None and (place.kind, place.modules[0]) == ("reduction", "first"), str(certificate)


@pytest.mark.parametrize("times", [1, 2])
def test_clipping_hides_no_factor(pool, tmp_path: Path, times: int) -> None:
    """Gradients that are averaged twice would be equal after they are clipped."""
    path, clip = tmp_path / "train.py", "nn.utils.clip_grad_norm_(model.parameters(), 1e-3)"
    again = "" if times == 1 else "[p.grad.div_(dist.get_world_size()) for p in model.parameters()]; "
    path.write_text(RIGHT.replace("optimizer.step()", f"{again}{clip}; optimizer.step()"))
    certificate = certify(Script(str(path), ("--rows", "{8/ranks}")), [2], run=pool.run)
    grid = certificate.grids[0]
    kinds = [one.key[0] for one in grid.wrong]
    assert sorted(kinds) == ([] if times == 1 else ["gradient"] * 4 + ["norm"]), str(certificate)
    assert "norm" in [one.key[0] for one in grid.compared]


def test_a_loss_that_is_not_the_whole_batchs_is_noticed(pool, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(RIGHT.replace("dist.all_reduce(total)", "pass"))
    certificate = certify(Script(str(path), ("--rows", "{8/ranks}")), [2], loss="train_loss", run=pool.run)
    assert [one.key[0] for one in certificate.grids[0].wrong] == ["loss"], str(certificate)


def test_a_text_that_is_never_printed_is_refused(pool, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(RIGHT)
    with pytest.raises(ValueError, match="prints no number after 'validation loss'"):
        certify(Script(str(path), ("--rows", "{8/ranks}")), [2], loss="validation loss", run=pool.run)


def test_a_function_finds_modules_beside_its_file(tmp_path: Path) -> None:
    tmp_path.joinpath("beside_it.py").write_text("HERE = 'beside'\n")
    tmp_path.joinpath("program.py").write_text(
        "from beside_it import HERE\ndef step(ranks):\n    import beside_it\n    return HERE, beside_it.HERE, ranks\n"
    )
    path = list(sys.path)
    assert program_of([f"{tmp_path}/program.py:step"])(ranks=2) == ("beside", "beside", 2)
    assert sys.path == path and "beside_it" not in sys.modules
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    elsewhere.joinpath("beside_it.py").write_text("HERE = 'elsewhere'\n")
    (elsewhere / "program.py").write_text((tmp_path / "program.py").read_text())
    assert program_of([f"{elsewhere}/program.py:step"])(ranks=1) == ("elsewhere", "elsewhere", 1)
    assert program_of([f"{tmp_path}/program.py:step"])(ranks=1) == ("beside", "beside", 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is visible")
@pytest.mark.parametrize("number", [2, 4])
@pytest.mark.parametrize("line", ["torch.cuda.set_device(0)", "torch.ones(2).cuda()", "torch.ones(2, device='cuda')"])
def test_a_program_that_needs_a_gpu_is_refused_by_its_line(tmp_path: Path, line: str, number: int) -> None:
    path = tmp_path / "program.py"
    path.write_text(f"import torch\n{line if number == 2 else ''}\ndef step(ranks):\n    {line}\n")
    try:
        program_of([f"{path}:step"])(ranks=1)
    except Exception as error:
        assert _needs_gpu(error).startswith(f"{path}:{number} asks for a GPU ({line}), and none is visible")
    else:
        raise AssertionError("a GPU was used")


@pytest.mark.parametrize(
    "name, line",
    [
        ("missing", "has no function missing"),
        ("loss_alone", "returned a Tensor: return (model, loss)"),
        ("three", "returned 3 values: return (model, loss)"),
        ("other_sizes", "unexpected keyword argument 'ranks'"),
    ],
)
def test_a_program_that_cannot_be_certified_is_refused_in_one_line(tmp_path: Path, name: str, line: str) -> None:
    path = tmp_path / "program.py"
    path.write_text(
        "import torch\ndef loss_alone(ranks): return torch.ones(())\ndef other_sizes(world): ...\n"
        "def three(ranks): return torch.nn.Linear(1, 1), 1.0, 2\n"
    )
    with pytest.raises((ValueError, TypeError)) as raised:
        record(program_of([f"{path}:{name}"]), {"ranks": 1})
    assert line in _refusal(raised.value)


def test_a_script_that_does_not_know_an_argument_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import argparse\nargparse.ArgumentParser().parse_args()\n")
    with pytest.raises(ValueError, match="ended with exit code 2; if it does not know an argument") as raised:
        Script(str(path), ("--loss", "x"))(ranks=1)
    assert _refusal(raised.value)


def test_the_words_of_a_program_are_split_as_by_a_shell(tmp_path: Path, monkeypatch, capsys) -> None:
    path, given = tmp_path / "my train.py", []
    path.touch()
    monkeypatch.setattr("megatron.certifying.__main__.certify", lambda program, *_, **__: given.append(program))
    monkeypatch.setattr("megatron.certifying.__main__.report", lambda make, picture: make())
    main(["--grid", "ranks=2", f"--words='{path}' --rows {{8/ranks}} '$(touch evil); two'"])
    assert given == [Script(str(path), ("--rows", "{8/ranks}", "$(touch evil); two"))]
    assert main(["--grid", "ranks=2", "--words", "'open"]) == 2
    assert main(["--grid", "ranks", f"--words='{path}'"]) == 2
    assert capsys.readouterr().err.count("error:") == 2


def test_a_function_may_ask_for_the_process_group(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text("import torch.distributed as dist\ndef step(ranks): return dist.init_process_group('nccl')\n")
    assert program_of([f"{path}:step"])(ranks=1) is None and not dist.is_initialized()


def test_numbers_after_a_text() -> None:
    def program() -> nn.Module:
        print("iter 0: loss 2.3451, time 12ms\n'loss': 1e-05, epoch 3\nloss nan\nvalidation done")
        print("loss: -0.5", file=sys.stderr)
        return nn.Linear(1, 1)

    assert Printed(program, "loss")()[1] == ["2.3451", "1e-05", "nan", "-0.5"]
    with captured() as output:
        print("inside")
        assert output() == "inside\n"


def test_numbers_that_a_program_logs_to_wandb(tmp_path: Path, monkeypatch) -> None:
    """With a stand-in whose runs send nothing; W&B itself is tried where it is installed (above)."""
    tmp_path.joinpath("wandb.py").write_text(
        "import os\nmode, log = [], None\nclass Run: log = None\n"
        "def init(**_):\n    mode.append(os.environ['WANDB_MODE'])\n    return Run()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setenv("WANDB_MODE", "online")

    def program() -> nn.Module:
        import wandb

        wandb.init().log({"loss": 0.5, "picture": [1, 2]}, step=1)
        wandb.log({"train/loss": torch.tensor(0.25), "name": "x"})
        return nn.Linear(1, 1)

    assert Printed(program, "loss")()[1] == ["0.5", "0.25"]
    import wandb

    assert wandb.mode == ["disabled"] and wandb.log is None
    monkeypatch.delitem(sys.modules, "wandb")


def test_arguments_have_the_sizes_of_the_grid() -> None:
    assert filled("--x={ranks},{8/ranks},{other}", {"ranks": 2}) == "--x=2,4,{other}"
    with pytest.raises(ValueError, match="9 is not a multiple of ranks=2"):
        filled("{9/ranks}", {"ranks": 2})
