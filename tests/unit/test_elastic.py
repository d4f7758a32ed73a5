# SPDX-License-Identifier: Apache-2.0
"""--elastic: the grid for the available processes."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import re
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.training.arguments.argv import take_ranks
from megatron.training.arguments.parser import parse
from megatron.training.refusal import Refusal
from tests.patience import patience
from tests.program import start_forked

FLAGS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 96 --max-position-embeddings 96 "
    "--micro-batch-size 1 --global-batch-size 24 --train-iters 4 --lr 1e-3 --mock-data --vocab-size 99 "
    "--tokenizer-type NullTokenizer --save c --load c"
)
LIST = "8: tp2 u2 r2; 6: U2 r3;4:u2 r2"


def grid(flags: list[str], processes: int) -> tuple[int, ...]:
    config = parse([*FLAGS.split(), *flags], world_size=processes)
    one = config.parallel
    assert any(note.startswith(f"elastic: {processes} processes") for note in config.notes)
    return (
        one.tensor_model_parallel_size,
        one.ulysses_parallel_size,
        one.ring_parallel_size,
        one.pipeline_model_parallel_size,
    )


@pytest.mark.parametrize(
    "processes, expected", [(8, (2, 2, 2, 1)), (6, (1, 2, 3, 1)), (4, (1, 2, 2, 1)), (12, (1, 2, 3, 1))]
)
def test_a_list_of_grids(processes, expected):
    assert grid(["--elastic-grids", LIST], processes) == expected


@pytest.mark.parametrize(
    "flags, processes, expected",
    [
        ("--ulysses-parallel-size 2 --ring-parallel-size 2", 8, (1, 2, 2, 1)),
        ("--ulysses-parallel-size 2 --ring-parallel-size 2", 6, (1, 1, 3, 1)),
        ("--ulysses-parallel-size 4 --ring-parallel-size 2", 6, (1, 2, 3, 1)),
        ("--context-parallel-size 8", 3, (1, 1, 3, 1)),
        ("--tensor-model-parallel-size 2 --context-parallel-size 4", 4, (2, 2, 1, 1)),
        ("--pipeline-model-parallel-size 2 --ulysses-parallel-size 4", 2, (1, 1, 1, 2)),
    ],
)
def test_the_grid_of_the_flags_is_reduced_until_it_fits(flags, processes, expected):
    assert grid(["--elastic", *flags.split()], processes) == expected


def test_the_planners_grid():
    """Long samples are split, short ones are not, for any number of remaining GPUs."""
    from megatron.simulator.planner.search import fastest

    def context(seq_length: int, processes: int) -> int:
        flags = f"--model llama3-8b --num-layers 4 --seq-length {seq_length} --max-position-embeddings {seq_length} "
        flags += "--micro-batch-size 1 --global-batch-size 24 --train-iters 4 --lr 1e-3 --mock-data --save c --load c "
        flags += "--bf16 --zero-stage 1 --elastic --gpu H100-80G --tokenizer-type NullTokenizer --vocab-size 128255"
        config = parse(flags.split(), world_size=processes, fastest=fastest)
        assert [note for note in config.notes if "x DP for the rest, the planner's choice for H100-80G" in note]
        return config.parallel.context_parallel_size

    assert context(4096, 8) == context(4096, 6) == 1 < min(context(2**17, 8), context(3 * 2**16, 6))
    with pytest.raises(Refusal, match="no grid of 2 processes fits H100-80G: save memory"):
        context(2**20, 2)


@pytest.mark.parametrize(
    "flags, processes, line",
    [
        (["--elastic-grids", LIST], 5, "no grid for 5 processes, nor for a divisor"),
        (["--elastic-grids", "8: tp3"], 8, "TP 3 x Ulysses 1 x Ring 1 x PP 1 does not divide 8 processes"),
        (["--elastic-grids", "8 tp2"], 8, "'8 tp2' cannot be read in --elastic-grids: write it as"),
        (["--elastic-grids", "8: tp2 tp4"], 8, "cannot be read"),
        (["--elastic-grids", "8: tp2; 8: u2"], 8, "8 processes have a grid already; leave one out"),
        (["--elastic-grids", " ; "], 8, "holds no grid"),
        (["--elastic", "--tensor-model-parallel-size", "4"], 6, "TP x PP = 4 does not divide 6 processes"),
        (["--gpu", "H100-80G"], 2, "add --dry-run, or --elastic, which takes the planner's grid"),
        (["--elastic", "--load", "d"], 2, "give --save DIR and --load with the same folder"),
    ],
)
def test_refusals(flags, processes, line):
    with pytest.raises(Refusal) as refused:
        parse([*FLAGS.split(), *flags], world_size=processes)
    assert line in str(refused.value)


def test_a_store_of_torchrun_that_keeps_later_nodes_out_is_noted(monkeypatch):
    flags = [*FLAGS.split(), "--elastic-grids", LIST]
    for keeps, noted in (("True", True), ("False", False)):
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", keeps)
        notes = parse(flags, world_size=4).notes
        assert any("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in note for note in notes) == noted


# Ranks that are given as flags: they set the environment and must agree with it.


RANK_FLAGS = "--rank 3 --world-size 8 --local-rank 1 --dist-url tcp://host.of.0:34566"
SET = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "host.of.0", "MASTER_PORT": "34566"}
RUN = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 --lr 1e-3 "
    "--micro-batch-size 1 --global-batch-size 8 --mock-data --vocab-size 99 --train-iters 1 --eval-iters 0"
)


def test_flags_become_the_environment():
    for flags in (
        RANK_FLAGS,
        RANK_FLAGS.replace("-rank 1", "_rank 1"),
        RANK_FLAGS.replace(" tcp", "=tcp").replace("st-u", "st_u"),
    ):
        environment: dict[str, str] = {}
        take_ranks(flags.split(), environment)
        assert environment == SET
    environment = {"MASTER_ADDR": "a"}
    take_ranks("--rank 0 --world-size 1 --dist-url env://".split(), environment)
    assert environment == {"MASTER_ADDR": "a", "RANK": "0", "WORLD_SIZE": "1"}
    environment = {}
    take_ranks("--dist-url tcp://[::1]:5 --rank 0".split(), environment)
    assert environment["MASTER_ADDR"] == "::1"


@pytest.mark.parametrize("flags", ["--world-size 8", "--local-rank 1", f"--dry-run {RANK_FLAGS}", "--rank x", ""])
def test_without_a_rank_nothing_is_set(flags: str):
    environment: dict[str, str] = {}
    take_ranks(flags.split(), environment)
    assert environment == {}


@pytest.mark.parametrize(
    ("environment", "flags", "words"),
    [
        ({"RANK": "0"}, RANK_FLAGS, ("--rank 3", "RANK=0")),
        ({"WORLD_SIZE": "4"}, RANK_FLAGS, ("--world-size 8", "WORLD_SIZE=4")),
        ({"MASTER_PORT": "1"}, RANK_FLAGS, ("--dist-url 34566", "MASTER_PORT=1")),
        ({}, "--rank 0 --dist-url file:///a", ("--dist-url file:///a", "tcp://HOST:PORT")),
    ],
)
def test_ranks_that_contradict_the_environment_are_refused(
    environment: dict[str, str], flags: str, words: tuple[str, ...]
):
    with pytest.raises(Refusal) as caught:
        take_ranks(flags.split(), dict(environment))
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)
    take_ranks(flags.split() if "file" not in flags else [], dict(SET))


def test_world_size_adds_no_note_if_it_is_right_and_is_refused_if_it_is_wrong():
    with_it, without = (parse(f"{RUN} {more}".split(), world_size=8) for more in (RANK_FLAGS, ""))
    assert with_it.simulation.world_size == 8 and with_it.notes == without.notes
    for flags, words in (
        ("--world-size 4", "--world-size 4, and 8 processes were started"),
        ("--rank 0", "--world-size"),
    ):
        with pytest.raises(Refusal, match=words):
            parse(f"{RUN} {flags}".split(), world_size=8)


@pytest.mark.lab
def test_a_run_whose_ranks_are_flags(tmp_path: Path):
    """Two processes as mpirun starts them: no RANK, WORLD_SIZE or MASTER_ADDR in their environment."""
    script = Path(__file__).parents[2] / "pretrain_gpt.py"
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PATH": os.environ["PATH"]}
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        url = f"tcp://127.0.0.1:{place.getsockname()[1]}"
    flags = f"{RUN} --device cpu --log-interval 1 --world-size 2 --dist-url {url}"
    folders = [tmp_path / str(rank) for rank in range(2)]
    processes = [
        start_forked(script, f"{flags} --rank {rank} --local-rank {rank}".split(), environment, folder)
        for rank, folder in enumerate(folders)
    ]
    for process in processes:
        process.join(patience(100))
    output = [(folder / name).read_text() for folder in folders for name in ("out", "err")]
    assert [process.exitcode for process in processes] == [0, 0], output
    assert "DP 2 x PP 1 on 2 x" in output[0] and "iteration" in output[0] and "iteration" not in output[2]


# The files of examples/ for schedulers: Slurm scripts queue themselves again; those of Kubernetes and TorchX are valid.


ROOT = Path(__file__).resolve().parents[2]
LLAMA = ROOT / "examples" / "llama"
MANIFEST = LLAMA / "pretrain_llama3_8b_kubernetes.yaml"
SLURM = sorted(ROOT.glob("examples/*/*slurm.sh"))


def slurm(script: Path, folder: Path, done: int, seconds_left: int, code: int = 0) -> tuple[int, str]:
    """(exit code, last call of scontrol) of a script whose srun ends with ``code`` after ``done`` iterations."""
    stubs = folder / "stubs"
    stubs.mkdir(parents=True)
    tracker = folder / "c" / "latest_checkpointed_iteration.txt"
    for name, text in {
        "srun": f"echo {done} >{tracker}; exit {code}",
        "scontrol": f'echo "$@" >>{folder}/calls',
    }.items():
        (stubs / name).write_text(f"#!/bin/sh\n{text}\n")
        (stubs / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{stubs}{os.pathsep}{os.environ['PATH']}", "CHECKPOINT_PATH": f"{folder}/c"}
    environment |= {
        "SLURM_JOB_ID": "7",
        "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "a,b",
        "SLURM_SUBMIT_DIR": f"{ROOT}",
    }
    environment |= {"TRAIN_ITERS": "100", "SLURM_JOB_END_TIME": str(int(time.time()) + seconds_left)}
    ended = subprocess.run(["bash", str(script)], env=environment, capture_output=True, timeout=patience(20))
    return ended.returncode, (folder / "calls").read_text().splitlines()[-1]


@pytest.mark.parametrize("script", SLURM, ids=lambda path: path.stem)
def test_a_slurm_job_queues_itself_again_when_its_time_is_up(script: Path, tmp_path: Path) -> None:
    text = script.read_text()
    assert "#SBATCH --requeue" in text and "--signal=TERM@300" in text
    assert slurm(script, tmp_path / "stopped", 40, 200, code=1) == (0, "requeue 7")  # torchrun fails on SIGTERM
    names = "show hostnames a,b"
    assert slurm(script, tmp_path / "done", 100, 200) == (0, names)
    assert slurm(script, tmp_path / "cancelled", 40, 9000, code=1) == (1, names)
    assert slurm(script, tmp_path / "failed", 40, 9000, code=3) == (3, names)


def differences(value: Any, schema: dict[str, Any], place: str = "") -> list[str]:
    """Differences of a value from an OpenAPI schema of Kubernetes, unknown keys included."""
    if schema.get("x-kubernetes-int-or-string"):
        return [] if isinstance(value, (int, str)) else [f"{place} is neither number nor text"]
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
    if not isinstance(value, kinds[schema["type"]]) or isinstance(value, bool) != (schema["type"] == "boolean"):
        return [f"{place} is no {schema['type']}"]
    result = []
    if "enum" in schema and value not in schema["enum"]:
        result.append(f"{place} is {value}, not one of {schema['enum']}")
    if isinstance(value, dict):
        result += [f"{place}.{name} is missing" for name in schema.get("required", []) if name not in value]
        for name, one in value.items():
            inner = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
            if inner:
                result += differences(one, inner, f"{place}.{name}")
            elif "properties" in schema:
                result.append(f"{place}.{name} is unknown")
    for number, one in enumerate(value if isinstance(value, list) else []):
        result += differences(one, schema["items"], f"{place}[{number}]")
    return result


def test_the_job_set_agrees_with_its_schema(tmp_path: Path) -> None:
    source = json.loads((Path(__file__).parent / "data" / "jobset.json").read_text())
    manifest = yaml.safe_load(MANIFEST.read_text())
    assert manifest["apiVersion"] == f"{source['group']}/{source['version']}" and manifest["kind"] == source["kind"]
    assert differences(manifest, source["schema"]) == []
    for change, wanted in (
        (lambda pod: pod["containers"][0].update(imag="x"), ".imag is unknown"),
        (lambda pod: pod["containers"][0].pop("name"), ".name is missing"),
        (lambda pod: pod.update(terminationGracePeriodSeconds="5"), "Seconds is no integer"),
        (lambda pod: pod.update(containers={}), "containers is no array"),
    ):
        other = copy.deepcopy(manifest)
        change(pod_of(other))
        assert [wanted in line for line in differences(other, source["schema"])] == [True], wanted

    pod, name = pod_of(manifest), manifest["metadata"]["name"]
    (container,) = pod["containers"]
    environment = {one["name"]: one["value"] for one in container["env"]}
    job = manifest["spec"]["replicatedJobs"][0]
    spec = job["template"]["spec"]
    assert environment["MASTER_ADDR"] == f"{name}-{job['name']}-0-0.{name}"  # JobSet's names of pods
    assert int(environment["NNODES"]) == spec["parallelism"] == spec["completions"]
    assert int(environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < pod["terminationGracePeriodSeconds"]
    script = ROOT / re.search(r"exec bash (\S+)", container["args"][0])[1]
    last = script.read_text().rindex("torchrun ")
    assert script.read_text()[last - 5 : last] == "exec "  # by default, process 1 of a container ignores signals
    assert {mount["name"] for mount in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}


def pod_of(manifest: dict) -> dict:
    return manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def component() -> Any:
    spec = importlib.util.spec_from_file_location("torchx_component", LLAMA / "torchx_component.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_torchx_component(monkeypatch: pytest.MonkeyPatch) -> None:
    """TorchX' linter checks it if TorchX is installed. A stand-in for TorchX' ddp returns its arguments."""
    import sys
    from types import ModuleType, SimpleNamespace

    if importlib.util.find_spec("torchx"):
        from torchx.specs.file_linter import validate

        assert validate(str(LLAMA / "torchx_component.py"), "pretrain") == []
    for name in ("torchx", "torchx.specs", "torchx.components", "torchx.components.dist"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["torchx"].specs = SimpleNamespace(AppDef=object)
    sys.modules["torchx.components.dist"].ddp = lambda *words, **settings: (words, settings)
    words, settings = component().pretrain("--seed", "7", nnodes="2:4")
    assert settings["j"] == "2:4x8"
    assert settings["env"]["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    config = parse([*words, "--tokenizer-type", "NullTokenizer"], world_size=32)
    assert config.run.seed == 7 and config.parallel.tensor_model_parallel_size == 2
    assert config.parallel.ulysses_parallel_size == 4 and config.checkpoint.save == config.checkpoint.load
