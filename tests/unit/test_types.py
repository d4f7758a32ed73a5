# SPDX-License-Identifier: Apache-2.0
"""Types of distribution (tests/distribution_types.py): functions have a type or a reason, and types find errors."""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("spmd_types", reason="the checker of types is not installed")

import torch  # noqa: E402

from tests import distribution_types  # noqa: E402
from tests.planted_types import PLANTED  # noqa: E402
from tests.program import run_forked  # noqa: E402
from tests.shared import Shared  # noqa: E402

ROOT = Path(__file__).parents[2]
ON_TENSORS = {
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single", "reduce_scatter",
    "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all", "all_to_all_single", "broadcast", "isend", "irecv",
    "send", "recv", "batch_isend_irecv", "reduce", "gather", "scatter", "P2POp",
}  # fmt: skip
LIBRARY = ("dist", "torch.distributed")


@cache
def modules() -> list[tuple[str, ast.Module]]:
    """(name, tree) of each module that may have an autograd function or a collective."""
    texts = {path: path.read_text() for path in sorted((ROOT / "megatron").rglob("*.py"))}
    return [
        (".".join(path.relative_to(ROOT / "megatron").with_suffix("").parts), ast.parse(text))
        for path, text in texts.items()
        if "autograd.Function" in text or "dist." in text or "torch.distributed" in text
    ]


def collectives(node: ast.AST, path: tuple[str, ...]) -> Iterator[str]:
    """The function around each mention of a collective, with its module and class."""
    for child in ast.iter_child_nodes(node):
        named = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        inner = (*path, child.name) if named else path
        if isinstance(child, ast.Attribute) and child.attr in ON_TENSORS and ast.unparse(child.value) in LIBRARY:
            yield ".".join(path)
        yield from collectives(child, inner)


@pytest.fixture
def output_of(shared: Shared) -> Callable[[str], Any]:
    """What a program of tests/ prints as JSON, by its name."""

    def run(program: str) -> Any:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        done = run_forked(ROOT / "tests" / f"{program}.py", [], environment)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return lambda program: shared(("types", program), lambda: run(program))


@pytest.mark.quick
def test_every_autograd_function_has_a_type_or_a_reason() -> None:
    functions = {
        f"{module}.{node.name}"
        for module, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and any("autograd.Function" in ast.unparse(base) for base in node.bases)
    }
    typed = {f"{one.__module__}.{one.__name__}".removeprefix("megatron.") for one in distribution_types.TYPED}
    assert functions == typed | set(distribution_types.UNTYPED) and not typed & set(distribution_types.UNTYPED)
    assert all(hasattr(one, "spmd_typecheck") for one in distribution_types.TYPED)


@pytest.mark.quick
def test_every_collective_has_a_type_or_a_reason() -> None:
    """Collectives are called as ``dist.name``, and each function that calls one is in the table."""
    known, used = distribution_types.COLLECTIVES, set()
    for module, tree in modules():
        for where in collectives(tree, (module,)):
            entries = {name for name in known if f"{where}.".startswith(f"{name}.")}
            assert len(entries) == 1, f"{where}: add it to COLLECTIVES in tests/distribution_types.py"
            used |= entries
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
                assert not ON_TENSORS & {alias.name for alias in node.names}, module
    assert used == set(known)


@pytest.mark.quick
def test_a_program_that_is_not_checked_has_no_overhead() -> None:
    """The program has no annotations, and the checker changes PyTorch only while it is active."""
    assert not [path for path in (ROOT / "megatron").rglob("*.py") if "spmd" in path.read_text()]
    assert type(vars(torch.autograd.Function)["apply"]) is classmethod


@pytest.mark.lab
def test_parts_of_the_program_pass_and_errors_do_not(output_of: Callable[[str], Any]) -> None:
    """In one process with a fake group of DP 2 x CP 2 x TP 2: 16 parts, and 25 errors in them."""
    verdicts = output_of("typed_programs")["verdicts"]
    right = {name for name, verdict in verdicts.items() if verdict == "right"}
    assert right == {
        "ulysses", "ring", "ring with gathered keys", "chunked loss", "chunked loss, TP-sp", "MLP", "MLP, TP-sp",
        "chunked loss by log-probabilities", "chunked loss, TP-sp by log-probabilities",
        "gradients summed over DP then CP", "norm of queries, weight summed over TP", "gathered sequence",
        "sum for averaged gradients", "linear attention", "short convolution", "linear attention in chunks",
    }  # fmt: skip
    assert len(verdicts) == 41


@pytest.mark.lab
def test_complete_models_have_types(output_of: Callable[[str], Any]) -> None:
    """On 8 ranks, in one process with a fake group. A gradient is partial (P) on the axes over which it is summed."""
    models = output_of("typed_models")["models"]
    assert {name: error for name, error in models.items() if isinstance(error, str)} == {}
    expected = {
        "GPT, TP with sequence parallelism and Ring, dropout": {
            "embedding.word_embeddings.weight": "tp V, ring P, dp P",
            "embedding.position_embeddings.weight": "tp I, ring P, dp P",
            "decoder.layers.0.input_layernorm.weight": "tp P, ring P, dp P",
            "decoder.layers.0.self_attention.linear_qkv.weight": "tp V, ring P, dp P",
            "decoder.layers.0.self_attention.linear_proj.bias": "tp P, ring P, dp P",
        },
        "GPT, TP and Ulysses, ALiBi, fp16": {"decoder.layers.0.input_layernorm.weight": "tp I, ulysses P, dp P"},
        "GPT, Ulysses and Ring, partitioned positions": {
            "embedding.position_embeddings.weight": "ulysses V, ring V, dp P"
        },
        "GPT, two stages, tied embeddings": {"embedding.word_embeddings.weight": "tp V, dp P, pp P"},
        "Llama, norms of queries and keys, TP": {
            "decoder.layers.0.self_attention.q_layernorm.weight": "tp P, ring P, dp P"
        },
        "GPT, adapters (LoRA), TP with sequence parallelism": {
            "decoder.layers.0.self_attention.linear_qkv.lora_a": "tp P, ulysses P, dp P",
            "decoder.layers.0.self_attention.linear_qkv.lora_b": "tp V, ulysses P, dp P",
        },
        "latents over the ring, TP with sequence parallelism": {
            "decoder.layers.0.self_attention.linear_kv_up_proj.weight": "tp V, ring P, dp P",
            "decoder.layers.0.input_layernorm.weight": "tp P, ring P, dp P",
        },
        "Gated DeltaNet and attention, TP with sequence parallelism": {
            "decoder.layers.0.self_attention.out_norm.weight": "tp I, ring P, dp P",
        },
        "Gated DeltaNet and attention, adapters (LoRA), TP": {
            "decoder.layers.0.self_attention.in_proj.lora_a": "tp I, ring P, dp P",
            "decoder.layers.0.self_attention.out_proj.lora_b": "tp I, ring P, dp P",
        },
        "Mamba2 and attention, TP with sequence parallelism": {
            "decoder.layers.0.self_attention.A_log": "tp V, ring P, dp P",
            "decoder.layers.0.self_attention.norm.weight": "tp V, ring P, dp P",
        },
        "experts with biases, TP": {
            "decoder.layers.0.mlp.experts.local_experts.0.linear_fc2.bias": "tp I, ulysses V, dp P",
            "decoder.layers.0.mlp.router.weight": "tp P, ulysses P, dp P",
            "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight": "tp V, ulysses V, dp P",
        },
    }
    for model, gradients in expected.items():
        assert gradients.items() <= models[model].items(), model


@pytest.mark.lab
def test_every_type_is_used(output_of: Callable[[str], Any]) -> None:
    programs = ("typed_programs", "typed_models", "planted_types")
    ran = {name for program in programs for name in output_of(program)["ran"]}
    assert ran == {one.__name__ for one in distribution_types.DECLARED}


@pytest.mark.lab
def test_types_alone_find_planted_errors(output_of: Callable[[str], Any]) -> None:
    """The message about each planted error names what is wrong; the same models without the error pass."""
    results = output_of("planted_types")
    assert {name: error for name, error in results["unchanged"].items() if isinstance(error, str)} == {}
    assert len(PLANTED) >= 20
    for name, planted in PLANTED.items():
        assert planted.error in results["planted"][name], f"{name} ({planted.where})"
