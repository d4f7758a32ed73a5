# SPDX-License-Identifier: Apache-2.0
"""Load a ``torch_dist`` checkpoint of Megatron-LM as if it were one of ours.

Each rank reads the parts that it needs, so the grids and ZeRO stages of the two programs may differ. Random states and
FP8 histories are not loaded: Megatron-LM's random states belong to TP x PP ranks, ours to tokens, and FP8 histories are
pickled objects of Transformer Engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, merge
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess

from megatron.platform.collectives import gathered_objects
from megatron.platform.core_versions import GROUP_KEYS
from megatron.training.checkpoint.megatron_lm.checked import Checked
from megatron.training.checkpoint.megatron_lm.megatron_args import (
    attention_of,
    model_described,
    model_of,
    namespace,
    vocabulary_block,
)
from megatron.training.checkpoint.megatron_lm.source import STATE, Buckets, Saved, Source, weights_in, without_layer
from megatron.training.checkpoint.megatron_lm.stored_tensors import StoredTensors, WholeTensors
from megatron.training.refusal import Refusal, refuse_together, some
from megatron.training.settings.config import Config

DISTRIBUTED = "optimizer.distributed."  # prefix of keys that belong to one data-parallel group
NEUTRAL = {"wd_mult": 1.0, "lr_mult": 1.0}  # defaults of a parameter group; all other identifiers default to False


@dataclass
class ForeignCheckpoint:
    """An open checkpoint of Megatron-LM, or of another program with names translated to Megatron-LM's."""

    path: Path
    common: dict[str, Any]
    args: dict[str, Any]
    stored: StoredTensors | WholeTensors
    weights_alone: bool = False  # no training state: a run starts from it at iteration 0

    @property
    def has_optimizer(self) -> bool:
        return any(key.startswith("optimizer.") for key in self.stored)

    @property
    def network(self) -> dict[str, Any]:
        """The settings of model and mask in its args, as ours. Raises Refusal if the model is not supported."""
        return model_described(self.args, self.path) | attention_of(self.args, self.path)

    def progress(self) -> dict[str, int]:
        """Fields of our Progress. Raises Refusal if the checkpoint does not have them."""
        progress = {
            "iteration": self.common.get("iteration"),
            "consumed_train_samples": self.args.get("consumed_train_samples"),
        }
        if missing := [name for name, value in progress.items() if not isinstance(value, int)]:
            raise Refusal(f"checkpoint {self.path} does not say its {missing[0]}: pass --finetune")
        if self.args.get("skipped_train_samples"):
            progress["consumed_train_samples"] += self.args["skipped_train_samples"]
        return progress


def open_megatron(path: Checked) -> ForeignCheckpoint | None:
    """Open a checkpoint of Megatron-LM; None if this program wrote it. Raises Refusal if neither program did."""
    common = path.common()
    if "config" in common:
        return None
    return ForeignCheckpoint(path.path, common, namespace(common.get("args"), path), StoredTensors(path))


def check_vocabulary(foreign: ForeignCheckpoint, vocab_size: int, config: Config) -> None:
    """Refuse a tokenizer whose vocabulary, padded as in the checkpoint, would have another number of rows."""
    rows = foreign.args.get("padded_vocab_size")
    if rows is None:
        return
    block = vocabulary_block(foreign.args)
    if not rows - block < vocab_size <= rows:
        own = "; a model's own tokenizer may have ids without rows: then convert the checkpoint with "
        own += "tools/convert_hf.py --to-hf, and load that folder"
        raise Refusal(
            f"checkpoint {foreign.path} has a vocabulary of {max(rows - block, 0) + 1} to {rows} tokens (padded to "
            f"{rows}), this run's tokenizer has {vocab_size}: use the checkpoint's tokenizer{own * (vocab_size > rows)}"
        )
    if vocab_size != rows:
        config.notes.append(
            f"the {rows - vocab_size} rows that pad the vocabulary of {foreign.path} count in Megatron-LM's loss, but "
            "not in this program's"
        )


def load(foreign: ForeignCheckpoint, state: dict[str, Any], left: str = "") -> dict[str, Any]:
    """Load ``state``, as core's ``dist_checkpointing.load`` does with a checkpoint of ours. All ranks call it.

    Args:
        state: weights and, if it is loaded, the optimizer, as core's sharded state in the form ``fully_reshardable``.
        left: name of a weight that need not be requested.

    Raises:
        Refusal: a tensor is missing, has another shape, or is in a form that cannot be read.
    """
    loaded, requested = refuse_together(lambda: _read(foreign, state))
    _check_all_requested(foreign, requested | {left})
    return loaded


def _read(foreign: ForeignCheckpoint, state: dict[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """(this rank's part of :func:`load`, names of the weights that it requested)."""
    with_optimizer = "optimizer" in state
    source = Source(foreign.stored, _buckets(foreign) if with_optimizer else None)
    groups, scaler = _groups(foreign) if with_optimizer else ([], None)
    sharded, kept, factories = load_preprocess(state)

    def read(value: Any) -> Any:
        if isinstance(value, ShardedTensor):
            return source.read(value)
        return value.data if isinstance(value, ShardedObject) else value

    loaded = dict_list_map_outplace(read, sharded)
    loaded = apply_factory_merges(merge(loaded, kept), factories)
    if with_optimizer:
        ours = loaded["optimizer"]["optimizer"]["param_groups"]
        loaded["optimizer"]["optimizer"]["param_groups"] = _matched(ours, groups)
        if scaler is not None:
            loaded["optimizer"]["grad_scaler"] = scaler
        if "opt_param_scheduler" in foreign.common:
            loaded["opt_param_scheduler"] = foreign.common["opt_param_scheduler"]
    return loaded, source.requested


def _buckets(foreign: ForeignCheckpoint) -> Buckets | None:
    kind = (foreign.common.get("content_metadata") or {}).get("distrib_optim_sharding_type")
    if not any(key.startswith(DISTRIBUTED) for key in foreign.stored):
        if not any(key.startswith(STATE) for key in foreign.stored):
            raise _unreadable(foreign, kind)
        return None
    if kind not in (None, "dp_reshardable", "fully_sharded_bucket_space"):
        raise _unreadable(foreign, kind)
    model, args = model_of(foreign.args, foreign.path), foreign.args
    return Buckets(
        foreign.stored,
        Saved(
            tensor=args.get("tensor_model_parallel_size") or 1,
            pipeline=args.get("pipeline_model_parallel_size") or 1,
            chunks=args.get("virtual_pipeline_model_parallel_size") or 1,
            layers=model.num_layers,
            gated=model.gated,
            tied=not model.untie_embeddings_and_output_weights,
        ),
    )


def _unreadable(foreign: ForeignCheckpoint, kind: str | None) -> Refusal:
    return Refusal(
        f"checkpoint {foreign.path}: its optimizer is in the form {kind or 'dp_zero_gather_scatter'}, which is not "
        "supported: load it in Megatron-LM and save it with --dist-ckpt-optim-fully-reshardable (before core 0.15: "
        "with --ckpt-fully-parallel-save), or pass --no-load-optim"
    )


def _groups(foreign: ForeignCheckpoint) -> tuple[list[dict[str, Any]], Any]:
    """(parameter groups with the number of steps, state of the loss scale)."""
    saved = foreign.common.get("optimizer")
    if saved is None or "param_groups" not in saved.get("optimizer", saved):  # one copy per data-parallel group
        first = f"{DISTRIBUTED}dp_group_idx_0."
        saved = {name: foreign.stored.object(f"{first}{name}") for name in ("optimizer", "grad_scaler")}
    inner = saved.get("optimizer") or saved
    groups = inner.get("param_groups")
    if not groups:
        raise Refusal(f"checkpoint {foreign.path}: its optimizer has no groups of parameters: pass --no-load-optim")
    step = (inner.get("state") or {}).get("common_step")
    step = next((group["step"] for group in groups if group.get("step") is not None), 0) if step is None else step
    return [{**group, "step": float(step)} for group in groups], saved.get("grad_scaler")


def _matched(ours: Sequence[dict[str, Any]], saved: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Our parameter groups with the checkpoint's values. Keys that only our kind of Adam has keep our values."""

    def identity(group: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(group.get(name, group.get(f"pre_{name}", NEUTRAL.get(name, False))) for name in GROUP_KEYS)

    known = {identity(group): group for group in saved}
    matched = []
    for group in ours:
        if identity(group) not in known:
            names = ", ".join(f"{name} {value}" for name, value in zip(GROUP_KEYS, identity(group)))
            raise Refusal(
                f"the checkpoint's optimizer has no group of parameters with {names}: give the --decoupled-lr of its "
                "run, or pass --no-load-optim"
            )
        other = known[identity(group)]
        matched.append(group | {name: other[name] for name in other if name in group or name == "step"})
        matched[-1].pop("params", None)
    return matched


def _check_all_requested(foreign: ForeignCheckpoint, own: set[str]) -> None:
    """Refuse a checkpoint with weights that no rank of this run requested."""
    known = set().union(*gathered_objects(own))
    unused = sorted({name for name in map(without_layer, weights_in(foreign.stored)) if name not in known})
    if unused := [name for name in unused if not name.endswith("rotary_pos_emb.inv_freq")]:
        raise Refusal(f"checkpoint {foreign.path} is of another model: this model does not have {some(unused)}")
