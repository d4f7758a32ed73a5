# SPDX-License-Identifier: Apache-2.0
"""The files of examples/ for schedulers: Slurm's scripts queue themselves again, Kubernetes' and TorchX' are valid."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.training.arguments.parser import parse
from tests.patience import patience

ROOT = Path(__file__).resolve().parents[2]
LLAMA = ROOT / "examples" / "llama"
MANIFEST = LLAMA / "pretrain_llama3_8b_kubernetes.yaml"
SLURM = sorted(ROOT.glob("examples/*/*slurm.sh"))


def slurm(script: Path, folder: Path, done: int, left: int, code: int = 0) -> tuple[int, str]:
    """Exit code of a script, and what it tells scontrol, where srun ends after ``done`` iterations."""
    stubs = folder / "stubs"
    stubs.mkdir(parents=True)
    tracker = folder / "c" / "latest_checkpointed_iteration.txt"
    for name, text in {
        "srun": f"echo {done} >{tracker}; exit {code}",
        "scontrol": f'echo "$@" >>{folder}/told',
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
    environment |= {"TRAIN_ITERS": "100", "SLURM_JOB_END_TIME": str(int(time.time()) + left)}
    ended = subprocess.run(["bash", str(script)], env=environment, capture_output=True, timeout=patience(20))
    return ended.returncode, (folder / "told").read_text().splitlines()[-1]


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
    """Where a value is not what an OpenAPI schema of Kubernetes says; a key that it does not know is an error."""
    if schema.get("x-kubernetes-int-or-string"):
        return [] if isinstance(value, (int, str)) else [f"{place} is neither number nor text"]
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
    if not isinstance(value, kinds[schema["type"]]) or isinstance(value, bool) != (schema["type"] == "boolean"):
        return [f"{place} is no {schema['type']}"]
    found = []
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"{place} is {value}, not one of {schema['enum']}")
    if isinstance(value, dict):
        found += [f"{place}.{name} is missing" for name in schema.get("required", []) if name not in value]
        for name, one in value.items():
            inner = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
            if inner:
                found += differences(one, inner, f"{place}.{name}")
            elif "properties" in schema:
                found.append(f"{place}.{name} is unknown")
    for number, one in enumerate(value if isinstance(value, list) else []):
        found += differences(one, schema["items"], f"{place}[{number}]")
    return found


def test_the_job_set_is_what_its_schema_says(tmp_path: Path) -> None:
    told = json.loads((Path(__file__).parent / "data" / "jobset.json").read_text())
    manifest = yaml.safe_load(MANIFEST.read_text())
    assert manifest["apiVersion"] == f"{told['group']}/{told['version']}" and manifest["kind"] == told["kind"]
    assert differences(manifest, told["schema"]) == []
    for change, wanted in (
        (lambda pod: pod["containers"][0].update(imag="x"), ".imag is unknown"),
        (lambda pod: pod["containers"][0].pop("name"), ".name is missing"),
        (lambda pod: pod.update(terminationGracePeriodSeconds="5"), "Seconds is no integer"),
        (lambda pod: pod.update(containers={}), "containers is no array"),
    ):
        other = copy.deepcopy(manifest)
        change(pod_of(other))
        assert [wanted in line for line in differences(other, told["schema"])] == [True], wanted

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
    assert script.read_text()[last - 5 : last] == "exec "  # process 1 of a container gets no signal by default
    assert {mount["name"] for mount in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}


def pod_of(manifest: dict) -> dict:
    return manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def component() -> Any:
    spec = importlib.util.spec_from_file_location("torchx_component", LLAMA / "torchx_component.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_torchx_component(monkeypatch: pytest.MonkeyPatch) -> None:
    """With TorchX by its own rules; without, with a stand-in that takes what TorchX' ddp takes."""
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
