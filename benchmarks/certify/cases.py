# SPDX-License-Identifier: Apache-2.0
"""What the libraries of the matrix compute: a small decoder of transformers, one training step, and the cases."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedModel,
    Qwen3NextConfig,
)

import megatron.context_parallel as cp

LENGTH, VOCABULARY, HEADS, RATE = 256, 97, 4, 0.5
AUX = 0.5  # coefficient of the loss that balances experts
Batch = dict[str, Tensor]
ALL = ((0, 0),)  # one micro-batch, no token masked


class NotApplicable(Exception):
    """The library has no such feature; the text says why."""


class Refused(Exception):
    """The library refuses, with this text."""


@dataclass(frozen=True)
class Case:
    """A model and a global batch.

    Attributes:
        documents: their ends in the sequence; where several are packed, positions restart.
        masked: a span of tokens without a label, for each micro-batch.
        clip: the largest norm of the gradients.
        experts: how many there are, 2 for each token, with a loss that balances the tokens of a micro-batch.
        hybrid: the first of two layers has linear attention (Gated DeltaNet).
        lora: only LoRA's weights of queries and values are trained.
    """

    documents: tuple[int, ...] = (LENGTH,)
    window: int | None = None
    sinks: bool = False
    kv_heads: int = 2
    dropout: float = 0.0
    tied: bool = False
    frozen: tuple[str, ...] = ()
    masked: tuple[tuple[int, int], ...] = ALL
    clip: float | None = None
    experts: int = 0
    hybrid: bool = False
    lora: bool = False

    def model(self, attention: str = "sdpa") -> PreTrainedModel:
        """The model, with weights so large that every token depends on those before it."""
        sizes = dict(
            vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=HEADS,
            num_key_value_heads=self.kv_heads, head_dim=16, max_position_embeddings=LENGTH,
            tie_word_embeddings=self.tied, attention_dropout=self.dropout, pad_token_id=None, bos_token_id=None,
            eos_token_id=None,
        )  # fmt: skip
        if self.sinks:
            config = GptOssConfig(
                **sizes, num_local_experts=2, num_experts_per_tok=2, layer_types=["full_attention"] * 2,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            )  # fmt: skip
        elif self.window:
            config = MistralConfig(**sizes, sliding_window=self.window)
        elif self.experts:
            config = MixtralConfig(
                **sizes, num_local_experts=self.experts, num_experts_per_tok=2, sliding_window=None,
                output_router_logits=True, router_aux_loss_coef=AUX,
            )  # fmt: skip
        elif self.hybrid:
            config = Qwen3NextConfig(
                **sizes, layer_types=["linear_attention", "full_attention"], mlp_only_layers=[0, 1],
                linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
                partial_rotary_factor=1.0,
            )  # fmt: skip
        else:
            config = LlamaConfig(**sizes)
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()
        model.config.use_cache = False
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1 or name.endswith("sinks"):
                    parameter.normal_(std=0.2 if parameter.dim() > 1 else 1.0)
                parameter.requires_grad_(not any(part in name for part in self.frozen))
        if self.lora:
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
        return model

    def batches(self) -> list[Batch]:
        """The micro-batches of a step."""
        starts = (0, *self.documents[:-1])
        positions = torch.cat([torch.arange(end - start) for start, end in zip(starts, self.documents)])[None]
        result = []
        for number, (start, end) in enumerate(self.masked):
            ids = torch.randint(VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(10 + number))
            labels = ids.clone()
            labels[:, start:end] = -100
            labels[:, list(starts[1:])] = -100  # a document's first token is not predicted
            result.append({"input_ids": ids, "labels": labels, "position_ids": positions.clone()})
        return result


CASES = {
    "dense": Case(),
    "GQA, 1 KV head": Case(kv_heads=1),
    "window": Case(window=64),
    "packed documents": Case(documents=(80, 180, LENGTH)),
    "sinks": Case(sinks=True),
    "unequal loss tokens": Case(masked=((0, 180),)),
    "accumulation": Case(masked=((0, 0), (0, 0))),
    "accumulation, unequal": Case(masked=((0, 220), (10, 80), (0, 0))),
    "dropout": Case(dropout=0.2),
    "experts, aux loss": Case(experts=4),
    "hybrid": Case(hybrid=True),
    "LoRA": Case(lora=True),
    "clipping": Case(clip=0.05),
    "tied": Case(tied=True),
    "frozen": Case(frozen=("embed_tokens", "layers.0.mlp.gate_proj", "layers.1.input_layernorm")),
}


@dataclass(frozen=True)
class Cell:
    """A program for ``cp.certify``: a case by one library. On one process it runs without the library's parallelism."""

    program: str
    case: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, **sizes: int) -> cp.Outcome:
        program = importlib.import_module(f"benchmarks.certify.with_{self.program}")
        return program.step(CASES[self.case], **sizes, **self.options)


def shifted(batch: Batch) -> Tensor:
    """The label of each token is the next token; -100 is none."""
    return F.pad(batch["labels"][:, 1:], (0, 1), value=-100)


def counted(batches: Sequence[Batch]) -> int:
    """Number of labels in the global batch."""
    return sum(int((shifted(batch) != -100).sum()) for batch in batches)


def share(logits: Tensor, labels: Tensor, count: int) -> Tensor:
    """What some tokens contribute to the mean loss of ``count`` labels."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum") / count


def whole(case: Case, mean_of_means: bool = False) -> cp.Outcome:
    """The outcome on one process, with transformers alone.

    Args:
        mean_of_means: each micro-batch has the mean of its labels, as in a library that averages micro-batches.
    """
    model, batches = case.model("eager" if case.sinks else "sdpa"), case.batches()
    total, count = torch.zeros(()), counted(batches)
    for batch in batches:
        if mean_of_means:
            count = counted([batch]) * len(batches)
        out = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False)
        loss = share(out.logits, shifted(batch), count)
        if case.experts:
            loss = loss + AUX * out.aux_loss
        loss.backward()
        total += loss.detach()
    return finish(model, total, case)


def of_parts(model: nn.Module, case: Case, part: Callable[[Tensor], Tensor]) -> cp.Outcome:
    """One training step in which each rank has a ``part`` of tokens, positions and labels [1, s]."""
    batches, total = case.batches(), torch.zeros(())
    count = counted(batches)
    for batch in batches:
        ids, at, labels = (part(x) for x in (batch["input_ids"], batch["position_ids"], shifted(batch)))
        loss = share(model(input_ids=ids, position_ids=at, use_cache=False).logits, labels, count)
        loss.backward()
        total += loss.detach()
    return summed(model, total, case, part(torch.arange(LENGTH)[None])[0])


def summed(model: nn.Module, loss: Tensor, case: Case, positions: Tensor | None = None) -> cp.Outcome:
    """The outcome of a loss and gradients that are sums over the ranks."""
    dist.all_reduce(loss)
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
    return finish(model, loss, case, positions)


def finish(
    model: nn.Module, loss: Tensor, case: Case, positions: Tensor | None = None, named: nn.Module | None = None
) -> cp.Outcome:
    """Clip gradients of the global batch if the case does, and update.

    Args:
        named: the model by whose names parameters are compared.
    """
    model = named or model
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    parameters = [p for p in model.parameters() if p.grad is not None]
    norm = nn.utils.clip_grad_norm_(parameters, case.clip) if case.clip else None
    torch.optim.SGD(parameters, lr=RATE).step()
    return cp.Outcome(model, loss, gradients=gradients, norm=norm, positions=positions)


def updated(
    model: nn.Module, before: Mapping[str, Tensor], loss: object, case: Case, after: Mapping[str, Tensor] | None = None
) -> cp.Outcome:
    """The outcome of a library that updates by itself (SGD at :data:`RATE`), with gradients from the weights' change.

    With clipping, neither the gradients nor DeepSpeed's norm are known, so only the change is compared.

    Args:
        after: whole weights, where each rank has a part of them.
    """
    after = after or copied(model)
    changes = {name: weight - before[name] for name, weight in after.items()}
    gradients = {n: -changes[n] / RATE if p.requires_grad else None for n, p in model.named_parameters()}
    kept = {n: change for n, change in changes.items() if gradients[n] is not None}
    return cp.Outcome(model, loss, gradients={} if case.clip else gradients, updates=kept)


def copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}
