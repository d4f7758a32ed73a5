# SPDX-License-Identifier: Apache-2.0
"""Library functions that our functions replace: every argument is computed, or refused by name.

A newer PyTorch or transformers with more arguments fails here. megatron-core's attention has a separate test
(tests/distributed/test_core_attention.py).
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

import megatron.context_parallel as cp
from tests.distributed.pool import RankError

LENGTH = 12
LAYOUT = cp.SequenceLayout(LENGTH, cp.abstract_grid())
TOKENS, WHO = {"query", "key", "value"}, {"module", "attention_mask"}


def operator() -> set[str]:
    return {one.name for one in torch.ops.aten.scaled_dot_product_attention.default._schema.arguments}


def parameters_of(function: Callable) -> set[str]:
    kinds = inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL
    return {name for name, one in inspect.signature(function).parameters.items() if one.kind not in kinds} - {"self"}


def of_transformers(name: str) -> set[str]:
    """The arguments of all attention functions if ``name`` is "attention", or else of all mask functions."""
    from transformers import masking_utils
    from transformers.integrations import flash_attention, flex_attention, sdpa_attention
    from transformers.utils import TransformersKwargs

    if name == "attention":
        modules = (flash_attention, flex_attention, sdpa_attention)
        result = [parameters_of(getattr(module, f"{module.__name__.rpartition('.')[2]}_forward")) for module in modules]
        return set.union(*result, set(TransformersKwargs.__annotations__))
    tree = ast.parse(inspect.getsource(masking_utils))
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return {word.arg for call in calls if ast.unparse(call.func) == "mask_interface" for word in call.keywords}


def of_trainer(name: str) -> set[str]:
    from transformers import Trainer, TrainingArguments

    return (
        {field.name for field in fields(TrainingArguments)}
        if name == "settings"
        else parameters_of(getattr(Trainer, name))
    )


LOSS_OR_MODEL = (
    "use_liger_kernel neftune_noise_alpha include_num_input_tokens_seen parallelism_config label_smoothing_factor"
)
SETTINGS = """
accelerator_config activation_checkpointing activation_checkpointing_kwargs adam_beta1 adam_beta2 adam_epsilon
auto_find_batch_size average_tokens_across_devices batch_eval_metrics bf16 bf16_full_eval data_seed
dataloader_drop_last dataloader_in_order dataloader_multiprocessing_context dataloader_num_workers
dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor ddp_backend ddp_broadcast_buffers
ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph ddp_timeout debug deepspeed disable_tqdm do_eval
do_predict do_train enable_jit_checkpoint eval_accumulation_steps eval_delay eval_do_concat_batches eval_on_start
eval_steps eval_strategy eval_use_gather_object fp16 fp16_full_eval fsdp fsdp_config full_determinism
gradient_accumulation_steps gradient_checkpointing gradient_checkpointing_kwargs greater_is_better hub_always_push
hub_model_id hub_private_repo hub_revision hub_strategy hub_token ignore_data_skip include_for_metrics label_names
learning_rate length_column_name liger_kernel_config load_best_model_at_end local_rank log_level log_level_replica
log_on_each_node logging_first_step logging_nan_inf_filter logging_steps logging_strategy lr_scheduler_kwargs
lr_scheduler_type max_grad_norm max_steps metric_for_best_model num_train_epochs optim optim_args
optim_target_modules output_dir per_device_eval_batch_size per_device_train_batch_size prediction_loss_only project
push_to_hub remove_unused_columns report_to restore_callback_states_from_checkpoint resume_from_checkpoint run_name
save_on_each_node save_only_model save_steps save_strategy save_total_limit seed skip_memory_metrics tf32
torch_compile torch_compile_backend torch_compile_mode torch_empty_cache_steps trackio_bucket_id trackio_space_id
trackio_static_space_id train_sampling_strategy use_cache use_cpu warmup_steps weight_decay
"""  # settings of loops, optimizers, logs and files that the Trainer handles or that compute_loss or the loaders read

# By interface: a function that returns all arguments; the computed ones; the refused ones.
INTERFACES: dict[str, tuple[Callable[[], set[str]], set[str], set[str]]] = {
    "scaled_dot_product_attention": (
        operator,
        {*TOKENS, "is_causal", "scale", "enable_gqa"},
        {"attn_mask", "dropout_p"},
    ),
    "MultiheadAttention()": (
        lambda: parameters_of(nn.MultiheadAttention.__init__),
        {"embed_dim", "num_heads", "bias", "kdim", "vdim", "batch_first", "device", "dtype"},
        {"dropout", "add_bias_kv", "add_zero_attn"},
    ),
    "MultiheadAttention.forward": (
        lambda: parameters_of(nn.MultiheadAttention.forward),
        {*TOKENS, "is_causal", "average_attn_weights"},  # the last one is about returned weights, which are refused
        {"key_padding_mask", "need_weights", "attn_mask"},
    ),
    "flex_attention": (lambda: parameters_of(flex_attention), set(), parameters_of(flex_attention)),  # all are refused
    "attention functions of PyTorch": (
        lambda: {name for name in vars(F) if "attention" in name},
        {"scaled_dot_product_attention", "multi_head_attention_forward"},
        set(),
    ),
    "attention functions of transformers": (
        lambda: of_transformers("attention"),
        {*TOKENS, *WHO, "dropout", "scaling", "sliding_window", "softcap", "is_causal", "s_aux",
         "position_ids", "num_items_in_batch", "output_attentions", "output_hidden_states", "output_router_logits"},
        {"cache", "position_bias", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"},
    ),
    "mask functions of transformers": (
        lambda: of_transformers("masks"),
        {"mask_function", "local_size", "allow_is_causal_skip", "use_vmap", "batch_size", "q_length", "kv_length",
         "q_offset", "kv_offset", "attention_mask", "allow_is_bidirectional_skip", "dtype", "device", "config"},
        set(),
    ),
    "Trainer()": (
        lambda: of_trainer("__init__"),
        {"model", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class", "callbacks",
         "optimizers", "optimizer_cls_and_kwargs", "compute_metrics", "preprocess_logits_for_metrics"},
        {"model_init", "compute_loss_func"},
    ),
    "Trainer.compute_loss": (
        lambda: of_trainer("compute_loss"), {"model", "inputs", "return_outputs", "num_items_in_batch"}, set()
    ),
    "Trainer.prediction_step": (
        lambda: of_trainer("prediction_step"), {"model", "inputs", "ignore_keys", "prediction_loss_only"}, set()
    ),
    "Trainer.evaluation_loop": (
        lambda: of_trainer("evaluation_loop"),
        {"dataloader", "description", "prediction_loss_only", "ignore_keys", "metric_key_prefix"},
        set(),
    ),
    "Trainer.get_test_dataloader": (lambda: of_trainer("get_test_dataloader"), {"test_dataset"}, set()),
    "Trainer.get_eval_dataloader": (lambda: of_trainer("get_eval_dataloader"), {"eval_dataset"}, set()),
    "Trainer.get_train_dataloader": (lambda: of_trainer("get_train_dataloader"), set(), set()),
    "TrainingArguments": (lambda: of_trainer("settings"), set(SETTINGS.split()), set(LOSS_OR_MODEL.split())),
    "AttentionRule, by cp.attention": (
        lambda: {field.name for field in fields(cp.AttentionRule)},
        parameters_of(cp.attention) - {"q", "k", "v", "layout", "key_layout"},
        {"measured", "up"},  # block sizes, which a run of training reads from a file; the layer's own projection
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", INTERFACES)
def test_every_argument_is_known(name):
    all_arguments, computed, refused = INTERFACES[name]
    assert not computed & refused and all_arguments() <= computed | refused  # other versions may lack some of them


def operator_with(mask=None, **more):
    q = torch.randn(1, 2, LENGTH, 4)
    with cp.context_parallel(LAYOUT, mask=mask):
        F.scaled_dot_product_attention(q, q, q, **more)


def layer_with(settings=None, mask=None, **call):
    layer, x = nn.MultiheadAttention(8, 2, batch_first=True, **settings or {}), torch.randn(1, LENGTH, 8)
    with cp.context_parallel(LAYOUT, mask=mask):
        layer(x, x, x, **{"need_weights": False, **call})


def flex(**more):
    q = torch.randn(1, 2, LENGTH, 4)
    with cp.context_parallel(LAYOUT, mask=cp.Causal()):
        flex_attention(q, q, q, **more)


def attention_of_transformers(**more):
    from megatron.context_parallel.huggingface.transformers_attention import attend

    q = torch.randn(1, 2, LENGTH, 4)
    attend(nn.Identity(), q, q, q, SimpleNamespace(window=None, ahead=False, attend=None), **more)


def mask_of_transformers(**more):
    from megatron.context_parallel.huggingface.transformers_attention import mask

    mask(batch_size=1, q_length=LENGTH, kv_length=LENGTH, **more)


def chunked_layer(layout=LAYOUT, **more):
    cp.ChunkedLayer(lambda x, _: (x, x, x), lambda out, x, _: x, [], layout, **more)


EARLIER = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
HOLE = torch.arange(LENGTH)[None] == 3
RING = cp.SequenceLayout(LENGTH, cp.abstract_grid(ring=2).at(ring=0))


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: operator_with(attn_mask=EARLIER), "attn_mask, which tests.unit.test_replaced_functions:"),
        (lambda: layer_with(mask=cp.Full(), attn_mask=~EARLIER), "which MultiheadAttention at tests.unit."),
        (
            lambda: operator_with(cp.Documents([5, LENGTH], cp.Full()), is_causal=True),
            "which lets queries see later keys",
        ),
        (lambda: operator_with(dropout_p=0.1), "does not support dropout_p"),
        (lambda: layer_with({"dropout": 0.1}), "does not support dropout_p"),
        (lambda: layer_with({"add_bias_kv": True}), "key has 13 tokens, but the layout gives each rank 12"),
        (lambda: layer_with({"add_zero_attn": True}), "key has 13 tokens, but the layout gives each rank 12"),
        (lambda: layer_with(key_padding_mask=HOLE), "give mask= to context_parallel and pass none"),
        (lambda: layer_with(mask=cp.Causal(), need_weights=True), "pass need_weights=False"),
        (flex, "flex_attention cannot run over ranks: call scaled_dot_product_attention, and give mask="),
        *(
            (lambda name=name: attention_of_transformers(**{name: torch.ones(1)}), f"passes {name} to its attention")
            for name in sorted(INTERFACES["attention functions of transformers"][2])
        ),
        (lambda: attention_of_transformers(is_causal=False), "not causal"),
        (lambda: attention_of_transformers(sliding_window=3), "a window of 3 tokens, but its mask one of None"),
        (lambda: attention_of_transformers(new=1), "passes new to its attention"),
        (lambda: mask_of_transformers(new=1), "passes new to its masks"),
        (lambda: mask_of_transformers(use_vmap=True), "this model is distributed over ranks: call it as"),
        (lambda: chunked_layer(streamed=True), "give offload="),
        (lambda: chunked_layer(RING, rule=cp.AttentionRule(gather_keys=True)), "gather_keys=True with a layer in"),
        (lambda: chunked_layer(ffn_pieces=2), "ffn_by_rows and ffn_pieces need an ffn: give ffn="),
    ],
)  # fmt: skip
def test_what_is_not_computed_is_refused_by_name(call, words):
    with pytest.raises(ValueError) as refused:
        call()
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_without_a_mask_one_process_returns_weights():
    layer_with(need_weights=True)


@pytest.mark.parametrize(
    "settings, more, words",
    [
        *(({name: value}, {}, name) for name, value in (("neftune_noise_alpha", 5.0), ("use_liger_kernel", True),
          ("include_num_input_tokens_seen", "all"), ("label_smoothing_factor", 0.1))),
        ({}, {"model_init": True}, "the Trainer and the context have different models"),
        ({}, {"another": True}, "the Trainer and the context have different models"),
        ({}, {"compute_loss_func": len}, "compute_loss_func"),
    ],
)  # fmt: skip
@pytest.mark.usual(0, 1, 2)
def test_what_the_trainer_would_ignore_is_refused_by_name(pool, tmp_path, settings, more, words):
    pytest.importorskip("accelerate", reason="accelerate is not installed, which transformers.Trainer needs")
    with pytest.raises(RankError, match=rf"ValueError: .*{words}"):
        pool.run(trainer_with, 1, str(tmp_path), settings, more)


def trainer_with(folder, settings, more):
    from transformers import Trainer, TrainingArguments

    from megatron.context_parallel.huggingface import ContextParallelMixin, parallelize
    from tests.hugging_face import tiny_model

    class LongTrainer(ContextParallelMixin, Trainer):
        pass

    model = tiny_model("llama")
    context = parallelize(model, cp.initialize_grid(), seq_length=LENGTH)
    settings = TrainingArguments(folder, use_cpu=True, report_to=[], **settings)
    arguments = {"compute_loss_func": more["compute_loss_func"]} if "compute_loss_func" in more else {}
    arguments["model"] = tiny_model("llama") if "another" in more else model
    if "model_init" in more:
        arguments = {"model_init": lambda: tiny_model("llama")}
    LongTrainer(context=context, args=settings, **arguments)
