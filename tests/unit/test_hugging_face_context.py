# SPDX-License-Identifier: Apache-2.0
"""Refused models and batches of transformers, and restoring a model."""

import copy
from functools import cache

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import bidirectional_mask_function as everything
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_bidirectional_mask_function,
)
from transformers.masking_utils import sliding_window_causal_mask_function as window_of

import megatron.context_parallel as cp
from megatron.context_parallel.huggingface import Fpdt, parallelize
from megatron.context_parallel.huggingface.decoder_loss import plain_weight
from megatron.context_parallel.huggingface.rank_batch import cut
from megatron.context_parallel.huggingface.transformers_attention import NAME, attend, masks_by
from megatron.context_parallel.huggingface.transformers_attention import mask as mask_interface
from tests.hugging_face import LENGTH, SIZES, take_grads, tiny_model, whole_batch

GRID = cp.Grid()
LAYOUT = cp.SequenceLayout(LENGTH, GRID)


@cache
def model(kind="llama"):
    return tiny_model(kind)


def state_of(module):
    """Everything that parallelize may change."""
    config = module.config.to_dict() | {"attention": module.config._attn_implementation}
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in module.modules()]
    return config, hooks, [set(vars(m)) for m in module.modules()], [m.training for m in module.modules()]


@pytest.mark.parametrize("fpdt", [None, Fpdt(16)])
def test_remove_restores_the_model(fpdt):
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    own = tiny_model("llama", use_cache=True, rope_parameters=dynamic).train()
    own.model.eval()
    before, batch = state_of(own), whole_batch()
    expected = own(**batch).loss
    context = parallelize(own, GRID, seq_length=LENGTH, fpdt=fpdt)
    assert state_of(own) != before and not own.config.use_cache
    own(**context.shard(batch))
    context.remove()
    context.remove()
    assert state_of(own) == before
    assert torch.equal(own(**batch).loss, expected)


def test_a_copy_uses_its_own_weights():
    own = tiny_model("llama")
    with parallelize(own, GRID, seq_length=LENGTH, fpdt=Fpdt(16)) as context:
        other = copy.deepcopy(own)
        with torch.no_grad():
            own.lm_head.weight.zero_()
            own.model.layers[0].mlp.down_proj.weight.zero_()
        losses = [float(one(**context.shard(whole_batch())).loss) for one in (own, other)]
    assert losses[0] == pytest.approx(torch.log(torch.tensor(96.0)).item()) and abs(losses[0] - losses[1]) > 0.1


def test_after_a_refusal_the_model_is_as_before():
    own = tiny_model("gemma2")
    before = state_of(own)
    with pytest.raises(ValueError, match="Gemma2DecoderLayer is different"):
        parallelize(own, GRID, seq_length=LENGTH, fpdt=Fpdt(16))
    assert state_of(own) == before


@pytest.mark.parametrize(
    "kind, sizes, message",
    [
        ("bloom", {"n_head": 4}, "BloomForCausalLM does not compute attention through"),
        ("falcon", {}, "FalconForCausalLM does not compute attention through"),
        ("mamba", {}, "layers of the kind linear_attention"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "layers of the kind conv"),
        ("roberta", {"is_decoder": True}, "RobertaForCausalLM does not count positions as 0, 1, 2"),
        ("marian", {"d_model": 32}, "MarianForCausalLM uses a token's index in its input in place of position_ids"),
        ("doge", {}, "DogeForCausalLM uses the entries of its attention mask"),
        ("llama", {"output_attentions": True}, "output_attentions=True"),
        ("mixtral", {"output_router_logits": True}, "output_router_logits=True"),
    ],
)
def test_models_that_are_refused(kind, sizes, message):
    config = AutoConfig.for_model(kind, **(SIZES | sizes), attn_implementation="eager")
    own = AutoModelForCausalLM.from_config(config)
    before = own.config._attn_implementation
    with pytest.raises(ValueError, match=message):
        parallelize(own, GRID, seq_length=LENGTH)
    assert own.config._attn_implementation == before


def test_a_convolution_inside_a_layer_is_detected():
    own = tiny_model("llama")

    class Shifted(torch.nn.Module):
        def __init__(self, mlp):
            super().__init__()
            self.mlp = mlp

        def forward(self, x):
            return self.mlp(x + 0.1 * torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1])

    own.model.layers[1].mlp = Shifted(own.model.layers[1].mlp)
    with pytest.raises(ValueError, match="see each other outside of its attention"):
        parallelize(own, GRID, seq_length=LENGTH)


def test_a_changed_loss_is_detected():
    own = tiny_model("llama")
    usual = own.loss_function
    own.loss_function = lambda *args, **kwargs: usual(*args, **kwargs) + 0.1
    with pytest.raises(ValueError, match="computes another loss"):
        parallelize(own, GRID, seq_length=LENGTH)


def test_other_refusals_at_start():
    with pytest.raises(ValueError, match="Linear is not a model of transformers"):
        parallelize(torch.nn.Linear(2, 2), GRID, seq_length=LENGTH)
    with pytest.raises(ValueError, match="tensor=2 is not supported with a model of transformers"):
        parallelize(model(), cp.abstract_grid(tensor=2), seq_length=LENGTH)
    with pytest.raises(ValueError, match="ulysses=8 does not divide the 4 query heads"):
        parallelize(model(), cp.abstract_grid(ulysses=8), seq_length=LENGTH)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(model().config)
    with pytest.raises(ValueError, match="no weights yet"):
        parallelize(empty, GRID, seq_length=LENGTH)
    with parallelize(model(), GRID, seq_length=LENGTH), pytest.raises(ValueError, match="already distributed"):
        parallelize(model(), GRID, seq_length=LENGTH)
    with pytest.raises(ValueError, match="1 or more"):
        Fpdt(chunk_size=0)
    for size, grid in ((LENGTH + 1, GRID), (3, cp.abstract_grid(ulysses=2, ring=2))):
        with pytest.raises(ValueError, match=f"chunk_size={size}: use {grid.context.size} to 48"):
            parallelize(model(), grid, seq_length=LENGTH, fpdt=Fpdt(size))
    granite = tiny_model("granite")
    with pytest.raises(ValueError, match="its parts are put together in another way"):
        parallelize(granite, GRID, seq_length=LENGTH, fpdt=Fpdt(16))


def test_calls_that_are_refused():
    batch = whole_batch()
    with parallelize(model(), GRID, seq_length=LENGTH) as context:
        own = context.shard(batch)
        for call in (batch, own | {"labels": batch["labels"]}):
            with pytest.raises(ValueError, match=r"call it as model\(\*\*context.shard"):
                model()(**call)
        with pytest.raises(ValueError, match="distributed over ranks"):
            model().model(input_ids=batch["input_ids"])
        for name, value in {"output_attentions": True, "use_cache": True, "logits_to_keep": 3}.items():
            with pytest.raises(ValueError, match=f"{name} is not supported over ranks"):
                model()(**own, **{name: value})
        with pytest.raises(ValueError, match="passes position_bias to its attention"):
            model()(**own, position_bias=torch.zeros(1))
    drop = tiny_model("llama", attention_dropout=0.5).train()
    with parallelize(drop, GRID, seq_length=LENGTH, fpdt=Fpdt(16)) as context:
        with pytest.raises(ValueError, match="fpdt with dropout of attention weights"):
            drop(**context.shard(batch))


POSITIONS = torch.arange(LENGTH)[None]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"pixel_values": POSITIONS}, "pixel_values is not supported over ranks"),
        ({"token_type_ids": POSITIONS[:, 1:]}, r"token_type_ids \[1, 47\] must have the shape of input_ids"),
        ({"input_ids": torch.zeros(1, LENGTH - 1, dtype=torch.int64)}, r"\[1, 47\] are not \[b, 48\]"),
        ({"labels": POSITIONS[:, 1:]}, r"labels \[1, 47\] must have the shape of input_ids"),
        ({"position_ids": torch.zeros(3, 1, LENGTH, dtype=torch.int64)}, "positions of several kinds"),
        ({"cu_seq_lens_q": torch.tensor([0, 24, LENGTH])}, "cu_seq_lens_q and position_ids have different documents"),
        ({"attention_mask": POSITIONS.ge(5).long()}, "neither all ones nor padding on the right"),
        ({"attention_mask": torch.zeros_like(POSITIONS)}, "neither all ones nor padding on the right"),
        ({"attention_mask": POSITIONS.lt(40).long()}, "labels at padding count in the loss: set them to -100"),
        ({"attention_mask": POSITIONS.ge(0), "position_ids": POSITIONS % 24}, "joins documents"),
        ({"attention_mask": POSITIONS.lt(40), "position_ids": POSITIONS % 24}, "leave attention_mask out"),
    ],
)
def test_batches_that_are_refused(change, message):
    batch = {"input_ids": torch.zeros(1, LENGTH, dtype=torch.int64), "labels": POSITIONS}
    with pytest.raises(ValueError, match=message):
        cut(batch | change, LAYOUT, 0)


def test_documents_come_from_positions_that_restart():
    batch = whole_batch()
    own, part = cut(batch, LAYOUT, 0)
    assert part.ends == ((11, 30, 48), (17, 30, 48)) and part.longest == 19
    assert torch.equal(own["shift_labels"][:, :-1], batch["labels"][:, 1:]) and own["shift_labels"][0, -1] == -100
    assert part.labelled == int(batch["labels"][:, 1:].ne(-100).sum())
    assert part.masks(None) == [cp.Documents(ends) for ends in part.ends]
    assert part.masks(8) == [cp.Documents(ends, cp.Window(7)) for ends in part.ends]
    packed = {"input_ids": batch["input_ids"][:1], "position_ids": POSITIONS % 24}
    flash = {"cu_seq_lens_q": torch.tensor([0, 24, LENGTH]), "max_length_q": 24, "seq_idx": POSITIONS // 24}
    assert cut(packed | flash, LAYOUT, 0)[1] == cut(packed, LAYOUT, 0)[1]
    plain = cut({"input_ids": batch["input_ids"]}, LAYOUT, 0)[1]
    assert plain.masks(None) == [cp.Causal()] and plain.masks(LENGTH) == [cp.Causal()] and plain.labelled is None


def test_masks_of_transformers_are_recognized():
    with masks_by(lambda window, ahead: (window, ahead)):
        assert mask_interface(mask_function=causal_mask_function) == (None, False)
        assert mask_interface(mask_function=window_of(8), local_size=8) == (8, False)
        assert mask_interface(mask_function=everything, allow_is_causal_skip=False) == (None, True)
        near = sliding_window_bidirectional_mask_function(8)
        assert mask_interface(mask_function=near, local_size=8, allow_is_causal_skip=False) == (8, True)
        chunked = chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.int64))
        odd = or_masks(causal_mask_function, lambda b, h, q, k: k == q + 1)
        for function, options in (
            (chunked, {"local_size": 8}),
            (window_of(9), {"local_size": 8}),
            (odd, {}),
            (near, {"local_size": 9}),
            (everything, {"use_vmap": True}),
            (causal_mask_function, {"use_vmap": True}),
        ):
            made = mask_interface(mask_function=function, **options)  # no error, as it may remain unused
            adds = "use_vmap" in options
            message = "adds to its causal mask" if adds else "neither causal"
            with pytest.raises(ValueError, match=message):
                attend(torch.nn.Identity(), *torch.zeros(3, 1, 1, 1, 1), made, sliding_window=8)


def test_a_head_that_does_more_is_distinguished_from_a_plain_one():
    assert plain_weight(model()) is model().lm_head.weight
    assert plain_weight(tiny_model("gemma2").bfloat16()) is None  # small logits would not show the soft-cap
    assert plain_weight(tiny_model("granite")) is None


@pytest.mark.parametrize("kind, fpdt", [("qwen3", None), ("gemma2", None), ("mixtral", Fpdt(16))])
def test_under_autocast(kind, fpdt):
    """As with Trainer's bf16=True: weights in fp32, products in bf16."""
    own, batch, result = tiny_model(kind).train(), whole_batch(), []
    for _ in range(2):
        context = parallelize(own, GRID, seq_length=LENGTH, fpdt=fpdt) if result else None
        with torch.autocast("cpu", torch.bfloat16):
            loss = own(**(context.shard(batch) if context else batch)).loss
        loss.backward()
        result.append((float(loss), take_grads(own)))
    (expected, theirs), (loss, mine) = result
    assert loss == pytest.approx(expected, rel=1e-3) and set(mine) == set(theirs)
    for name, grad in mine.items():  # a token routed to another expert differs by more than rounding
        assert (grad - theirs[name]).norm() < (0.3 if kind == "mixtral" else 0.05) * theirs[name].norm(), name


def test_without_labels_the_loss_is_zero():
    batch = whole_batch()
    with parallelize(model(), GRID, seq_length=LENGTH) as context:
        assert model()(**context.shard(batch | {"labels": torch.full((2, LENGTH), -100)})).loss == 0
    assert model().config._attn_implementation != NAME


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
def test_layers_that_choose_keys_generate_with_their_cache_in_a_pause(kind):
    own, batch = tiny_model(kind, use_cache=True), whole_batch()
    given = {"input_ids": batch["input_ids"][:, :20], "max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    expected = own.generate(**given)
    with parallelize(own, GRID, seq_length=LENGTH) as context:
        loss = own(**context.shard(batch)).loss
        with pytest.raises(ValueError, match="this model is distributed over ranks"):
            own.generate(**given)
        with context.paused():
            assert torch.equal(own.generate(**given), expected)
        assert torch.equal(own(**context.shard(batch)).loss, loss)
