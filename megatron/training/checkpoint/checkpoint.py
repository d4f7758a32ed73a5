# SPDX-License-Identifier: Apache-2.0
"""Save and resume through megatron-core's dist_checkpointing: any grid writes, any grid reads.

A checkpoint is written beside its final name and renamed when it is whole, so a full disk or a kill never harms the
ones before it. ``latest_checkpointed_iteration.txt`` names the latest, as in Megatron-LM, whose training program loads
what is written here: beside our own settings there is what it looks for, under its names. What it has written itself is
loaded through megatron_lm/.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import nn

from megatron.context_parallel.core.lora import is_adapter
from megatron.training.arguments.config import CheckpointConfig, Config
from megatron.training.checkpoint.adapters import begin_anew, without_adapters
from megatron.training.checkpoint.checksums import unchanged
from megatron.training.checkpoint.foreign import open_foreign
from megatron.training.checkpoint.hugging_face.folders import readable
from megatron.training.checkpoint.megatron_lm import incoming
from megatron.training.checkpoint.megatron_lm.checked import Checked
from megatron.training.checkpoint.megatron_lm.outgoing import engine_states, for_megatron
from megatron.training.checkpoint.megatron_lm.places import checkpoint_path, universal_path
from megatron.training.checkpoint.owner import Owner
from megatron.training.checkpoint.pieces import METADATA, Places, find_places
from megatron.training.checkpoint.reading import load_state
from megatron.training.checkpoint.run_state import Progress, load_schedule, random_state, set_random_state
from megatron.training.checkpoint.same_model import check_model
from megatron.training.checkpoint.saving import Save
from megatron.training.checkpoint.sharded_state import (
    elements_of_shard,
    load_optimizer,
    load_weights,
    optimizer_state,
    weights_state,
)
from megatron.training.checkpoint.shelf import VALIDATION
from megatron.training.model.precision import compute_dtype
from megatron.training.refusal import Refusal


def save(
    folder: str,
    progress: Progress,
    chunks: Sequence[nn.Module],
    optimizer: MegatronOptimizer | None,
    schedule: OptimizerParamScheduler | None,
    config: Config,
) -> Path:
    """Write ``folder/iter_NNNNNNN`` and point the tracker at it. All ranks call it.

    Raises:
        OSError: the checkpoint could not be written; earlier ones are untouched.
    """
    going = begin_save(folder, progress, chunks, optimizer, schedule, config)
    going.write()
    return going.finish()


def begin_save(
    folder: str,
    progress: Progress,
    chunks: Sequence[nn.Module],
    optimizer: MegatronOptimizer | None,
    schedule: OptimizerParamScheduler | None,
    config: Config,
    after: Callable[[], Any] = lambda: None,
    validation_loss: float | None = None,
    owner: Owner | None = None,
) -> Save:
    """The same as far as all ranks take part; :class:`Save` does the rest.

    Args:
        after: called on rank 0 when the checkpoint is there.
        validation_loss: of these weights, if they were evaluated.
        owner: of the folder; None where nobody else can be saving there.
    """

    def describe() -> dict[str, Any]:
        gather_parameters(chunks, config)
        return _state(chunks, optimizer, schedule, progress, config, loading=False)

    beside = {}
    if validation_loss is not None:
        beside[VALIDATION] = json.dumps({"validation_loss": validation_loss}).encode()
    final = Path(folder) / f"iter_{progress.iteration:07d}"
    return Save(final, describe, dict(METADATA), after, beside, owner, progress.run)


def find(settings: CheckpointConfig, notes: list[str] | None = None) -> Path | None:
    """The checkpoint that ``--load`` (or else ``--pretrained-checkpoint``) means, None where there is none.

    Args:
        notes: where a line goes if it is not the one that its folder names as the latest.

    Raises:
        Refusal: it was asked for by name and is not there, or it is not clear which is the latest.
    """
    if settings.load:
        folder, step = Path(settings.load), settings.ckpt_step
        if settings.universal_checkpoint:
            found = universal_path(folder, step)
        else:
            found = checkpoint_path(folder, step, whole=not settings.skip_damaged_checkpoints, notes=notes)
        if found:
            return found
        if settings.exit_on_missing_checkpoint:
            raise Refusal(f"--load {settings.load} holds no checkpoint, and --exit-on-missing-checkpoint is set")
    if settings.pretrained_checkpoint:
        found = checkpoint_path(Path(settings.pretrained_checkpoint), None, notes=notes)
        if found is None:
            raise Refusal(f"--pretrained-checkpoint {settings.pretrained_checkpoint} holds no checkpoint")
        return found
    return None


def load(
    path: Checked,
    chunks: Sequence[nn.Module],
    optimizer: MegatronOptimizer | None,
    schedule: OptimizerParamScheduler | None,
    config: Config,
) -> Progress:
    """Load weights and, unless only weights are wanted, optimizer, schedule, random state and progress.

    Args:
        optimizer: None for a model that is not trained; then with ``--finetune``.

    Raises:
        Refusal: the checkpoint is of another model, or another job removed or replaced it meanwhile.
    """
    with unchanged(path.path), readable(path.path):
        return _load(path, chunks, optimizer, schedule, config)


def _load(
    path: Path,
    chunks: Sequence[nn.Module],
    optimizer: MegatronOptimizer | None,
    schedule: OptimizerParamScheduler | None,
    config: Config,
) -> Progress:
    settings = config.checkpoint
    theirs = open_foreign(path)
    common = theirs.common if theirs else path.common()
    pretrained = settings.pretrained_checkpoint is not None and Path(settings.pretrained_checkpoint) == path.path.parent
    weights_only = settings.finetune or pretrained or (theirs is not None and theirs.weights_alone)
    model = theirs.model if theirs else common.get("config", {}).get("model", {})
    check_model(model, config, path.path, weights_only)
    anew = begin_anew(model, config.model, path.path, weights_only)
    saved, here = common.get("vocab_size"), getattr(unwrap(chunks[0]), "real_vocab_size", None)
    if theirs:
        incoming.check_vocabulary(theirs, here, config)
    elif saved is not None and saved != here:
        raise Refusal(
            f"checkpoint {path} has a vocabulary of {saved} tokens, the tokenizer here {here}: use its tokenizer"
        )
    with_optimizer = settings.load_optim and not weights_only
    if with_optimizer and not (theirs.has_optimizer if theirs else "optimizer" in common):
        raise Refusal(
            f"checkpoint {path} has no optimizer state: pass --finetune, or --no-load-optim to go on without it"
        )
    there = theirs.args.get("optimizer") if theirs else common.get("config", {}).get("optimizer", {}).get("optimizer")
    if with_optimizer and there not in (None, config.optimizer.optimizer):
        raise Refusal(f"checkpoint {path} has the states of --optimizer {there}: use it, or pass --no-load-optim")
    with_rng = settings.load_rng and not weights_only and common.get("rng_world_size") == dist.get_world_size()
    state = _state(
        chunks,
        optimizer if with_optimizer else None,
        schedule if with_optimizer else None,
        Progress(),
        config,
        loading=True,
        with_rng=with_rng,
        adapters=not anew,
    )
    places = _places(chunks, optimizer, config)
    loaded = incoming.load(theirs, state) if theirs else load_state(state, path)
    for index, (chunk, key) in enumerate(zip(chunks, _chunk_keys(chunks))):
        if config.parallel.zero_stage < 2:
            unwrap(chunk).load_state_dict(loaded[key], strict=not anew)
        elif key in loaded:
            load_weights(loaded[key], _asked(places[index], with_optimizer, not anew))
    if with_optimizer:
        load_optimizer(optimizer, loaded["optimizer"], places)
        if schedule is not None:
            load_schedule(schedule, loaded, path.path)
    elif optimizer is not None:
        optimizer.reload_model_params()
    if with_rng:
        set_random_state(loaded["rng"])
    return Progress() if weights_only else _progress(theirs, common)


def progress_in(path: Checked, settings: CheckpointConfig) -> Progress:
    """How far a run that loads this checkpoint has come."""
    pretrained = settings.pretrained_checkpoint is not None and Path(settings.pretrained_checkpoint) == path.path.parent
    if settings.finetune or pretrained:
        return Progress()
    theirs = open_foreign(path)
    if theirs and theirs.weights_alone:
        return Progress()
    with readable(path.path):
        return _progress(theirs, {} if theirs else path.common())


def _progress(theirs: incoming.Theirs | None, common: dict[str, Any]) -> Progress:
    """Of a checkpoint's common state; where tokens are not counted, all samples were of one length."""
    found = theirs.progress() if theirs else common["progress"]
    progress = Progress(**found)
    if "consumed_train_tokens" not in found:
        length = theirs.args.get("seq_length") if theirs else common.get("config", {}).get("data", {}).get("seq_length")
        progress.consumed_train_tokens = progress.consumed_train_samples * (length or 0)
    return progress


def gather_parameters(chunks: Sequence[nn.Module], config: Config) -> None:
    """Under --overlap-param-gather a step's new weights arrive with the next forward pass only: fetch them now."""
    if config.parallel.overlap_param_gather:
        for chunk in chunks:
            chunk.start_param_sync(force_sync=True)


def unwrap(chunk: nn.Module) -> nn.Module:
    """The model inside data-parallel and half-precision wrappers."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _state(
    chunks: Sequence[nn.Module],
    optimizer: MegatronOptimizer | None,
    schedule: OptimizerParamScheduler | None,
    progress: Progress,
    config: Config,
    *,
    loading: bool,
    with_rng: bool | None = None,
    adapters: bool = True,
) -> dict[str, Any]:
    """Everything a checkpoint holds, as megatron-core's sharded state.

    Args:
        adapters: whether the checkpoint has those of the model.
    """
    vocab_size = getattr(unwrap(chunks[0]), "real_vocab_size", None)  # the weights' vocabulary is padded
    state: dict[str, Any] = {
        **({} if loading else for_megatron(config, vocab_size, progress.iteration, progress.consumed_train_samples)),
        "config": asdict(config),
        "progress": asdict(progress),
        "vocab_size": vocab_size,
        "rng_world_size": dist.get_world_size() if config.checkpoint.save_rng else None,
    }
    models, places = {}, _places(chunks, optimizer, config)
    for index, (chunk, key) in enumerate(zip(chunks, _chunk_keys(chunks))):
        if config.parallel.zero_stage < 2:
            found = unwrap(chunk).sharded_state_dict(metadata=dict(METADATA))
            models[key] = found if adapters else without_adapters(found)
        elif (asked := _asked(places[index], loading and optimizer is not None, adapters)).pieces:
            models[key] = weights_state(asked, compute_dtype(config))
        if not loading:
            state[f"engine states {index}"] = engine_states(unwrap(chunk))
    state.update(models)
    if optimizer is not None and (loading or config.checkpoint.save_optim):
        state["optimizer"] = optimizer_state(optimizer, places, loading=loading)
        if schedule is not None:
            state["opt_param_scheduler"] = schedule.state_dict()
    if config.checkpoint.save_rng if with_rng is None else with_rng:
        rank, world = dist.get_rank(), dist.get_world_size()
        state["rng"] = ShardedObject("rng", random_state(), (world,), (rank,), replica_id=0)
    return state


def _places(chunks: Sequence[nn.Module], optimizer: MegatronOptimizer | None, config: Config) -> list[Places]:
    """Where parameters, and with ZeRO 1 the shards that the optimizer has of them, lie in a checkpoint."""
    held = None
    if config.parallel.zero_stage == 1:
        if optimizer is None:
            return []  # weights are whole
        held = partial(elements_of_shard, optimizer)
    return [find_places(unwrap(chunk), held) for chunk in chunks]


def _asked(places: Places, with_optimizer: bool, adapters: bool) -> Places:
    """What is read as weights under FSDP, whose trained weights are the optimizer's main weights."""
    if with_optimizer:
        return places.only(lambda parameter, _: not parameter.requires_grad)
    return places if adapters else places.only(lambda _, name: not is_adapter(name))


def _chunk_keys(chunks: Sequence[nn.Module]) -> list[str]:
    return ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))]
