# SPDX-License-Identifier: Apache-2.0
"""megatron-core's configuration is one that core accepts, also for GPUs, which no test here has."""

import pytest
import torch
from megatron.core.fusions.fused_bias_gelu import bias_gelu
from torch.nn import functional

from megatron.context_parallel.layout.grid import Axis, Grid
from megatron.training.arguments.parser import parse
from megatron.training.model.core_config import transformer_config
from tests.distributed.training_runs import LLAMA, RUN, SHAPE

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
        ("", by_fused_kernel, functional.gelu),  # what Megatron-LM does without any flag
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
    with torch.compiler.set_stance("force_eager"):  # core compiles its kernel; the formula is what counts here
        same_x, other_x = same(x), other(x)
    assert torch.allclose(activation(x), same_x, rtol=0, atol=2e-8)  # the fused kernel has 8 digits of sqrt(2 / pi)
    assert (activation(x) - other_x).abs().max() > 1e-4
