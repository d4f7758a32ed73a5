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
    NEVER,
    NOT_NEGATIVE,
    NOT_TINY,
    count,
    flag,
    function,
    layer_pattern,
    size,
    tokens,
    weights,
)
from megatron.training.settings.kinds import KINDS, KindSettings
from megatron.training.settings.read_with import (
    FP8,
    FP8_DELAYED,
    GELU,
    LORA,
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
class NetworkSettings:
    """Settings of all models."""

    model: str | None = flag(
        None,
        "named shape, such as llama3-8b, or hf:DIR with a config.json; single flags override it",
        loaded=NEVER,
        computes=False,
    )
    num_layers: int | None = size(None, "number of transformer layers", aliases=["--encoder-num-layers"])
    hidden_size: int | None = size(None, "width of the residual stream")
    ffn_hidden_size: int | None = size(
        None, "width of the MLP; default 4h, or about 8h/3 in a multiple of 64 with --swiglu"
    )
    num_attention_heads: int | None = size(None, "number of query heads")
    group_query_attention: bool = flag(
        False, "grouped-query attention with --num-query-groups key/value heads", loaded=ALWAYS
    )
    num_query_groups: int = size(1, "key/value heads under --group-query-attention", loaded=ALWAYS)
    kv_channels: int | None = size(None, "size of a head; default hidden_size / num_attention_heads")
    max_position_embeddings: int | None = count(None, "longest sequence the model is made for", type=tokens)
    position_embedding_type: str = function(
        "learned_absolute",
        "how the model gets the positions of tokens",
        type=positions,
        choices=["learned_absolute", "rope", "yarn", "alibi", "none"],
        loaded=ALWAYS,
    )
    rotary_base: int = function(
        10000,
        "base period of RoPE",
        aliases=["--rotary-position-embeddings-theta"],
        read_with=ROPE,
        range=AT_LEAST_1,
        loaded=ALWAYS,
    )
    rotary_base_local: int | None = function(
        None,
        "base period of RoPE in layers with a window, where it is not scaled; default --rotary-base",
        range=AT_LEAST_1,
    )
    no_rope_freq: int | list[int] | None = function(
        None,
        "layers without RoPE: every N-th; or 1 for each of them and 0 for the others, as in ([0]*3+[1])*4",
        type=layer_pattern,
    )
    rotary_percent: float = function(
        1.0, "share of a head that is rotated", read_with=ROPE, range=(ABOVE_ZERO, AT_MOST_1), loaded=ALWAYS
    )
    rotary_interleaved: bool = function(
        False, "rotate neighbouring pairs, not the two halves of a head", read_with=ROPE, loaded=ALWAYS
    )
    rotary_seq_len_interpolation_factor: float | None = function(
        None, "linear interpolation of RoPE", read_with=ROPE, range=ABOVE_ZERO
    )
    use_rope_scaling: bool = function(False, "RoPE scaling as in Llama 3.1", read_with=ROPE)
    rope_scaling_factor: float = function(8.0, "factor of --use-rope-scaling", read_with=ROPE_SCALING, range=ABOVE_ZERO)
    yarn_rotary_scaling_factor: float = function(
        1.0, "YaRN: how much longer than the original length", aliases=["--rotary-scaling-factor"], range=ABOVE_ZERO
    )
    yarn_original_max_position_embeddings: int = function(4096, "YaRN: original length", range=AT_LEAST_1)
    yarn_beta_fast: float = function(
        32.0,
        "YaRN: pairs that rotate more often than this within the original length are not changed",
        range=ABOVE_ZERO,
    )
    yarn_beta_slow: float = function(
        1.0,
        "YaRN: pairs that rotate less often than this within the original length are interpolated",
        range=ABOVE_ZERO,
    )
    yarn_mscale: float = function(
        1.0,
        "YaRN: numerator of the attention factor, (0.1 ln(factor) x this + 1)",
        aliases=["--mscale"],
        range=NOT_NEGATIVE,
    )
    yarn_mscale_all_dim: float = function(
        0.0,
        "YaRN: coefficient in the denominator of the attention factor",
        aliases=["--mscale-all-dim"],
        range=NOT_NEGATIVE,
    )
    yarn_correction_range_round_to_int: bool = function(
        True,
        "YaRN: do not round the two bounds of --yarn-beta-fast and --yarn-beta-slow to integers",
        flags=["--no-yarn-correction-range-round-to-int"],
    )
    normalization: str = weights(
        "LayerNorm",
        "normalization layer",
        type=normalization,
        choices=["LayerNorm", "RMSNorm"],
        loaded=ALWAYS,
        core=True,
    )
    norm_epsilon: float = function(
        1e-5,
        "epsilon of the normalization",
        aliases=["--layernorm-epsilon"],
        range=NOT_NEGATIVE,
        core="layernorm_epsilon",
    )
    apply_layernorm_1p: bool = function(
        False, "store the weights of the norm minus 1", loaded=ALWAYS, core="layernorm_zero_centered_gamma"
    )
    swiglu: bool = weights(False, "gated MLP with SiLU", loaded=ALWAYS)
    geglu: bool = weights(False, "gated MLP with GELU by tanh, as in Gemma")
    quick_geglu: bool = weights(False, "gated MLP with x sigmoid(1.702 x), as in gpt-oss")
    glu_linear_offset: float = function(0.0, "gated MLP: number added to the half that is not activated", core=True)
    activation_func_clamp_value: float | None = function(
        None,
        "gated MLP: limit of both halves before the activation; the activated half has no lower limit",
        range=ABOVE_ZERO,
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
    add_bias_linear: bool = weights(
        True, "no bias in the linear layers", flags=["--disable-bias-linear"], loaded=ALWAYS, core=True
    )
    add_qkv_bias: bool = weights(False, "bias in the QKV projection only", loaded=ALWAYS, core=True)
    qk_layernorm: bool = weights(False, "normalize queries and keys of each head", core=True)
    qk_layernorm_all_heads: bool = weights(
        False, "normalize the queries of all heads together, and so the keys, as in OLMo 2"
    )
    attention_output_gate: bool = weights(
        False,
        "multiply the output of attention by the sigmoid of a gate, which is projected with the queries",
        core=True,
    )
    softmax_scale: float | None = function(
        None, "factor of attention scores; default 1 / square root of --kv-channels", range=ABOVE_ZERO, core=True
    )
    attn_logit_softcapping: float | None = function(
        None, "soft-cap of attention scores: a score s becomes C tanh(s / C), as in Gemma 2", range=ABOVE_ZERO
    )
    final_logit_softcapping: float | None = function(None, "soft-cap of the logits of the vocabulary", range=ABOVE_ZERO)
    softmax_type: str = weights(
        "vanilla",
        "softmax of attention: off-by-one adds 1 to its sum, learnable adds a sink: one learned score per head",
        choices=["vanilla", "off-by-one", "learnable"],
        core=True,
    )
    sandwich_norm: bool = weights(
        False, "normalize the outputs of attention and MLP too, before they are added, as in Gemma 2 and 3"
    )
    reordered_norm: bool = weights(
        False, "normalize the outputs of attention and MLP in place of their inputs, as in OLMo 2"
    )
    parallel_residual: bool = function(
        False, "attention and MLP both read the layer's input, and their sum is added, as in GPT-NeoX"
    )
    scale_embeddings: bool = function(
        False, "multiply word embeddings by the square root of --hidden-size, as in Gemma"
    )
    embedding_multiplier: float | None = function(None, "factor of word embeddings, as in Granite", range=ABOVE_ZERO)
    residual_multiplier: float | None = function(
        None, "factor of the outputs of attention and MLP, before they are added", range=ABOVE_ZERO
    )
    logits_scaling: float | None = function(None, "divisor of the logits of the vocabulary", range=ABOVE_ZERO)
    embed_layernorm: bool = weights(False, "LayerNorm of the word embeddings, as in BLOOM")
    untie_embeddings_and_output_weights: bool = weights(False, "separate weights for the output layer", loaded=ALWAYS)
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
    experimental_attention_variant: str | None = weights(
        None,
        "gated_delta_net: layers that --linear-attention-freq chooses have a state in place of keys and values, as in "
        "Qwen3-Next; dsa: queries choose the keys that they read, as in DeepSeek V3.2",
        choices=[kind.condition.value for kind in KINDS if kind.condition.value],
    )
    lora_rank: int | None = count(
        None, "train only adapters of this rank on the linear layers (LoRA)", network=ADAPTERS
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
    reward_model: bool = flag(
        False,
        "train a reward model, a model with one number in place of logits, on pairs of answers as --dpo's; a pair may "
        "have a margin",
        computes=True,
    )
    make_vocab_size_divisible_by: int = count(
        128,
        "pad the vocabulary to a multiple of this times TP",
        read_with=WITHOUT_PADDED_SIZE,
        generation=True,
        computes=False,
    )
    padded_vocab_size: int | None = count(
        None,
        "rows of the embedding; replaces --make-vocab-size-divisible-by",
        aliases=["--pad-vocab-size-to"],
        generation=True,
        computes=False,
    )
    vocab_size: int | None = count(None, "vocabulary size; default the tokenizer's", loaded=NEVER, generation=True)
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
    fp8_amax_history_len: int = count(1, "length of the FP8 amax history", read_with=FP8_DELAYED)
    fp8_amax_compute_algo: str = flag(
        "most_recent", "how FP8 reads the amax history", choices=["most_recent", "max"], read_with=FP8_DELAYED
    )

    @property
    def gated(self) -> bool:
        """Whether the MLP has three matrices: gate, up and down."""
        return self.swiglu or self.geglu or self.quick_geglu


@dataclass
class ModelConfig(KindSettings, NetworkSettings):
    """The network. Shapes may come from a named model (``--model``), which single flags override."""
