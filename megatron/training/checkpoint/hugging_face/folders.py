# SPDX-License-Identifier: Apache-2.0
"""What both ways share: names in a checkpoint's hf/, folders that appear whole, a world of one process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from megatron.training.checkpoint.hugging_face.llama import DTYPES
from megatron.training.checkpoint.megatron_lm.file_list import CHECKSUMS
from megatron.training.disk import sync_folders_up, sync_tree
from megatron.training.refusal import Refusal, reason

HEADERS = "safetensors_headers.json"  # in hf/: the headers of the original's files
OTHERS = "other_tensors.safetensors"  # and its tensors that transformers ignores
IGNORED = ".rotary_emb.inv_freq"  # old checkpoints hold RoPE's frequencies, which follow from config.json
LM_HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# What does not come along: weights in any format, code, what we add ourselves.
LEFT = (".safetensors", ".bin", ".pth", ".pt", ".gguf", ".h5", ".msgpack", ".onnx", ".py", HEADERS, CHECKSUMS)

Done = Callable[[], Any]  # called after each tensor, for a progress bar


def companions(folder: Path) -> list[Path]:
    """The files beside the weights: config.json, generation_config.json, tokenizer, licence, index."""
    return sorted(path for path in folder.iterdir() if path.is_file() and not path.name.endswith(LEFT))


def copy_files(files: list[Path], folder: Path) -> list[str]:
    for path in files:
        shutil.copyfile(path, folder / path.name)
    return [path.name for path in files]


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder beside ``target`` that takes its name when all has gone well, and goes away otherwise."""
    final = target.resolve()
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise Refusal(f"{target}: it is there and not empty; choose another folder, or remove it")
    partial = final.with_name(f".{final.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        sync_tree(partial)
        partial.replace(final)
        sync_folders_up(final.parent)
    except OSError as error:
        raise Refusal(f"{target}: {reason(error)}; nothing was written") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def one_process() -> Iterator[None]:
    """megatron-core's checkpoints want process groups: a world of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Whatever a damaged checkpoint makes torch raise, in one line."""
    try:
        yield
    except Refusal:
        raise
    except (Exception, CheckpointException) as error:
        raise Refusal(f"checkpoint {path} cannot be read: {reason(cause(error))}") from error


def cause(error: BaseException) -> BaseException:
    """The error inside torch's CheckpointException; an interruption inside it is raised again.

    Closing a file that a full disk or an interruption left incomplete is an error of its own, which hides the first.
    """
    if not isinstance(error, CheckpointException):
        return error
    chain = [next(iter(error.failures.values()))[0]]
    while chain[-1].__context__ is not None:
        chain.append(chain[-1].__context__)
    first = [link for link in chain if isinstance(link, (OSError, KeyboardInterrupt, SystemExit))]
    if first and not isinstance(first[-1], OSError):
        raise first[-1]
    return first[-1] if first else chain[0]


def dtype_name(dtype: torch.dtype) -> str:
    return next(name for name, known in DTYPES.items() if known == dtype)


def some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
