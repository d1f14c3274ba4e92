"""Keys of a config.json that change nothing of what a model computes for given weights, by what they are for.

A copy that another program quantised, converted or saved again is the same model. A key that is on no list here, nor on
the architecture's own, is not known: see `config_keys.check_unknown`. Read: `PreTrainedConfig` and `GenerationConfig`
of transformers 5.17 and 5.23; srt/configs/model_config.py, srt/model_loader/checkpoint_quantization.py,
srt/speculative/dspark_components/dspark_config.py and srt/models of SGLang 0.5.17 and 0.5.23; compressed-tensors 0.18.
"""

from __future__ import annotations

_ABOUT_THE_FILE = """
    _auto_class _commit_hash _from_model_config _name_or_path architectures auto_map custom_pipelines finetuning_task
    model_type name_or_path prefix tokenizer_class transformers_version transformers_weights
    dtype torch_dtype torchscript use_bfloat16
    id2label label2id num_labels problem_type task_specific_params
"""
# Another way to the same numbers, or what a call returns beside them.
_HOW_IT_RUNS = """
    _attn_implementation _attn_implementation_autoset _attn_implementation_internal _experts_implementation
    _experts_implementation_internal _flash_attn_2_enabled _flash_attn_3_enabled attn_implementation
    chunk_size_feed_forward experts_implementation is_encoder_decoder keys_to_ignore_at_inference output_attentions
    output_hidden_states output_router_logits return_dict use_cache use_flash_attention use_flash_attention_2
    use_flash_attention_3 use_flash_attn use_grouped_mm
"""
_OF_TRAINING = """
    attention_dropout attention_probs_dropout_prob attn_dropout attn_pdrop aux_loss_alpha classifier_dropout dropout
    embd_dropout embd_pdrop embedding_dropout ep_size gradient_checkpointing hidden_dropout hidden_dropout_prob
    initializer_range layerdrop lora_dropout mtp_loss_scaling_factor pretraining_tp resid_dropout resid_pdrop
    router_aux_loss_coef router_jitter_noise router_z_loss_coef seq_aux use_liger_kernel
"""
# transformers takes them out of a config.json: they belong into generation_config.json, and SGLang reads them there.
_OF_GENERATION = """
    assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight assistant_lookbehind bad_words_ids
    begin_suppress_tokens cache_config cache_implementation compile_config constraints continuous_batching_config
    disable_compile diversity_penalty do_sample dola_layers early_stopping encoder_no_repeat_ngram_size
    encoder_repetition_penalty epsilon_cutoff eta_cutoff exponential_decay_length_penalty force_words_ids guidance_scale
    is_assistant length_penalty low_memory max_cache_len max_length max_matching_ngram_size max_new_tokens max_time
    min_length min_new_tokens min_p no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule
    num_beam_groups num_beams num_return_sequences output_logits output_scores penalty_alpha prefill_chunk_size
    prompt_lookup_num_tokens remove_invalid_values renormalize_logits repetition_penalty return_dict_in_generate
    sequence_bias speculation_type stop_strings suppress_tokens target_lookbehind temperature token_healing top_h top_k
    top_p typical_p use_mtp watermarking_config
"""
# The weights are rounded, not the model: `quantization` is MLX's, by the names of layers, and the last two are of
# compressed-tensors. How an expert's weights are stored is `expert_dtype`.
_OF_STORED_WEIGHTS = "expert_dtype quantization quantization_config compression_config sparsity_config"
# Layers and heads that draft tokens. The model checks each of them, and patterns leave those layers out.
_OF_DRAFTS = """
    dflash_config index_share_for_mtp_iteration mtp_num_layers num_mtp_layers num_nextn_predict_layers
    speculative_decoding
"""
_OF_TOKENS = "bos_token_id decoder_start_token_id eos_token_id pad_token_id sep_token_id"
_OTHERS = f"{_OF_STORED_WEIGHTS} {_OF_DRAFTS} {_OF_TOKENS} indexcache"  # the last is of this project

INCIDENTAL = frozenset(f"{_ABOUT_THE_FILE} {_HOW_IT_RUNS} {_OF_TRAINING} {_OF_GENERATION} {_OTHERS}".split())
# A head for drafts beside a model; notes of programs: experts that REAP took out, a tokenizer that Unsloth mended.
_BEGINNINGS = ("dspark_", "reap_", "unsloth_")
_ENDINGS = ("_token_id", "_token_ids", "_token_index")  # which token means what: mask_token_id, image_token_index


def is_incidental(key: str) -> bool:
    """Return whether a key of a config.json changes nothing of what the model computes."""
    return key in INCIDENTAL or key.startswith(_BEGINNINGS) or key.endswith(_ENDINGS)
