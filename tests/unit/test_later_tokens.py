# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction: shifted batches, what is refused, FLOPs and the name in the log."""

from __future__ import annotations

import pytest
import torch

from megatron.training.arguments.parser import parse
from megatron.training.data.batches import shifted
from megatron.training.refusal import Refusal
from megatron.training.report.mfu import step_flops
from megatron.training.settings.models import LLAMA_DEFAULTS

BASE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --micro-batch-size 1 --train-iters 4 "
    "--lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 301 --device cpu"
)
MTP = "--mtp-num-layers 1"


@pytest.mark.parametrize(
    "flags",
    ["--fpdt-stream-hidden --fpdt", "--lora-rank 4", "--embed-layernorm", "--hidden-dropout 0.1",
     "--position-embedding-type learned_absolute --max-position-embeddings 64", "--fp8-format hybrid",
     "--offload-checkpoints",
     "--elastic --gpu H100-80G --save out/a --load out/a --global-batch-size 2"],
)  # fmt: skip
def test_refused(flags: str) -> None:
    with pytest.raises(Refusal, match=f"--mtp-num-layers 1 with {flags.split()[0]}") as caught:
        parse(f"{BASE} {MTP} {flags}".split(), LLAMA_DEFAULTS, 1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("flags", ["--mtp-num-layers -1", "--mtp-loss-scaling-factor -0.1"])
def test_ranges(flags: str) -> None:
    with pytest.raises(Refusal, match=flags):
        parse(f"{BASE} {MTP} {flags}".split(), LLAMA_DEFAULTS, 1)


def test_the_planner_refuses_it(capsys) -> None:
    from tools.plan import main

    shape = "--num-layers 2 --hidden-size 64 --num-attention-heads 8 --vocab-size 301"
    assert main([*f"{shape} {MTP} --seq-length 64 --gpus 8 --gpu H100-80G".split()]) == 2
    assert "--mtp-num-layers 1: the planner does not know" in capsys.readouterr().err


def test_shifted() -> None:
    batch = {"tokens": torch.tensor([[1, 2, 3, 4, 5, 6]]), "labels": torch.tensor([[2, 3, 4, 5, 6, 7]])}
    batch |= {"loss_mask": torch.tensor([[1.0, 1, 1, 1, 0, 1]]), "document_ends": torch.tensor([[4, 6]])}
    one = shifted(batch, torch.tensor([5, 0, 3, 2, 4]), 1)  # rows of a rank may lie anywhere
    assert one["tokens"].tolist() == [[0, 2, 5, 4, 6]] and one["labels"].tolist() == [[0, 3, 6, 5, 7]]
    assert one["loss_mask"].tolist() == [[0, 1, 0, 1, 1]]  # position 3 is the last of its document
    two = shifted(batch, torch.tensor([0, 1, 2, 3]), 2)
    assert two["loss_mask"].tolist() == [[1, 1, 0, 0]]
    del batch["document_ends"]
    assert shifted(batch, torch.tensor([0, 1, 2, 3, 4]), 2)["loss_mask"].tolist() == [[1, 1, 0, 1, 0]]


@pytest.mark.parametrize("model", ["", "--num-experts 4 --moe-ffn-hidden-size 48"])
def test_flops(model: str) -> None:
    """Each layer costs a layer like the last, a projection of 2 h to h and the output layer."""
    sizes = [step_flops(parse(f"{BASE} {model} {flags}".split(), LLAMA_DEFAULTS, 1), 301).model for flags in
             ("", "--num-layers 4", "--mtp-num-layers 2")]  # fmt: skip
    plain, longer, ahead = sizes
    assert ahead - plain == pytest.approx(longer - plain + 2 * 3 * 2 * 64 * (2 * 64 * 64 + 64 * 301))
