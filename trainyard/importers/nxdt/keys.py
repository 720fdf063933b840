"""Every key that NxD Training (NxDT 1.6) reads from its YAML, with its meaning here.

`copies_to` and `maps_to` name our keys, `ignore` explains why a key has no effect, `refuse` why it is not supported:
nothing is dropped silently. Keys that NxDT misspells are listed as it spells them.
"""

from trainyard.importers.key_table import KeyRule, copies_to, ignore, maps_to, refuse, split_names

SHUFFLE = "which tokens exceed the capacity of an expert depends on their sample alone"
NEMO_SFT = "NeMo's data sections; nearest: data.train_dir with records of input and output"
PROMPTSOURCE = "templates of promptsource; nearest: data.train_dir with records of input and output"
ADAPTER = "a run with lora ends with an adapter/ folder, PEFT's, whatever its layout"
MERGE = ADAPTER + "; trainyard convert RUN DST --to hf --merge merges it"
WHOLE_PAIRS = "answers and prompts are compared whole; longer pairs are dropped and counted (data.chat.too_long)"
REFERENCE = "always: scores are found by the content of a pair; NxDT joins them by position with other pairs"
DEVICE = "a setting of the device's compiler or runtime; set its environment variable instead"
LOGGING = "logging is set by log.every, log.directory and log.loggers"
LOGGER_OPTIONS = "set by environment variables, such as WANDB_PROJECT and MLFLOW_EXPERIMENT_NAME"
EPOCHS = "runs are measured in steps, not epochs"
FUSED = "the device chooses kernels (device.kernels)"
CHECKPOINT_FORMAT = "NxDT's checkpoint format; our checkpoints are complete, in fp32 where the run has fp32"
DETECTED = "the checkpoint format is detected"
LATEST = "the latest checkpoints are kept"
NAMED_BY_STEP = "checkpoints are named by step"
LOADING = "one stateless thread prefetches samples"
RUN_END = "a run ends after train.steps or by a signal"
OWN_SHARD = "each rank initializes its own shard"
PARTIAL_RECOMPUTE = "recompute is the same for every block of every stage; nearest: leave it out"

TOP: dict[str, KeyRule] = {
    "name": maps_to("text", "log.name"),
    "model_source": maps_to("text", "model.family"),
    "seed": copies_to("int", "train.seed"),
    "compiler_flags compiler_cache_url": ignore("text", DEVICE),
    "aync_exec_max_inflight_requests async_exec_max_inflight_requests neuron_rt_exec_timeout": ignore("int", DEVICE),
    "bucket_size_collectives": copies_to("int", "layout.bucket_mib"),
    "neuron_experimental_compress_rg": ignore("bool", DEVICE),
    "hydra": ignore("any", "settings of NxDT's launcher"),
    "defaults": refuse("list", "composed of several files; pass the composed file (--cfg job --resolve prints it)"),
}
TRAINER: dict[str, KeyRule] = {
    "devices num_nodes": maps_to("int", "layout.ranks"),
    "lnc": ignore("int", "devices already counts logical cores, which are the ranks"),
    "max_epochs check_val_every_n_epoch": ignore("int", EPOCHS),
    "max_steps": copies_to("int", "train.steps"),
    "max_time": ignore("any", RUN_END, None),
    "log_every_n_steps": copies_to("int", "log.every"),
    "val_check_interval": maps_to("number", "evaluate.every"),
    "num_sanity_val_steps": ignore("int", "there is no evaluation before the first step"),
    "limit_val_batches": maps_to("number", "evaluate.batches"),
    "limit_test_batches": ignore("number", "test sets are not evaluated"),
    "gradient_clip_val": copies_to("number", "optimizer.max_grad_norm", 0.0),
    "sequential_move_factor": ignore("int", OWN_SHARD),
    "accumulate_grad_batches": refuse("int", "follows from the batch sizes; nearest: leave it out", 1),
    "accelerator strategy logger enable_checkpointing enable_progress_bar benchmark enable_model_summary": ignore(
        "any", "a setting of NxDT's trainer"
    ),
    "precision": ignore("any", "set by the precision section"),
}
EXP_MANAGER: dict[str, KeyRule] = {
    "log_local_rank_0_only log_global_rank_0_only use_datetime_version log_step_timing log_parameter_norm "
    "log_gradient_norm enable_recovery_time_instrumentation": ignore("bool", LOGGING),
    "create_tensorboard_logger create_wandb_logger create_mlflow_logger": maps_to("bool", "log.loggers"),
    "wandb_logger_kwargs mlflow_logger_kwargs": ignore("mapping", LOGGER_OPTIONS),
    "step_timing_kwargs summary_writer_kwargs": ignore("mapping", LOGGING),
    "explicit_log_dir exp_log_dir": maps_to("text", "log.directory, log.name"),
    "exp_dir": maps_to("text", "log.directory"),
    "name": maps_to("text", "log.name"),
    "version": ignore("any", "the run directory is log.directory/NAME"),
    "files_to_copy": ignore("any", "a run saves its config.yaml"),
    "resume_if_exists": maps_to("bool", "checkpoint.resume"),
    "resume_past_end": ignore("bool", "a finished run has no steps left", False),
    "resume_ignore_no_checkpoint": ignore("bool", "a run without a checkpoint starts fresh"),
    "resume_from_checkpoint": maps_to("text", "checkpoint.init_from"),
    "create_checkpoint_callback": maps_to("bool", "checkpoint.every"),
    "disable_validation_on_resume": ignore("bool", "evaluation depends on the step number"),
    "max_time_per_run": ignore("any", RUN_END, None),
    "seconds_to_sleep": ignore("number", "nothing to wait for"),
    "ema.enable": refuse("bool", "an average of the weights is not supported; nearest: false", False),
    "ema.decay ema.apply_ema_every_n_steps ema.start_step ema.evaluate_ema_weights_instead": ignore(
        "any", "read only with ema.enable"
    ),
    "save_xser": ignore("bool", CHECKPOINT_FORMAT),
    "load_xser": ignore("bool", DETECTED),
    "save_bf16": ignore("bool", CHECKPOINT_FORMAT, False),
    "async_checkpointing": ignore("bool", "training continues during a save unless checkpoint.blocking=true"),
    "ckpt_ptl_version": ignore("any", DETECTED),
}
CHECKPOINT_CALLBACK: dict[str, KeyRule] = {
    "monitor": ignore("text", LATEST, "step", "global_step"),
    "save_top_k": maps_to("int", "checkpoint.keep"),
    "mode": ignore("text", LATEST, "max"),
    "save_last": ignore("bool", "a run that saves checkpoints also saves at its end"),
    "filename": ignore("text", NAMED_BY_STEP),
    "enable_version_counter": ignore("bool", NAMED_BY_STEP),
    "use_master_weights_in_ckpt": ignore("bool", CHECKPOINT_FORMAT),
    "dirpath": copies_to("text", "checkpoint.directory"),
    "model_parallel_size": ignore("int", "follows from the layout"),
    "every_n_epochs": ignore("int", EPOCHS, 0),
    "every_n_train_steps": maps_to("int", "checkpoint.every"),
    "train_time_interval": maps_to("mapping", "checkpoint.every_minutes"),
    "save_on_train_epoch_end": ignore("bool", EPOCHS),
    "save_nemo_on_train_end": ignore("bool", "see checkpoint.export_hf"),
}
STRATEGY: dict[str, KeyRule] = {
    "tensor_model_parallel_size": copies_to("int", "layout.tp"),
    "pipeline_model_parallel_size": copies_to("int", "layout.pp"),
    "virtual_pipeline_model_parallel_size": copies_to("int", "layout.vpp"),
    "pipeline_model_parallel_split_rank": ignore("int", "for encoder-decoder models", 0),
    "context_parallel_size": copies_to("int", "layout.cp"),
    "expert_model_parallel_size": copies_to("int", "layout.ep"),
    "token_shuffle_group_size": ignore("int", SHUFFLE, 1),
    "zero1": maps_to("bool", "layout.zero"),
    "sequence_parallel": maps_to("bool", "layout.sequence_parallel"),
    "kv_replicator": ignore("int", "follows from layout.tp and model.kv_heads"),
}
DATA: dict[str, KeyRule] = {
    "micro_batch_size": copies_to("int", "train.micro_batch"),
    "global_batch_size": copies_to("int", "train.global_batch"),
    "train_dir": maps_to("text", "data.source, data.paths, data.chat.format"),
    "val_dir": maps_to("text", "evaluate.sets"),
    "test_dir": ignore("text", "test sets are not evaluated"),
    "dev_choose_samples": ignore("int", "all records are used; nearest: a file with the first ones", None),
    "dataset_name subset_name prompt_name": refuse("text", PROMPTSOURCE),
    "packing": maps_to("bool", "data.packing"),
    "use_sft_style_data_module": ignore("bool", "follows from the paths: train_dir or data_prefix"),
    "data_prefix": maps_to("any", "data.source, data.paths, data.weights"),
    "index_mapping_dir": ignore("text", "there are no index files"),
    "data_impl": refuse("text", "only memory-mapped .bin and .idx are read; nearest: mmap", "mmap", "infer"),
    "splits_string": maps_to("any", "data.split"),
    "seq_length": maps_to("int", "data.seq_len"),
    "skip_warmup": ignore("bool", LOADING),
    "num_workers": ignore("int", LOADING),
    "dataloader_type": maps_to("text", "data.order"),
    "reset_position_ids reset_attention_mask": maps_to("bool", "data.document_mask"),
    "eod_mask_loss": maps_to("bool", "data.mask_eod_loss"),
    "validation_drop_last": ignore("bool", "evaluation uses full batches"),
    "no_seqlen_plus_one_input_tokens": refuse("bool", "a sample has data.seq_len + 1 tokens; nearest: false", False),
    "pad_samples_to_global_batch_size drop_last": ignore("bool", "every batch is full"),
    "fine_tuning": refuse("any", NEMO_SFT, False),
    "train_ds validation_ds test_ds": refuse("any", NEMO_SFT),
    "tokenizer.library tokenizer.type tokenizer.model": maps_to("text", "data.tokenizer"),
    "tokenizer.vocab_file": maps_to("text", "data.vocab_file"),
    "tokenizer.merge_file": maps_to("text", "data.merges_file"),
    "tokenizer.delimiter": ignore("text", "for tabular data"),
    "tokenizer.sentencepiece_legacy": ignore("bool", "the data is already tokenized", False),
    "tokenizer.use_fast": ignore("bool", "there is one implementation"),
}
PRECISION: dict[str, KeyRule] = {
    "type": maps_to("text", "precision.kind"),
    "parallel_layers_reduce_dtype": ignore("text", "tensor parallel reductions use the compute dtype", "bf16"),
}
MANUAL_PRECISION: dict[str, KeyRule] = {
    "master_weights": maps_to("bool", "precision.kind"),
    "fp32_grad_acc": maps_to("bool", "precision.grad_dtype"),
    "fp32_grads_cc": maps_to("bool", "precision.reduce_dtype"),
    "xla_use_bf16 xla_downcast_bf16 neuron_rt_stochastic_rounding_en": maps_to("digit", "precision.kind"),
}
"""Keys of the precision section that NxDT reads only with type=manual."""
ALIGNMENT: dict[str, KeyRule] = {
    "dpo.kl_beta": maps_to("number", "preference.beta"),
    "dpo.loss_type": maps_to("text", "preference.variant"),
    "dpo.precompute_ref_log_probs": ignore("bool", REFERENCE, True),
    "dpo.max_prompt_length orpo.max_prompt_length": ignore("int", WHOLE_PAIRS),
    "dpo.truncation_mode orpo.truncation_mode": ignore("text", WHOLE_PAIRS),
    "sft.packing": maps_to("bool", "data.packing"),
    "orpo.beta": maps_to("number", "preference.beta"),
    "peft.lora_rank": maps_to("int", "lora.rank"),
    "peft.lora_alpha": maps_to("number", "lora.alpha"),
    "peft.lora_dropout": maps_to("number", "lora.dropout"),
    "peft.lora_bias": refuse("text", "biases are not trained with adapters; nearest: none", "none"),
    "peft.lora_verbose": ignore("bool", "the number of trained weights is always printed"),
    "peft.target_modules": maps_to("list", "lora.targets"),
    "peft.load_lora_from_ckpt": refuse("bool", "adapters are PEFT's; nearest: lora.init_from=ADAPTER", False),
    "peft.save_lora_base": ignore("bool", "a checkpoint holds what is trained and names its base"),
    "peft.merge_lora": ignore("bool", MERGE, False),
    "peft.save_lora_config_adapter": ignore("bool", ADAPTER),
    "peft.merge_sharded_lora": ignore("bool", ADAPTER),
}
MODEL: dict[str, KeyRule] = {
    "model_config": maps_to("text", "model.vocab, model.heads, model.kv_heads, model.ffn"),
    "encoder_seq_length": maps_to("int", "data.seq_len"),
    "max_position_embeddings": maps_to("int", "model.max_positions"),
    "num_layers": maps_to("int", "model.layers"),
    "hidden_size": maps_to("int", "model.hidden"),
    "rope_theta position_freq_base position_abf_factor": maps_to("number", "model.rope_theta"),
    "qkv_linear": ignore("bool", "kv heads are sharded or replicated over tp ranks as their number requires"),
    "fuse_qkv": maps_to("bool", "model.fuse_qkv"),
    "transpose_nki_inputs": ignore("bool", DEVICE),
    "pipeline_cuts": maps_to("list", "layout.pipeline_cuts"),
    "use_cpu_initialization": ignore("bool", OWN_SHARD),
    "weight_init_only": maps_to("bool", "checkpoint.init_from"),
    "activations_checkpoint_granularity": maps_to("text", "recompute.kind"),
    "activations_checkpoint_recompute": maps_to("list", "recompute.kind, recompute.modules"),
    "activations_checkpoint_recompute_mlp": maps_to("bool", "recompute.kind, recompute.modules"),
    "activations_checkpoint_method": refuse("text", PARTIAL_RECOMPUTE, "uniform"),
    "activations_checkpoint_num_layers": refuse("int", PARTIAL_RECOMPUTE, 1),
    "activations_checkpoint_layers_per_pipeline num_micro_batches_with_partial_activation_checkpoints": refuse(
        "any", PARTIAL_RECOMPUTE
    ),
    "disable_layer_norm_checkpointing": ignore("bool", "set by activations_checkpoint_recompute"),
    "do_layer_norm_weight_decay": ignore("bool", "norms and biases never decay here"),
    "save_logits": ignore("bool", "logits are computed in chunks", False),
    "fusions.softmax fusions.flash_attention persist_layer_norm gradient_accumulation_fusion "
    "bias_activation_fusion bias_dropout_add_fusion masked_softmax_fusion": ignore("bool", FUSED),
    "fusions.ring_attention": maps_to("bool", "layout.cp_method"),
    "ffn_hidden_size": maps_to("int", "model.ffn"),
    "num_attention_heads": maps_to("int", "model.heads"),
    "num_kv_heads": maps_to("int", "model.kv_heads"),
    "init_method_std": maps_to("number", "model.init_std"),
    "use_scaled_init_method": maps_to("bool", "model.scaled_init"),
    "hidden_dropout": maps_to("number", "model.hidden_dropout, model.embedding_dropout"),
    "attention_dropout": maps_to("number", "model.attention_dropout"),
    "ffn_dropout": ignore("number", "there is no dropout inside the MLP; hidden_dropout applies to its output", 0, 0.0),
    "kv_channels": maps_to("int", "model.head_dim"),
    "apply_query_key_layer_scaling": ignore("bool", "softmax runs in fp32, which needs no extra scaling"),
    "normalization position_embedding_type activation": maps_to("text", "model.family"),
    "layernorm_epsilon": maps_to("number", "model.norm_eps"),
    "make_vocab_size_divisible_by": ignore("int", "the vocabulary is padded only as layout.tp requires"),
    "share_embeddings_and_output_weights": maps_to("bool", "model.tie_embeddings"),
    "rotary_percentage": refuse("number", "RoPE rotates full heads; nearest: 1.0", 1, 1.0),
    "positition_interpolation_factor position_interpolation_factor": maps_to("number", "model.rope_scaling"),
    "transformer_block_type": refuse("text", "blocks are pre-norm; nearest: pre_ln", "pre_ln"),
    "has_bias": maps_to("bool", "model.family"),
    "sliding_window_size": maps_to("int", "model.sliding_window"),
    "fp32_residual_connection": refuse("bool", "the residual stream has the compute dtype; nearest: false", False),
    "fp16_lm_cross_entropy": refuse("bool", "the loss runs in fp32; nearest: false", False),
    "use_emha": refuse("bool", "unsupported attention; nearest: false", False),
    "megatron_amp_o2": ignore("bool", "set by precision.type"),
    "precision": ignore("any", "set by precision.type"),
    "wrap_with_zero": ignore("bool", "set by distributed_strategy.zero1"),
    "optim.name": maps_to("text", "optimizer.kind"),
    "optim.lr": copies_to("number", "optimizer.lr"),
    "optim.weight_decay": copies_to("number", "optimizer.weight_decay", 0.01),
    "optim.betas": maps_to("list", "optimizer.beta1, optimizer.beta2"),
    "optim.eps": copies_to("number", "optimizer.eps", 1e-8),
    "optim.capturable": ignore("bool", "the update never synchronizes with the host"),
    "optim.sched.name": maps_to("text", "schedule.kind"),
    "optim.sched.warmup_steps": maps_to("int", "schedule.warmup_steps"),
    "optim.sched.warmup_ratio": maps_to("number", "schedule.warmup_steps"),
    "optim.sched.constant_steps": maps_to("int", "schedule.decay_steps"),
    "optim.sched.min_lr": maps_to("number", "schedule.min_lr"),
    "optim.sched.max_steps": ignore("int", "trainer.max_steps replaces it, in NxDT too"),
    "moe.num_experts": maps_to("int", "model.experts"),
    "moe.top_k": maps_to("int", "model.top_k"),
    "moe.capacity_factor": maps_to("number", "model.capacity_factor"),
    "moe.dropless": maps_to("bool", "model.capacity_factor"),
    "moe.router_aux_loss_coef": maps_to("number", "model.balance_loss"),
    "moe.output_router_logits": maps_to("bool", "model.balance_loss"),
    "moe.normalize_top_k_affinities": maps_to("bool", "model.normalize_top_k"),
    "moe.frequency": refuse("int", "every layer has experts; nearest: 1", 1),
    "moe.dropout moe.moe_dropout": refuse("number", "experts have no dropout; nearest: 0.0", 0, 0.0),
    "moe.glu_mlp": refuse("bool", "experts are SwiGLU; nearest: true", True),
    "moe.routing_algorithm": refuse("text", "unsupported routing; nearest: top_k", "top_k"),
    "moe.router_activation": refuse("text", "the router's weights are a softmax; nearest: softmax", "softmax"),
    "moe.sinkhorn_iterations moe.sinkhorn_tol": ignore("number", "read only with routing_algorithm=sinkhorn"),
    "moe.token_shuffle_group_size moe.token_shuffle_seed": ignore("int", SHUFFLE, 1),
}
NXDT_KEYS: dict[str, KeyRule] = {
    **split_names(TOP),
    **split_names(TRAINER, "trainer."),
    **split_names(EXP_MANAGER, "exp_manager."),
    **split_names(CHECKPOINT_CALLBACK, "exp_manager.checkpoint_callback_params."),
    **split_names(STRATEGY, "distributed_strategy."),
    **split_names(DATA, "data."),
    **split_names(MODEL, "model."),
    **split_names(PRECISION | MANUAL_PRECISION, "precision."),
    **split_names(ALIGNMENT, "model_alignment_strategy."),
}
"""Rules by dotted key."""
KEYS_FOUND_AT_ANY_DEPTH = {
    "ring_attention": "model.fusions.ring_attention",
    "context_parallel_size": "distributed_strategy.context_parallel_size",
    **{f"lora_{name}": f"model_alignment_strategy.peft.lora_{name}" for name in ("rank", "alpha", "dropout", "bias")},
    "kl_beta": "model_alignment_strategy.dpo.kl_beta",
    "wrap_with_zero": "model.wrap_with_zero",
}
"""Names that NxDT searches at any depth of the tree, with their regular keys."""
