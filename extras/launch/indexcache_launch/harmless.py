"""The flags of SGLang that neither change what a layer attends to nor the passes in which that is proven.

A flag that is not here, and that no `Combination` reads, was never run with a pattern, and is said so: a flag of a next
version, too. Names are attributes of SGLang's server arguments. Read: the fields and parsers of 0.5.11 to 0.5.23.
"""

from __future__ import annotations

_SERVER = """
    help host port fastapi_root_path served_model_name api_key admin_api_key ssl_keyfile ssl_certfile ssl_ca_certs
    ssl_keyfile_password enable_ssl_refresh enable_http2 http2_max_concurrent_streams
    http2_initial_connection_window_size enable_http_worker_reuseport grpc_port grpc_response_timeout_secs tool_server
    chat_template hf_chat_template_name completion_template default_chat_template_kwargs trust_request_chat_template
    reasoning_parser tool_call_parser enable_strict_thinking enable_cache_report stream_interval
    incremental_streaming_output stream_response_default_include_usage return_input_ids return_output_ids
    sampling_defaults preferred_sampling_params enable_response_store file_storage_path weight_version warmups
    skip_server_warmup batch_notify_size asr_max_buffer_seconds asr_max_concurrent_sessions allow_auto_truncate
"""  # warm-up: `combinations.proven_first` says what it means

_TOKENS = """
    tokenizer_path tokenizer_mode tokenizer_backend tokenizer_worker_num detokenizer_worker_num skip_tokenizer_init
    enable_tokenizer_batch_encode disable_tokenizer_batch_decode enable_dynamic_batch_tokenizer
    dynamic_batch_tokenizer_batch_size dynamic_batch_tokenizer_batch_timeout grammar_backend
    constrained_json_whitespace_pattern constrained_json_disable_any_whitespace constrained_json_max_whitespace_cnt
    disable_outlines_disk_cache sampling_backend sampling_mask_max_tokens enable_custom_logit_processor random_seed
    enable_watermark watermark_config enable_fp32_lm_head enable_return_hidden_states return_hidden_states_mode
    enable_return_aux_hidden_states return_aux_hidden_state_layer_ids enable_return_routed_experts
"""

_IMAGES = """
    enable_multimodal limit_mm_data_per_request mm_process_config
    allowed_media_domains media_url_max_file_size_mb disable_fast_image_processor image_processor_backend
    enable_broadcast_mm_inputs_process enable_mm_global_cache mm_global_cache_backend mm_enable_dp_encoder
    mm_feature_transport mm_io_worker_num mm_processor_worker_num mm_preprocess_cache_size_mb mm_attention_backend
    keep_mm_feature_on_device trust_mm_content_hashes enable_precise_embedding_interpolation
"""  # no model with patterns has images

_SEEN = """
    log_level log_level_http log_requests log_requests_level log_requests_format log_requests_target
    uvicorn_access_log_exclude_prefixes show_time_cost decode_log_interval crash_dump_folder enable_metrics
    enable_metrics_for_all_schedulers tokenizer_metrics_custom_labels_header tokenizer_metrics_allowed_custom_labels
    extra_metric_labels bucket_time_to_first_token bucket_inter_token_latency bucket_e2e_request_latency
    prompt_tokens_buckets generation_tokens_buckets collect_tokens_histogram gc_warning_threshold_secs gc_threshold
    enable_request_time_stats_logging export_metrics_to_file export_metrics_to_file_dir enable_mfu_metrics
    enable_forward_pass_metrics forward_pass_metrics_ipc_name forward_pass_metrics_worker_id kv_events_config
    enable_trace trace_modules otlp_traces_endpoint otlp_service_name load_publish_endpoint
    load_snapshot_publish_interval enable_profile_cuda_graph spec_trace_dir
"""

_MACHINE = """
    base_gpu_id gpu_id_step numa_node watchdog_timeout soft_watchdog_timeout sleep_on_idle dist_timeout dist_init_addr
    nccl_port node_rank gated_launch_port engine_info_bootstrap_port load_balance_method enable_p2p_check
    custom_sigquit_handler disable_custom_all_reduce enable_mscclpp enable_nccl_nvls pre_warm_nccl
    enable_dp_attention_local_control_broadcast pp_max_micro_batch_size pp_async_batch_depth
"""

_SCHEDULE = """
    mem_fraction_static max_running_requests max_queued_requests max_total_tokens max_prefill_tokens
    prefill_max_requests chunked_prefill_size enable_dynamic_chunking schedule_policy schedule_conservativeness
    schedule_low_priority_values_first enable_priority_scheduling disable_priority_preemption
    priority_scheduling_preemption_threshold default_priority_value abort_on_priority_when_disabled
    enable_prefill_delayer prefill_delayer_max_delay_passes prefill_delayer_max_delay_ms
    prefill_delayer_token_usage_low_watermark prefill_delayer_queue_min_ratio prefill_decode_interval
    prefill_decode_interval_min_bs prefill_delayer_forward_passes_buckets prefill_delayer_wait_seconds_buckets
    scheduler_recv_interval num_continuous_decode_steps disable_overlap_schedule min_free_slots_delay retraction_policy
    disable_radix_cache radix_eviction_policy radix_eviction_policy_config context_length
"""  # chunks, prefix hits and batches of all sizes were compared

_WEIGHTS = """
    model_path revision download_dir trust_remote_code model_loader_extra_config weight_loader_disable_mmap
    weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads weight_loader_drop_cache_after_load
    delete_ckpt_after_loading json_model_override_args
"""  # what was loaded is proven; model overrides are checked by name on their own

_EXPERTS = """
    moe_runner_backend fp8_gemm_runner_backend fp4_gemm_runner_backend bf16_gemm_backend flashinfer_mxfp4_moe_precision
    disable_flashinfer_cutlass_moe_fp4_allgather disable_shared_experts_fusion enforce_shared_experts_fusion
    enable_fused_moe_sum_all_reduce init_expert_location ep_dispatch_algorithm ep_num_redundant_experts enable_eplb
    eplb_algorithm eplb_rebalance_num_iterations eplb_rebalance_layers_per_chunk
    eplb_min_rebalancing_utilization_threshold expert_distribution_recorder_mode
    expert_distribution_recorder_buffer_size enable_expert_distribution_metrics expert_balancedness_report_mode
    deepep_mode deepep_config deepep_dispatcher_output_dtype moe_dense_tp_size moe_dp_size shared_experts_tp_size
    kt_weight_path kt_method kt_cpuinfer kt_threadpool_count kt_num_gpu_experts kt_max_deferred_experts_per_token
    speculative_moe_runner_backend
"""  # which kernels multiply, and where experts are

_GRAPHS = """
    disable_cuda_graph disable_decode_cuda_graph disable_prefill_cuda_graph disable_piecewise_cuda_graph
    disable_cuda_graph_padding cuda_graph_bs cuda_graph_max_bs cuda_graph_bs_decode cuda_graph_max_bs_decode
    cuda_graph_bs_prefill cuda_graph_max_bs_prefill cuda_graph_max_seq_len_prefill cuda_graph_prefill_max_context
    piecewise_cuda_graph_tokens piecewise_cuda_graph_max_tokens enable_cudagraph_gc torch_compile_max_bs
"""  # how large captured passes are, or that none is

_DETAILS = """
    speculative_num_steps speculative_num_draft_tokens speculative_draft_model_revision
    speculative_draft_load_format speculative_accept_threshold_single speculative_accept_threshold_acc
    speculative_token_map speculative_use_rejection_sampling speculative_ngram_capacity
    speculative_ngram_external_corpus_max_tokens speculative_ngram_external_corpus_path
    speculative_ngram_external_sam_budget speculative_ngram_match_type speculative_ngram_max_bfs_breadth
    speculative_ngram_max_trie_depth speculative_ngram_min_bfs_breadth disaggregation_bootstrap_port
    disaggregation_ib_device disaggregation_decode_polling_interval num_reserved_decode_tokens hicache_ratio
    hicache_size hicache_write_policy hicache_storage_prefetch_policy hicache_storage_prefetch_retry_max_attempts
    hicache_storage_prefetch_retry_poll_interval hicache_storage_backend_extra_config hisparse_config max_loaded_loras
    max_lora_rank max_loras_per_batch lora_eviction_policy lora_backend lora_target_modules max_lora_chunk_size
    lmcache_config_file flexkv_config_file tbo_token_distribution_threshold
"""  # how a feature that a combination judges is done

HARMLESS = frozenset(
    " ".join((_SERVER, _TOKENS, _IMAGES, _SEEN, _MACHINE, _SCHEDULE, _WEIGHTS, _EXPERTS, _GRAPHS, _DETAILS)).split()
)
