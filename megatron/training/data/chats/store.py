# SPDX-License-Identifier: Apache-2.0
"""The tokens of a file of chats: rendered once, by the first rank, and kept beside the data."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from array import array
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from megatron.training.arguments.config import DataConfig
from megatron.training.data.chats.read import read_chats
from megatron.training.data.chats.template import ChatTemplate
from megatron.training.data.files import load_numbers
from megatron.training.data.reading import DataError, FileArray, unmapped
from megatron.training.data.whole_folder import check_whole, whole_folder
from megatron.training.refusal import Refusal, one_line

logger = logging.getLogger(__name__)
PARTS = {"tokens": np.int32, "spoken": np.bool_, "starts": np.int64, "lines": np.int64}


@dataclass(frozen=True)
class Store:
    """The conversations of one file, one after another.

    Attributes:
        tokens: int32 [all tokens].
        spoken: bool [all tokens], the assistant's.
        starts: int64 [conversations + 1], where each begins, and the end.
        lines: int64 [conversations], the line in the file.
    """

    path: str
    tokens: np.ndarray | FileArray
    spoken: np.ndarray | FileArray
    starts: np.ndarray | FileArray
    lines: np.ndarray | FileArray

    def __len__(self) -> int:
        return len(self.lines)

    def lengths(self) -> np.ndarray:
        """Tokens of each conversation."""
        return np.diff(self.starts)


def render(path: str, flag: str, template: ChatTemplate, bar: bool = False) -> Store:
    """All conversations of a file as tokens.

    Raises:
        Refusal: the first that is none, or that the template cannot render, with file and line; or there is none.
    """
    tokens, spoken, starts, lines = array("i"), bytearray(), array("q", [0]), array("q")
    with tqdm(unit=" chats", desc=os.path.basename(path), disable=None if bar else True) as progress:
        for chat in read_chats(path, flag):
            rendered = template(chat)
            tokens.frombytes(rendered.ids.tobytes())
            spoken += rendered.spoken.tobytes()
            starts.append(len(tokens))
            lines.append(int(chat.where.rpartition(" ")[2]))
            progress.update()
    if not lines:
        raise Refusal(f"{flag} {path}: it holds no conversations")
    parts = (np.frombuffer(part, kind) for part, kind in zip((tokens, spoken, starts, lines), PARTS.values()))
    return Store(path, *parts)


def folder_of(path: str, template: ChatTemplate, data: DataConfig) -> str:
    """Where the tokens of a file are kept: by all that they depend on."""
    import transformers

    stat, tokenizer = os.stat(path), template.tokenizer
    text = json.dumps(
        [
            os.path.abspath(path),
            stat.st_size,
            stat.st_mtime_ns,
            tokenizer.backend_tokenizer.to_str(),
            str(sorted(tokenizer.special_tokens_map.items())),
            template.given or tokenizer.chat_template,
            transformers.__version__,
            "3",  # of the form of the folder, and of this program's way to find the assistant's words
        ],
        sort_keys=True,
    )
    root = data.data_cache_path or os.path.join(os.path.dirname(os.path.abspath(path)), "index-cache")
    return os.path.join(root, "chats-" + hashlib.sha256(text.encode()).hexdigest()[:24])


def keep(store: Store, folder: str) -> None:
    """Write a store into a folder that appears whole; without one where nothing can be written."""
    try:
        with whole_folder(folder) as temporary:
            for name in PARTS:
                np.save(os.path.join(temporary, f"{name}.npy"), getattr(store, name))
    except OSError as error:
        if not os.path.isdir(folder):  # else another run was faster
            logger.warning("no cache of tokens in %s (%s): every rank renders the chats", folder, error.strerror)


def kept(path: str, folder: str) -> Store | None:
    """The store in a folder, read from its files; None where there is no folder.

    Raises:
        Refusal: the folder is damaged.
    """
    if not os.path.isdir(folder):
        return None
    try:
        parts = [unmapped(load_numbers(os.path.join(folder, f"{name}.npy"))) for name in PARTS]
        store = Store(path, *parts)
        same = [(part.dtype, part.ndim) for part in parts] == [(np.dtype(kind), 1) for kind in PARTS.values()]
        if not same or not len(store.starts) == len(store.lines) + 1 > 1:
            raise ValueError("its parts do not fit together")
        if not len(store.tokens) == len(store.spoken) == store.starts[-1]:
            raise ValueError("its parts do not fit together")
        if store.starts[0] != 0 or (store.starts[1:] <= store.starts[:-1]).any():
            raise ValueError("its conversations do not follow one another")
    except (OSError, ValueError, DataError) as error:
        raise Refusal(f"{folder} holds no tokens of chats ({one_line(error, 100)}): remove it") from None
    check_whole(folder)
    return store
