# SPDX-License-Identifier: Apache-2.0
"""The parts of ``cp.certify`` that need one process: limits, factors, rows, small shapes, the tool."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch

import megatron.context_parallel as cp
from megatron.certifying import rounding
from megatron.certifying.bisecting import _between
from megatron.certifying.certificate import Certificate, OnGrid, check_finite
from megatron.certifying.comparing import Compared, fitted, listed
from megatron.certifying.of_torch.choices import Choice, Choices
from megatron.certifying.processes_of_program import _how
from megatron.certifying.programs.small_shape import flags_of_grid, grids_of, left_out, small_flags
from megatron.certifying.recording import GRADIENT, Recording, Reference
from megatron.certifying.rows import part_of, zigzag
from megatron.certifying.sight import reach
from megatron.training.arguments.parser import parse
from megatron.training.settings.models import LLAMA_DEFAULTS
from tools import certify


def test_the_limit_bounds_false_alarms() -> None:
    """For normal errors the share of false alarms is below the given probability and above a tenth of it."""
    draws = torch.randn(200_000, 5, generator=torch.Generator().manual_seed(0)).abs()
    limit = rounding.factor(4, 1, false_alarms=0.01)
    share = float((draws[:, 4] > limit * draws[:, :4].amax(1)).double().mean())
    assert 0.001 < share <= 0.01


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rounding_changes_results_by_their_last_bits_and_no_integers(dtype: torch.dtype) -> None:
    x, count = torch.rand(100).to(dtype), torch.ones(7, dtype=dtype)
    right = x * 3
    with rounding.Rounding(0):
        changed, total = x * 3, count.sum()
        view = x[3:5]
    error = float(((changed - right) / right).abs().max())
    assert 0 < error <= 1.6 * torch.finfo(dtype).eps and total == 7 and torch.equal(view, x[3:5])


@pytest.mark.parametrize("kind", ["topk", "max", "argmax", "argmin", "sort", "dim 0", "smallest"])
def test_a_choice_is_replayed_only_among_scores_that_agree(kind: str) -> None:
    """Rows in another order: a tie, a tie of masked scores, a choice of other scores, a gap above the limit."""
    scores = torch.tensor([[0.5, 0.5, 0.1], [0.3, -torch.inf, 0.3], [0.9, 0.8, 0.8], [0.2, 0.7, 0.7 + 1e-3]])
    moved = torch.tensor([[-1e-7, 1e-7, 0], [0, 0, 1e-7], [-0.5, 0, 1e-7], [0, 2e-3, 0]])
    largest, k = kind not in ("smallest", "argmin"), {"topk": 2, "sort": 3}.get(kind, 1)
    one, ranks = (scores, scores + moved) if largest else (-scores, -scores - moved)

    def choose(x: torch.Tensor) -> torch.Tensor:
        if kind == "dim 0":
            return x.T.topk(1, dim=0).indices.T
        if kind.startswith("arg"):
            return getattr(x, kind)(-1, keepdim=True)
        if kind == "sort":
            return x.argsort(-1, descending=True)
        return x.max(-1, keepdim=True).indices if kind == "max" else x.topk(k, largest=largest).indices

    right = torch.tensor([[0, 1, 2], [0, 2, 1], [0, 1, 2], [2, 1, 0]])[:, :k]
    given = [Choice(one.double(), right, largest, 1e-6, "router")]
    order, own = torch.tensor([3, 1, 0, 2]), torch.tensor([[1, 0, 2], [2, 0, 1], [2, 1, 0], [1, 2, 0]])[:, :k]
    assert choose(ranks).equal(own)
    with Choices(given) as choices:
        assert choose(ranks[order])[[2, 1]].equal(given[0].chosen[:2]), "ties"
        assert choose(ranks[order])[[3, 0]].equal(own[2:]), "other scores"
    flip = choices.flips[0]
    assert (flip.module, flip.row, flip.right) == ("router", 1, given[0].chosen[1].tolist()) and flip.gap == 0
    x = ranks[:1].clone().requires_grad_()
    with Choices(given):
        x.topk(1, largest=largest).values.sum().backward()
    if k == 1:
        assert x.grad.tolist() == [[1, 0, 0]], "the gradient is that of the other score"


def test_factor_and_cosine() -> None:
    x = torch.tensor([3.0, 4.0])
    assert fitted(2 * x, x) == pytest.approx((2.0, 1.0)) and fitted(x.flip(0) * torch.tensor([1, -1]), x)[1] == 0
    assert listed([0, 1, 2, 3, 6]) == "0-3, 6"


def test_rows_of_samples_that_are_flattened_with_positions() -> None:
    whole, own = torch.randn(16, 2, 6), zigzag(16, 1, 2)
    for flat in (whole.flatten(0, 1), whole.transpose(0, 1).flatten(0, 1)):
        by_position = flat.equal(whole.flatten(0, 1))
        part = whole[own].flatten(0, 1) if by_position else whole[own].transpose(0, 1).flatten(0, 1)
        rows, _ = part_of(flat, part, {len(own): own}, 16)
        assert torch.equal(rows, part)
    heads, _ = part_of(whole, whole[:, :, 3:] * 1.01, {len(own): own}, 16)
    assert torch.equal(heads, whole[:, :, 3:]) and part_of(whole, -whole[:, :, :3], {len(own): own}, 16) is None


def test_the_module_whose_code_runs_between_two_modules() -> None:
    assert _between("a.attention.v", "a.attention.o") == "a.attention"
    assert (
        _between("embed", "a.norm", other_is_later=True) == "a"
        and _between("a.norm", "embed", other_is_later=False) == "a.norm"
    )


def test_two_windows_reach_twice_as_far() -> None:
    seen = reach(cp.Window(3).allowed, 2, 16)
    assert seen[10].nonzero().flatten().tolist() == list(range(4, 11))


COMMAND = (
    "torchrun --nproc-per-node 16 pretrain_llama.py --model llama3-8b --seq-length 131072 --micro-batch-size 1 "
    "--global-batch-size 8 --train-iters 100 --lr 1e-4 --mock-data --vocab-size 128256 --save out/x --log-interval 7"
)


@pytest.mark.parametrize(
    "flags, kept",
    [
        ("--tensor-model-parallel-size 2 --sequence-parallel --bf16 --zero-stage 1", "--bf16 --zero-stage"),
        ("--ulysses-parallel-size 4 --fpdt --zero-stage 3", "--fpdt --fpdt-chunk-size --zero-stage"),
        ("--ring-parallel-size 8 --attention-mask window --window-size 4095,0", "--attention-mask --window-size=2,0"),
        ("--context-parallel-size 4 --pipeline-model-parallel-size 2 --lora-rank 8", "--lora-rank"),
        ("--model deepseek-v3 --ulysses-parallel-size 4 --ring-parallel-size 2", "--q-lora-rank --moe-layer-freq"),
        ("--attention-mask block-sparse --global-batch-size 16 --attention-dropout 0.1", "--sparse-block-size"),
    ],
)
def test_a_small_program_has_the_flags_of_the_command(flags: str, kept: str) -> None:
    words = f"{COMMAND} {flags}".split()[4:]
    config = parse(words, LLAMA_DEFAULTS, 16)
    small = small_flags(config)
    assert set(kept.split()) <= set(small) and not {"--save", "--log-interval", "--model"} & set(small)
    for grid in [{}, *grids_of(config, 16)]:
        ranks = 2 ** len(grid)
        result = parse(flags_of_grid(small, grid), world_size=ranks)
        assert result.model.hidden_size <= 128 and result.data.seq_length == 64
        assert result.model.position_embedding_type == config.model.position_embedding_type
        assert result.optimizer.bf16 == config.optimizer.bf16


def test_axes_of_a_command_are_taken_alone_and_in_pairs() -> None:
    words = f"{COMMAND} --tensor-model-parallel-size 2 --ring-parallel-size 4".split()[4:]
    config = parse(words, LLAMA_DEFAULTS, 16)
    grids = grids_of(config, 16)
    assert {"ring": 2} in grids and {"tensor": 2, "data": 2} in grids and len(grids) == 6
    assert len(grids_of(config, 16, processes=2)) == 3
    config.model.fp8_format, config.attention.attention_kernel = "hybrid", "cudnn"
    assert [note.split()[0] for note in left_out(config)] == ["--fp8-format", "--attention-kernel"]
    config.model.fp8_format, config.attention.attention_kernel = None, "auto"
    config.model.num_experts, config.parallel.expert_model_parallel_size = 8, 4
    assert left_out(config) == ["--expert-model-parallel-size 4: checked with all experts on each rank"]


@pytest.mark.parametrize(
    "words, message",
    [
        ("", "no program"),
        ("nothing", "no training command"),
        ("a.py:step", "give its grids"),
        ("--grid ranks=x a.py:step", "give sizes from 1 to 64"),
    ],
)
def test_the_tool_refuses_in_one_line(words: str, message: str, capsys: pytest.CaptureFixture) -> None:
    assert certify.main(words.split()) == 2
    out, error = capsys.readouterr()
    assert not out and error.startswith("error: ") and message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"auto_map": {"AutoConfig": "a.B"}}', "auto_map asks for code"),
        ("[]", "not a JSON object"),
        ('{"num_hidden_layers": 100000000}', "'num_hidden_layers' 100000000 is not a number"),
    ],
)
def test_a_config_json_that_asks_for_too_much_is_refused(text: str, message: str, tmp_path, capsys) -> None:
    (tmp_path / "config.json").write_text(text)
    for given in (tmp_path, tmp_path / "config.json"):
        assert certify.main([str(given)]) == 2
        assert message in (error := capsys.readouterr().err) and error.count("\n") == 1


def test_the_tool_refuses_a_command_as_the_program_does(capsys: pytest.CaptureFixture) -> None:
    assert certify.main("pretrain_gpt.py --num-layers 2".split()) == 2
    assert "--hidden-size" in capsys.readouterr().err


def test_a_certificate_can_be_printed_and_drawn(tmp_path: Path) -> None:
    good = Compared((GRADIENT, "a.weight"), (1e-7, 2e-7), 1e-6, 1.0, 1.0)
    bad = Compared((GRADIENT, "b.weight"), (1e-7, 1.0), 1e-6, 2.0, 1.0)
    certificate = Certificate([OnGrid({"ring": 2}, [good, bad]), OnGrid({"ulysses": 2}, [good])])
    text = str(certificate)
    assert not certificate.right and "b.weight: error 1.0e+00" in text and "2 times the right one" in text
    assert text.endswith("WRONG: results differ from one process on ring 2") and "ranks 1" in text
    certificate.draw(str(tmp_path / "picture.png"))
    assert (tmp_path / "picture.png").stat().st_size > 5000


@pytest.mark.parametrize(
    "numbers, message",
    [
        ({("loss", "0"): torch.tensor(float("nan"))}, "loss 0 is not finite"),
        ({("loss", "0"): torch.tensor(1.0), (GRADIENT, "a"): None}, "no parameter has a gradient"),
    ],
)
def test_a_program_without_finite_losses_and_gradients_is_refused(numbers: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_finite(Reference(Recording(numbers), {}, 8))


def test_nothing_to_compare_is_refused() -> None:
    with pytest.raises(ValueError, match="no grids"):
        cp.certify(lambda: None, [])


def end_by_signal() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_ends_without_an_error_is_explained() -> None:
    process = multiprocessing.get_context("fork").Process(target=end_by_signal)
    process.start()
    assert "too little memory" in _how(process)


def test_many_experts_become_narrow() -> None:
    config = parse("--model deepseek-v3.2 --seq-length 256 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data "
                   "--vocab-size 99".split(), None, 1)  # fmt: skip
    flags = " ".join(small_flags(config))
    assert "--moe-ffn-hidden-size 32 --moe-shared-expert-intermediate-size 32" in flags and "--num-experts 256" in flags
