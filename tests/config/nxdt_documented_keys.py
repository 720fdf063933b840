"""Keys of NxD Training 1.6, collected from its documentation, example files and source. The import must know them."""


def _below(section: str, names: str) -> str:
    return " ".join(f"{section}.{name}" for name in names.split())


DOCUMENTED = " ".join(
    [
        "name model_source seed compiler_flags compiler_cache_url aync_exec_max_inflight_requests",
        "bucket_size_collectives neuron_rt_exec_timeout neuron_experimental_compress_rg",
        _below(
            "trainer",
            "devices num_nodes lnc max_epochs max_steps log_every_n_steps val_check_interval check_val_every_n_epoch "
            "num_sanity_val_steps limit_val_batches limit_test_batches gradient_clip_val max_time "
            "sequential_move_factor",
        ),
        _below(
            "exp_manager",
            "log_local_rank_0_only log_global_rank_0_only create_tensorboard_logger create_wandb_logger "
            "wandb_logger_kwargs create_mlflow_logger mlflow_logger_kwargs explicit_log_dir exp_log_dir exp_dir name "
            "version use_datetime_version resume_if_exists resume_past_end resume_ignore_no_checkpoint "
            "resume_from_checkpoint create_checkpoint_callback files_to_copy log_step_timing step_timing_kwargs "
            "ema.enable ema.decay ema.apply_ema_every_n_steps ema.start_step ema.evaluate_ema_weights_instead "
            "disable_validation_on_resume max_time_per_run seconds_to_sleep log_parameter_norm log_gradient_norm "
            "enable_recovery_time_instrumentation save_xser load_xser save_bf16 async_checkpointing ckpt_ptl_version",
        ),
        _below(
            "exp_manager.checkpoint_callback_params",
            "monitor save_top_k mode save_last filename dirpath model_parallel_size every_n_epochs every_n_train_steps "
            "train_time_interval save_on_train_epoch_end save_nemo_on_train_end use_master_weights_in_ckpt "
            "enable_version_counter",
        ),
        _below(
            "distributed_strategy",
            "tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size "
            "pipeline_model_parallel_split_rank context_parallel_size expert_model_parallel_size zero1 "
            "sequence_parallel kv_replicator",
        ),
        _below(
            "data",
            "micro_batch_size global_batch_size train_dir val_dir test_dir dev_choose_samples seq_length dataset_name "
            "subset_name prompt_name data_prefix index_mapping_dir data_impl splits_string skip_warmup num_workers "
            "dataloader_type reset_position_ids reset_attention_mask eod_mask_loss validation_drop_last "
            "no_seqlen_plus_one_input_tokens pad_samples_to_global_batch_size drop_last fine_tuning train_ds "
            "validation_ds test_ds tokenizer.library tokenizer.type tokenizer.model tokenizer.vocab_file "
            "tokenizer.merge_file tokenizer.delimiter tokenizer.sentencepiece_legacy tokenizer.use_fast",
        ),
        _below(
            "model",
            "model_config encoder_seq_length max_position_embeddings num_layers hidden_size rope_theta qkv_linear "
            "fuse_qkv transpose_nki_inputs pipeline_cuts use_cpu_initialization weight_init_only "
            "activations_checkpoint_granularity activations_checkpoint_recompute do_layer_norm_weight_decay "
            "save_logits fusions.softmax fusions.flash_attention fusions.ring_attention ffn_hidden_size "
            "num_attention_heads num_kv_heads init_method_std use_scaled_init_method hidden_dropout attention_dropout "
            "ffn_dropout kv_channels apply_query_key_layer_scaling normalization layernorm_epsilon "
            "make_vocab_size_divisible_by persist_layer_norm share_embeddings_and_output_weights "
            "position_embedding_type rotary_percentage "
            "position_freq_base position_abf_factor positition_interpolation_factor activation transformer_block_type "
            "has_bias sliding_window_size fp32_residual_connection fp16_lm_cross_entropy gradient_accumulation_fusion "
            "bias_activation_fusion bias_dropout_add_fusion masked_softmax_fusion activations_checkpoint_method "
            "activations_checkpoint_num_layers activations_checkpoint_layers_per_pipeline "
            "num_micro_batches_with_partial_activation_checkpoints disable_layer_norm_checkpointing megatron_amp_o2 "
            "use_emha optim.name optim.lr optim.weight_decay optim.betas optim.capturable optim.sched.name "
            "optim.sched.warmup_steps optim.sched.constant_steps optim.sched.min_lr optim.sched.max_steps",
        ),
        _below(
            "model.moe",
            "num_experts frequency dropout capacity_factor dropless glu_mlp routing_algorithm top_k "
            "output_router_logits router_aux_loss_coef normalize_top_k_affinities",
        ),
        _below(
            "precision",
            "type master_weights fp32_grad_acc fp32_grads_cc xla_use_bf16 xla_downcast_bf16 "
            "neuron_rt_stochastic_rounding_en parallel_layers_reduce_dtype",
        ),
        _below(
            "model_alignment_strategy",
            "dpo.kl_beta dpo.loss_type dpo.max_prompt_length dpo.precompute_ref_log_probs dpo.truncation_mode "
            "sft.packing orpo.beta orpo.max_prompt_length orpo.truncation_mode peft.lora_rank peft.lora_alpha "
            "peft.lora_dropout peft.lora_bias peft.lora_verbose peft.target_modules peft.load_lora_from_ckpt "
            "peft.save_lora_base peft.merge_lora peft.save_lora_config_adapter peft.merge_sharded_lora",
        ),
    ]
)
