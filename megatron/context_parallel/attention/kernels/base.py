# SPDX-License-Identifier: Apache-2.0
"""The contract of an attention kernel: it adds a list of tiles to sums in fp32: to out and lse, or to dq, dk and dv.

Tensors are ``[s, b, heads, d]`` with any strides: q, dq ``[s, b, h, d]``; k, dk ``[t, b, hk, d]`` with hk dividing h;
v, dv ``[t, b, hk, dv]``; out, dout ``[s, b, h, dv]``, where dv is d for kernels without ``supports_value_dim``; lse and
delta ``[s, b, h]``. Query head i reads key head ``i // (h // hk)``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron.context_parallel.attention.kernels.sums import Accumulator, GradientSum, KeyGradients
from megatron.context_parallel.layout.masks import Mask
from megatron.context_parallel.layout.tiles import Tiles
from megatron.context_parallel.positions.position_dropout import Dropout
from megatron.decisions.block_sizes import BlockTable

Capability = tuple[int, int]


class KernelUnavailable(ValueError):
    """The requested kernel cannot run. ``reason`` is one line with the alternatives."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f'kernel="{name}": {reason}')
        self.name, self.reason = name, reason

    def __reduce__(self) -> tuple:  # for pickle
        return type(self), (self.name, self.reason)


@dataclass(frozen=True)
class Scores:
    """How the weight of a (query, key) pair follows from ``q @ k^T``.

    Attributes:
        scale: factor on q @ k^T, above 0.
        mask: evaluated for each pair of a masked tile; already reduced to what matters within tiles (``inside_tiles``).
        slopes: of ALiBi, fp32 [heads], for the heads in q and on their device: ``slope * |distance|`` is subtracted.
        mask_in_host: masks of pairs are made in host memory and copied to the device, a block of rows at a time.
        dropout: of the weights of the softmax over *all* keys, for the samples and heads in q. It does not change lse,
            so that tiles are merged as without dropout.
        softcap: a score s becomes ``softcap * tanh(s / softcap)``, before ALiBi.
        measured: block sizes of Triton's kernels that were measured on this machine.
    """

    scale: float
    mask: Mask | None = None
    slopes: Tensor | None = None
    mask_in_host: bool = False
    dropout: Dropout | None = None
    softcap: float | None = None
    measured: BlockTable | None = None


class Final(NamedTuple):
    """The gradient of the output, and the *final* results of these queries, merged over all their tiles."""

    dout: Tensor
    out: Tensor | None  # not needed by kernels with a delta
    lse: Tensor
    delta: Tensor | None  # from :meth:`Kernel.delta`


class Kernel(Protocol):
    """The softmax over tiles, forward and backward; plain functions of tensors, without autograd.

    The forward pass merges the outputs of tiles by the log-sum-exp of their scores. The backward pass uses the *final*
    lse and out: with ``p = exp(scale * q k^T - lse)`` and ``delta = rowsum(dout * out)``, the sum of the tiles'
    gradients is the gradient of the complete attention. Under dropout, v is multiplied by p / (probability of keeping)
    for kept pairs and by 0 for the others. A query without any key has out 0, lse -inf and gradient 0.
    """

    name: str
    supports_mask: bool
    supports_bias: bool  # of a score: ALiBi
    supports_dropout: bool
    supports_softcap: bool
    supports_value_dim: bool

    def why_not(self, *, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """None if the kernel can run on these tensors, else a short reason, for example "needs a GPU".

        ``head_dim``: the larger head size of keys and values.
        """
        ...

    def why_not_on(self, capability: Capability, dtype: torch.dtype, head_dim: int) -> str | None:
        """Like :meth:`why_not`, for a GPU of this capability on another machine that has the newest packages."""
        ...

    def attend(
        self, tiles: Tiles, q_SBHD: Tensor, k_SBHD: Tensor, v_SBHD: Tensor, scores: Scores, result: Accumulator
    ) -> None:
        """Merge tiles into ``result``. Their row numbers are indices into q, and into k and v."""
        ...

    def attend_grad(
        self,
        tiles: Tiles,
        q_SBHD: Tensor,
        k_SBHD: Tensor,
        v_SBHD: Tensor,
        scores: Scores,
        final: Final,
        dq: GradientSum,
        dkv: KeyGradients,
    ) -> None:
        """Add the gradients of tiles to ``dq`` and ``dkv``."""
        ...

    def delta(self, out_SBHD: Tensor, dout_SBHD: Tensor) -> Tensor | None:
        """Row sums of ``dout * out``, fp32 [s, b, heads]; None if the kernel uses ``out`` itself."""
        ...


def package_reason(package: str, wanted: str, fits: Callable[[str], bool], load: Callable[[], Any]) -> str | None:
    """Why a package cannot be used, or None.

    Args:
        wanted: its name and versions, for pip.
        fits: whether a version is one whose source was read.
        load: imports what is used of it.
    """
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        return f"needs the package {wanted}: pip install '{wanted}'"
    if not fits(version):
        return f"needs {wanted}, and {version} is installed: pip install '{wanted}'"
    try:
        load()
    except Exception as error:  # made for other versions of what it uses: ImportError, OSError and others
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        return f"{package} {version} cannot be imported: {why}"
    return None


def gpu_reason(device: torch.device) -> str | None:
    """Why GPU kernels cannot run on a device, or None."""
    return "needs a GPU" if device.type != "cuda" or not torch.cuda.is_available() else None
