# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels as a GPU runs them, against attention's definition in float64."""

from __future__ import annotations

import pytest
import torch

from megatron.context_parallel.attention.kernels.triton_kernels.triton_kernel import missing_triton
from tests.unit.test_triton import EXTRAS, MASKS, ZIGZAG, check
from tests.unit.triton_cases import Case, errors

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or missing_triton() is not None, reason=missing_triton() or "needs a CUDA device"
)

GPU = torch.device("cuda")
LONG = {"q_at": ((0, 611), (1789, 2400)), "blocks": (((0, 611), (1789, 2400)), ((611, 1789),))}


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("mask", MASKS)
def test_fp32(mask, extra):
    check(errors(Case(MASKS[mask], **ZIGZAG, **EXTRAS[extra]), GPU), 2e-5)


@pytest.mark.parametrize("head, value", [(64, 64), (128, 128), (80, 80), (192, 128), (256, 256)])
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("mask", MASKS)
def test_bf16(mask, extra, head, value):
    case = Case(MASKS[mask], **LONG, h=4, hk=2, d=head, dv=value, dtype=torch.bfloat16, **EXTRAS[extra])
    if mask == "documents":
        case = Case(MASKS[mask], **ZIGZAG, h=4, hk=2, d=head, dv=value, dtype=torch.bfloat16, **EXTRAS[extra])
    check(errors(case, GPU), 2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_any_strides(dtype):
    check(errors(Case(MASKS["two-sided"], layout="strided", b=2, **LONG, dtype=dtype), GPU), 1e-2)
