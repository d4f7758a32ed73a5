# SPDX-License-Identifier: Apache-2.0
"""What other programs call settings of ours, for those who come from there: a table read by `megatron_flags.py`.

USP (yunchang), LoongTrain, DeepSpeed, Hugging Face's trainer and configurations. Megatron-LM's own forks, whose scripts
run here, are in `fork_flags.py`. None of these is read as ours: their values are not always what ours would be.
"""

from __future__ import annotations

OTHER_NAMES: tuple[tuple[str, str], ...] = (
    # the grid
    ("use --tensor-model-parallel-size", "--tp-size 1 --tp_size 1 --tp 1 --tensor-parallel 1"),
    ("use --pipeline-model-parallel-size", "--pipeline-parallel-size 1 --pp-size 1 --pp_size 1 --pp 1"),
    ("use --context-parallel-size", "--cp-size 1 --sp-size 1 --sp_size 1 --sequence_parallel_size 1"),
    (
        "use --ulysses-parallel-size",
        """
        --ulysses-degree 1 --ulysses_degree 1 --sp-ulysses-degree 1 --sp_ulysses_degree 1 --ulysses-size 1
        --head-parallel-size 1 --head_size 1
        """,
    ),
    ("use --ds-sequence-parallel-size", "--ds-sequence-parallel 1"),
    (
        "use --ring-parallel-size",
        "--ring-degree 1 --ring_degree 1 --sp-ring-degree 1 --sp_ring_degree 1 --ring-size 1 --context_size 1",
    ),
    ("use --context-parallel-balance zigzag, or contiguous", "--ring-impl-type 1 --ring_impl_type 1"),
    # the model
    ("use --qk-layernorm", "--use-qk-norm --qk-norm"),
    ("use --rotary-base", "--rope-theta 1 --rope_theta 1 --rotary-emb-base 1"),
    ("use --num-layers", "--num-hidden-layers 1 --num_hidden_layers 1 --n-layers 1 --n_layers 1"),
    ("use --ffn-hidden-size", "--intermediate-size 1 --intermediate_size 1"),
    ("use --group-query-attention with --num-query-groups", "--num-kv-heads 1 --num_key_value_heads 1 --kv-heads 1"),
    ("use --norm-epsilon", "--rms-norm-eps 1 --rms_norm_eps 1 --rmsnorm-epsilon 1"),
    ("use --position-embedding-type rope", "--use-rope --use-rotary-emb"),
    ("use --window-size N-1,0", "--sliding-window 1 --sliding_window 1 --sliding-window-size 1"),
    ("use --attention-kernel", "--attn-implementation 1 --attn_implementation 1"),
    # the batch and the schedule
    ("use --seq-length", "--max-seq-length 1 --max_seq_length 1 --max-seq-len 1 --sequence-length 1 --seqlen 1"),
    ("use --micro-batch-size", "--per-device-train-batch-size 1 --per_device_train_batch_size 1 --mbs 1"),
    ("use --global-batch-size", "--train-batch-size 1 --gbs 1"),
    ("use --lr", "--learning-rate 1 --learning_rate 1"),
    ("use --lr-warmup-iters", "--warmup-steps 1 --warmup_steps 1"),
    ("use --lr-decay-style", "--lr-scheduler-type 1 --lr_scheduler_type 1"),
    ("use --clip-grad", "--max-grad-norm 1 --max_grad_norm 1 --gradient-clipping 1"),
    ("use --train-iters", "--max-steps 1 --max_steps 1 --train-steps 1"),
    # memory
    (
        "use --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "--gradient-checkpointing --gradient_checkpointing --activation-checkpointing",
    ),
)
