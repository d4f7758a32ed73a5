# SPDX-License-Identifier: Apache-2.0
"""Training by accelerate, transformers and peft, with rows split over ranks. Each docstring says why it is right."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron.certifying.recording import Outcome
from tests.referee.pieces import WORDS, Decoder, averaged, losses, mine, story, summed


def llama(**more: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(vocab_size=WORDS, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, max_position_embeddings=32, pad_token_id=None, bos_token_id=None,
                 eos_token_id=None)  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**sizes, **more))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    return model


def rows() -> list[dict[str, Tensor]]:
    """Eight rows whose numbers of labels differ."""
    ids, labels = story(rows=8)
    return [{"input_ids": i, "labels": label} for i, label in zip(ids, labels)]


def accelerate_loop(ranks: int) -> Outcome:
    """Two micro-steps: sums are divided by the labels of all ranks and micro-steps, and both means are undone."""
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    raw = Decoder()
    loader = DataLoader(rows(), batch_size=4 // ranks)
    model, optimizer, loader = accelerator.prepare(raw, torch.optim.AdamW(raw.parameters(), lr=1e-2), loader)
    batches = list(loader)
    count = accelerator.gather(sum((batch["labels"] != -100).sum() for batch in batches)).sum()
    total = torch.zeros(())
    for batch in batches:
        with accelerator.accumulate(model):
            loss = losses(model(batch["input_ids"]), batch["labels"])
            accelerator.backward(loss * accelerator.num_processes * 2 / count)
            total += loss.detach() / count
            optimizer.step()
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 100.0)
    accelerator.state._reset_state(True)
    return Outcome(raw, summed(total))


def trainer(ranks: int) -> Outcome:
    """Trainer counts the labels of all ranks and micro-steps; weights change by its gradients."""
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers import PrinterCallback, Trainer, TrainingArguments

    model, rate = llama(), 0.5
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, use_cpu=True, per_device_train_batch_size=4 // ranks, gradient_accumulation_steps=2, max_steps=1,
            learning_rate=rate, optim="sgd", lr_scheduler_type="constant", max_grad_norm=0.0, report_to=[],
            save_strategy="no", logging_steps=1, disable_tqdm=True, train_sampling_strategy="sequential",
        )  # fmt: skip
        run = Trainer(model=model, args=arguments, train_dataset=rows())
        run.remove_callback(PrinterCallback)
        run.train()
    log = next(row for row in run.state.log_history if "loss" in row)
    changes = {name: p.detach() - before[name] for name, p in model.named_parameters()}
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    return Outcome(model, log["loss"], gradients={n: -x / rate for n, x in changes.items()}, updates=changes)


def adapters(ranks: int) -> tuple[nn.Module, Tensor]:
    """LoRA of peft on a frozen model of transformers under DDP; all rows have equally many labels."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    ids = torch.randint(WORDS, (4, 12), generator=torch.Generator().manual_seed(2))
    wrapped = nn.parallel.DistributedDataParallel(model)
    loss = wrapped(input_ids=mine(ids), labels=mine(ids), use_cache=False).loss
    loss.backward()
    torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2).step()
    return model, averaged(loss)


def classifier(ranks: int) -> tuple[nn.Module, Tensor]:
    """BERT of transformers with padded rows: a row has one label, so the mean of means is the mean."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes = dict(vocab_size=WORDS, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
                 max_position_embeddings=32, num_labels=3, hidden_dropout_prob=0.0,
                 attention_probs_dropout_prob=0.0)  # fmt: skip
    model = BertForSequenceClassification(BertConfig(**sizes)).train()
    ids, labels = story(rows=8)
    wrapped = nn.parallel.DistributedDataParallel(model)
    logits = wrapped(input_ids=mine(ids), attention_mask=mine((labels != -100).long())).logits
    loss = F.cross_entropy(logits, mine(torch.arange(8) % 3))
    loss.backward()
    return model, averaged(loss)
