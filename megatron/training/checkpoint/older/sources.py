# SPDX-License-Identifier: Apache-2.0
"""Where weights come from: files of Megatron-LM's format ``torch``, or a universal checkpoint of DeepSpeed's.

    DIR/iter_0000100/mp_rank_TT[_PPP]/model_optim_rng.pt        a file for each rank of TP x PP
    DIR/global_step100_universal/zero/NAME/fp32.pt              a file for each weight, whole, in fp32

Files are mapped, not read, and a weight is put together when it is asked for, so memory holds a weight, not the model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.training.checkpoint.megatron_lm import unpickle
from megatron.training.checkpoint.megatron_lm.args import model_of, namespace
from megatron.training.checkpoint.megatron_lm.checked import Checked
from megatron.training.checkpoint.megatron_lm.places import TRACKER, name_in
from megatron.training.checkpoint.older.names import Name, core_name, joined, pipe_names, reordered
from megatron.training.refusal import Refusal

RANK = re.compile(r"mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?$")
STATES = "mp_rank_00_model_states.pt"


@dataclass(frozen=True)
class Weights:
    """A model's weights by core's names, layers counted over the whole model, each to be made by its function."""

    path: Path
    args: dict[str, Any]
    tensors: dict[Name, Callable[[], Tensor]]


def source_path(folder: Path, step: int | None) -> Path:
    """What :func:`open_source` reads in ``folder``. Raises Refusal where it has none of the forms above."""
    path = _path(folder, step)
    if (path / "zero").is_dir() or any(path.glob("mp_rank_*/model_optim_rng.pt")):
        return path
    if (path / "metadata.json").exists():
        raise Refusal(f"--from {folder}: {path.name} is of the format torch_dist, which --load takes as it is")
    if any(path.glob("*zero_pp_rank_*")):
        raise Refusal(
            f"--from {folder}: {path.name} is of DeepSpeed's own form: make a universal one of it with DeepSpeed's "
            "ds_to_universal.py, and give that"
        )
    raise Refusal(f"--from {folder}: neither mp_rank_*/model_optim_rng.pt nor zero/ in {path}")


def open_source(path: Checked) -> Weights:
    """The weights of a checkpoint. Raises Refusal where it does not hang together."""
    return universal_weights(path) if is_universal(path) else _torch(path)


def is_universal(path: Checked) -> bool:
    """Whether it is one of DeepSpeed's universal checkpoints."""
    return any(name.startswith("zero/") for name in path.files)


def _path(folder: Path, step: int | None) -> Path:
    if step is not None:
        choices = [folder / f"iter_{step:07d}", folder / f"global_step{step}_universal", folder / f"global_step{step}"]
        found = next((path for path in choices if path.is_dir()), None)
        if found is None:
            raise Refusal(f"--from {folder}: no checkpoint of --ckpt-step {step} there")
        return found
    for tracker in (TRACKER, "latest_universal", "latest"):
        if (folder / tracker).exists():
            text = name_in(folder / tracker)
            path = folder / (f"iter_{int(text):07d}" if text.isascii() and text.isdecimal() else text)
            if path.is_dir():
                return path
    return folder


def _torch(path: Checked) -> Weights:
    files: dict[tuple[int, int], Any] = {}
    for name in sorted(name for name in path.files if name.endswith("/model_optim_rng.pt")):
        file = path.file(name)
        tensor, pipeline, expert = (int(part) if part else 0 for part in RANK.match(file.parent.name).groups())
        if expert:
            raise Refusal(f"{path}: experts on ranks of their own are not built here")
        files[tensor, pipeline] = unpickle.read(file, mmap=True)
    first = files.get((0, 0))
    if not isinstance(first, dict):
        raise Refusal(f"{path}: there is no file of the first rank, mp_rank_00")
    args = namespace(first.get("args"), path)
    model = model_of(args, path)
    tensors = 1 + max(tensor for tensor, _ in files)
    stages = 1 + max(stage for _, stage in files)
    if len(files) != tensors * stages:
        raise Refusal(f"{path}: {len(files)} files of ranks, and not TP {tensors} x PP {stages}")
    version, heads = first.get("checkpoint_version", 0), model.num_attention_heads // tensors
    found: dict[Name, Callable[[], Tensor]] = {}
    begin = 0
    chunks = [key for key in ("model", *(f"model{index}" for index in range(len(first)))) if key in first]
    for chunk in chunks:
        for stage in range(stages):
            parts = [dict(_flat(files[tensor, stage][chunk])) for tensor in range(tensors)]
            count = 0
            for name in parts[0]:
                if (core := core_name(name)) is None:
                    continue
                if core.layer is not None:
                    count = max(count, core.layer + 1)
                    core = Name(core.key, core.layer + begin)
                found.setdefault(core, _merged(path, parts, name, core.key, model.swiglu, version, heads))
            begin += count
    if not model.untie_embeddings_and_output_weights:
        found.pop(Name("output_layer.weight"), None)  # the last stage's copy
    return Weights(path.path, args, found)


def _merged(
    path: Checked, parts: list[dict[str, Tensor]], name: str, key: str, gated: bool, version: float, heads: int
) -> Callable[[], Tensor]:
    def merge() -> Tensor:
        try:
            tensors = [part[name] for part in parts]
            if "linear_qkv." in key and not key.endswith(("layer_norm_weight", "layer_norm_bias")):
                tensors = [reordered(tensor, version, heads) for tensor in tensors]
            return joined(tensors, key, gated)
        except (KeyError, ValueError, RuntimeError) as error:
            raise Refusal(f"{path}: {name} does not fit together over TP: {error}") from None

    return merge


def _flat(state: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """(dotted name, tensor) of nested dictionaries."""
    for name, value in state.items() if isinstance(state, dict) else ():
        if isinstance(value, torch.Tensor):
            yield f"{prefix}{name}", value
        elif isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")


def universal_weights(path: Checked) -> Weights:
    """A universal checkpoint's. Raises Refusal where it does not say of which model they are."""
    if STATES not in path.files:
        raise Refusal(f"{path}: {STATES} is missing, which says of which model the weights are")
    states = unpickle.read(path.file(STATES))
    args = namespace(states.get("args") if isinstance(states, dict) else None, path.path / STATES)
    model = model_of(args, path)
    found = {name: whole(path.file(f"zero/{folder}/fp32.pt")) for folder, name in universal_names(path).items()}
    if not model.untie_embeddings_and_output_weights:
        found.pop(Name("output_layer.weight"), None)
    return Weights(path.path, args, found)


def universal_names(path: Checked) -> dict[str, Name]:
    """The weight that each folder of a universal checkpoint is of."""
    names = sorted(name.split("/")[1] for name in path.files if name.startswith("zero/") and name.endswith("/fp32.pt"))
    piped = pipe_names(names)
    cores = {name: piped.get(name, Name(name)) if piped else core_name(name) for name in names}
    return {name: core for name, core in cores.items() if core is not None}


def whole(file: Path) -> Callable[[], Tensor]:
    """What makes a weight, or a state of one, from its file."""

    def read() -> Tensor:
        held = unpickle.read(file)
        tensor = held.get("param") if isinstance(held, dict) else held
        if not isinstance(tensor, torch.Tensor):
            raise Refusal(f"{file}: no weight in it")
        return tensor

    return read
