# SPDX-License-Identifier: Apache-2.0
"""megatron-core's configuration is one that core accepts, also for GPUs, which no test here has."""

import pytest

from megatron.context_parallel.layout.grid import Axis, Grid
from megatron.training.arguments.parser import parse
from megatron.training.model.build import transformer_config
from tests.distributed.training_runs import LLAMA, RUN, SHAPE

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
