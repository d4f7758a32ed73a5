# SPDX-License-Identifier: Apache-2.0
"""benchmarks/gpu.sh with tiny sizes on a CPU: every stage and its files, resumed runs, and stages that fail."""

from __future__ import annotations

import ast
import csv
import json
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks import fpdt, layer_work
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import attention, kernels, pictures, predict, program, rates, run_tests, step
from benchmarks.gpu.ahead import compiled
from benchmarks.gpu.profile import KernelRun, group_of, hidden, summary, union
from benchmarks.gpu.report import beside, by_tiles
from benchmarks.gpu.stage import BROKEN, GPU, TINY, Case, Stage, compared, read
from megatron.context_parallel.attention.kernels.triton_kernels.triton_kernel import missing_triton
from megatron.simulator.machines.machine_file import load
from megatron.training.arguments.parser import parse
from megatron.training.settings.models import LLAMA_DEFAULTS
from tests.patience import patience

ROOT = Path(__file__).resolve().parents[2]
ABOUT = {"device": "a CPU", "tiny": True, "torch": "2", "cores": 2, "host_memory": 2**30}


def run(folder: Path, *words: str, start: str = "fork") -> int:
    return gpu.main(["--device", "cpu", *words, str(folder)], start)


WITHOUT_PYTEST = """
import importlib.util, sys
sys.path.insert(0, {root!r})
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "pytest" else find(name, *more)
if __name__ == "__main__":  # the processes of stages import this file under another name
    from benchmarks.gpu.__main__ import main

    sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.full
def test_all_stages(tmp_path: Path) -> None:
    """Every stage starts by spawn, as on a GPU, in a process that has no pytest."""
    program = tmp_path / "without_pytest.py"
    program.write_text(WITHOUT_PYTEST.format(root=str(ROOT)))
    command = [sys.executable, str(program), "--device", "cpu", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patience(150))
    assert done.returncode == 0, done.stdout + done.stderr
    result = {name: read(tmp_path, name) for name in gpu.STAGES}
    for name, report in result.items():
        assert report["finished"] and report["tiny"] and report["cases"], name
        assert not [figures for figures in report["cases"].values() if "failed" in figures], (name, report["cases"])
    skipped = [sum(case["skipped"].values()) for case in result["tests"]["cases"].values()]
    assert result["tests"]["runner"] == "by_ourselves" and min(skipped) > 0 and sum(skipped) > 100
    machine = load(tmp_path / "machine.json")
    assert machine.dtype == "fp32" and len(machine.gemm.points) == len(TINY.gemm) and machine.gpus == 1
    cpu = result["attention"]["cases"]["cpu 256"]
    assert cpu["backward"]["of_gemm"] == pytest.approx(
        2.5
        * attention.flops(TINY, 256 * 257 / 2)
        / cpu["backward"]["seconds"]
        / result["attention"]["gemm_flops_per_second"]
    )
    assert result["attention"]["chosen"] == {"32": "cpu", "128": "cpu"}
    assert result["attention"]["cases"]["documents of 32, cpu"]["pairs_of_causal"] == 4 * 32 * 33 / (128 * 129)
    window = result["attention"]["cases"]["window 16, auto, 128"]
    assert window["pairs_of_causal"] == (16 * 17 / 2 + 112 * 16) / (128 * 129 / 2)
    for case in result["step"]["cases"].values():
        profile = case["profile"]
        assert sum(profile["groups"].values()) == pytest.approx(profile["seconds"], rel=0.05)
        assert {"GEMM", "attention", "elementwise", "idle"} <= set(profile["groups"])
    assert all(min(case["first_seconds"], case["later_seconds"]) > 0 for case in result["first"]["cases"].values())
    assert result["fpdt"]["copies"]["copy_seconds"] > 0 and 0 <= result["fpdt"]["copies"]["hidden"] <= 1
    assert result["longest"]["longest"]["tokens"] == 2 * TINY.longest[0]
    for name in ("attention", "step", "fpdt", "longest"):
        for case, figures in result[name]["cases"].items():
            assert figures["prediction"] and all(value > 0 for value in figures["prediction"].values()), (name, case)
    for name, case in result["simulator"]["cases"].items():
        assert case["measured_over_measured"] == case["predicted"]["measured"] / case["seconds"] > 0, name
    assert len(result["simulator"]["cases"]) == 4 + 2 + 5 + 2
    text = (tmp_path / "report.md").read_text()
    assert all(f"## {name}" in text for name in gpu.STAGES) and "MFU" in text
    assert all((tmp_path / f"{name}.png").stat().st_size > 5000 for name in pictures.DRAW)

    before = (tmp_path / "rates.json").read_text()
    assert run(tmp_path, "--stage", "rates") == 0 and (tmp_path / "rates.json").read_text() == before
    assert run(tmp_path, "--stage", "rates", "--again") == 0 and (tmp_path / "rates.json").read_text() != before


@pytest.mark.full
def test_a_stage_starts_by_spawn(tmp_path: Path) -> None:
    """As it must on a GPU: a fork would find functions that a new process does not."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--stage", "rates", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patience(60))
    assert done.returncode == 0 and read(tmp_path, "rates")["finished"], done.stdout + done.stderr


@pytest.mark.full
@pytest.mark.skipif(missing_triton() is not None, reason=missing_triton() or "")
def test_kernels_are_compiled_in_parallel_into_the_cache_on_disk(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    jobs = [partial(kernels.launches, each, TINY) for each in list(kernels.variants(TINY))[:2]]
    result = compiled([*jobs, partial(sum, ())], 90, processes=2)
    assert result["kernels"] == 4 and len(result["not_compiled"]) == 1, result
    made = set(tmp_path.rglob("*.cubin"))
    assert compiled(jobs, 90, processes=1)["kernels"] == 4 and set(tmp_path.rglob("*.cubin")) == made


def test_launches_and_bytes_of_a_layer_by_name() -> None:
    """RMSNorm, RoPE, SwiGLU and the residual are one launch each way; recompute repeats those of the forward pass."""
    machine, found = load("H200-141G"), {}
    for mode in ("none", "recompute"):
        layer, rest = layer_work.layer_and_rest(program.Plan(2, 256, mode), TINY, machine)
        names = {name: count for (_, name, _), (count, _) in layer_work.by_name(layer).items()}
        found[mode] = names["rms_norm"], names["rms_norm_backward"], names["_rotate"], names["swiglu"]
        assert layer_work.by_name(rest)["memory", "fused_adam", False][0] > 0 and layer_work.totals(layer)[0] <= 34
    assert found == {"none": (2, 2, 4, 1), "recompute": (4, 2, 6, 2)}


def test_the_report_compares_the_predicted_kernel_with_the_fastest() -> None:
    cases = {"documents of 512, cudnn": 0.002, "documents of 512, triton": 0.001, "documents of 8192, cudnn": 0.001}
    report = {"kernels": ["cudnn", "triton"], "chosen": {"512": "triton", "8192": "triton"}}
    *_, short, long = by_tiles(report | {"cases": {name: {"seconds": seconds} for name, seconds in cases.items()}})
    assert [cell.strip() for cell in short.split("|")[1:-1]] == ["512", "2.00", "1.00", "triton", "triton"]
    assert [cell.strip() for cell in long.split("|")[1:-1]] == ["8,192", "1.00", "", "triton", "cudnn"]


PLAN = {"layers": 2, "length": 8192, "mode": "recompute", "chunk": 0}
FIGURES = {
    "gemm 4096": ({"size": 4096, "flops_per_second": 4e14}, "flops_per_second"),
    "mlp up 28672 x 4096": ({"m": 8192, "n": 28672, "k": 4096, "flops_per_second": 5e14}, "flops_per_second"),
    "memory": ({"bytes_per_second": 2e12}, "bytes_per_second"),
    "host": ({"bytes_per_second": 4e10, "latency": 1e-5}, "bytes_per_second"),
    "launch": ({"seconds": 4e-6}, "seconds"),
    "attention over 8192": ({"size": 8192, "forward": 4e14, "backward": 3e14}, "forward backward"),
    "triton 8192": (
        {"kernel": "triton", "length": 8192, "forward": {"seconds": 2e-3}, "backward": {"seconds": 6e-3}},
        "forward/seconds backward/seconds",
    ),
    "causal, auto, 8192": ({"length": 8192, "seconds": 8e-3, "pairs_of_causal": 1.0}, "seconds"),
    "8192 tokens, full recompute": (PLAN | {"seconds": 0.1}, "seconds"),
}


def test_each_measurement_has_its_prediction_beside_it(tmp_path, capsys) -> None:
    machine = load("H100-80G")
    stage = Stage("rates", tmp_path, ABOUT, 1)
    stage.predict = lambda name, figures: predict.prediction(name, figures, GPU, machine)
    stage.run([Case(name, lambda figures=figures: dict(figures)) for name, (figures, _) in FIGURES.items()])
    printed = capsys.readouterr().out
    for name, (figures, places) in FIGURES.items():
        foreseen = stage.report["cases"][name]["prediction"]
        assert list(foreseen) == places.split(), name
        for what, measured, predicted in compared(figures, foreseen):
            assert measured / 4 < predicted < measured * 4, (name, what, measured, predicted)
            assert f"   {what}: {measured:.4g} measured, {predicted:.4g} predicted" in printed
    assert len(beside(stage.report)) == 3 + len(FIGURES) + 2
    half = FIGURES["causal, auto, 8192"][0] | {"pairs_of_causal": 0.5}
    whole = stage.report["cases"]["causal, auto, 8192"]["prediction"]["seconds"]
    assert predict.prediction("", half, GPU, machine)["seconds"] < 0.8 * whole
    assert predict.prediction("tests/gpu/test_one.py", {"passed": 3}, GPU, machine) == {}


def test_a_stage_that_fails_records_its_reason_and_the_next_stage_runs(tmp_path, monkeypatch, capfd) -> None:
    assert run(tmp_path, "--stage", "simulator", "--stage", "rates") == 1
    assert "run the stage rates first" in read(tmp_path, "simulator")["failed"]
    assert read(tmp_path, "rates")["finished"]
    assert "**The stage failed: FileNotFoundError" in (tmp_path / "report.md").read_text()


def test_a_stage_that_hangs_is_stopped_and_keeps_its_results(tmp_path, monkeypatch, capfd) -> None:
    def run_stage(stage, sizes, device):
        stage.keep("one", {"seconds": 1})
        time.sleep(60)

    monkeypatch.setattr(rates, "run", run_stage)
    monkeypatch.setattr(gpu, "GRACE", 0.5)
    assert run(tmp_path, "--stage", "rates", "--minutes", "0.02") == 1
    result = read(tmp_path, "rates")
    assert result["cases"]["one"]["seconds"] == 1 and not result["finished"] and "stopped after" in result["failed"]


def test_after_an_error_of_the_gpu_the_stage_continues_with_the_next_case(tmp_path, monkeypatch, capfd) -> None:
    def lost():
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    def run_stage(stage, sizes, device):
        stage.run([Case("one", lambda: {"seconds": 1}), Case("two", lost), Case("three", lambda: {"seconds": 3})])

    monkeypatch.setattr(rates, "run", run_stage)
    assert run(tmp_path, "--stage", "rates") == 0
    result = read(tmp_path, "rates")["cases"]
    assert result["three"]["seconds"] == 3 and "illegal memory access" in result["two"]["failed"]


def test_cases_that_would_exceed_the_time_are_left_out(tmp_path, capsys) -> None:
    ran = []

    def take(name: str, seconds: float):
        def work():
            ran.append(name)
            time.sleep(seconds)
            return {}

        return work

    stage = Stage("rates", tmp_path, ABOUT, 10 / 60)
    cases = [Case("short", take("short", 0.2), 0.01, "slow"), Case("long", take("long", 0), 100, "slow")]
    stage.run([*cases, Case("other", take("other", 0), 1, "quick")])
    assert ran == ["short", "other"] and "left out" in stage.report["cases"]["long"]["failed"]
    assert "left: long" in capsys.readouterr().out
    stage.finish()
    again = Stage("rates", tmp_path, ABOUT, 60)  # the next run makes up for what was left out
    again.run([*cases, Case("other", take("other", 0), 1, "quick")])
    again.finish()
    assert ran == ["short", "other", "long"] and again.report["finished"] and not stage.report["finished"]


def test_a_stopped_stage_keeps_its_finished_cases(tmp_path, capsys) -> None:
    def stage_of(about=ABOUT, **options):
        return Stage("rates", tmp_path, about, 1, **options)

    first = stage_of()
    first.run([Case("good", lambda: {"seconds": 1}), Case("bad", lambda: 1 / 0)])
    assert first.report["cases"]["bad"]["failed"] == "ZeroDivisionError: division by zero"
    assert set(stage_of().known) == {"good"} and set(stage_of(keep_failed=True).known) == {"good", "bad"}
    assert not stage_of(ABOUT | {"device": "another"}).known
    with pytest.raises(SystemExit) as ended:
        first.run([Case("lost", lambda: (_ for _ in ()).throw(RuntimeError("CUDA error: 700")))])
    assert ended.value.code == BROKEN
    first.finish()
    assert not stage_of().known  # after it has finished, --again repeats all cases


def test_after_out_of_memory_fewer_layers_are_measured(tmp_path, monkeypatch, capsys) -> None:
    seen = []

    def steps_of(plan, *others):
        seen.append(plan.layers)
        if plan.layers > 6:
            raise program.Failed("out of memory")
        return {}

    monkeypatch.setattr(step, "steps_of", steps_of)
    stage = Stage("step", tmp_path, ABOUT, 1)
    step.measured(program.Plan(9, 128, "none"), TINY, "cuda", stage, 1, False)
    assert seen == [9, 7, 5]
    monkeypatch.setattr(step, "steps_of", lambda *_: (_ for _ in ()).throw(program.Failed("out of memory")))
    with pytest.raises(program.Failed):  # it does not try forever
        step.measured(program.Plan(2, 128, "none"), TINY, "cuda", stage, 1, False)


def test_as_many_layers_as_fit(monkeypatch) -> None:
    class Card:
        total_memory = 85e9

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Card)
    layers = [
        step.fitting(GPU, program.Plan(32, length, step.MODE[mode]), torch.device("cuda")).layers
        for length, mode in GPU.steps
    ]
    assert layers[0] > layers[1] >= 2 and layers[2] > layers[1] and layers[3] >= 4, layers


def test_a_program_that_fails_or_hangs_gives_a_reason(tmp_path) -> None:
    words = program.flags(program.Plan(1, 128, "none"), TINY, "cpu")
    chunked = program.flags(program.Plan(1, 128, "none", chunk=64), TINY, "cpu")
    with (
        pytest.raises(program.Failed, match="--fpdt-chunk-size"),
        program.Program(chunked, tmp_path / "log", "fork") as wrong,
    ):
        wrong.ask("step", 60)
    with (
        pytest.raises(program.Failed, match="no answer to step"),
        program.Program(words, tmp_path / "log", "fork") as slow,
    ):
        slow.ask("step", 0)
    assert not slow.process.is_alive()
    with pytest.raises(program.Failed, match="code -9"), program.Program(words, tmp_path / "log", "fork") as killed:
        killed.process.kill()
        killed.ask("step", 60)


# ---- the profile


def test_kernels_by_what_they_do() -> None:
    assert {name: group_of(name) for name in KERNELS} == KERNELS


KERNELS = {
    "void flash_fwd_kernel<cutlass::bfloat16_t>": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7": "attention",
    "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT": "GEMM",
    "sm90_xmma_gemm_bf16bf16_bf16f32": "GEMM",
    "Memcpy DtoH (Device -> Pinned)": "copies to the host",
    "Memcpy HtoD (Pinned -> Device)": "copies to the device",
    "Memcpy DtoD (Device -> Device)": "copies within",
    "ncclDevKernel_SendRecv": "communication",
    "_rotate_kernel": "RoPE",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>": "elementwise",
    "aten::mm": "GEMM",
    "aten::mul": "elementwise",
    "aten::_fused_rms_norm": "norm",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdam>": "optimizer",
}


def test_idle_time_and_hidden_copies() -> None:
    ran = [
        KernelRun("nvjet", 0, 40),
        KernelRun("nvjet", 50, 100),
        KernelRun("Memcpy HtoD", 30, 50),  # half of it is not overlapped
        KernelRun("Memcpy DtoH", 60, 80),  # overlapped completely by a product
    ]
    result = summary(ran)
    assert result["seconds"] == pytest.approx(100e-6) and result["groups"]["idle"] == pytest.approx(0)
    assert result["groups"]["GEMM"] == pytest.approx(90e-6) and result["top"][0]["count"] == 2
    assert result["hidden_copies"] == hidden(ran) == pytest.approx(30 / 40)
    assert hidden(ran[:2]) is None and summary([])["groups"] == {}
    assert summary([KernelRun("nvjet", 0, 10), KernelRun("nvjet", 30, 40)])["groups"]["idle"] == pytest.approx(20e-6)
    assert union([(5, 6), (0, 2), (1, 3)]) == [(0, 3), (5, 6)]


# ---- tests/gpu without pytest


def test_tests_without_pytest(tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_some_of_ours.py").write_text(
        "import pytest\n"
        "seen = []\n"
        "class A: x = 1\n"
        "@pytest.mark.parametrize('a, b', [(1, 2), (3, 4)])\n"
        "@pytest.mark.parametrize('c', [5, 6], ids=str)\n"
        "def test_good(a, b, c, monkeypatch):\n"
        "    monkeypatch.setattr(A, 'x', a)\n"
        "    assert (a, b) in [(1, 2), (3, 4)] and c in (5, 6) and A.x == a\n"
        "def test_put_back(): assert A.x == 1\n"
        "def test_wrong(): assert A.x == 2, 'no'\n"
        "def test_skipped(): pytest.skip('not here')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "tests"))
    monkeypatch.setattr(run_tests, "ROOT", tmp_path / "tests")
    stage = Stage("tests", tmp_path, ABOUT, 1)
    result = run_tests.by_ourselves(tmp_path / "tests" / "test_some_of_ours.py", stage)
    assert result == {"passed": 5, "skipped": {"not here": 1}, "wrong": {"test_wrong[]": "AssertionError: no"}}


def test_our_runner_supports_what_the_tests_use() -> None:
    known = {"mark.parametrize", "mark.skipif", "skip"}
    for file in run_tests.FOLDER.glob("test_*.py"):
        tree = ast.parse(file.read_text())
        used = {ast.unparse(node).removeprefix("pytest.") for node in ast.walk(tree)
                if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("pytest.")}  # fmt: skip
        assert used - {"mark"} <= known, file
        fixtures = {a.arg for f in tree.body if isinstance(f, ast.FunctionDef) and f.name.startswith("test_")
                    and not f.decorator_list for a in f.args.args}  # fmt: skip
        assert fixtures <= {"monkeypatch"}, file


def test_results_of_pytest() -> None:
    text = """<testsuite><testcase name="a"/><testcase name="b"><skipped message="no GPU"/></testcase>
    <testcase name="c"><failure message="assert 1 == 2&#10;more">text</failure></testcase>
    <testcase name="d"><error message="it broke"/></testcase></testsuite>"""
    result = run_tests.counted(ElementTree.fromstring(text).iter("testcase"))
    assert result == {"passed": 1, "skipped": {"no GPU": 1}, "wrong": {"c": "assert 1 == 2", "d": "it broke"}}


def test_the_machine_of_a_gpu_extends_the_shipped_one(monkeypatch) -> None:
    class Card:
        total_memory = 85e9

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Card)
    cases = {"gemm 8192": {"size": 8192, "flops_per_second": 7e14}, "memory": {"bytes_per_second": 3e12}}
    report = {
        "device": "NVIDIA H200",
        "capability": [9, 0],
        "attention_kernel": "cudnn",
        "cases": cases | {"host": {"failed": "out of memory"}},
    }
    result = rates.machine_of(report, torch.device("cuda"))
    assert result["extends"] == "H200-141G" and result["peak"]["bf16"] == 989.4e12 and result["memory"] == 85e9
    assert "host_link" not in result and "attention" not in result and json.dumps(result)


# The FPDT benchmark: flags of all modes are accepted, and figures become files and a picture.


def benchmark(monkeypatch: pytest.MonkeyPatch, *words: str):
    monkeypatch.setattr(sys, "argv", ["fpdt.py", "--device", "cpu", *words])
    return fpdt.arguments()


@pytest.mark.parametrize("model", [(), ("--model", "gpt-2.7b"), ("--model", "llama3-8b"), ("--kv-heads", "2")])
@pytest.mark.parametrize("mode", list(fpdt.MODES))
def test_flags_of_every_mode_are_accepted(mode: str, model: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    args = benchmark(monkeypatch, *model, "--compare", mode)
    run = fpdt.Run(mode, 8 if "fpdt" in mode else None)
    config = parse(fpdt.flags(run, args), LLAMA_DEFAULTS, 1)
    assert config.chunks.fpdt == ("fpdt" in mode)
    assert config.chunks.loss_chunks == 2 * -(-args.vocab_size // config.model.hidden_size)
    assert mode in args.modes and fpdt.REFERENCE in args.modes


def test_figures_become_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    args = benchmark(monkeypatch, "--chunks", "1", "4")
    report = {"problem": {**vars(args), "peak_flops": 1e11}, "load_at_start": 0.0, "rows": []}
    for chunks in args.chunks:
        group = [fpdt.Run(mode, chunks if "fpdt" in mode else None) for mode in args.modes]
        for number, run in enumerate(group):
            step = {"seconds": 1.0 + number, "cpu_seconds": 2.0, "foreign": 0.0, "flops": 1e10, "peak_flops": None}
            run.steps = [step, step]
            run.memory = {"states": 2**30, "activations": 2**28, "host": 0, "to_host": 0, "to_device": 0}
        group[-1].steps, group[-1].memory, group[-1].failed = [], {}, "out of memory"
        report["rows"] += [fpdt.row(run, group[0], args, 1e11) for run in group]
    fpdt.write(report, tmp_path / "sweep")
    fpdt.show(report)

    assert json.loads((tmp_path / "sweep.json").read_text())["rows"][1]["of_reference"] == 0.5
    assert len(list(csv.DictReader((tmp_path / "sweep.csv").open()))) == 2 * len(args.modes)
    assert (tmp_path / "sweep.png").stat().st_size > 5000
    assert "out of" in capsys.readouterr().out  # the table may wrap the line
