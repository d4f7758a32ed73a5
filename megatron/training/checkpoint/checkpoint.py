# SPDX-License-Identifier: Apache-2.0
"""Save and resume through megatron-core's dist_checkpointing; a checkpoint can be loaded on a different grid.

A checkpoint is written under a temporary name and renamed when it is complete, so a full disk or a kill never harms
earlier ones. ``latest_checkpointed_iteration.txt`` names the latest, as in Megatron-LM. Megatron-LM's training program
can load these checkpoints: they also hold the arguments that it expects. megatron_lm/ loads Megatron-LM's checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import nn

from megatron.context_parallel.core.lora import is_adapter
from megatron.training.checkpoint import older_formats
from megatron.training.checkpoint.checkpoint_folder import VALIDATION
from megatron.training.checkpoint.checksums import unchanged
from megatron.training.checkpoint.hugging_face import load_folder
from megatron.training.checkpoint.hugging_face.safetensors_folder import readable
from megatron.training.checkpoint.megatron_lm import load_torch_dist
from megatron.training.checkpoint.megatron_lm.checked import Checked
from megatron.training.checkpoint.megatron_lm.load_torch_dist import ForeignCheckpoint
from megatron.training.checkpoint.megatron_lm.megatron_args import engine_states, for_megatron
from megatron.training.checkpoint.megatron_lm.places import checkpoint_path, is_hugging_face, universal_path
from megatron.training.checkpoint.older_formats import is_universal
from megatron.training.checkpoint.owner import Owner, is_pretrained
from megatron.training.checkpoint.read_torch_dist import load_state
from megatron.training.checkpoint.run_state import Progress, load_schedule, random_state, set_random_state
from megatron.training.checkpoint.save_job import Save
from megatron.training.checkpoint.sharded_state import (
    METADATA,
    ShardPlaces,
    elements_of_shard,
    find_places,
    load_optimizer,
    load_weights,
    optimizer_state,
    weights_state,
)
from megatron.training.model.core_config import compute_dtype
from megatron.training.model.reward_head import is_head
from megatron.training.model.weights import unwrap
from megatron.training.refusal import Refusal
from megatron.training.settings.config import CheckpointConfig, Config, ModelConfig
from megatron.training.settings.flag import ADAPTERS, names_with
from megatron.training.settings.kinds import KINDS
from megatron.training.settings.same_network import differences, flat, of_run

HEAD_OF_LOGITS = "output_layer.weight"


def adapters_are_new(saved: dict[str, Any], model: ModelConfig, path: Path, weights_only: bool) -> bool:
    """Whether this run has adapters (--lora-rank) and the checkpoint has none.

    Args:
        saved: the model settings stored in the checkpoint.

    Raises:
        Refusal: the checkpoint's adapters have other settings or would be left out, or the run would resume with new
            ones.
    """
    saved_rank, rank = saved.get("lora_rank"), model.lora_rank
    if saved_rank is None and rank is not None and not weights_only:
        raise Refusal(
            f"checkpoint {path} has no adapters: to begin --lora-rank {rank} from its weights, pass --finetune"
        )
    if saved_rank is not None and rank is None:
        raise Refusal(
            f"checkpoint {path} has adapters: give --lora-rank {saved_rank}, or merge them into the weights with "
            "tools/convert_hf.py --from DIR --to-hf DIR, and load that"
        )
    if saved_rank is not None:
        wrong = [
            f"--{name.replace('_', '-')} {_flag_value(saved[name])} in the checkpoint, "
            f"{_flag_value(getattr(model, name))} in this run"
            for name in names_with(ModelConfig, "network", ADAPTERS)
            if name in saved and saved[name] != getattr(model, name)
        ]
        if wrong:
            raise Refusal(f"checkpoint {path} has other adapters: {'; '.join(wrong)}")
    return saved_rank is None and rank is not None


def _flag_value(value: Any) -> str:
    return " ".join(value) if isinstance(value, list) else f"{value:g}"


def head_is_new(saved: dict[str, Any], model: ModelConfig, path: Path, weights_only: bool) -> bool:
    """Whether this run trains a reward model (--reward-model) and the checkpoint has a language model's head.

    Raises:
        Refusal: the checkpoint is a reward model and the run is not, or the run would resume with a new head.
    """
    before, now = bool(saved.get("reward_model")), model.reward_model
    if before and not now:
        raise Refusal(f"checkpoint {path} is a reward model, without logits: give --reward-model to train or score it")
    if now and not before and not weights_only:
        raise Refusal(
            f"checkpoint {path} is no reward model: to begin --reward-model from its weights, pass --finetune"
        )
    return now and not before


def trains_others(saved: dict[str, Any], config: Config, path: Path) -> bool:
    """Whether the checkpoint's optimizer has states of other parameters than this run trains."""
    before, now = (
        next(filter(None, (kind.trains(settings) for kind in KINDS)), "all weights")
        for settings in (saved, vars(config.model))
    )
    if before != now:
        config.notes.append(f"{path} has trained {before}, and this run trains {now}: the optimizer begins anew")
    return before != now


def check_model(saved: dict[str, Any], config: Config, path: Path, changed: bool) -> None:
    """Refuse a checkpoint whose weights have other shapes, or whose network computes differently.

    Args:
        saved: the checkpoint's settings by name, of all sections; empty if it has none.
        changed: whether this run may change what the network computes; it is then told so in ``config.notes``.
    """
    weights, function = differences(saved, of_run(config))
    if weights:
        raise Refusal(f"checkpoint {path} is of another model: {'; '.join(weights + function)}")
    if function and not changed:
        raise Refusal(
            f"checkpoint {path} is of another model: {'; '.join(function)}: give the checkpoint's settings "
            "(--use-checkpoint-args takes those of the model and its mask), or pass --finetune to go on with these"
        )
    if function:
        config.notes.append(f"this run changes the network of {path}: {'; '.join(function)}")


def open_foreign(path: Checked) -> ForeignCheckpoint | None:
    """Open another program's checkpoint; None if this program wrote it. Raises Refusal if it cannot be read."""
    if is_hugging_face(path.path):
        return load_folder.open_folder(path)
    if is_universal(path):
        return older_formats.open_universal(path)
    return load_torch_dist.open_megatron(path)


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
    """Prepare a checkpoint; the returned :class:`Save` writes it, possibly in the background. All ranks call it.

    Args:
        after: called on rank 0 when the checkpoint is complete.
        validation_loss: of these weights, if they were evaluated.
        owner: this job's lock on the folder; None if no other job can be saving there.
    """

    def describe() -> dict[str, Any]:
        gather_parameters(chunks, config)
        return _state(chunks, optimizer, schedule, progress, config, loading=False)

    extra_files = {}
    if validation_loss is not None:
        extra_files[VALIDATION] = json.dumps({"validation_loss": validation_loss}).encode()
    final = Path(folder) / f"iter_{progress.iteration:07d}"
    return Save(final, describe, after, extra_files=extra_files, owner=owner, run=progress.run)


def find(settings: CheckpointConfig, notes: list[str] | None = None) -> Path | None:
    """The checkpoint that ``--load``, or else ``--pretrained-checkpoint``, refers to; None if there is none.

    Args:
        notes: receives a line if the folder's tracker names another checkpoint as the latest.

    Raises:
        Refusal: a checkpoint was asked for explicitly and does not exist, or it is not clear which is the latest.
    """
    if settings.load:
        folder, step = Path(settings.load), settings.ckpt_step
        if settings.universal_checkpoint:
            path = universal_path(folder, step)
        else:
            path = checkpoint_path(folder, step, whole=not settings.skip_damaged_checkpoints, notes=notes)
        if path:
            return path
        if settings.exit_on_missing_checkpoint:
            raise Refusal(f"--load {settings.load} holds no checkpoint, and --exit-on-missing-checkpoint is set")
    if settings.pretrained_checkpoint:
        path = checkpoint_path(Path(settings.pretrained_checkpoint), None, notes=notes)
        if path is None:
            raise Refusal(f"--pretrained-checkpoint {settings.pretrained_checkpoint} holds no checkpoint")
        return path
    return None


def load(
    path: Checked,
    chunks: Sequence[nn.Module],
    optimizer: MegatronOptimizer | None,
    schedule: OptimizerParamScheduler | None,
    config: Config,
    unread: Collection[str] = (),
) -> Progress:
    """Load weights and, unless only weights are wanted, optimizer, schedule, random state and progress.

    Args:
        optimizer: None for a model that is not trained; ``--finetune`` must then be set.
        unread: settings of the network that may differ, because nothing of this run depends on them.

    Raises:
        Refusal: the checkpoint holds another model, or another job removed or replaced it during the load.
    """
    with unchanged(path.path), readable(path.path):
        return _load(path, chunks, optimizer, schedule, config, unread)


def _load(
    path: Path,
    chunks: Sequence[nn.Module],
    optimizer: MegatronOptimizer | None,
    schedule: OptimizerParamScheduler | None,
    config: Config,
    unread: Collection[str],
) -> Progress:
    settings = config.checkpoint
    foreign = open_foreign(path)
    common = foreign.common if foreign else path.common()
    pretrained = is_pretrained(path.path, settings)
    weights_only = settings.finetune or pretrained or (foreign is not None and foreign.weights_alone)
    network = foreign.network if foreign else flat(common.get("config", {}))
    network = {name: value for name, value in network.items() if name not in unread}
    check_model(network, config, path.path, changed=settings.finetune or pretrained)
    new = [test for test, absent in ((is_adapter, adapters_are_new), (is_head, head_is_new))
           if absent(network, config.model, path.path, weights_only)]  # fmt: skip
    if foreign:  # of this program's checkpoints, arguments_of.vocabulary gave the model its rows
        load_torch_dist.check_vocabulary(foreign, getattr(unwrap(chunks[0]), "real_vocab_size", None), config)
    resumes = settings.load_optim and not weights_only
    if resumes and not (foreign.has_optimizer if foreign else "optimizer" in common):
        raise Refusal(
            f"checkpoint {path} has no optimizer state: pass --finetune, or --no-load-optim to continue without it"
        )
    saved_optimizer = (
        foreign.args.get("optimizer") if foreign else common.get("config", {}).get("optimizer", {}).get("optimizer")
    )
    if resumes and saved_optimizer not in (None, config.optimizer.optimizer):
        raise Refusal(
            f"checkpoint {path} has the states of --optimizer {saved_optimizer}: use it, or pass --no-load-optim"
        )
    with_optimizer = resumes and not trains_others(network, config, path.path)
    with_rng = settings.load_rng and not weights_only and common.get("rng_world_size") == dist.get_world_size()
    state = _state(
        chunks,
        optimizer if with_optimizer else None,
        schedule if resumes else None,
        Progress(),
        config,
        loading=True,
        with_rng=with_rng,
        new=new,
    )
    places = _places(chunks, optimizer, config)
    loaded = (
        load_torch_dist.load(foreign, state, left=HEAD_OF_LOGITS if is_head in new else "")
        if foreign
        else load_state(state, path)
    )
    for index, (chunk, key) in enumerate(zip(chunks, _chunk_keys(chunks))):
        if config.parallel.zero_stage < 2:
            unwrap(chunk).load_state_dict(loaded.get(key, {}), strict=not new)  # a stage may hold nothing
        elif key in loaded:
            load_weights(loaded[key], _weights_under_fsdp(places[index], with_optimizer, new))
    if with_optimizer:
        load_optimizer(optimizer, loaded["optimizer"], places)
    elif optimizer is not None:
        optimizer.reload_model_params()
    if resumes and schedule is not None:
        load_schedule(schedule, loaded, path.path)
    if with_rng:
        set_random_state(loaded["rng"])
    return Progress() if weights_only else _progress(foreign, common)


def progress_in(path: Checked, settings: CheckpointConfig) -> Progress:
    """The progress (iteration, samples, tokens) at which a run that loads this checkpoint starts."""
    if settings.finetune or is_pretrained(path.path, settings):
        return Progress()
    foreign = open_foreign(path)
    if foreign and foreign.weights_alone:
        return Progress()
    with readable(path.path):
        return _progress(foreign, {} if foreign else path.common())


def _progress(foreign: ForeignCheckpoint | None, common: dict[str, Any]) -> Progress:
    """A checkpoint's progress. A missing number of tokens is computed: samples times the saved sequence length."""
    saved = foreign.progress() if foreign else common["progress"]
    progress = Progress(**saved)
    if "consumed_train_tokens" not in saved:
        length = (
            foreign.args.get("seq_length") if foreign else common.get("config", {}).get("data", {}).get("seq_length")
        )
        progress.consumed_train_tokens = progress.consumed_train_samples * (length or 0)
    return progress


def gather_parameters(chunks: Sequence[nn.Module], config: Config) -> None:
    """Gather the updated weights now; with --overlap-param-gather they would arrive in the next forward pass."""
    if config.parallel.overlap_param_gather:
        for chunk in chunks:
            chunk.start_param_sync(force_sync=True)


def _state(
    chunks: Sequence[nn.Module],
    optimizer: MegatronOptimizer | None,
    schedule: OptimizerParamScheduler | None,
    progress: Progress,
    config: Config,
    *,
    loading: bool,
    with_rng: bool | None = None,
    new: Sequence[Callable[[str], bool]] = (),
) -> dict[str, Any]:
    """Everything a checkpoint holds, as megatron-core's sharded state.

    Args:
        new: tests of parameters' names; those that pass one are not in the checkpoint.
    """
    vocab_size = getattr(unwrap(chunks[0]), "real_vocab_size", None)  # the embedding's rows are padded
    state: dict[str, Any] = {
        **({} if loading else for_megatron(config, vocab_size, progress.iteration, progress.consumed_train_samples)),
        "config": asdict(replace(config, notes=[])),  # ranks may have other notes, and this is saved once
        "progress": asdict(progress),
        "vocab_size": vocab_size,
        "rng_world_size": dist.get_world_size() if config.checkpoint.save_rng else None,
    }
    models, places = {}, _places(chunks, optimizer, config)
    for index, (chunk, key) in enumerate(zip(chunks, _chunk_keys(chunks))):
        if config.parallel.zero_stage < 2:
            sharded = unwrap(chunk).sharded_state_dict(metadata=dict(METADATA))
            models[key] = {name: part for name, part in sharded.items() if not any(test(name) for test in new)}
        else:
            weights = _weights_under_fsdp(places[index], loading and optimizer is not None, new)
            if weights.pieces or weights.others:
                models[key] = weights_state(weights, compute_dtype(config))
        if not loading:
            state[f"engine states {index}"] = engine_states(unwrap(chunk))
    state.update(models)
    if optimizer is not None and (loading or config.checkpoint.save_optim):
        state["optimizer"] = optimizer_state(optimizer, places, loading=loading)
    if schedule is not None and (loading or config.checkpoint.save_optim):
        state["opt_param_scheduler"] = schedule.state_dict()
    if config.checkpoint.save_rng if with_rng is None else with_rng:
        rank, world = dist.get_rank(), dist.get_world_size()
        state["rng"] = ShardedObject("rng", random_state(), (world,), (rank,), replica_id=0)
    return state


def _places(chunks: Sequence[nn.Module], optimizer: MegatronOptimizer | None, config: Config) -> list[ShardPlaces]:
    """Where each parameter lies in the checkpoint; with ZeRO 1, where this rank's optimizer shard of it lies."""
    shard = None
    if config.parallel.zero_stage == 1:
        if optimizer is None:
            return []  # no shards: every rank has the complete weights
        shard = partial(elements_of_shard, optimizer)
    return [find_places(unwrap(chunk), shard) for chunk in chunks]


def _weights_under_fsdp(places: ShardPlaces, with_optimizer: bool, new: Sequence[Callable[[str], bool]]) -> ShardPlaces:
    """The parameters whose weights are read under FSDP. The optimizer, if it is read, has those of trained ones."""
    if with_optimizer:
        return places.only(lambda parameter, _: not parameter.requires_grad)
    return places.only(lambda _, name: not any(test(name) for test in new)) if new else places


def _chunk_keys(chunks: Sequence[nn.Module]) -> list[str]:
    return ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))]
