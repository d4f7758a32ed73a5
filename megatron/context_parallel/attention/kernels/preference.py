# SPDX-License-Identifier: Apache-2.0
"""Which kernel is the fastest on which GPU: the order in which ``auto`` tries them.

What decides, until a table of our own measurements does:

- Hopper: flash-attn 3 and cuDNN are written for it and run 1.6 to 1.75 times as fast as FlashAttention-2, which knows
  none of its instructions (FlashAttention-3 paper, figure 5).
- Blackwell's data-centre GPUs: cuDNN is as fast as FlashAttention-4 (flash-attention pull request 2605); what the
  package calls version 2 has nothing of theirs.
- Ampere, Ada and Blackwell's other GPUs: FlashAttention-2; cuDNN gets 0.82 to 1.0 of it (Hugging Face's transformers,
  pull request 48163: A100, A10G, L40S, RTX PRO 6000).
- Many tiles, of many shapes: Triton's kernel does them in one launch. cuDNN plans on the host for each new shape.
"""

from __future__ import annotations

HOPPER, BLACKWELL = (9,), (10, 11)  # major versions; 12 has the instructions of 8 for this


def preferred(
    capability: tuple[int, int] | None, *, flash_attn: int | None = None, many_tiles: bool = False
) -> tuple[str, ...]:
    """Names of kernels, best first, whether or not they can run; the slow ones that can everything come last.

    Args:
        capability: of the GPU; None: a CPU.
        flash_attn: version of the package that would run on it; None: not installed.
        many_tiles: the mask makes many small tiles, or tiles of many shapes: windows, documents, block-sparse.
    """
    if capability is None:
        return ("cpu", "triton", "math", "flash_attn", "cudnn", "flash")
    major = capability[0]
    if major in HOPPER:
        fused = ["flash_attn", "cudnn", "flash"] if flash_attn == 3 else ["cudnn", "flash_attn", "flash"]
    elif major in BLACKWELL:
        fused = ["cudnn", "flash_attn", "flash"]
    else:
        fused = ["flash_attn", "flash", "cudnn"]
    if many_tiles:
        fused.remove("cudnn")
        return ("triton", *fused, "cudnn", "cpu", "math")
    return (*fused, "triton", "cpu", "math")
