# SPDX-License-Identifier: Apache-2.0
"""Masks, packed documents and their balance: derived settings and refusals."""

from __future__ import annotations

import json

import pytest
import torch

import megatron.context_parallel as cp
from megatron.context_parallel.layout.grid import abstract_grid
from megatron.training.arguments.validate import complete
from megatron.training.model.attention_rule import attention_mask, attention_rule
from megatron.training.refusal import Refusal
from megatron.training.report.mfu import attended_share
from tests.unit.test_validate import build

TWO = "--ring-parallel-size 2"
FUNCTION = "def every_second(q, k):\n    return (q - k) % 2 == 0\n"


@pytest.mark.parametrize(
    "flags, mask, documents, balance",
    [
        ("", cp.Causal(), False, "zigzag"),
        ("--attention-mask full", cp.Full(), False, "zigzag"),
        ("--window-size 15,0", cp.Window(15), False, "contiguous"),
        ("--window-size (15,2)", cp.Window(15, 2), False, "contiguous"),
        ("--attention-mask window --window-size=-1,0", cp.Window(192), False, "contiguous"),
        ("--window-size 15,0 --context-parallel-balance zigzag", cp.Window(15), False, "zigzag"),
        ("--window-size 7,0 --window-global-tokens 3", cp.Window(7, 0, 3), False, "contiguous"),
        ("--attention-mask document", cp.Causal(), True, "documents"),
        ("--reset-attention-mask", cp.Causal(), True, "documents"),
        ("--reset-attention-mask --attention-mask full", cp.Full(), True, "documents"),
        ("--reset-attention-mask --micro-batch-size 2", cp.Causal(), True, "zigzag"),
        ("--reset-attention-mask --window-size 15,0", cp.Window(15), True, "contiguous"),
        ("--reset-attention-mask --context-parallel-balance contiguous", cp.Causal(), True, "contiguous"),
        ("--attention-mask block-sparse --sparse-block-size 64 --sparse-window-blocks 2", cp.BlockSparse(64,
         cp.LongformerBlocks(2, 1), 192), False, "contiguous"),
        ("--attention-mask block-sparse --sparse-pattern bigbird --sparse-random-blocks 5", cp.BlockSparse(128,
         cp.BigBirdBlocks(3, 1, 5), 192), False, "contiguous"),
        ("--attention-mask block-sparse --sparse-pattern strided --sparse-stride 4", cp.BlockSparse(128,
         cp.StridedBlocks(4), 192), False, "zigzag"),
    ],
)  # fmt: skip
def test_derived_masks_and_balances(flags, mask, documents, balance):
    config = build(f"{TWO} {flags}", 2)
    assert attention_mask(config) == mask
    assert config.data.reset_attention_mask == documents
    assert config.parallel.context_parallel_balance == balance
    again = complete(config, 2)
    assert attention_mask(again) == mask and again.parallel.context_parallel_balance == balance


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--attention-mask window", "--attention-mask window needs --window-size"),
        ("--attention-mask causal --window-size 15,0", "--window-size is used only by --attention-mask window"),
        ("--window-size 15", "--window-size"),
        ("--window-size 15,-2", "sizes are counts of tokens"),
        ("--window-global-tokens 4", "--window-global-tokens is used only by --attention-mask window"),
        ("--sparse-block-size 64", "--sparse-block-size is used only by --attention-mask block-sparse"),
        ("--attention-mask block-sparse --sparse-stride 4",
         "--sparse-stride is used only by --sparse-pattern strided, not by longformer"),
        ("--attention-mask block-sparse --sparse-block-size 0", "--sparse-block-size"),
        ("--attention-mask function", "needs --mask-function FILE.py:NAME"),
        ("--mask-function a.py:b", "--mask-function is used only by --attention-mask function"),
        ("--context-parallel-balance documents",
         "--context-parallel-balance documents distributes packed documents: add --attention-mask document"),
        ("--attention-mask document --micro-batch-size 2 --context-parallel-balance documents",
         "--context-parallel-balance documents with --micro-batch-size 2"),
        ("--attention-mask document --micro-batch-size 2 --fpdt --fpdt-chunk-size 64 --fpdt-stream-hidden",
         "--fpdt-stream-hidden with packed documents and --micro-batch-size 2"),
        ("--reset-position-ids --position-embedding-type alibi",
         "--reset-position-ids with --position-embedding-type alibi needs --reset-attention-mask"),
        ("--attention-mask sliding", "choose from causal, full, window, document, block-sparse, function"),
    ],
)  # fmt: skip
def test_attention_settings_that_are_refused(flags, words):
    with pytest.raises(Refusal) as caught:
        build(flags)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content, words",
    [
        (None, "No such file"),
        ("[[0], [1]", "use longformer, bigbird, strided"),
        ("[[0], [0, 2]]", "block numbers from 0 to 1"),
        ("[[0, 1], [1]]", "keeps key block 1 for query block 0, but --attention-mask block-sparse is causal"),
        ("[[0]]", "must have 2 rows"),
        ("[0, 1]", "use longformer, bigbird, strided"),
    ],
)
def test_a_bad_list_of_blocks_is_refused(tmp_path, content, words):
    path = tmp_path / "blocks.json"
    if content is not None:
        path.write_text(content)
    config = build(f"--attention-mask block-sparse --sparse-pattern {path}")
    with pytest.raises(Refusal, match="--sparse-pattern") as caught:
        attention_mask(config)
    assert words in str(caught.value)


def test_a_users_list_of_blocks(tmp_path):
    path = tmp_path / "blocks.json"
    path.write_text(json.dumps([[0], []]))
    mask = attention_mask(build(f"--attention-mask block-sparse --sparse-pattern {path}"))
    assert mask.key_spans(0) == ((0, 128),) and mask.key_spans(1) == ()


@pytest.mark.parametrize(
    "content, name, words",
    [
        (None, "f", "there is no file"),
        ("f = 3", "f", "has no function f"),
        ("raise KeyError('x')", "f", "cannot be run: KeyError"),
        (FUNCTION, "", "give a file and a function in it"),
    ],
)
def test_a_bad_mask_function_is_refused(tmp_path, content, name, words):
    path = tmp_path / "mask.py"
    if content is not None:
        path.write_text(content)
    config = build(f"--attention-mask function --mask-function {path}:{name}")
    with pytest.raises(Refusal, match="--mask-function") as caught:
        attention_mask(config)
    assert words in str(caught.value)


def test_a_users_mask_function(tmp_path):
    (tmp_path / "mask.py").write_text(FUNCTION)
    config = build(
        f"--attention-mask function --mask-function {tmp_path / 'mask.py'}:every_second --mask-cpu-threshold 9"
    )
    rule = attention_rule(config, abstract_grid())
    q, k = torch.arange(4)[:, None], torch.arange(4)[None]
    assert rule.mask.allowed(q, k).int().tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1]]
    assert rule.mask_cpu_threshold == 9


def test_a_note_says_that_a_mask_threshold_has_no_effect():
    message = "--mask-cpu-threshold has no effect"
    assert any(message in note for note in build("--mask-cpu-threshold 4").notes)
    assert not any(message in note for note in build("--mask-cpu-threshold 4 --window-size 9,0").notes)
    assert not any(message in note for note in build("--window-size 99,0").notes)


def test_alibi_slopes_are_split_with_the_heads():
    config = build("--position-embedding-type alibi --tensor-model-parallel-size 2", 2)
    rules = [attention_rule(config, abstract_grid(tensor=2).at(tensor=rank)) for rank in (0, 1)]
    assert torch.equal(torch.cat([rule.alibi_slopes for rule in rules]), cp.alibi_slopes(12))


def test_flops_count_what_the_mask_allows():
    assert attended_share(build("")) == 0.5
    assert attended_share(build("--attention-mask full")) == 1.0
    assert attended_share(build("--window-size 1,0")) == pytest.approx((2 * 192 - 1) / 192**2)
