# SPDX-License-Identifier: Apache-2.0
"""What the libraries of the matrix compute: a small decoder of transformers, one training step, and the cases."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig, MistralConfig, PreTrainedModel

import megatron.context_parallel as cp

LENGTH, VOCABULARY, HEADS, RATE = 128, 97, 4, 0.5
Batch = dict[str, Tensor]
ALL = ((0, 0),)  # one micro-batch, no token masked


@dataclass(frozen=True)
class Case:
    """A model and a global batch.

    Attributes:
        documents: their ends in the sequence; where several are packed, positions restart.
        masked: a span of tokens without a label, for each micro-batch.
        clip: the largest norm of the gradients.
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
    "causal": Case(),
    "packed": Case(documents=(40, 90, LENGTH)),
    "window": Case(window=32),
    "sinks": Case(sinks=True),
    "1 KV head": Case(kv_heads=1),
    "dropout": Case(dropout=0.2),
    "tied": Case(tied=True),
    "frozen": Case(frozen=("embed_tokens", "layers.0.mlp.gate_proj", "layers.1.input_layernorm")),
    "uneven": Case(masked=((0, 110), (5, 40), (0, 0))),
    "clipping": Case(clip=0.05),
}


@dataclass(frozen=True)
class Cell:
    """A program for ``cp.certify``: a case by one library. On one process it runs without the library's parallelism."""

    peer: str
    case: str

    def __call__(self, **sizes: int) -> cp.Outcome:
        return importlib.import_module(f"benchmarks.certify.with_{self.peer}").step(CASES[self.case], **sizes)


def shifted(batch: Batch) -> Tensor:
    """The label of each token is the next token; -100 is none."""
    return F.pad(batch["labels"][:, 1:], (0, 1), value=-100)


def counted(batches: Sequence[Batch]) -> int:
    """Number of labels in the global batch."""
    return sum(int((shifted(batch) != -100).sum()) for batch in batches)


def share(logits: Tensor, labels: Tensor, count: int) -> Tensor:
    """What some tokens contribute to the mean loss of ``count`` labels."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum") / count


def whole(case: Case) -> cp.Outcome:
    """The outcome on one process, with transformers alone."""
    model, batches = case.model("eager" if case.sinks else "sdpa"), case.batches()
    total, count = torch.zeros(()), counted(batches)
    for batch in batches:
        logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
        loss = share(logits, shifted(batch), count)
        loss.backward()
        total += loss.detach()
    return finish(model, total, case)


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


def updated(model: nn.Module, before: Mapping[str, Tensor], loss: object, case: Case) -> cp.Outcome:
    """The outcome of a library that updates by itself (SGD at :data:`RATE`), with gradients from the weights' change.

    With clipping, neither the gradients nor DeepSpeed's norm are known, so only the change is compared.
    """
    changes = {n: p.detach() - before[n] for n, p in model.named_parameters()}
    gradients = {n: -changes[n] / RATE if p.requires_grad else None for n, p in model.named_parameters()}
    kept = {n: change for n, change in changes.items() if gradients[n] is not None}
    return cp.Outcome(model, loss, gradients={} if case.clip else gradients, updates=kept)


def copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}
