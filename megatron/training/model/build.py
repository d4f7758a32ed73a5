# SPDX-License-Identifier: Apache-2.0
"""Builds this rank's model: core's GPT with our attention, positions and weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megatron.context_parallel.core.expert_choice import RouterRule
from megatron.context_parallel.core.gpt_dropout import ModelDropout
from megatron.context_parallel.core.later_tokens import later_token_layers
from megatron.context_parallel.core.learned_positions import PartitionedEmbedding
from megatron.context_parallel.core.lora import Lora, train_adapters_alone
from megatron.context_parallel.core.mixers.state_mixer import Mixer
from megatron.context_parallel.core.spec import (
    AttentionSettings,
    ChunkSettings,
    LayerRule,
    NormedWords,
    StageLayers,
    block_spec,
)
from megatron.context_parallel.fpdt.host_store import Offload, SavedInHost
from megatron.context_parallel.layout.grid import Grid
from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.context_parallel.positions.rope import LayoutRotaryEmbedding, Rope, Yarn
from megatron.training.arguments.stages import stage_span
from megatron.training.arguments.validate.check_memory import layers_recompute, loss_chunks
from megatron.training.data.tokenizer import padded_vocab_size
from megatron.training.model.attention_rule import attention_rule, layer_masks
from megatron.training.model.core_config import in_chunks, router_rule, transformer_config
from megatron.training.model.gpt import LongContextGPT, scale_embeddings
from megatron.training.model.weights import initialize_weights
from megatron.training.settings.config import Config, ModelConfig
from megatron.training.settings.kinds import kinds_in, mixers_of
from megatron.training.settings.kinds.layer_patterns import expert_layers, hybrid_pattern
from megatron.training.settings.models import ROTARY, rope_layers, window_layers


def build_model(
    config: Config,
    grid: Grid,
    layout: SequenceLayout,
    vocab_size: int,
    device: torch.device,
    offload: Offload | None = None,
    on_gpu: bool | None = None,
) -> list[GPTModel]:
    """This rank's model chunks (one, or one per virtual pipeline stage), with their initial weights, on ``device``.

    Args:
        config: the completed settings.
        vocab_size: without padding, which this function adds.
        offload: needed by --fpdt with offload and by --offload-checkpoints.
        on_gpu: whether core may use the kernels that it compiles for GPUs; by default, if ``device`` is one.
    """
    core_config = transformer_config(config, grid, on_gpu=device.type == "cuda" if on_gpu is None else on_gpu)
    stages = core_config.virtual_pipeline_model_parallel_size
    rule, rotaries = attention_rule(config, grid), layer_rotaries(config, layout, device)
    own = list(zip(layer_masks(config), rotaries))  # compared without the rule, whose slopes are a tensor
    layers = tuple(LayerRule(replace(rule, mask=mask), rotary) for mask, rotary in own)
    settings = AttentionSettings(
        layout,
        rule,
        separate=config.data.reset_attention_mask,
        rotary=rotaries[0],
        latents=config.parallel.latent_exchange == "latents",
        keep=config.attention.keep_attention,
        layers=layers if any(one != own[0] for one in own) else (),
        dropout=ModelDropout(config.model.attention_dropout, config.model.hidden_dropout, config.run.seed),
        linear_kernel=config.attention.linear_attention_kernel,
    )
    model_chunks = []
    for stage in range(stages or 1):
        chunk = _build_chunk(config, core_config, grid, settings, vocab_size, stage if stages else None, offload)
        initialize_weights(chunk, core_config, config, vocab_size, device)
        if config.model.lora_rank:
            train_adapters_alone(chunk)
        for name in filter(None, (kind.built(config.model) for kind in kinds_in(config.model))):
            _from_mixers(name)(chunk)
        model_chunks.append(chunk)
    return model_chunks


def _build_chunk(
    config: Config,
    core_config: TransformerConfig,
    grid: Grid,
    settings: AttentionSettings,
    vocab_size: int,
    stage: int | None,
    offload: Offload | None,
) -> GPTModel:
    model, attention = config.model, config.attention
    stages = core_config.virtual_pipeline_model_parallel_size or 1
    first = grid.pipeline.rank == 0 and (stage or 0) == 0
    last = grid.pipeline.rank == grid.pipeline.size - 1 and (stage or 0) == stages - 1
    chunk_settings = None
    if in_chunks(config):
        chunk_settings = ChunkSettings(
            settings,
            fpdt=config.chunks.fpdt,
            ffn_chunks=config.chunks.ffn_chunks,
            offload=offload if config.chunks.fpdt_offload else None,
            streamed=config.chunks.fpdt_stream_hidden,
        )

    def spec_of(start: int, stop: int) -> TransformerBlockSubmodules:
        """The layers from ``start`` to ``stop`` of the complete model."""
        number, recomputed = stop - start, 0
        if layers_recompute(config):
            recomputed = number if attention.recompute_method == "uniform" else attention.recompute_num_layers
        layers = StageLayers(
            num_layers=number,
            transformer_engine=model.transformer_impl == "transformer_engine",
            recomputed=recomputed,
            lora=lora(model),
            experts=_experts(model, start, stop),
            input_norms=not model.reordered_norm,
            output_norms=model.sandwich_norm or model.reordered_norm,
            all_heads_norms=model.qk_layernorm_all_heads,
            parallel_residual=model.parallel_residual,
            residual_multiplier=model.residual_multiplier,
            final_scale=None if model.logits_scaling is None else 1 / model.logits_scaling,
            mixers=_mixers(config, start, stop),
            pattern=hybrid_pattern(model)[start:stop],
        )
        return block_spec(core_config, settings, layers, chunk_settings)

    start, stop = stage_span(config, grid.pipeline.rank, stage or 0)
    spec, further = spec_of(start, stop), None
    if last and model.mtp_num_layers:  # they are built like the model's last layer, which may be on an earlier stage
        further = later_token_layers(model.mtp_num_layers, spec if start < stop else spec_of(stop - 1, stop))
    learned = model.position_embedding_type == "learned_absolute"
    partitioned = config.parallel.partition_position_embedding
    chunk = LongContextGPT(
        config=core_config,
        transformer_layer_spec=spec,
        vocab_size=padded_vocab_size(
            vocab_size, model.make_vocab_size_divisible_by, grid.tensor.size, model.padded_vocab_size
        ),
        real_vocab_size=vocab_size,
        tensor=grid.tensor,
        loss_chunks=loss_chunks(config, vocab_size),
        scoring=config.pairs,
        rewards=model.reward_model,
        chunks=chunk_settings,
        settings=settings,
        softcap=model.final_logit_softcapping,
        max_sequence_length=model.max_position_embeddings,
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=not (model.untie_embeddings_and_output_weights or model.reward_model),
        # Positions that are not learned are applied in our attention; partitioned ones follow below.
        position_embedding_type="learned_absolute" if learned and not partitioned else "none",
        vp_stage=stage,
        mtp_block_spec=further,
    )
    if model.embed_layernorm and first:
        chunk.embedding.word_embeddings = NormedWords(chunk.embedding.word_embeddings, core_config)
    factor = model.hidden_size**0.5 if model.scale_embeddings else model.embedding_multiplier
    if factor and (first or further):
        scale_embeddings(chunk.embedding.word_embeddings, factor)
    if partitioned and first:
        chunk.embedding = PartitionedEmbedding(chunk.embedding, settings.layout, model.max_position_embeddings)
    if config.chunks.offload_checkpoints:
        save_layer_inputs_in_host(chunk.decoder, offload)
    return chunk


def _mixers(config: Config, start: int, stop: int) -> dict[int, Mixer]:
    """What the layers of a stage, from 0, have in place of attention."""
    kinds = {layer - start: kind for layer, kind in mixers_of(config.model).items() if start <= layer < stop}
    mixers = {kind: partial(_from_mixers(kind.mixer), **kind.options(config)) for kind in {*kinds.values()}}
    return {layer: mixers[kind] for layer, kind in kinds.items()}


def _from_mixers(place: str) -> Callable:
    """What "module:function" in context_parallel/core/mixers/ names."""
    module, name = place.split(":")
    return getattr(import_module(f"megatron.context_parallel.core.mixers.{module}"), name)


def _experts(model: ModelConfig, start: int, stop: int) -> dict[int, RouterRule] | None:
    """The layers of a stage that have experts, from 0, and how tokens choose them; None for a dense model."""
    if not model.num_experts:
        return None
    rule = router_rule(model)
    return {index: rule for index, one in enumerate(expert_layers(model)[start:stop]) if one}


def layer_rotaries(config: Config, layout: SequenceLayout, device: torch.device) -> list[LayoutRotaryEmbedding | None]:
    """The rotary embedding of each layer; layers with the same one share it."""
    model, made = config.model, {None: None}

    def of(kind: Rope | None) -> LayoutRotaryEmbedding | None:
        if kind not in made:
            made[kind] = LayoutRotaryEmbedding(kind, layout, device, restarts=config.data.reset_position_ids)
        return made[kind]

    windows = window_layers(config.attention, model.num_layers)
    return [of(rope(model, local=bool(own)) if rotated else None) for rotated, own in zip(rope_layers(model), windows)]


def rope(model: ModelConfig, local: bool = False) -> Rope | None:
    """The model's rotary embedding; None with other positions.

    Args:
        local: return the rotary embedding of layers with a window; it may have a separate base, without scaling.
    """
    if local and model.rotary_base_local:
        plain = replace(
            model,
            position_embedding_type="rope",
            rotary_base=model.rotary_base_local,
            rotary_base_local=None,
            rotary_seq_len_interpolation_factor=None,
            use_rope_scaling=False,
        )
        return rope(plain)
    if model.position_embedding_type not in ROTARY:
        return None
    yarn, latent = None, model.multi_latent_attention
    if model.position_embedding_type == "yarn":
        yarn = Yarn(
            factor=model.yarn_rotary_scaling_factor,
            original_length=model.yarn_original_max_position_embeddings,
            beta_fast=model.yarn_beta_fast,
            beta_slow=model.yarn_beta_slow,
            mscale=model.yarn_mscale,
            mscale_all_dim=model.yarn_mscale_all_dim,
            whole_pairs=model.yarn_correction_range_round_to_int,
        )
    return Rope(
        dim=model.qk_pos_emb_head_dim if latent else int(model.kv_channels * model.rotary_percent),
        base=model.rotary_base,
        interleaved=model.rotary_interleaved or latent,
        interpolation=model.rotary_seq_len_interpolation_factor or 1.0,
        llama3=model.rope_scaling_factor if model.use_rope_scaling else None,
        yarn=yarn,
    )


def lora(model: ModelConfig) -> Lora | None:
    """The model's adapters, if it has any."""
    return Lora(model.lora_rank, model.lora_alpha, tuple(model.lora_targets)) if model.lora_rank else None


def save_layer_inputs_in_host(decoder: TransformerBlock, offload: Offload) -> None:
    """Keep in host memory the inputs that the layers of a block save for backward."""

    def in_host(hidden_states: Tensor, **_: Any) -> saved_tensors_hooks:
        hooks = SavedInHost(offload, (hidden_states if decoder.pre_process else decoder.input_tensor).shape)
        return saved_tensors_hooks(hooks.pack, hooks.unpack)

    _run_within(decoder, in_host)
    if decoder.final_layernorm is not None:  # no layer, but core's block calls it within the hooks: these replace them
        _run_within(decoder.final_layernorm, lambda *_, **__: saved_tensors_hooks(lambda x: x, lambda x: x))


def _run_within(module: nn.Module, context: Callable[..., saved_tensors_hooks]) -> None:
    """Enter, for each forward pass of ``module``, what ``context`` makes of its arguments."""
    entered: list[saved_tensors_hooks] = []

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entered.append(context(*args, **kwargs))
        entered[-1].__enter__()

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(lambda *_: entered.pop().__exit__(), always_call=True)
