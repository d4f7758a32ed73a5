# SPDX-License-Identifier: Apache-2.0
"""The numbers and configurations, by name, that a run derives from its settings. No model is built."""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron.context_parallel.layout.grid import Axis, abstract_grid
from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.training import job
from megatron.training.arguments.schedule import BatchSizes
from megatron.training.arguments.validate import data_parallel_size
from megatron.training.arguments.validate.check_memory import attention_chunks, loss_chunks
from megatron.training.data.tokenizer import padded_vocab_size
from megatron.training.model import build, core_config, optimizer
from megatron.training.model.attention_rule import attention_rule
from megatron.training.model.core_config import compute_dtype
from megatron.training.model.weights import draw
from megatron.training.settings.config import Config

VOCABULARY = 301


class _Enough(Exception):
    """Raised to stop a function once its arguments are known."""


def built(config: Config, world_size: int) -> dict[str, Any]:
    """What a run builds from a completed configuration: {"part.name": value}, or {"part": value} for a single value."""
    parallel, model = config.parallel, config.model
    grid = replace(
        abstract_grid(
            ulysses=parallel.ulysses_parallel_size,
            ring=parallel.ring_parallel_size,
            tensor=parallel.tensor_model_parallel_size,
        ),
        data=Axis(data_parallel_size(config, world_size)),
        pipeline=Axis(parallel.pipeline_model_parallel_size),
    )
    layout = SequenceLayout(
        config.data.seq_length,
        grid,
        "zigzag" if parallel.context_parallel_balance == "documents" else parallel.context_parallel_balance,
        chunks=attention_chunks(config),
    )
    rule = attention_rule(config, grid)
    result = {
        "grid": str(grid),
        "balance": parallel.context_parallel_balance,
        "layout": layout.positions.tolist(),
        "mask": repr(rule.mask),
        "attention-kernel": rule.kernel,
        "attention-blocks": rule.measured,
        "alibi": None if rule.alibi_slopes is None else rule.alibi_slopes.tolist(),
        "gathered-keys": rule.exchange,
        "mask-threshold": rule.mask_cpu_threshold,
        "softcap": rule.softcap,
        "rope": repr(build.rope(model)),
        "dtype": str(compute_dtype(config)),
        "in-chunks": core_config.in_chunks(config),
        "attention-chunks": attention_chunks(config),
        "ffn-chunks": config.chunks.ffn_chunks,
        "loss-chunks": loss_chunks(config, VOCABULARY),
        "rows": padded_vocab_size(
            VOCABULARY, model.make_vocab_size_divisible_by, grid.tensor.size, model.padded_vocab_size
        ),
        "positions": model.max_position_embeddings if model.position_embedding_type == "learned_absolute" else 0,
        "zero": parallel.zero_stage,
    }
    core = core_config.transformer_config(config, grid, on_gpu=False)
    result |= {f"core.{field.name}": _plain(getattr(core, field.name)) for field in fields(core)}
    result |= {"weights": float(draw("linear.weight", (4, 4), core, config, torch.device("cpu")).sum())}
    result |= _model(config, grid, layout)
    result |= {f"ddp.{name}": value for name, value in _data_parallel(config).items()}
    result |= {f"optimizer.{name}": value for name, value in _optimizer(config, core).items()}
    if not config.run.skip_train:
        groups = SimpleNamespace(param_groups=[{"default_config": True}])
        schedule = vars(optimizer.build_schedule(groups, config))
        result |= {f"schedule.{name}": value for name, value in schedule.items() if name != "optimizer"}
    data = config.data
    sizes = BatchSizes(data, data.micro_batch_size * grid.data.size)
    iterations, samples = job.length_of_run(config, sizes)
    result |= {"iterations": iterations, "samples": samples, "micro-batches": sizes.get()}
    result |= {"evaluations": job.evaluations(config, iterations)}
    return result


def _plain(value: Any) -> Any:
    if isinstance(value, PipelineParallelLayerLayout):
        return value.layout
    return getattr(value, "__qualname__", value) if callable(value) else value


def _model(config: Config, grid: Any, layout: SequenceLayout) -> dict[str, Any]:
    """The arguments of megatron-core's GPTModel and of our layers."""
    seen: dict[str, Any] = {"partitioned": False, "layer inputs in host memory": False}

    def spec(_: Any, settings: Any, layers: Any, chunks: Any) -> None:
        seen["linear-kernel"] = settings.linear_kernel
        seen.update({f"dropout.{name}": value for name, value in vars(settings.dropout).items()})
        seen["rules"] = [(repr(one.rule.mask), one.rotary and repr(one.rotary.rope)) for one in settings.layers]
        seen["host memory"] = chunks is not None and chunks.offload is not None
        seen["kept attention"] = settings.keep
        seen["streamed"] = chunks is not None and chunks.streamed
        made = {index: (mixer.func, mixer.keywords) for index, mixer in layers.mixers.items()}
        seen.update({f"layers.{name}": value for name, value in {**vars(layers), "mixers": made}.items()})

    def model(**arguments: Any) -> SimpleNamespace:
        names = ("max_sequence_length", "share_embeddings_and_output_weights", "position_embedding_type", "softcap")
        seen.update({f"model.{name}": arguments[name] for name in names})
        return SimpleNamespace(embedding=SimpleNamespace(word_embeddings=None), decoder=None)

    def mark(name: str) -> Any:
        return lambda *_: seen.update({name: True})

    with (
        mock.patch.object(build, "initialize_weights", lambda *_: None),
        mock.patch.object(build, "block_spec", spec),
        mock.patch.object(build, "train_adapters_alone", lambda _: None),
        mock.patch.object(build, "LongContextGPT", model),
        mock.patch.object(build, "later_token_layers", lambda number, _: number),
        mock.patch.object(build, "PartitionedEmbedding", mark("partitioned")),
        mock.patch.object(build, "scale_embeddings", lambda _, factor: seen.update({"factor of embeddings": factor})),
        mock.patch.object(build, "save_layer_inputs_in_host", mark("layer inputs in host memory")),
    ):
        build.build_model(config, grid, layout, VOCABULARY, torch.device("cpu"), SimpleNamespace())
    return {name.replace(" ", "-"): value for name, value in seen.items()}


def _data_parallel(config: Config) -> dict[str, Any]:
    chunk = SimpleNamespace(config=None)
    with (
        mock.patch.object(optimizer, "in_compute_dtype", lambda chunk, _: chunk),
        mock.patch.object(optimizer, "DistributedDataParallel", lambda _, settings, *args, **kwargs: settings),
        mock.patch.object(optimizer, "FullySharded", lambda chunk, config: SimpleNamespace(fsdp=True)),
    ):
        return vars(optimizer.wrap_for_data_parallelism([chunk], config)[0])


def _optimizer(config: Config, core: Any) -> dict[str, Any]:
    seen: dict[str, Any] = {}

    def record(settings: Any, *args: Any, **kwargs: Any) -> None:
        seen.update({field.name: getattr(settings, field.name) for field in fields(settings)})
        raise _Enough

    with (
        mock.patch.object(optimizer, "get_megatron_optimizer", record),
        mock.patch.object(optimizer.dist, "get_backend", lambda: "gloo"),
    ):
        try:
            optimizer.build_optimizer([SimpleNamespace(module=SimpleNamespace(config=core))], config)
        except _Enough:
            return seen
    raise AssertionError("get_megatron_optimizer was not called")
