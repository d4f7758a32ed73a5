# SPDX-License-Identifier: Apache-2.0
"""The update of the weights in few launches: equal to core's own, and counted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer import optimizer as core_optimizer
from megatron.core.utils import local_multi_tensor_l2_norm, local_multi_tensor_scale
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.training.model.updates import update


class Calls(TorchDispatchMode):
    """Counts the operators that run: on a GPU each is at least one launch."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func._schema.name.startswith(("aten::detach", "aten::view", "aten::alias"))
        return func(*args, **(kwargs or {}))


SHAPES = [(30, 7), (11,), (4, 5, 6), (1,)] * 10


def drawn(seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def test_norms_scales_and_copies_are_cores() -> None:
    """Each as core's own function, in a number of calls that does not grow with the number of tensors."""
    grads, buffer = drawn(1), torch.zeros(1, dtype=torch.int)
    wanted, _ = local_multi_tensor_l2_norm_on_cpu(grads)
    with Calls() as calls:
        norm, _ = update._norm(0, buffer, [grads])
    assert norm.shape == (1,) and float(norm) == pytest.approx(float(wanted), rel=1e-6)
    mine, theirs = [x.clone() for x in grads], [x.clone() for x in grads]
    with Calls() as calls:
        update._scale(0, buffer, [mine, mine], 0.37)
    with Calls() as others:
        local_multi_tensor_scale(0, buffer, [theirs, theirs], 0.37)
    assert all(torch.equal(x, y) for x, y in zip(mine, theirs)) and calls.count <= 2 < others.count / 20
    narrow, same = drawn(2, torch.bfloat16), drawn(2, torch.bfloat16)
    with Calls() as calls:
        update._copy(grads, narrow)
    for x, y in zip(grads, same):
        y.copy_(x)
    assert all(torch.equal(x, y) for x, y in zip(narrow, same)) and calls.count == 1
    update._copy([], [])


def local_multi_tensor_l2_norm_on_cpu(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, None]:
    return torch.stack([torch.norm(tensor) for tensor in tensors]).norm().view(1), None


def test_fused_functions_of_other_libraries_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    def theirs(*_: object) -> None: ...

    monkeypatch.setattr(clip_grads, "l2_norm_impl", theirs)
    monkeypatch.setattr(clip_grads, "multi_tensor_scale_impl", local_multi_tensor_scale)
    monkeypatch.setattr(core_optimizer, "multi_tensor_scale_impl", theirs)
    monkeypatch.setattr(core_optimizer, "_multi_tensor_copy_this_to_that", theirs)
    update.use_multi_tensor_calls()
    assert clip_grads.l2_norm_impl is core_optimizer.multi_tensor_scale_impl is theirs
    assert clip_grads.multi_tensor_scale_impl is update._scale
    assert local_multi_tensor_l2_norm.__module__ == update.FALLBACK


class Part:
    """As much of core's optimizer as an update needs, around PyTorch's Adam."""

    def __init__(self, fused: bool, clip: float) -> None:
        self.parameters = [x.requires_grad_() for x in drawn(3)]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-2, weight_decay=0.1, foreach=False)
        self.config = SimpleNamespace(clip_grad=clip, log_num_zeros_in_grad=False)
        for parameter in self.parameters:
            zeros = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[parameter] = {"step": torch.zeros(()), **zeros}
        if fused:
            update.use_fused_adam(self)

    def get_parameters(self) -> list[torch.Tensor]:
        return self.parameters

    def prepare_grads(self) -> bool:
        return False

    def get_grad_norm(self) -> float:
        return float(update._norm(0, None, [[x.grad for x in self.parameters]])[0])

    def step_with_ready_grads(self) -> bool:
        self.optimizer.step()
        return True


@pytest.mark.parametrize("clip", [0.0, 0.5, 1e6])
def test_the_fused_update_is_adams(clip: float) -> None:
    """Five updates, clipped or not, against PyTorch's plain loop with clipped gradients; few calls in each."""
    mine, plain = Part(True, clip), Part(False, clip)
    for step in range(5):
        for part in (mine, plain):
            for parameter, grad in zip(part.parameters, drawn(10 + step)):
                parameter.grad = grad
        with Calls() as calls:
            updated, norm, zeros = update.update(mine, lambda _: True)
        assert updated and zeros is None and calls.count < 60
        if clip:
            torch.nn.utils.clip_grad_norm_(plain.parameters, clip)
        with Calls() as others:
            plain.optimizer.step()
        assert others.count > 5 * calls.count
        assert getattr(mine.optimizer, "grad_scale", None) is None
    for x, y in zip(mine.parameters, plain.parameters):
        assert torch.allclose(x, y, rtol=1e-6, atol=1e-7)
    for x, y in zip(mine.parameters, plain.parameters):
        states = mine.optimizer.state[x], plain.optimizer.state[y]
        assert all(torch.allclose(states[0][name], states[1][name], rtol=1e-5, atol=1e-9) for name in states[0])


def test_a_bad_norm_changes_nothing() -> None:
    part, seen = Part(True, 1.0), []
    before = [x.detach().clone() for x in part.parameters]
    for parameter, grad in zip(part.parameters, drawn(4)):
        parameter.grad = grad
    updated, norm, _ = update.update(part, lambda norm: bool(seen.append(norm)))
    assert not updated and seen == [norm]
    assert all(torch.equal(x, y) for x, y in zip(before, part.parameters))
