"""Every key that NxD Training (NxDT 1.6) reads from its YAML, with its meaning here; model_keys.py has the rest.

`copies_to` and `maps_to` name our keys, `ignore` explains why a key has no effect, `refuse` why it is not supported:
nothing is dropped silently. Keys that NxDT misspells are listed as it spells them.
"""

from trainyard.config.importers.key_table import KeyRule, copies_to, ignore, ignore_all, maps_to, refuse, refuse_all

MOE = "mixture of experts: only dense models are supported; nearest: the dense model of the family, without model.moe"
ALIGN = "only pre-training is supported; nearest: leave model_alignment_strategy out and train on packed text"
LORA = "low-rank adapters: all weights are trained here; nearest: leave model_alignment_strategy out"
SFT = "supervised fine-tuning on prompt and answer records: " + ALIGN
DPO = "preference training (DPO): " + ALIGN
ORPO = "preference training (ORPO): " + ALIGN
DEVICE = "a setting of the device's compiler or runtime; set its environment variable instead"
LOGGING = "logging is set by log.every, log.directory and log.tensorboard"
EPOCHS = "runs are measured in steps, not epochs"
TRAINER_ONLY = "a setting of NxDT's trainer"
FUSED = "the device chooses kernels (device.kernels)"
MANUAL_ONLY = "read only with precision.type=manual"
EMA_ONLY = "read only with ema.enable"
CHECKPOINT_FORMAT = "NxDT's checkpoint format; our checkpoints are complete, in fp32 where the run has fp32"
DETECTED = "the checkpoint format is detected"
LATEST = "the latest checkpoints are kept"
NAMED_BY_STEP = "checkpoints are named by step"
LOADING = "one stateless thread prefetches samples"
VALIDATION_SET = "held-out samples come from data.split (Megatron) or data.validation_fraction, not from a separate set"
RUN_END = "a run ends after train.steps or by a signal"
OWN_SHARD = "each rank initializes its own shard"

TOP: dict[str, KeyRule] = {
    "name": maps_to("text", "log.name"),
    "model_source": maps_to("text", "model.family"),
    "seed": copies_to("int", "train.seed"),
    **ignore_all("text", DEVICE, "compiler_flags compiler_cache_url"),
    **ignore_all("int", DEVICE, "aync_exec_max_inflight_requests async_exec_max_inflight_requests"),
    "bucket_size_collectives": copies_to("int", "layout.bucket_mib"),
    "neuron_rt_exec_timeout": ignore("int", DEVICE),
    "neuron_experimental_compress_rg": ignore("bool", DEVICE),
    "hydra": ignore("any", "settings of NxDT's launcher"),
    "defaults": refuse("list", "composed of several files; pass the composed file (--cfg job --resolve prints it)"),
}
TRAINER: dict[str, KeyRule] = {
    "devices": maps_to("int", "layout.ranks"),
    "num_nodes": maps_to("int", "layout.ranks"),
    "lnc": ignore("int", "devices already counts logical cores, which are the ranks"),
    "max_epochs": ignore("int", EPOCHS),
    "max_steps": copies_to("int", "train.steps"),
    "max_time": ignore("any", RUN_END, None),
    "log_every_n_steps": copies_to("int", "log.every"),
    "val_check_interval": maps_to("number", "evaluate.every"),
    "check_val_every_n_epoch": ignore("int", EPOCHS),
    "num_sanity_val_steps": ignore("int", "there is no evaluation before the first step"),
    "limit_val_batches": maps_to("number", "evaluate.batches"),
    "limit_test_batches": ignore("number", "test sets are not evaluated"),
    "gradient_clip_val": maps_to("number", "optimizer.max_grad_norm"),
    "sequential_move_factor": ignore("int", OWN_SHARD),
    "accumulate_grad_batches": refuse("int", "follows from the batch sizes; nearest: leave it out", 1),
    **ignore_all(
        "any",
        TRAINER_ONLY,
        "accelerator strategy logger enable_checkpointing enable_progress_bar benchmark enable_model_summary",
    ),
    "precision": ignore("any", "set by the precision section"),
}
EXP_MANAGER: dict[str, KeyRule] = {
    **ignore_all(
        "bool",
        LOGGING,
        "log_local_rank_0_only log_global_rank_0_only use_datetime_version log_step_timing log_parameter_norm "
        "log_gradient_norm enable_recovery_time_instrumentation",
    ),
    "create_tensorboard_logger": copies_to("bool", "log.tensorboard"),
    "create_wandb_logger": ignore("bool", LOGGING, False),
    "create_mlflow_logger": ignore("bool", LOGGING, False),
    **ignore_all(
        "mapping", LOGGING, "wandb_logger_kwargs mlflow_logger_kwargs step_timing_kwargs summary_writer_kwargs"
    ),
    "explicit_log_dir": maps_to("text", "log.directory, log.name"),
    "exp_log_dir": maps_to("text", "log.directory, log.name"),
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
    **ignore_all(
        "any", EMA_ONLY, "ema.decay ema.apply_ema_every_n_steps ema.start_step ema.evaluate_ema_weights_instead"
    ),
    "save_xser": ignore("bool", CHECKPOINT_FORMAT),
    "load_xser": ignore("bool", DETECTED),
    "save_bf16": ignore("bool", CHECKPOINT_FORMAT, False),
    "async_checkpointing": ignore("bool", "training continues during a save unless checkpoint.blocking=true"),
    "ckpt_ptl_version": ignore("any", DETECTED),
    "checkpoint_callback_params.monitor": ignore("text", LATEST, "step", "global_step"),
    "checkpoint_callback_params.save_top_k": maps_to("int", "checkpoint.keep"),
    "checkpoint_callback_params.mode": ignore("text", LATEST, "max"),
    "checkpoint_callback_params.save_last": ignore("bool", "a run that saves checkpoints also saves at its end"),
    "checkpoint_callback_params.filename": ignore("text", NAMED_BY_STEP),
    "checkpoint_callback_params.dirpath": copies_to("text", "checkpoint.directory"),
    "checkpoint_callback_params.model_parallel_size": ignore("int", "follows from the layout"),
    "checkpoint_callback_params.every_n_epochs": ignore("int", EPOCHS, 0),
    "checkpoint_callback_params.every_n_train_steps": maps_to("int", "checkpoint.every"),
    "checkpoint_callback_params.train_time_interval": maps_to("mapping", "checkpoint.every_minutes"),
    "checkpoint_callback_params.save_on_train_epoch_end": ignore("bool", EPOCHS),
    "checkpoint_callback_params.save_nemo_on_train_end": ignore("bool", "see checkpoint.export_hf"),
    "checkpoint_callback_params.use_master_weights_in_ckpt": ignore("bool", CHECKPOINT_FORMAT),
    "checkpoint_callback_params.enable_version_counter": ignore("bool", NAMED_BY_STEP),
}
STRATEGY: dict[str, KeyRule] = {
    "tensor_model_parallel_size": copies_to("int", "layout.tp"),
    "pipeline_model_parallel_size": copies_to("int", "layout.pp"),
    "virtual_pipeline_model_parallel_size": copies_to("int", "layout.vpp"),
    "pipeline_model_parallel_split_rank": ignore("int", "for encoder-decoder models", 0),
    "context_parallel_size": copies_to("int", "layout.cp"),
    "expert_model_parallel_size": refuse("int", MOE, 1),
    "token_shuffle_group_size": refuse("int", MOE, 1),
    "zero1": maps_to("bool", "layout.zero"),
    "sequence_parallel": maps_to("bool", "layout.sequence_parallel"),
    "kv_replicator": ignore("int", "follows from layout.tp and model.kv_heads"),
}
DATA: dict[str, KeyRule] = {
    "micro_batch_size": copies_to("int", "train.micro_batch"),
    "global_batch_size": copies_to("int", "train.global_batch"),
    "train_dir": maps_to("text", "data.source, data.paths"),
    "val_dir": ignore("text", VALIDATION_SET, None),
    "test_dir": ignore("text", "test sets are not evaluated"),
    "dev_choose_samples": refuse("int", SFT),
    **refuse_all("text", SFT, "dataset_name subset_name prompt_name"),
    "packing": refuse("bool", SFT, False),
    "use_sft_style_data_module": ignore("bool", "follows from the paths: train_dir or data_prefix"),
    "data_prefix": maps_to("any", "data.source, data.paths, data.weights"),
    "index_mapping_dir": ignore("text", "there are no index files"),
    "data_impl": refuse("text", "only memory-mapped .bin and .idx are read; nearest: mmap", "mmap", "infer"),
    "splits_string": maps_to("any", "data.split"),
    "seq_length": maps_to("int", "data.seq_len"),
    "skip_warmup": ignore("bool", LOADING),
    "num_workers": ignore("int", LOADING),
    "dataloader_type": maps_to("text", "data.order"),
    "reset_position_ids": maps_to("bool", "data.document_mask"),
    "reset_attention_mask": maps_to("bool", "data.document_mask"),
    "eod_mask_loss": maps_to("bool", "data.mask_eod_loss"),
    "validation_drop_last": ignore("bool", "evaluation uses full batches"),
    "no_seqlen_plus_one_input_tokens": refuse("bool", "a sample has data.seq_len + 1 tokens; nearest: false", False),
    "pad_samples_to_global_batch_size": ignore("bool", "every batch is full"),
    "drop_last": ignore("bool", "every batch is full"),
    "fine_tuning": refuse("any", SFT, False),
    **refuse_all("any", SFT, "train_ds validation_ds test_ds"),
    "tokenizer.library": maps_to("text", "data.tokenizer"),
    "tokenizer.type": maps_to("text", "data.tokenizer"),
    "tokenizer.model": maps_to("text", "data.tokenizer"),
    "tokenizer.vocab_file": maps_to("text", "data.vocab_file"),
    "tokenizer.merge_file": maps_to("text", "data.merges_file"),
    "tokenizer.delimiter": ignore("text", "for tabular data"),
    "tokenizer.sentencepiece_legacy": ignore("bool", "the data is already tokenized", False),
    "tokenizer.use_fast": ignore("bool", "there is one implementation"),
}
MANUAL_PRECISION_KEYS = (
    "master_weights",
    "fp32_grad_acc",
    "fp32_grads_cc",
    "xla_use_bf16",
    "xla_downcast_bf16",
    "neuron_rt_stochastic_rounding_en",
)
"""Keys that NxDT reads only with precision.type=manual."""
PRECISION: dict[str, KeyRule] = {
    "type": maps_to("text", "precision.kind"),
    "master_weights": maps_to("bool", "precision.kind"),
    "fp32_grad_acc": maps_to("bool", "precision.grad_dtype"),
    "fp32_grads_cc": maps_to("bool", "precision.reduce_dtype"),
    "xla_use_bf16": maps_to("digit", "precision.kind"),
    "xla_downcast_bf16": maps_to("digit", "precision.kind"),
    "neuron_rt_stochastic_rounding_en": maps_to("digit", "precision.kind"),
    "parallel_layers_reduce_dtype": ignore("text", "tensor parallel reductions use the compute dtype", "bf16"),
}
ALIGNMENT: dict[str, KeyRule] = {
    **refuse_all(
        "any",
        DPO,
        "dpo.kl_beta dpo.loss_type dpo.max_prompt_length dpo.precompute_ref_log_probs dpo.truncation_mode",
    ),
    "sft.packing": refuse("any", SFT),
    **refuse_all("any", ORPO, "orpo.beta orpo.max_prompt_length orpo.truncation_mode"),
    **refuse_all(
        "any",
        LORA,
        "peft.lora_rank peft.lora_alpha peft.lora_dropout peft.lora_bias peft.lora_verbose peft.target_modules "
        "peft.load_lora_from_ckpt peft.save_lora_base peft.merge_lora peft.save_lora_config_adapter "
        "peft.merge_sharded_lora",
    ),
}
