# SPDX-License-Identifier: Apache-2.0
"""One training step of TRL's SFTTrainer: accelerate's parallelism, and packing of documents."""

from __future__ import annotations

import megatron.context_parallel as cp
from benchmarks.certify.cases import LENGTH, VOCABULARY, Case
from benchmarks.certify.with_accelerate import trained


def step(case: Case, sequence: int = 1, context: int = 1, stage: int = 3) -> cp.Outcome:
    """As :func:`benchmarks.certify.with_accelerate.step`; several documents are packed by the trainer."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    starts, packs, rows = (0, *case.documents[:-1]), len(case.documents) > 1, []
    for batch in case.batches():
        ids, labels = batch["input_ids"][0], batch["labels"][0]
        for start, end in zip(starts, case.documents):
            counted = (labels[start:end] != -100).int()
            counted[0] = 1  # TRL itself leaves out a document's first token
            rows.append({"input_ids": ids[start:end].tolist(), "completion_mask": counted.tolist()})
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(VOCABULARY)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1")
    others = dict(max_length=LENGTH, packing=packs, shuffle_dataset=False, bf16=False, gradient_checkpointing=False)
    if any(end for _, end in case.masked):
        others["completion_only_loss"] = True
    else:
        rows = [{"input_ids": row["input_ids"]} for row in rows]
    model = case.model("eager" if case.sinks else "sdpa")
    data, other = Dataset.from_list(rows), {"processing_class": tokenizer}
    return trained(SFTTrainer, SFTConfig, case, model, data, sequence, context, stage, other=other, **others)
