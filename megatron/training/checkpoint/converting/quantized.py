# SPDX-License-Identifier: Apache-2.0
"""Weights in MXFP4 (gpt-oss) and FP8 (DeepSeek V3), which are dequantized when they are read.

MXFP4 (Open Compute Project, microscaling formats 1.0): a tensor ``NAME_blocks`` with two FP4 numbers a byte, the lower
half first, 32 in a block, and ``NAME_scales`` with an exponent a block. transformers has NAME as [experts, in, out].
FP8 in blocks (DeepSeek V3): ``NAME`` in e4m3, and ``NAME_scale_inv`` with a factor for each block of a matrix; the
last blocks of a matrix may be smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.training.checkpoint.hugging_face.safetensors_folder import Entry, Header, dtype_name
from megatron.training.refusal import Refusal

CONFIG = "quantization_config"
BLOCKS, SCALES, FACTORS = "_blocks", "_scales", "_scale_inv"
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # and their negatives
BIAS = 127  # of an exponent of MXFP4
Read = Callable[[str], Tensor]


@dataclass(frozen=True)
class Quantized:
    """How the weights of a folder are quantized.

    Attributes:
        method: mxfp4 or fp8.
        where: the folder's config.json, for messages.
        block: rows and columns of a block of FP8.
    """

    method: str
    where: Path
    block: tuple[int, int] = (128, 128)

    def headers(self, headers: Mapping[str, Header]) -> dict[str, Header]:
        """The headers as if the weights were in bf16.

        Raises:
            Refusal: a scale is missing, or does not fit its weight.
        """
        entries = {name: entry for header in headers.values() for name, entry in header.entries.items()}
        return {
            file: Header(
                header.text, dict(self._plain(name, entries) for name in header.entries if self._kept(name)), {}
            )
            for file, header in headers.items()
        }

    def _kept(self, name: str) -> bool:
        return not name.endswith(SCALES if self.method == "mxfp4" else FACTORS)

    def _plain(self, name: str, entries: Mapping[str, Entry]) -> tuple[str, Entry]:
        """(name, entry) of a weight as if it were in bf16."""
        entry = entries[name]
        if self.method == "mxfp4" and name.endswith(BLOCKS):
            stem = name.removesuffix(BLOCKS)
            scale = entries.get(stem + SCALES)
            if (
                stem in entries
                or entry.shape[3:] != (16,)
                or entry.dtype != "U8"
                or scale is None
                or scale.dtype != "U8"
            ):
                raise Refusal(
                    f"{self.where}: {CONFIG} mxfp4: {name} is no MXFP4 weight of all experts with {stem + SCALES} in U8"
                )
            self._check_shape(stem + SCALES, scale, name, entry.shape[:-1])
            experts, out, blocks, half = entry.shape
            return stem, Entry("BF16", (experts, blocks * half * 2, out), 0, 0)
        if self.method == "fp8" and entry.dtype == "F8_E4M3":
            scale = entries.get(name + FACTORS)
            if len(entry.shape) != 2 or scale is None or scale.dtype not in ("F32", "BF16"):
                raise Refusal(
                    f"{self.where}: {CONFIG} fp8: {name} is no FP8 matrix with {name + FACTORS} in F32 or BF16"
                )
            wanted = tuple(-(-size // step) for size, step in zip(entry.shape, self.block))
            self._check_shape(name + FACTORS, scale, f"{name} with weight_block_size {list(self.block)}", wanted)
            return name, Entry("BF16", entry.shape, 0, 0)
        return name, entry

    def _check_shape(self, name: str, scale: Entry, weight: str, wanted: tuple[int, ...]) -> None:
        if scale.shape != wanted:
            raise Refusal(f"{self.where}: {name} is {list(scale.shape)}, but {weight} requires {list(wanted)}")

    def reader(self, read: Read, headers: Mapping[str, Header], dtype: torch.dtype) -> Read:
        """A function that reads a weight by its name in :meth:`headers`, dequantized to ``dtype``.

        It raises a Refusal if the result is not finite.
        """
        entries = {name: entry for header in headers.values() for name, entry in header.entries.items()}

        def dequantized(name: str) -> Tensor:
            if self.method == "mxfp4" and name + BLOCKS in entries:
                return finite(from_mxfp4(read(name + BLOCKS), read(name + SCALES), dtype), name + SCALES)
            if self.method == "fp8" and entries[name].dtype == "F8_E4M3":
                return finite(from_fp8(read(name), read(name + FACTORS), self.block, dtype), name + FACTORS)
            return read(name)

        def finite(weight: Tensor, scales: str) -> Tensor:
            if not all(one.isfinite().all() for one in weight.split(1 if weight.dim() == 3 else weight.size(0))):
                raise Refusal(
                    f"{self.where.parent}: {scales} with its weight gives NaN or infinity in {dtype_name(dtype)}: the "
                    "file is damaged, or --dtype too narrow"
                )
            return weight

        return dequantized


def quantization(config: Mapping[str, Any], where: Path) -> Quantized | None:
    """How the weights of a config.json are quantized; None if they are not.

    Raises:
        Refusal: in a way that is not supported.
    """
    given = config.get(CONFIG)
    if not given:
        return None
    method = given.get("quant_method") if isinstance(given, dict) else None
    if method == "mxfp4":
        return Quantized(method, where)
    if method != "fp8":
        raise Refusal(f"{where}: {CONFIG} with quant_method {method!r} is not supported: only mxfp4 and fp8 in blocks")
    block = given.get("weight_block_size")
    sizes = isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
    if not sizes or given.get("fmt", "e4m3") != "e4m3":
        raise Refusal(f"{where}: {CONFIG} fp8 needs weight_block_size, two numbers above 0, and fmt e4m3")
    return Quantized(method, where, (block[0], block[1]))


def from_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 [experts, out, blocks, 16] and uint8 [experts, out, blocks] -> ``dtype`` [experts, in, out], a view."""
    numbers = torch.tensor([sign * number for sign in (1.0, -1.0) for number in FP4], dtype=dtype)
    result = torch.empty(*blocks.shape[:2], blocks.size(2) * blocks.size(3) * 2, dtype=dtype)
    for one, expert, exponents in zip(result, blocks, scales):  # one expert at a time, to save memory
        halves = torch.stack((expert & 15, expert >> 4), dim=-1).flatten(-2)  # [out, blocks, 32]
        wide = torch.ldexp(numbers[halves.int()], exponents.int()[..., None] - BIAS)
        one.copy_(wide.flatten(-2))
    return result.transpose(1, 2)


def from_fp8(weight: Tensor, factors: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """e4m3 [n, m] and its factors for blocks -> ``dtype`` [n, m]; the products are in fp32."""
    result, columns = torch.empty(weight.shape, dtype=dtype), weight.size(1)
    for rows, out, row in zip(weight.split(block[0]), result.split(block[0]), factors):
        out.copy_(rows.float() * row.repeat_interleave(min(block[1], columns))[:columns])
    return result
