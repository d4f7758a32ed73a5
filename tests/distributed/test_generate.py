# SPDX-License-Identifier: Apache-2.0
"""Generation gives transformers' tokens on any grid; logits of decoding equal those of one pass over the sequence."""

from __future__ import annotations

import json
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.distributed.flags import A2A, ETP1, P2, R2, RUN, SHAPE, T2, U2, ep
from tests.hugging_face import save_model
from tests.pairs import full_but
from tests.program import ENVIRONMENT, run_forked, run_ranks
from tools.convert_hf import main as convert

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY = 301
SIZES = {"hidden_size": 64, "vocab_size": VOCABULARY}
LLAMA = SIZES | {
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "tie_word_embeddings": False, "eos_token_id": 2,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192, "rope_theta": 500000.0}  # fmt: skip
# Every second layer has a window, and in Gemma 3 another RoPE.
GEMMA = LLAMA | {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 12, "tie_word_embeddings": True,
                 "layer_types": ["sliding_attention", "full_attention"], "pad_token_id": None}  # fmt: skip
BASES = {"sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
         "full_attention": {"rope_type": "default", "rope_theta": 20000.0}}  # fmt: skip
LATENTS = {
    "rope_parameters": YARN | {"mscale": 0.8, "mscale_all_dim": 1.2}, "num_key_value_heads": 8, "q_lora_rank": 24,
    "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16, "first_k_dense_replace": 2,
    "rms_norm_eps": 1e-6,
}  # fmt: skip
ROUTED = {"n_routed_experts": 8, "moe_intermediate_size": 32, "n_shared_experts": 1, "num_experts_per_tok": 4,
          "routed_scaling_factor": 2.5, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}  # fmt: skip
CHOICE = {"index_topk": 12, "index_head_dim": 16, "index_n_heads": 16, "head_dim": 8}
MAMBA = {"n_groups": 4, "eos_token_id": 2}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", LLAMA),
    "llama, YaRN": ("llama", LLAMA | {"rope_parameters": YARN}),
    "llama 3.1": ("llama", LLAMA | {"rope_parameters": LLAMA3}),
    "qwen2": ("qwen2", LLAMA | {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", LLAMA | {"head_dim": 16}),
    "gemma2": ("gemma2", GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("gemma3_text", GEMMA | {"rope_parameters": BASES}),
    "olmo3": ("olmo3", LLAMA | {"sliding_window": 12, "layer_types": GEMMA["layer_types"], "rope_parameters": BASES}),
    "gpt_neox": ("gpt_neox", LLAMA | {"rotary_pct": 0.5, "bos_token_id": 1, "eos_token_id": 2}),
    "qwen3_next": ("qwen3_next", LLAMA
     | {"num_hidden_layers": 4, "num_key_value_heads": 4, "num_experts": 0, "head_dim": 16, "linear_key_head_dim": 8}
     | {"linear_value_head_dim": 12, "linear_num_key_heads": 4, "linear_num_value_heads": 8}
     | {"layer_types": ["linear_attention", "full_attention"] * 2}),
    "nemotron_h": ("nemotron_h", SIZES | MAMBA
     | {"intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
     | {"layers_block_type": ["linear_attention", "full_attention", "moe", "linear_attention", "full_attention", "mlp"]}
     | {"n_routed_experts": 4, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 24}
     | {"mamba_num_heads": 8, "mamba_head_dim": 12, "ssm_state_size": 6}),
    "mamba2": ("mamba2", SIZES | MAMBA
     | {"num_heads": 8, "head_dim": 16, "state_size": 6, "num_hidden_layers": 4, "tie_word_embeddings": True}),
    "bloom": ("bloom", SIZES | {"n_layer": 2, "n_head": 8, "eos_token_id": 2}),
    "deepseek": ("deepseek_v3", LLAMA | LATENTS),
    "deepseek, experts": ("deepseek_v3", LLAMA | LATENTS | ROUTED),
    "deepseek, chosen keys": ("deepseek_v32", LLAMA | LATENTS | ROUTED | CHOICE),
    "glm, a choice for two layers": ("glm_moe_dsa", LLAMA | LATENTS | ROUTED | CHOICE
     | {"num_hidden_layers": 4, "indexer_types": ["full", "shared"] * 2}),
    "mixtral": ("mixtral", LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2}),
}  # fmt: skip
WITH_CHOICE = ("deepseek, chosen keys", "glm, a choice for two layers")
WITH_EXPERTS = ("deepseek, experts", "mixtral", "nemotron_h", *WITH_CHOICE)
WITH_STATES = ("qwen3_next", "nemotron_h", "mamba2")
NULL = f"--tokenizer-type NullTokenizer --vocab-size {VOCABULARY - 1}"
LENGTHS, NEW = (5, 23, 5, 37, 1), 40  # decoded tokens reach every rank of a ring of two
GRIDS = {
    "one process": (1, ""),
    "U 2": (2, U2),
    "R 2": (2, R2),
    "R 3": (3, "--ring-parallel-size 3"),
    "U 4": (4, "--ulysses-parallel-size 4"),  # with two KV heads
    "U 2 x R 2": (4, f"{U2} {R2}"),
    "U 2 x R 2, contiguous": (4, f"{U2} {R2} --context-parallel-balance contiguous"),
    "R 2 at once": (2, "--context-parallel-size 2 --cp-comm-type all_gather"),
    "TP 2": (2, T2),
    "TP 2 x R 2": (4, f"{T2} {R2}"),
    "TP 4": (4, "--tensor-model-parallel-size 4"),
    "PP 2 x U 2": (4, f"{P2} {U2}"),
    "DP 2, two at once": (2, "--micro-batch-size 2"),
}
EXPERT_GRIDS = {
    "EP 2 on U 2": (2, f"{U2} {ep(2)}"),
    "EP 2 on R 2": (2, f"{R2} {ep(2)} {A2A}"),
    "EP 2 on TP 2": (2, f"{T2} {ETP1} {ep(2)}"),
    "TP 2 x U 2, EP 2": (4, f"{T2} {U2} {ep(2)} {A2A}"),
    "PP 2 x U 2, EP 2": (4, f"{P2} {U2} {ep(2)}"),
    "DP 2 x U 2, EP 2": (4, f"--micro-batch-size 1 {U2} {ep(2)}"),
}
USUAL = {
    ("deepseek", "TP 2 x R 2"),
    ("glm, a choice for two layers", "U 2 x R 2"),
    ("gemma3", "U 2 x R 2"),
    ("qwen2", "PP 2 x U 2"),
    ("qwen3", "U 4"),
    ("qwen3_next", "U 2 x R 2"),
    ("nemotron_h", "U 2 x R 2"),
    ("bloom", "R 3"),
    ("mixtral", "EP 2 on TP 2"),
}
EVERY = (*product(KINDS, GRIDS), *product(WITH_EXPERTS, EXPERT_GRIDS))
CASES = full_but((case for case in EVERY if case != ("olmo3", "TP 4")), *USUAL)  # refused: two KV heads


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One folder per kind, made when it is first needed."""
    return cache(lambda kind: save_model(tmp_path_factory.mktemp("model"), *KINDS[kind]))


@pytest.fixture(scope="module")
def readable(folders, tmp_path_factory):
    """The folder that --load takes: that of transformers, or with latents, states or experts a converted one."""

    def converted(kind: str) -> Path:
        if kind not in ("deepseek", *WITH_STATES, *WITH_EXPERTS):
            return folders(kind)
        folder = tmp_path_factory.mktemp("converted") / "ours"
        assert convert(["--from-hf", str(folders(kind)), "--to", str(folder)]) == 0
        return folder

    return cache(converted)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def transformers_tokens(folders, shared):
    """Each prompt alone through transformers' ``generate``: its new tokens."""

    def generated(kind: str) -> list[list[int]]:
        model = AutoModelForCausalLM.from_pretrained(folders(kind), attn_implementation="eager").eval()
        result = []
        for prompt in prompts():
            ids = torch.tensor([prompt])
            whole = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW, pad_token_id=0
            )
            result.append(whole[0, len(prompt) :].tolist())
        return result

    return lambda kind: shared(("transformers generate", kind), lambda: generated(kind))


def decoder_of(folder: Path, flags: str, new_tokens: int = NEW) -> tuple[Any, Any]:
    """(decoder, configuration) as tools/generate.py makes them."""
    from megatron.inference.load import configure, load_decoder
    from megatron.training.setup import start

    words = f"{NULL} --device cpu {flags}".split()
    config, _ = configure(words, str(folder), None, None, dist.get_world_size())
    runtime = start(config)
    config.data.seq_length = max(LENGTHS) + new_tokens
    return load_decoder(config, runtime, VOCABULARY), config


def answers(folder: Path, flags: str, drawn: dict[str, Any] | None = None) -> tuple[list[list[int]], int, int]:
    """(new tokens of each prompt, bytes of keys and values on this rank, by the formula)."""
    from megatron.inference.generate import Request, Sampling, generate
    from megatron.training.settings.kinds.dsa_kind import chooses
    from megatron.training.settings.models import model_shape
    from tests.unit.test_generate import cache_bytes

    decoder, config = decoder_of(folder, flags)
    sampling = Sampling(**({"greedy": False, "seed": 5} | drawn if drawn else {}))
    request = Request(NEW, sampling, stop=(2,), batch=config.data.micro_batch_size)
    result, counts = generate(decoder, prompts(), request)
    formula = cache_bytes(
        model_shape(config.model, VOCABULARY),
        decoder.grid,
        prompt=max(LENGTHS),
        new_tokens=NEW,
        batch=len(LENGTHS),
        itemsize=4,
        balance=decoder.balance,
    )
    shape = model_shape(config.model, VOCABULARY)
    if linear := shape.linear:  # some layers have a state, whose size follows from no length
        values, with_states = linear.heads * linear.values, sum(linear.layers)
        state = linear.keys * values + 3 * (2 * linear.key_heads * linear.keys + values)  # and rows to be convolved
        with_keys = shape.pattern.count("*") if shape.pattern else shape.layers - with_states
        states = 4 * with_states // decoder.grid.pipeline.size * len(LENGTHS) * state // decoder.grid.tensor.size
        formula = formula * with_keys // shape.layers + states
    if config.model.dsa_indexer_topk:  # layers that choose also keep the indexer's keys
        choosing = sum(chooses(config.model)) / shape.layers
        kept = shape.latent.keys + shape.latent.rotated
        formula = round(formula * (1 + choosing * shape.latent.index_dim / kept))
    return [answer.tokens for answer in result], counts.cache_bytes, formula


@pytest.mark.parametrize("kind, grid", CASES)
@pytest.mark.usual(0, 4, 6)
def test_token_for_token_as_transformers(pool, readable, transformers_tokens, kind, grid):
    world, flags = (GRIDS | EXPERT_GRIDS)[grid]
    expected = transformers_tokens(kind)
    for tokens, held, formula in pool.run(answers, world, readable(kind), flags):
        assert tokens == expected
        assert held == formula or grid.startswith("DP")
    assert len({token for answer in expected for token in answer}) > 10  # not a loop of a few tokens


@pytest.mark.parametrize("grid", ["R 2", pytest.param("TP 2 x R 2", marks=pytest.mark.full)])
def test_draws_are_the_same_on_every_grid_and_in_every_batch(pool, folders, grid):
    drawn = {"temperature": 1.5, "top_k": 50, "top_p": 0.9}
    folder, (world, flags) = folders("llama"), GRIDS[grid]
    alone = pool.run(answers, 1, folder, "--micro-batch-size 1", drawn)[0][0]
    assert [one[0] for one in pool.run(answers, world, folder, flags, drawn)] == [alone] * world


# Teacher forcing: our own model over whole sequences, and over prompts and one token after the other.
FORCED = "--num-layers 2 --num-workers 0"
RULES = {
    "learned positions, function": (
        "--position-embedding-type learned_absolute",
        "--attention-mask function --mask-function {function}",
    ),
    "sinks, GQA, narrow window": (
        "--softmax-type learnable --group-query-attention --num-query-groups 2 --position-embedding-type rope",
        "--window-size 6,0 --window-global-tokens 3",
    ),
    "ALiBi, window": ("--position-embedding-type alibi", "--window-size 40,0"),
    "off by one, half RoPE": ("--softmax-type off-by-one --position-embedding-type rope --rotary-percent 0.5", ""),
    "interpolated, interleaved": (
        "--position-embedding-type rope --rotary-interleaved --rotary-seq-len-interpolation-factor 2",
        "",
    ),
}
FORCED_GRIDS = ("one process", "U 2 x R 2", "R 3", "TP 2 x R 2")
FORCED_USUAL = {("learned positions, function", "R 3"), ("sinks, GQA, narrow window", "U 2 x R 2")}
FORCED_CASES = full_but(product(RULES, FORCED_GRIDS), *FORCED_USUAL)
TOTAL = 96


def forced(flags: str, mask: str, grid: str) -> tuple[Tensor, Tensor | None]:
    """Logits [b, steps, vocabulary] after the prompts, by decoding and, on one process, by one pass over all tokens."""
    from megatron.inference.decoder import Decoder
    from megatron.training.arguments.parser import parse
    from megatron.training.model.build import build_model
    from megatron.training.setup import start

    shape = SHAPE.replace("64 --max-position-embeddings 64", f"{TOTAL} --max-position-embeddings {TOTAL}")
    words = f"{shape} {RUN} --attention-dropout 0 --hidden-dropout 0 {FORCED} {flags} {mask}"
    config = parse(f"{words} {grid}".split(), None, dist.get_world_size())
    runtime = start(config)
    (model,) = build_model(config, runtime.grid, runtime.layout, VOCABULARY, runtime.device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "softmax_offset" in name:
                first = runtime.grid.tensor.rank * parameter.numel()
                parameter.copy_(torch.linspace(-2, 2, 8)[first : first + parameter.numel()])
            else:
                parameter *= 6 if parameter.dim() > 1 else 1  # so that attention weights differ clearly
    tokens = torch.randint(3, 300, (len(LENGTHS), TOTAL), generator=torch.Generator().manual_seed(1))
    whole = None
    if dist.get_world_size() == 1:
        positions = torch.arange(TOTAL).expand_as(tokens)
        with torch.no_grad():
            whole = model.eval()(tokens, positions, None)[..., :VOCABULARY]
    decoder, lengths, steps = Decoder(model, runtime.grid, runtime.layout.balance), sorted(LENGTHS), NEW
    result = [decoder.prefill([row[:n].tolist() for row, n in zip(tokens, lengths)], steps)]
    for step in range(steps):
        result.append(decoder.decode(torch.stack([row[n + step] for row, n in zip(tokens, lengths)])))
    if whole is not None:
        whole = torch.stack([row[n - 1 : n + steps] for row, n in zip(whole, lengths)])
    return torch.stack(result, dim=1), whole


@pytest.fixture
def function(tmp_path_factory) -> str:
    file = tmp_path_factory.getbasetemp() / "every_third.py"
    file.write_text("def every_third(q, k):\n    return (q - k) % 3 < 2\n")
    return f"{file}:every_third"


@pytest.mark.parametrize("rule, grid", FORCED_CASES)
@pytest.mark.usual(0)
def test_logits_are_those_of_one_pass_over_the_whole(pool, reference, function, rule, grid):
    flags, mask = RULES[rule]
    mask = mask.format(function=function)
    decoded, whole = reference(forced, flags, mask, "")
    scale = whole.abs().max()
    assert (decoded - whole).abs().max() <= 1e-5 * scale and scale > 1
    world, words = GRIDS[grid]
    if world > 1:
        for result, _ in pool.run(forced, world, flags, mask, words):
            assert (result - whole).abs().max() <= 1e-5 * scale


def test_the_program(folders, transformers_tokens, tmp_path):
    """tools/generate.py under torchrun with a folder of tools/convert_hf.py: answers in a file."""
    converted = ["--from-hf", str(folders("llama")), "--to", str(tmp_path / "ours")]
    assert run_forked(ROOT / "tools" / "convert_hf.py", converted, ENVIRONMENT).returncode == 0
    file, output = tmp_path / "prompts.jsonl", tmp_path / "out" / "answers.jsonl"
    rows = [{"tokens": prompts()[0]}, {"prompt": " ".join(map(str, prompts()[1]))}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = ["--load", str(tmp_path / "ours"), "--prompts", str(file), "--output", str(output)]
    argv += f"--max-new-tokens {NEW} --ring-parallel-size 2 --device cpu {NULL}".split()
    first, second = run_ranks(ROOT / "tools" / "generate.py", argv, ENVIRONMENT, 2)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    result = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["tokens"] for row in result] == transformers_tokens("llama")[:2]
    assert [row["prompt_tokens"] for row in result] == prompts()[:2]
    kept = [[token for token in row["tokens"] if token != 2] for row in result]
    assert first.stdout.splitlines() == [f"[{n}] {' '.join(map(str, row))}" for n, row in enumerate(kept, 1)]
    assert "Ring 2" in first.stderr and "tokens/s" in first.stderr and not second.stdout


@pytest.mark.full
def test_a_rank_that_dies_is_named_by_the_others(folders, tmp_path):
    (tmp_path / "mask.py").write_text(
        "import os\n\n\ndef deadly(q, k):\n    if os.environ['RANK'] == '1':\n        os.kill(os.getpid(), 9)\n"
        "    return q >= k\n"
    )
    argv = ["--load", str(folders("llama")), "--prompt", "3 4 5", *f"--max-new-tokens 2 --device cpu {NULL}".split()]
    argv += ["--ring-parallel-size", "2", "--attention-mask", "function"]
    argv += ["--mask-function", f"{tmp_path}/mask.py:deadly"]
    first, second = run_ranks(ROOT / "tools" / "generate.py", argv, ENVIRONMENT, 2)
    assert (first.returncode, second.returncode) == (1, -9), first.stderr
    assert "error: rank 1 on " in first.stderr and "Traceback" not in first.stderr, first.stderr
