# SPDX-License-Identifier: Apache-2.0
"""Settings of the network."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.training.settings.flag import (
    ABOVE_ZERO,
    ADAPTERS,
    ALWAYS,
    AT_LEAST_1,
    AT_MOST_1,
    BELOW_1,
    FUNCTION,
    NEVER,
    NOT_NEGATIVE,
    NOT_TINY,
    WEIGHTS,
    expert_pattern,
    flag,
    layer_pattern,
)
from megatron.training.settings.read_with import (
    EXPERTS,
    FP8,
    FP8_DELAYED,
    GELU,
    HYBRID,
    LATENT,
    LINEAR,
    LORA,
    MTP,
    ROPE,
    ROPE_SCALING,
    WITHOUT_PADDED_SIZE,
    WITHOUT_XAVIER,
)


def normalization(text: str) -> str:
    """Megatron-LM's name of a normalization; Megatron-DeepSpeed writes it in lower case."""
    return {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}.get(text.lower(), text)


def positions(text: str) -> str:
    """Megatron-LM's name of a position embedding; BigScience writes rotary and absolute."""
    return {"rotary": "rope", "absolute": "learned_absolute"}.get(text, text)


@dataclass
class ModelConfig:
    """The network. Shapes may come from a named model (``--model``), which single flags override."""

    model: str | None = flag(
        None,
        "named shape, such as llama3-8b, or hf:DIR with a config.json; single flags override it",
        loaded=NEVER,
        computes=False,
    )
    num_layers: int | None = flag(
        None,
        "number of transformer layers",
        aliases=["--encoder-num-layers"],
        network=WEIGHTS,
        range=AT_LEAST_1,
        core=True,
    )
    hidden_size: int | None = flag(None, "width of the residual stream", network=WEIGHTS, range=AT_LEAST_1, core=True)
    ffn_hidden_size: int | None = flag(
        None,
        "width of the MLP; default 4h, or about 8h/3 in a multiple of 64 with --swiglu",
        network=WEIGHTS,
        range=AT_LEAST_1,
        core=True,
    )
    num_attention_heads: int | None = flag(None, "number of query heads", network=WEIGHTS, range=AT_LEAST_1, core=True)
    group_query_attention: bool = flag(
        False, "grouped-query attention with --num-query-groups key/value heads", loaded=ALWAYS
    )
    num_query_groups: int = flag(
        1, "key/value heads under --group-query-attention", network=WEIGHTS, range=AT_LEAST_1, loaded=ALWAYS, core=True
    )
    kv_channels: int | None = flag(
        None, "size of a head; default hidden_size / num_attention_heads", network=WEIGHTS, range=AT_LEAST_1, core=True
    )
    max_position_embeddings: int | None = flag(None, "longest sequence the model is made for", range=AT_LEAST_1)
    position_embedding_type: str = flag(
        "learned_absolute",
        "how the model gets the positions of tokens",
        type=positions,
        choices=["learned_absolute", "rope", "yarn", "alibi", "none"],
        network=FUNCTION,
        loaded=ALWAYS,
    )
    rotary_base: int = flag(
        10000,
        "base period of RoPE",
        aliases=["--rotary-position-embeddings-theta"],
        network=FUNCTION,
        read_with=ROPE,
        range=AT_LEAST_1,
        loaded=ALWAYS,
    )
    rotary_base_local: int | None = flag(
        None,
        "base period of RoPE in layers with a window, where it is not scaled; default --rotary-base",
        network=FUNCTION,
    )
    no_rope_freq: int | list[int] | None = flag(
        None,
        "layers without RoPE: every N-th; or 1 for each of them and 0 for the others, as in ([0]*3+[1])*4",
        type=layer_pattern,
        network=FUNCTION,
    )
    rotary_percent: float = flag(
        1.0,
        "share of a head that is rotated",
        network=FUNCTION,
        read_with=ROPE,
        range=(ABOVE_ZERO, AT_MOST_1),
        loaded=ALWAYS,
    )
    rotary_interleaved: bool = flag(
        False,
        "rotate neighbouring pairs, not the two halves of a head",
        network=FUNCTION,
        read_with=ROPE,
        loaded=ALWAYS,
    )
    rotary_seq_len_interpolation_factor: float | None = flag(
        None, "linear interpolation of RoPE", network=FUNCTION, read_with=ROPE, range=ABOVE_ZERO
    )
    use_rope_scaling: bool = flag(False, "RoPE scaling as in Llama 3.1", network=FUNCTION, read_with=ROPE)
    rope_scaling_factor: float = flag(
        8.0, "factor of --use-rope-scaling", network=FUNCTION, read_with=ROPE_SCALING, range=ABOVE_ZERO
    )
    yarn_rotary_scaling_factor: float = flag(
        1.0,
        "YaRN: how much longer than the original length",
        aliases=["--rotary-scaling-factor"],
        network=FUNCTION,
        range=ABOVE_ZERO,
    )
    yarn_original_max_position_embeddings: int = flag(4096, "YaRN: original length", network=FUNCTION, range=AT_LEAST_1)
    yarn_beta_fast: float = flag(
        32.0,
        "YaRN: pairs that rotate more often than this within the original length are not changed",
        network=FUNCTION,
        range=ABOVE_ZERO,
    )
    yarn_beta_slow: float = flag(
        1.0,
        "YaRN: pairs that rotate less often than this within the original length are interpolated",
        network=FUNCTION,
        range=ABOVE_ZERO,
    )
    yarn_mscale: float = flag(
        1.0,
        "YaRN: numerator of the attention factor, (0.1 ln(factor) x this + 1)",
        aliases=["--mscale"],
        network=FUNCTION,
        range=NOT_NEGATIVE,
    )
    yarn_mscale_all_dim: float = flag(
        0.0,
        "YaRN: coefficient in the denominator of the attention factor",
        aliases=["--mscale-all-dim"],
        network=FUNCTION,
        range=NOT_NEGATIVE,
    )
    yarn_correction_range_round_to_int: bool = flag(
        True,
        "YaRN: do not round the two bounds of --yarn-beta-fast and --yarn-beta-slow to integers",
        flags=["--no-yarn-correction-range-round-to-int"],
        network=FUNCTION,
    )
    normalization: str = flag(
        "LayerNorm",
        "normalization layer",
        type=normalization,
        choices=["LayerNorm", "RMSNorm"],
        network=WEIGHTS,
        loaded=ALWAYS,
        core=True,
    )
    norm_epsilon: float = flag(
        1e-5,
        "epsilon of the normalization",
        aliases=["--layernorm-epsilon"],
        network=FUNCTION,
        range=NOT_NEGATIVE,
        core="layernorm_epsilon",
    )
    apply_layernorm_1p: bool = flag(
        False,
        "store the weights of the norm minus 1",
        network=FUNCTION,
        loaded=ALWAYS,
        core="layernorm_zero_centered_gamma",
    )
    swiglu: bool = flag(False, "gated MLP with SiLU", network=WEIGHTS, loaded=ALWAYS)
    geglu: bool = flag(False, "gated MLP with GELU by tanh, as in Gemma", network=WEIGHTS)
    quick_geglu: bool = flag(False, "gated MLP with x sigmoid(1.702 x), as in gpt-oss", network=WEIGHTS)
    glu_linear_offset: float = flag(
        0.0, "gated MLP: number added to the half that is not activated", network=FUNCTION, core=True
    )
    activation_func_clamp_value: float | None = flag(
        None,
        "gated MLP: limit of both halves before the activation; the activated half has no lower limit",
        network=FUNCTION,
        core=True,
    )
    squared_relu: bool = flag(False, "squared ReLU instead of GELU", loaded=ALWAYS)
    bias_gelu_fusion: bool = flag(
        True,
        "compute GELU with erf, as Megatron-LM does without its fused kernel, which uses tanh; --disable-bias-linear "
        "does this too",
        flags=["--no-bias-gelu-fusion"],
        read_with=GELU,
    )
    openai_gelu: bool = flag(False, "compute GELU with tanh, whatever the other flags say")
    add_bias_linear: bool = flag(
        True, "no bias in the linear layers", flags=["--disable-bias-linear"], network=WEIGHTS, loaded=ALWAYS, core=True
    )
    add_qkv_bias: bool = flag(False, "bias in the QKV projection only", network=WEIGHTS, loaded=ALWAYS, core=True)
    qk_layernorm: bool = flag(False, "normalize queries and keys of each head", network=WEIGHTS, core=True)
    qk_layernorm_all_heads: bool = flag(
        False, "normalize the queries of all heads together, and so the keys, as in OLMo 2", network=WEIGHTS
    )
    attention_output_gate: bool = flag(
        False,
        "multiply the output of attention by the sigmoid of a gate, which is projected with the queries",
        network=WEIGHTS,
        core=True,
    )
    softmax_scale: float | None = flag(
        None, "factor of attention scores; default 1 / square root of --kv-channels", network=FUNCTION, core=True
    )
    attn_logit_softcapping: float | None = flag(
        None, "soft-cap of attention scores: a score s becomes C tanh(s / C), as in Gemma 2", network=FUNCTION
    )
    final_logit_softcapping: float | None = flag(None, "soft-cap of the logits of the vocabulary", network=FUNCTION)
    softmax_type: str = flag(
        "vanilla",
        "softmax of attention: off-by-one adds 1 to its sum, learnable adds a sink: one learned score per head",
        choices=["vanilla", "off-by-one", "learnable"],
        network=WEIGHTS,
        core=True,
    )
    sandwich_norm: bool = flag(
        False,
        "normalize the outputs of attention and MLP too, before they are added, as in Gemma 2 and 3",
        network=WEIGHTS,
    )
    reordered_norm: bool = flag(
        False, "normalize the outputs of attention and MLP in place of their inputs, as in OLMo 2", network=WEIGHTS
    )
    parallel_residual: bool = flag(
        False, "attention and MLP both read the layer's input, and their sum is added, as in GPT-NeoX", network=FUNCTION
    )
    scale_embeddings: bool = flag(
        False, "multiply word embeddings by the square root of --hidden-size, as in Gemma", network=FUNCTION
    )
    embed_layernorm: bool = flag(False, "LayerNorm of the word embeddings, as in BLOOM", network=WEIGHTS)
    untie_embeddings_and_output_weights: bool = flag(
        False, "separate weights for the output layer", network=WEIGHTS, loaded=ALWAYS
    )
    hidden_dropout: float = flag(0.1, "dropout on the residual branches", range=(BELOW_1, NOT_TINY), loaded=ALWAYS)
    attention_dropout: float = flag(
        0.1,
        "dropout on attention probabilities; the draw depends on positions, so it is the same on every grid",
        range=(BELOW_1, NOT_TINY),
        loaded=ALWAYS,
    )
    init_method_std: float = flag(
        0.02, "standard deviation of the initial weights", read_with=WITHOUT_XAVIER, range=NOT_NEGATIVE, loaded=NEVER
    )
    init_method_xavier_uniform: bool = flag(False, "Xavier-uniform initial weights", loaded=NEVER)
    multi_latent_attention: bool = flag(
        False, "keys and values from a latent of each token (MLA), as in DeepSeek V3", network=WEIGHTS
    )
    q_lora_rank: int | None = flag(
        None,
        "MLA: width of the queries' latent; default none",
        network=WEIGHTS,
        read_with=LATENT,
        range=AT_LEAST_1,
        core=True,
    )
    kv_lora_rank: int = flag(
        32,
        "MLA: width of the latent of keys and values",
        network=WEIGHTS,
        read_with=LATENT,
        range=AT_LEAST_1,
        core=True,
    )
    qk_head_dim: int = flag(
        128,
        "MLA: entries of a query or key head that are not rotated",
        network=WEIGHTS,
        read_with=LATENT,
        range=AT_LEAST_1,
        core=True,
    )
    qk_pos_emb_head_dim: int = flag(
        64,
        "MLA: entries of a query or key head that RoPE rotates",
        network=WEIGHTS,
        read_with=LATENT,
        range=AT_LEAST_1,
        core=True,
    )
    v_head_dim: int = flag(
        128, "MLA: size of a value head", network=WEIGHTS, read_with=LATENT, range=AT_LEAST_1, core=True
    )
    rope_type: str | None = flag(
        None,
        "MLA: RoPE; default yarn, which is rope at --rotary-scaling-factor 1",
        choices=["rope", "yarn"],
        read_with=LATENT,
    )
    experimental_attention_variant: str | None = flag(
        None,
        "attention of the layers that --linear-attention-freq chooses: a state in place of keys and values, as in "
        "Qwen3-Next",
        choices=["gated_delta_net"],
        network=WEIGHTS,
    )
    linear_attention_freq: int | list[int] | None = flag(
        None,
        "layers with a state: all but every N-th; or 1 for each of them and 0 for the others, as in ([1]*3+[0])*4",
        type=layer_pattern,
        network=WEIGHTS,
        read_with=LINEAR,
        core=True,
    )
    linear_conv_kernel_dim: int = flag(
        4,
        "layers with a state: tokens that the short convolution sees",
        network=WEIGHTS,
        read_with=LINEAR,
        range=AT_LEAST_1,
        core=True,
    )
    linear_key_head_dim: int = flag(
        128,
        "layers with a state: size of a query or key head",
        network=WEIGHTS,
        read_with=LINEAR,
        range=AT_LEAST_1,
        core=True,
    )
    linear_value_head_dim: int = flag(
        128, "layers with a state: size of a value head", network=WEIGHTS, read_with=LINEAR, range=AT_LEAST_1, core=True
    )
    linear_num_key_heads: int = flag(
        16,
        "layers with a state: number of query and key heads",
        network=WEIGHTS,
        read_with=LINEAR,
        range=AT_LEAST_1,
        core=True,
    )
    linear_num_value_heads: int = flag(
        32,
        "layers with a state: number of value heads, a multiple of the key heads",
        network=WEIGHTS,
        read_with=LINEAR,
        range=AT_LEAST_1,
        core=True,
    )
    is_hybrid_model: bool = flag(
        False,
        "a layer is a Mamba2 layer, attention or an MLP: see --hybrid-override-pattern",
        network=WEIGHTS,
        core=True,
    )
    hybrid_override_pattern: str | None = flag(
        None,
        "hybrid model: for each layer M (Mamba2), * (attention), - (MLP) or E (experts), as in M-M*-; default all M, "
        "or by the two ratios",
        network=WEIGHTS,
        read_with=HYBRID,
    )
    hybrid_attention_ratio: float = flag(
        0.0, "hybrid model: share of attention layers, which are spread evenly", network=WEIGHTS, read_with=HYBRID
    )
    hybrid_mlp_ratio: float = flag(
        0.0, "hybrid model: share of MLP layers, which are spread evenly", network=WEIGHTS, read_with=HYBRID
    )
    mamba_state_dim: int = flag(
        128,
        "hybrid model: state of Mamba2 for each number of a head",
        network=WEIGHTS,
        read_with=HYBRID,
        range=AT_LEAST_1,
        core=True,
    )
    mamba_head_dim: int = flag(
        64, "hybrid model: size of a head of Mamba2", network=WEIGHTS, read_with=HYBRID, range=AT_LEAST_1, core=True
    )
    mamba_num_groups: int = flag(
        8,
        "hybrid model: groups of heads that share B and C, and a norm",
        network=WEIGHTS,
        read_with=HYBRID,
        range=AT_LEAST_1,
        core=True,
    )
    mamba_num_heads: int | None = flag(
        None,
        "hybrid model: number of heads of Mamba2; default 2 x --hidden-size / --mamba-head-dim",
        network=WEIGHTS,
        read_with=HYBRID,
        range=AT_LEAST_1,
        core=True,
    )
    mamba_dt_min: float = flag(
        0.0, "hybrid model: smallest time step; 0.001 in transformers' Nemotron H", network=FUNCTION, read_with=HYBRID
    )
    mtp_num_layers: int | None = flag(
        None,
        "layers that each predict one more token ahead (multi-token prediction)",
        network=WEIGHTS,
        range=NOT_NEGATIVE,
        core=True,
    )
    mtp_loss_scaling_factor: float = flag(
        0.1, "weight of the mean of their losses", read_with=MTP, range=NOT_NEGATIVE, core=True
    )
    num_experts: int | None = flag(
        None, "experts of a layer (mixture of experts)", network=WEIGHTS, range=AT_LEAST_1, core="num_moe_experts"
    )
    moe_layer_freq: int | list[int] = flag(
        1,
        "layers with experts: every N-th, or 1 and 0 for each layer, as in [0]*3+[1]*29",
        type=expert_pattern,
        network=WEIGHTS,
        read_with=EXPERTS,
        core=True,
    )
    moe_ffn_hidden_size: int | None = flag(
        None,
        "width of an expert; default --ffn-hidden-size",
        network=WEIGHTS,
        read_with=EXPERTS,
        range=AT_LEAST_1,
        core=True,
    )
    moe_shared_expert_intermediate_size: int | None = flag(
        None,
        "width of an expert that all tokens go to, in addition",
        network=WEIGHTS,
        read_with=EXPERTS,
        range=AT_LEAST_1,
        core=True,
    )
    moe_shared_expert_gate: bool = flag(
        False,
        "multiply the output of that expert by a sigmoid, as in Qwen3-Next",
        network=WEIGHTS,
        read_with=EXPERTS,
        core=True,
    )
    moe_router_topk: int = flag(
        2, "number of experts per token", network=FUNCTION, read_with=EXPERTS, range=AT_LEAST_1, core=True
    )
    moe_router_score_function: str = flag(
        "softmax",
        "scores of experts",
        choices=["softmax", "sigmoid", "sqrtsoftplus"],
        network=FUNCTION,
        read_with=EXPERTS,
    )
    moe_router_pre_softmax: bool = flag(
        False,
        "softmax over all experts before the choice, instead of over the chosen ones",
        network=FUNCTION,
        read_with=EXPERTS,
        core=True,
    )
    moe_router_num_groups: int | None = flag(
        None,
        "groups of experts, of which the best are chosen first",
        network=FUNCTION,
        read_with=EXPERTS,
        range=AT_LEAST_1,
    )
    moe_router_group_topk: int | None = flag(
        None, "how many of these groups a token may use", network=FUNCTION, read_with=EXPERTS, range=AT_LEAST_1
    )
    moe_router_topk_scaling_factor: float | None = flag(
        None, "factor of the chosen experts' weights", network=FUNCTION, read_with=EXPERTS, range=ABOVE_ZERO
    )
    moe_router_dtype: str | None = flag(
        None, "dtype of the router", choices=["fp32", "fp64"], read_with=EXPERTS, core=True
    )
    moe_router_enable_expert_bias: bool = flag(
        False,
        "balance experts by adding to their scores a bias that follows their load; it affects the choice alone",
        network=WEIGHTS,
        read_with=EXPERTS,
    )
    moe_router_bias_update_rate: float = flag(
        0.001, "change of the bias of experts in a step", read_with=EXPERTS, range=NOT_NEGATIVE
    )
    moe_router_load_balancing_type: list[str] = flag(
        ["aux_loss"],
        "load-balancing losses: aux_loss (over a micro-batch), seq_aux_loss (over a sample), both, or none; or "
        "sinkhorn, which evens the choice itself",
        nargs="+",
        read_with=EXPERTS,
    )
    moe_aux_loss_coeff: list[float] = flag(
        [0.0], "coefficient of each load-balancing loss", nargs="+", read_with=EXPERTS
    )
    moe_z_loss_coeff: float | None = flag(
        None, "coefficient of the router's z-loss", read_with=EXPERTS, range=NOT_NEGATIVE
    )
    moe_expert_capacity_factor: float | None = flag(
        None,
        "largest number of tokens of an expert in a micro-batch, over the mean; default no limit",
        network=FUNCTION,
        read_with=EXPERTS,
        range=ABOVE_ZERO,
        core=True,
    )
    moe_enable_routing_replay: bool = flag(
        False,
        "layers of --recompute-granularity full keep the experts of their first pass, and choose them again",
        read_with=EXPERTS,
    )
    moe_token_drop_policy: str = flag(
        "probs",
        "which tokens an expert keeps: those with the largest weights, or the first ones",
        choices=["probs", "position"],
        network=FUNCTION,
        read_with=EXPERTS,
    )
    lora_rank: int | None = flag(
        None, "train only adapters of this rank on the linear layers (LoRA)", range=AT_LEAST_1, network=ADAPTERS
    )
    lora_alpha: float = flag(
        32.0,
        "LoRA: the output of an adapter is scaled by this over its rank",
        read_with=LORA,
        range=ABOVE_ZERO,
        network=ADAPTERS,
    )
    lora_targets: list[str] | None = flag(
        None,
        "LoRA: layers with adapters; linear_qkv: all that make queries, keys, values; default all of the model's",
        nargs="+",
        read_with=LORA,
        network=ADAPTERS,
    )
    make_vocab_size_divisible_by: int = flag(
        128,
        "pad the vocabulary to a multiple of this times TP",
        read_with=WITHOUT_PADDED_SIZE,
        range=AT_LEAST_1,
        generation=True,
        computes=False,
    )
    padded_vocab_size: int | None = flag(
        None,
        "rows of the embedding; replaces --make-vocab-size-divisible-by",
        aliases=["--pad-vocab-size-to"],
        range=AT_LEAST_1,
        generation=True,
        computes=False,
    )
    vocab_size: int | None = flag(
        None, "vocabulary size; default the tokenizer's", range=AT_LEAST_1, loaded=NEVER, generation=True
    )
    transformer_impl: str = flag(
        "auto",
        "layers from megatron-core (local) or Transformer Engine; auto: the latter on GPUs where it is installed",
        choices=["auto", "local", "transformer_engine"],
        loaded=NEVER,
        generation=True,
        computes=False,
    )
    fp8_format: str | None = flag(
        None,
        "FP8 through Transformer Engine",
        choices=["e4m3", "hybrid"],
        loaded=NEVER,
        generation="FP8 layers are not tested with single tokens; use --dtype bf16",
    )
    fp8_recipe: str = flag(
        "delayed", "FP8 scaling recipe", choices=["tensorwise", "delayed", "mxfp8", "blockwise"], read_with=FP8
    )
    fp8_amax_history_len: int = flag(1, "length of the FP8 amax history", read_with=FP8_DELAYED, range=AT_LEAST_1)
    fp8_amax_compute_algo: str = flag(
        "most_recent", "how FP8 reads the amax history", choices=["most_recent", "max"], read_with=FP8_DELAYED
    )

    @property
    def gated(self) -> bool:
        """Whether the MLP has three matrices: gate, up and down."""
        return self.swiglu or self.geglu or self.quick_geglu
