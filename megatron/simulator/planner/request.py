# SPDX-License-Identifier: Apache-2.0
"""What the planner is asked: a model by name or by the training program's own flags, and how many tokens."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache

from megatron.formulas.strategy import Workload
from megatron.simulator.planner.documents import packed
from megatron.training.arguments.config import Config
from megatron.training.arguments.models import LLAMA, model_shape
from megatron.training.arguments.parser import parse
from megatron.training.refusal import Refusal

JOB = "--micro-batch-size 1 --train-iters 1000 --lr 3e-4 --mock-data".split()


@dataclass(frozen=True)
class Request:
    """A model, as flags of the training program.

    Attributes:
        flags: ``--model NAME``, or sizes; those that are not given are a Llama's.
        documents: how long packed documents are (documents.py); empty: a sample is one.
        window: tokens that a query sees, itself among them; 0: all before it.
    """

    flags: tuple[str, ...]
    global_batch: int = 1
    documents: str = ""
    window: int = 0

    @property
    def entry(self) -> str:
        """The program that trains it: ``pretrain_llama.py`` or ``pretrain_gpt.py``."""
        name = _config(self.flags, 1024).model.model
        return "pretrain_llama.py" if name is None or name.startswith("llama") else "pretrain_gpt.py"

    def workload(self, seq_length: int) -> Workload:
        """
        Raises:
            Refusal: the flags are wrong, not about a model, or about something that the planner does not know.
        """
        config = _config(self.flags, seq_length)
        # One more than --vocab-size: a run without a tokenizer of its own counts the end of a document.
        shape = model_shape(config.model, config.model.vocab_size + 1)
        if not self.documents and not 0 < self.window < seq_length:
            return Workload(shape, seq_length, self.global_batch)
        found = packed(self.documents, seq_length, self.window)
        counted = {"keys": found.keys, "spread": found.spread, "uneven": found.uneven}
        return Workload(shape, seq_length, self.global_batch, **counted)

    def program_flags(self, seq_length: int) -> list[str]:
        """The model's flags, as they go into a command."""
        named = _config(self.flags, seq_length).model.model
        given = any(flag.partition("=")[0] == "--max-position-embeddings" for flag in self.flags)
        flags = [*self.flags, *([] if named or given else ["--max-position-embeddings", str(seq_length)])]
        flags += ["--window-size", f"{self.window - 1},0"] if self.window else []
        return flags + (["--reset-position-ids", "--reset-attention-mask"] if self.documents else [])


@lru_cache(maxsize=256)
def _config(flags: tuple[str, ...], seq_length: int) -> Config:
    if any(flag.partition("=")[0] == "--fp8-format" for flag in flags):
        raise Refusal(
            "--fp8-format: the planner does not know its memory: plan without it, then ask a dry run of that plan with "
            "--fp8-format for time and memory"
        )
    defaults = {f"model.{name}": value for name, value in LLAMA.items()}
    read = parse(list(flags), defaults)
    plain = Config()
    for section in fields(Config):
        if section.name in ("model", "notes"):
            continue
        given, usual = getattr(read, section.name), getattr(plain, section.name)
        for setting in fields(given):
            if getattr(given, setting.name) != getattr(usual, setting.name):
                flag = "--" + setting.name.replace("_", "-")
                raise Refusal(f"{flag} is not about the model, and the planner chooses it: --help has its own options")
    words = [*flags, "--seq-length", str(seq_length), *JOB]
    if read.model.model is None and read.model.max_position_embeddings is None:
        words += ["--max-position-embeddings", str(seq_length)]
    if read.model.model is None and read.model.vocab_size is None:
        raise Refusal("missing: --vocab-size; --model names a whole shape, for example --model llama3-8b")
    config = parse(words, defaults, world_size=1)
    _known(config)
    return config


def _known(config: Config) -> None:
    """Refuse what neither memory nor time are known of."""
    model = config.model
    wrong = {
        "--position-embedding-type alibi": model.position_embedding_type == "alibi",
        "--hidden-dropout": model.hidden_dropout > 0,
        "--qk-layernorm": model.qk_layernorm,
        f"--softmax-type {model.softmax_type}": model.softmax_type != "vanilla",
        "--embed-layernorm": model.embed_layernorm,
    }
    for flag in (flag for flag, given in wrong.items() if given):
        raise Refusal(f"{flag}: the planner does not know its time and memory: plan without it")
