# SPDX-License-Identifier: Apache-2.0
"""TRL's own trainers over ranks: the losses, norms and rewards of each step are those of TRL on one process."""

from __future__ import annotations

import json
import math
import os
import random
from pathlib import Path
from typing import Any

import pytest

import megatron.context_parallel as cp
from megatron.context_parallel.huggingface import Fpdt, TrlMixin, parallelize
from megatron.system.whole_file import replace_file
from tests.chats import make_tokenizer, sentence
from tests.errors import change_last_bits, limit_of_rounding
from tests.hugging_face import save_model
from tests.pairs import also_in_full

pytest.importorskip("trl", reason="TRL is not installed: pip install 'megatron-longcontext[peers]'")
ROWS = 12
COMMON = {
    "use_cpu": True, "bf16": False, "report_to": [], "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no",
    "learning_rate": 1e-3, "lr_scheduler_type": "constant", "per_device_train_batch_size": 4, "seed": 3,
    "gradient_checkpointing": False, "ddp_find_unused_parameters": False,
}  # fmt: skip


def rows(kind: str) -> list[dict[str, Any]]:
    draw, made = random.Random(4), []
    for _ in range(ROWS):
        prompt, good, bad = ([{"role": role, "content": sentence(draw, draw.randint(1, 4))}]
                             for role in ("user", "assistant", "assistant"))  # fmt: skip
        made.append({
            "SFT": {"messages": prompt + good},
            "DPO": {"prompt": prompt, "chosen": good, "rejected": bad},
            "Reward": {"chosen": prompt + good, "rejected": prompt + bad},
            "GRPO": {"prompt": prompt},
        }[kind])  # fmt: skip
    return made


def write_rows(folder: str, kind: str) -> str:
    """A file with the rows; every process writes the same."""
    path = Path(folder) / f"{kind}.jsonl"
    if not path.exists():
        replace_file(path, "".join(json.dumps(row) + "\n" for row in rows(kind)))
    return str(path)


def vowels(completions: list[Any], **_: Any) -> list[float]:
    """A reward by a rule."""
    texts = [one[0]["content"] for one in completions]
    return [sum(letter in "aeiou" for letter in text) / (1 + len(text)) for text in texts]


def prepare_folder(folder: Path) -> None:
    from transformers import AutoTokenizer

    make_tokenizer(folder, "chatml")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token, tokenizer.eos_token = "<|end|>", "<|im_end|>"
    tokenizer.save_pretrained(folder)
    sizes = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "attention_dropout": 0.0,
        "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    save_model(folder, "llama", sizes)


def train(kind: str, folder: str, grid: dict[str, int] | None, steps: int, **options: Any) -> list[dict[str, float]]:
    """What a trainer logs of each step; ``grid``: None for TRL without our mixin; ``resume``: a checkpoint.

    ``last_bit``: each weight is first changed by its last bit, which shows what rounding does to the later steps.
    """
    import datasets
    import trl
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, set_seed

    for state in (AcceleratorState, PartialState):
        state._reset_state()
    GradientState._reset_state()
    set_seed(1)
    architecture = AutoModelForSequenceClassification if kind == "Reward" else AutoModelForCausalLM
    model = architecture.from_pretrained(folder, **({"num_labels": 1} if kind == "Reward" else {}))
    if options.pop("last_bit", False):
        change_last_bits(model.parameters())
    base, configuration = getattr(trl, f"{kind}Trainer"), getattr(trl, f"{kind}Config")
    extra: dict[str, Any] = {"max_length": 128} if kind != "GRPO" else {
        "num_generations": 4, "max_completion_length": 12, "beta": 0.05, "gradient_accumulation_steps": 2,
    }  # fmt: skip
    lora, settings, resume = options.pop("lora", False), options.pop("settings", {}), options.pop("resume", None)
    output = {"output_dir": os.path.join(folder, "out"), "max_steps": steps}
    args = configuration(**(output | COMMON | extra | settings))
    given: dict[str, Any] = {"reward_funcs": vowels} if kind == "GRPO" else {}
    if lora:
        from peft import LoraConfig

        given["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])
    if grid is not None:
        context = given["context"] = parallelize(model, cp.initialize_grid(**grid), seq_length=128, **options)
        base = type(f"Long{kind}", (TrlMixin, base), {})
    data = datasets.Dataset.from_list(rows(kind))
    if settings.get("precompute_ref_log_probs"):  # TRL's ranks share a file of them, beside those of the data
        data = datasets.load_dataset("json", data_files=write_rows(folder, kind), split="train", cache_dir=folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    trainer = base(model=model, args=args, train_dataset=data, processing_class=tokenizer, **given)
    trainer.train(resume_from_checkpoint=resume)
    kept = ("loss", "grad_norm", "reward", "entropy", "kl", "rewards/margins", "accuracy", "mean_token_accuracy")
    log = [{name: float(one[name]) for name in kept if name in one} for one in trainer.state.log_history]
    if grid is not None:
        context.remove()
    return [one for one in log if "loss" in one]


@pytest.fixture(scope="module")
def alone(pool, shared, tmp_path_factory):
    """(folder of the model, what TRL logs on one process)."""
    folder = tmp_path_factory.mktemp("trl")
    prepare_folder(folder)

    def run(kind: str, steps: int, **options: Any) -> tuple[str, list[dict[str, float]]]:
        key = ("trl", kind, steps, sorted(options))
        return str(folder), shared(key, lambda: pool.run(train, 1, kind, str(folder), None, steps, timeout=240,
                                                         **options)[0])  # fmt: skip

    return run


U2, R2, BOTH = {"ulysses": 2}, {"ring": 2}, {"ulysses": 2, "ring": 2}
CASES = [
    (kind, steps, grid, {})
    for kind, steps in (("DPO", 5), ("GRPO", 10), ("Reward", 5), ("SFT", 5))
    for grid in (R2, BOTH, U2)
] + [
    ("DPO", 5, BOTH, {"fpdt": Fpdt(chunk_size=16)}),
    ("DPO", 3, R2, {"lora": True}),
    ("DPO", 3, BOTH, {"settings": {"precompute_ref_log_probs": True}}),
    ("GRPO", 4, R2, {"settings": {"loss_type": "bnpo", "num_iterations": 2}}),
    ("SFT", 3, R2, {"balance": "documents"}),
]  # fmt: skip


@pytest.mark.parametrize("kind, steps, grid, options", [CASES[0], *also_in_full(*CASES[1:])])
@pytest.mark.lab
def test_steps_are_those_of_trl_alone(pool, alone, shared, kind, steps, grid, options):
    world = grid.get("ulysses", 1) * grid.get("ring", 1)
    of_trl = {name: options[name] for name in ("lora", "settings") if name in options}
    folder, expected = alone(kind, steps, **of_trl)
    assert len(expected) == steps and len({one["loss"] for one in expected}) > 1
    rounding = last_bits(pool, shared, kind, steps, folder, expected, of_trl)
    for log in pool.run(train, world, kind, folder, grid, steps, timeout=300, **options):
        for mine, theirs in zip(log, expected, strict=True):
            for name, x in theirs.items():
                # exp(d) - 1 - d of small d loses digits
                relative = {"kl": 1e-3, "loss": 1e-5}.get(name, 1e-4)
                assert mine[name] == pytest.approx(x, rel=relative, abs=max(1e-7, rounding.get(name, 0))), name


def last_bits(pool, shared, kind, steps, folder, expected, options) -> dict[str, float]:
    """By name, twice what the last bits of weights change on one process.

    GRPO's loss is a sum of terms of about the size 1, the advantages, which cancel; sums over a shared prompt have
    another order. So ten steps move it by 5e-6, and two iterations over one batch by 2e-5.
    """
    if kind != "GRPO":
        return {"rewards/margins": 1e-6, "entropy": 1e-6}
    key = ("trl last bits", steps, sorted(options))
    moved = shared(key, lambda: pool.run(train, 1, kind, folder, None, steps, timeout=240, last_bit=True, **options)[0])
    found = {}
    for name in {name for one in expected for name in one}:
        changes = (abs(a[name] - b[name]) for a, b in zip(expected, moved) if name in a and name in b)
        found[name] = limit_of_rounding(0.0, [*changes], 5e-5 if name == "loss" else math.inf)
    return found


@pytest.mark.full
@pytest.mark.parametrize("kind", ["DPO", "GRPO", "Reward"])
def test_a_checkpoint_is_resumed(pool, alone, tmp_path, kind):
    """The steps after it are those of TRL on one process, which did not stop."""
    folder, expected = alone(kind, 4)
    saving = {"output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 2}
    pool.run(train, 4, kind, folder, BOTH, 2, timeout=300, settings=saving)
    again = pool.run(train, 4, kind, folder, BOTH, 4, timeout=300, resume=str(tmp_path / "checkpoint-2"))
    for log in again:
        for mine, theirs in zip(log[-2:], expected[2:], strict=True):
            assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5, abs=1e-6 if kind == "GRPO" else 1e-7)
            assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


REFUSED = [
    ("GRPO", {"per_device_train_batch_size": 2, "num_generations": 4, "gradient_accumulation_steps": 1}, "multiple of"),
    ("DPO", {"use_weighting": True}, "use_weighting"),
]


def refusal_of(kind: str, folder: str, settings: dict[str, Any]) -> str:
    with pytest.raises(ValueError) as refused:
        train(kind, folder, R2, 1, settings=settings)
    return str(refused.value)


@pytest.mark.parametrize("kind, settings, message", REFUSED)
@pytest.mark.lab
def test_settings_that_are_refused(pool, tmp_path, kind, settings, message):
    prepare_folder(tmp_path)
    assert message in pool.run(refusal_of, 2, kind, str(tmp_path), settings, timeout=120)[0]
