# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction: its losses and gradients are those written out here, on every grid."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from tests.distributed.flags import A2A, FULL, P2, SP, ZERO2, ZERO3, cp, ep, fpdt
from tests.distributed.training_runs import (
    compare_runs,
    data_of,
    evaluated_loss,
    first_gradients,
    make_job,
    save_job,
    take_steps,
    train_job,
)
from tests.hugging_face import save_with_later_tokens

MTP = "--num-layers 2 --mtp-num-layers 2 --mtp-loss-scaling-factor 0.3 --init-method-std 0.1 --eod-mask-loss"
ONE = f"{MTP} --mtp-num-layers 1"
OF_GPT = "--position-embedding-type rope --hidden-dropout 0 --scale-embeddings"  # tied embeddings, LayerNorm, biases
TIED = f"{MTP} {OF_GPT}"
DOCUMENTS = f"{MTP} --attention-mask document --reset-position-ids --micro-batch-size 1 --global-batch-size 2"
LATENT = (
    f"{MTP} --multi-latent-attention --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16 "
    "--attention-dropout 0.1"
)
EXPERTS = f"{MTP} --num-experts 8 --moe-ffn-hidden-size 48 --moe-aux-loss-coeff 0.02 --moe-z-loss-coeff 0.002"
DEEPSEEK = (
    f"{LATENT} --num-experts 8 --moe-ffn-hidden-size 48 --moe-layer-freq [0]+[1] --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.01 --moe-router-dtype fp32 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01 --moe-shared-expert-intermediate-size 32"
)
UNBALANCED = (
    f"{MTP} --num-experts 4 --moe-ffn-hidden-size 48 --moe-router-load-balancing-type none --moe-aux-loss-coeff 0"
)
LAYERS = f"{MTP} --window-size 16,0 --window-attn-skip-freq 2"

# (processes, model, grid)
CASES = [
    (2, MTP, f"{SP} --loss-chunks 4"),
    (4, TIED, f"{P2} {cp(2, 1)} --loss-chunks 2"),
    (2, f"{MTP} --num-layers 4", f"{P2} --pipeline-model-parallel-layout Ett|t|t|mmL --micro-batch-size 1"),
    (2, f"{MTP} --num-layers 4", f"{P2} --pipeline-model-parallel-layout E|tttt|mm|L --micro-batch-size 1"),
    (2, DOCUMENTS, "--ring-parallel-size 2"),
    (2, LATENT, cp(1, 2)),
    (2, EXPERTS, f"{cp(1, 2)} {ep(2)} {A2A}"),
    (4, DEEPSEEK, f"{cp(1, 2)} {ep(4)} {A2A} --zero-stage 1"),
    (2, LAYERS, f"{cp(1, 2)} --ffn-chunks 3 --loss-chunks 4 {ZERO3}"),
    (2, MTP, f"{cp(1, 2)} {fpdt(32)} {FULL}"),
    (2, ONE, f"{cp(1, 2)} --recompute-granularity selective {ZERO2}"),
]


def run(flags: str, mistake: Callable | None = None, steps: int = 2) -> tuple[list, list, dict[str, torch.Tensor]]:
    """Losses (the model's and those ahead) and gradient norms of each step, and the gradients of the first."""
    from megatron.training.data import batches as module

    job, right = make_job(flags, llama=OF_GPT not in flags), module.shifted
    if mistake is not None:
        module.shifted = mistake
    try:
        with first_gradients(job) as grads:
            results = take_steps(job, steps)
    finally:
        module.shifted = right
    losses = [loss for one in results for loss in (one.lm_loss, *one.further.values())]
    losses += [loss for one in results if one.experts for loss in one.experts.losses.values()]
    return losses, [one.grad_norm for one in results], grads


@pytest.mark.parametrize("world, model, grid", CASES)
@pytest.mark.usual(2, 3, 4, 5)
def test_losses_and_gradients_do_not_depend_on_the_grid(pool, reference, world, model, grid):
    expected = reference(run, model)
    further = {EXPERTS: 2, DEEPSEEK: 1}.get(model, 0)  # auxiliary losses
    assert (
        len(expected[0]) == 2 * (2 + further if model == ONE else 3 + further)
        and "mtp.layers.0.eh_proj.weight" in expected[2]
    )
    compare_runs(pool.run(run, world, f"{model} {grid}", timeout=180), expected)


def by_hand(flags: str) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses and gradients of a step on one process, with each label looked up one by one."""
    from megatron.certifying.programs.whole_gradients import full_gradients
    from megatron.context_parallel.layout.documents import restart
    from megatron.platform.core_versions import inner_layer

    job = make_job(flags)
    (chunk,), settings = job.model_chunks, job.config.model
    model, length, layers = chunk.module, job.config.data.seq_length, settings.mtp_num_layers
    batches, vocabulary, seen = data_of(job), job.vocab_size, []
    model.decoder.register_forward_hook(lambda *call: seen.append(call[-1]))

    def norm(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:], module.weight, settings.norm_epsilon)

    sums, counts = [0.0] * (1 + layers), [0.0] * (1 + layers)
    for _ in range(job.batch_sizes.get()):
        batch = next(batches)
        tokens, labels, mask, ends = (batch.get(key) for key in ("tokens", "labels", "loss_mask", "document_ends"))
        positions = torch.arange(length).expand(len(tokens), -1)
        if ends is not None:
            positions = torch.stack([restart(torch.arange(length), tuple(dict.fromkeys(row))) for row in ends.tolist()])
        losses = model(tokens, positions, ends, labels=labels, loss_mask=mask)
        sums[0] += (losses * mask).sum()
        counts[0] += float(mask.sum())
        hidden = seen.pop()
        for number, layer in enumerate(model.mtp.layers, 1):
            later, label, kept = torch.zeros_like(tokens), torch.zeros_like(labels), torch.zeros_like(mask)
            for sample in range(len(tokens)):
                own = [length] if ends is None else ends[sample].tolist()
                for place in range(length - number):
                    later[sample, place] = tokens[sample, place + number]
                    label[sample, place] = labels[sample, place + number]
                    if not any(place < end <= place + number for end in own):
                        kept[sample, place] = mask[sample, place + number]
            embedded = functional.embedding(later, model.embedding.word_embeddings.weight).transpose(0, 1)
            both = torch.cat((norm(layer.enorm, embedded), norm(layer.hnorm, hidden)), dim=-1)
            hidden, _ = inner_layer(layer)(both @ layer.eh_proj.weight.t(), ends)
            hidden = norm(layer.final_layernorm, hidden)
            logits = (hidden @ model.output_layer.weight[:vocabulary].t()).transpose(0, 1)
            each = functional.cross_entropy(logits.flatten(0, 1), label.flatten(), reduction="none")
            sums[number] += (each * kept.flatten()).sum()
            counts[number] += float(kept.sum())
    ((sums[0] + settings.mtp_loss_scaling_factor / layers * sum(sums[1:])) / counts[0]).backward()
    gradients = full_gradients(job)
    norm_of_all = float(torch.cat([grad.flatten() for grad in gradients.values()]).norm())
    return [float(total) / count for total, count in zip(sums, counts)], [norm_of_all], gradients


@pytest.mark.parametrize(
    "model, world, grid", [(MTP, 1, ""), (MTP, 2, cp(1, 2)), (DOCUMENTS, 2, cp(1, 2)), (UNBALANCED, 2, ep(2))]
)
@pytest.mark.usual(0, 3)
def test_against_a_computation_written_out(pool, reference, model, world, grid):
    expected = reference(by_hand, model)
    compare_runs(pool.run(run, world, f"{model} {grid}", None, 1, timeout=120), expected)


def labels_in_place(batch: dict, positions: torch.Tensor, by: int) -> dict:
    """A mistake: the labels of the next token, for every layer."""
    return over_ends(batch, positions, by) | {key: batch[key][:, positions] for key in ("labels", "loss_mask")}


def own_rows(batch: dict, positions: torch.Tensor, by: int) -> dict:
    """A mistake: each rank shifts its own rows, as if they were the whole sequence."""
    from megatron.training.data.batches import KEYS

    moved = {key: batch[key][:, positions].roll(-by, 1) for key in KEYS}
    for part in moved.values():
        part[:, -by:] = 0
    return moved


def over_ends(batch: dict, positions: torch.Tensor, by: int) -> dict:
    """A mistake: labels from the next document."""
    from megatron.training.data.batches import KEYS

    there = positions + by
    return {key: batch[key][:, there.clamp(max=batch[key].size(1) - 1)] * (there < batch[key].size(1)) for key in KEYS}


PROMPTS = [[5, 17, 130, 2, 99, 40], [250, 3, 3, 71, 8, 200]]


def logits_of_training(flags: str, folder: str) -> tuple[int, torch.Tensor]:
    """Save a trained model. Size of its vocabulary, and its logits of the last token of each prompt.

    Also compares an evaluation's loss with that of its logits.
    """
    job = make_job(flags, llama=OF_GPT not in flags)
    train_job(job, 1)
    save_job(folder, job)
    batch = next(data_of(job))
    loss = evaluated_loss(job, iter([batch]), 1)
    model = job.model_chunks[0].module.eval()
    prompts = torch.tensor(PROMPTS)
    with torch.no_grad():
        whole, logits = (
            model(tokens, torch.arange(tokens.size(1)).expand(len(tokens), -1), None)[..., : job.vocab_size]
            for tokens in (batch["tokens"], functional.pad(prompts, (0, 64 - prompts.size(1))))
        )
    each = functional.cross_entropy(whole.flatten(0, 1), batch["labels"].flatten(), reduction="none")
    mask = batch["loss_mask"].flatten()
    assert float((each * mask).sum() / mask.sum()) == pytest.approx(loss, rel=1e-5)
    return job.vocab_size, logits[:, prompts.size(1) - 1]


def logits_of_generation(folder: str, vocabulary: int, grid: str) -> torch.Tensor | None:
    import torch.distributed as dist

    from megatron.inference.load import configure, load_decoder
    from megatron.training.setup import start

    words = f"--tokenizer-type NullTokenizer --vocab-size 301 --device cpu {grid}".split()
    config, _ = configure(words, folder, None, None, dist.get_world_size())
    runtime = start(config)
    config.data.seq_length = 16
    decoder = load_decoder(config, runtime, vocabulary)
    assert len(decoder.attentions) == len(decoder.model.decoder.layers)
    return decoder.prefill(PROMPTS, 1)


@pytest.mark.parametrize("model", [MTP, f"{TIED} --attention-dropout 0"])
@pytest.mark.usual(1)
def test_generation_and_evaluation_use_the_main_head(pool, tmp_path, model):
    vocabulary, expected = pool.run(logits_of_training, 1, model, str(tmp_path), timeout=120)[0]
    for logits in pool.run(logits_of_generation, 2, str(tmp_path), vocabulary, P2, timeout=120)[1:]:
        assert float((logits - expected).abs().max()) < 1e-4


# The same layers in transformers, which reads released files.


def losses_in_transformers(folder: str, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
    """Of the next token, and of the one after it, by transformers' own classes."""
    from transformers import AutoModelForCausalLM
    from transformers.modeling_layers import MtpModel

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{len(model.model.layers)}\."]  # else V3's 61st alone
    ahead, sums = MtpModel.from_pretrained(model), [0.0, 0.0]
    with torch.no_grad():
        for tokens, labels in batches:
            out = model(tokens, output_hidden_states=True, use_cache=False)
            places = torch.arange(tokens.size(1) - 1)[None]
            later = ahead.forward_layer(0, out.hidden_states[-1][:, :-1], places, None, input_ids=tokens[:, 1:])
            for number, logits in enumerate((out.logits, ahead._project_to_logits(later))):
                each = functional.cross_entropy(logits.flatten(0, 1), labels[:, number:].flatten())
                sums[number] += float(each) / len(batches)
    return sums


def first_step(flags: str) -> tuple[list[float], list[tuple[torch.Tensor, torch.Tensor]]]:
    job = make_job(flags)
    seen = [(one["tokens"], one["labels"]) for one, _ in zip(data_of(job), range(job.batch_sizes.get()))]
    (one,) = take_steps(job)
    return [one.lm_loss, *one.further.values()], seen


@pytest.mark.parametrize("kind", ["deepseek_v3", pytest.param("glm4_moe", marks=pytest.mark.full)])
@pytest.mark.lab
def test_losses_are_those_of_transformers(pool, tmp_path, kind):
    from tools.convert_hf import main

    sizes = {"hidden_size": 64, "num_attention_heads": 8, "vocab_size": 301, "intermediate_size": 96,
             "n_routed_experts": 8, "n_shared_experts": 1, "moe_intermediate_size": 32, "num_experts_per_tok": 4,
             "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "num_hidden_layers": 4}  # fmt: skip
    own = {
        "deepseek_v3": {"num_key_value_heads": 8, "q_lora_rank": 20, "kv_lora_rank": 24, "qk_nope_head_dim": 12,
                        "qk_rope_head_dim": 8, "v_head_dim": 16},
        "glm4_moe": {"num_key_value_heads": 4, "head_dim": 8, "use_qk_norm": True},
    }  # fmt: skip
    sizes |= own[kind]
    save_with_later_tokens(tmp_path / "in", kind, sizes)
    assert main(["--from-hf", str(tmp_path / "in"), "--to", str(tmp_path / "ours"), "--mtp-num-layers", "1"]) == 0
    flags = f"--model hf:{tmp_path / 'in'} --mtp-num-layers 1 --load {tmp_path / 'ours'} --finetune --vocab-size 300"
    flags += " --make-vocab-size-divisible-by 1 --seq-length 64 --moe-router-load-balancing-type none"
    losses, batches = pool.run(first_step, 1, flags, timeout=120)[0]
    assert losses == pytest.approx(losses_in_transformers(str(tmp_path / "in"), batches), rel=1e-5)
    grid = f"{SP} {cp(1, 2)} {ep(2)}"
    for mine, _ in pool.run(first_step, 4, f"{flags} {grid}", timeout=120):
        assert mine == pytest.approx(losses, rel=1e-5)
