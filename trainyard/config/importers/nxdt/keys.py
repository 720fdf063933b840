"""Every key that NxD Training (NxDT 1.6) reads from its YAML, and what it is here: the one table.

`to` names our keys, `ignored` says why a key has no effect, `refused` why it cannot be: what our models and runs do
not have is not silently left out. A key of theirs that is spelt wrongly in their own code is listed as they spell it.
"""

from trainyard.config.importers.key_table import Key, ignored, refused, to

MOE = "mixture of experts: models are dense here; nearest: the dense model of the same family, without model.moe"
ALIGN = "only pre-training is done here; nearest: leave model_alignment_strategy out and train on packed text"
LORA = "low-rank adapters: all weights are trained here; nearest: leave model_alignment_strategy out"
SFT = "supervised fine-tuning on records of prompts and answers: " + ALIGN
DEVICE = "a setting of the device's own compiler or runtime; set its environment variable if it is wanted"
OWN_LOGS = "logs are written in one way here: log.every, log.directory, log.tensorboard"
EPOCHS = "steps are what counts here, not epochs"
FUSED = "kernels are chosen by the device (device.kernels)"
MANUAL = "read with precision.type=manual alone"
WRITING = "a matter of how their checkpoints are written; ours are whole, in fp32 where the run has fp32"
LOADING = "samples are made ahead by one thread, without state"
SET = "no separate set: held-out samples are data.split's (Megatron) or data.validation's"

TOP: dict[str, Key] = {
    "name": to("text", "log.name"),
    "model_source": to("text", "model.family"),
    "seed": to("int", "train.seed"),
    "compiler_flags": ignored("text", DEVICE),
    "compiler_cache_url": ignored("text", DEVICE),
    "aync_exec_max_inflight_requests": ignored("int", DEVICE),
    "async_exec_max_inflight_requests": ignored("int", DEVICE),
    "bucket_size_collectives": to("int", "layout.bucket"),
    "neuron_rt_exec_timeout": ignored("int", DEVICE),
    "neuron_experimental_compress_rg": ignored("bool", DEVICE),
    "hydra": ignored("any", "settings of their launcher"),
    "defaults": refused(
        "list", "composed of several files; give the composed one (their --cfg job --resolve prints it)"
    ),
}
TRAINER: dict[str, Key] = {
    "devices": to("int", "layout.ranks"),
    "num_nodes": to("int", "layout.ranks"),
    "lnc": ignored("int", "devices counts logical cores already, which are the ranks"),
    "max_epochs": ignored("int", EPOCHS),
    "max_steps": to("int", "train.steps"),
    "max_time": ignored("any", "a run ends after train.steps or by a signal", None),
    "log_every_n_steps": to("int", "log.every"),
    "val_check_interval": to("number", "evaluate.every"),
    "check_val_every_n_epoch": ignored("int", EPOCHS),
    "num_sanity_val_steps": ignored("int", "no trial evaluation before the first step"),
    "limit_val_batches": to("number", "evaluate.batches"),
    "limit_test_batches": ignored("number", "no test set is run"),
    "gradient_clip_val": to("number", "optimizer.clip"),
    "sequential_move_factor": ignored("int", "each rank makes its own slice of the weights"),
    "accumulate_grad_batches": refused("int", "follows from the batch sizes; nearest: leave it out", 1),
    **{
        name: ignored("any", "a setting of their trainer")
        for name in ("accelerator", "strategy", "logger", "enable_checkpointing", "enable_progress_bar", "benchmark")
    },
    "enable_model_summary": ignored("any", "a setting of their trainer"),
    "precision": ignored("any", "the precision section says it"),
}
EXP_MANAGER: dict[str, Key] = {
    **{
        name: ignored("bool", OWN_LOGS)
        for name in (
            "log_local_rank_0_only",
            "log_global_rank_0_only",
            "use_datetime_version",
            "log_step_timing",
            "log_parameter_norm",
            "log_gradient_norm",
            "enable_recovery_time_instrumentation",
        )
    },
    "create_tensorboard_logger": to("bool", "log.tensorboard"),
    "create_wandb_logger": ignored("bool", OWN_LOGS, False),
    "wandb_logger_kwargs": ignored("mapping", OWN_LOGS),
    "create_mlflow_logger": ignored("bool", OWN_LOGS, False),
    "mlflow_logger_kwargs": ignored("mapping", OWN_LOGS),
    "step_timing_kwargs": ignored("mapping", OWN_LOGS),
    "summary_writer_kwargs": ignored("mapping", OWN_LOGS),
    "explicit_log_dir": to("text", "log.directory, log.name"),
    "exp_log_dir": to("text", "log.directory, log.name"),
    "exp_dir": to("text", "log.directory"),
    "name": to("text", "log.name"),
    "version": ignored("any", "a run's directory is log.directory/NAME"),
    "files_to_copy": ignored("any", "a run keeps its config.yaml"),
    "resume_if_exists": to("bool", "checkpoint.resume"),
    "resume_past_end": ignored("bool", "a finished run has no steps left to make", False),
    "resume_ignore_no_checkpoint": ignored("bool", "a run with nothing to resume begins"),
    "resume_from_checkpoint": to("text", "checkpoint.start"),
    "create_checkpoint_callback": to("bool", "checkpoint.every"),
    "disable_validation_on_resume": ignored("bool", "evaluation goes by the step number"),
    "max_time_per_run": ignored("any", "a run ends after train.steps or by a signal", None),
    "seconds_to_sleep": ignored("number", "nothing to wait for"),
    "ema.enable": refused("bool", "averaged weights are not kept here; nearest: false", False),
    **{
        f"ema.{name}": ignored("any", "read with ema.enable alone")
        for name in ("decay", "apply_ema_every_n_steps", "start_step", "evaluate_ema_weights_instead")
    },
    "save_xser": ignored("bool", WRITING),
    "load_xser": ignored("bool", "which form a checkpoint has is found out"),
    "save_bf16": ignored("bool", WRITING, False),
    "async_checkpointing": ignored("bool", "steps go on while a checkpoint is written; checkpoint.blocking=true waits"),
    "ckpt_ptl_version": ignored("any", "which form a checkpoint has is found out"),
    "checkpoint_callback_params.monitor": ignored("text", "the newest are kept", "step", "global_step"),
    "checkpoint_callback_params.save_top_k": to("int", "checkpoint.keep"),
    "checkpoint_callback_params.mode": ignored("text", "the newest are kept", "max"),
    "checkpoint_callback_params.save_last": ignored("bool", "a run that saves writes one at its end too"),
    "checkpoint_callback_params.filename": ignored("text", "checkpoints are named by their step"),
    "checkpoint_callback_params.dirpath": to("text", "checkpoint.directory"),
    "checkpoint_callback_params.model_parallel_size": ignored("int", "follows from the layout"),
    "checkpoint_callback_params.every_n_epochs": ignored("int", EPOCHS, 0),
    "checkpoint_callback_params.every_n_train_steps": to("int", "checkpoint.every"),
    "checkpoint_callback_params.train_time_interval": to("mapping", "checkpoint.minutes"),
    "checkpoint_callback_params.save_on_train_epoch_end": ignored("bool", EPOCHS),
    "checkpoint_callback_params.save_nemo_on_train_end": ignored("bool", "Hugging Face form is written at the end"),
    "checkpoint_callback_params.use_master_weights_in_ckpt": ignored("bool", WRITING),
    "checkpoint_callback_params.enable_version_counter": ignored("bool", "checkpoints are named by their step"),
}
STRATEGY: dict[str, Key] = {
    "tensor_model_parallel_size": to("int", "layout.tp"),
    "pipeline_model_parallel_size": to("int", "layout.pp"),
    "virtual_pipeline_model_parallel_size": to("int", "layout.vpp"),
    "pipeline_model_parallel_split_rank": ignored("int", "for models with two towers", 0),
    "context_parallel_size": to("int", "layout.cp"),
    "expert_model_parallel_size": refused("int", MOE, 1),
    "token_shuffle_group_size": refused("int", MOE, 1),
    "zero1": to("bool", "layout.zero"),
    "sequence_parallel": to("bool", "layout.sequence_parallel"),
    "kv_replicator": ignored("int", "follows from layout.tp and model.kv_heads"),
}
DATA: dict[str, Key] = {
    "micro_batch_size": to("int", "train.micro_batch"),
    "global_batch_size": to("int", "train.global_batch"),
    "train_dir": to("text", "data.source, data.paths"),
    "val_dir": ignored("text", SET, None),
    "test_dir": ignored("text", "no test set is run"),
    "dev_choose_samples": refused("int", SFT),
    "dataset_name": refused("text", SFT),
    "subset_name": refused("text", SFT),
    "prompt_name": refused("text", SFT),
    "packing": refused("bool", SFT, False),
    "use_sft_style_data_module": ignored("bool", "the paths say it: train_dir or data_prefix"),
    "data_prefix": to("any", "data.source, data.paths, data.weights"),
    "index_mapping_dir": ignored("text", "there are no index files"),
    "data_impl": refused("text", "only memory-mapped .bin and .idx are read; nearest: mmap", "mmap", "infer"),
    "splits_string": to("any", "data.split"),
    "seq_length": to("int", "data.sequence"),
    "skip_warmup": ignored("bool", LOADING),
    "num_workers": ignored("int", LOADING),
    "dataloader_type": to("text", "data.order"),
    "reset_position_ids": to("bool", "data.separate"),
    "reset_attention_mask": to("bool", "data.separate"),
    "eod_mask_loss": to("bool", "data.mask_ends"),
    "validation_drop_last": ignored("bool", "evaluation takes whole batches"),
    "no_seqlen_plus_one_input_tokens": refused("bool", "a sample has sequence + 1 tokens here; nearest: false", False),
    "pad_samples_to_global_batch_size": ignored("bool", "every batch is whole"),
    "drop_last": ignored("bool", "every batch is whole"),
    "fine_tuning": refused("any", SFT, False),
    **{name: refused("any", SFT) for name in ("train_ds", "validation_ds", "test_ds")},
    "tokenizer.library": to("text", "data.tokenizer"),
    "tokenizer.type": to("text", "data.tokenizer"),
    "tokenizer.model": to("text", "data.tokenizer"),
    "tokenizer.vocab_file": to("text", "data.vocab_file"),
    "tokenizer.merge_file": to("text", "data.merges_file"),
    "tokenizer.delimiter": ignored("text", "for tables"),
    "tokenizer.sentencepiece_legacy": ignored("bool", "tokens are made already", False),
    "tokenizer.use_fast": ignored("bool", "one implementation"),
}
PRECISION_BY_HAND = (
    "master_weights",
    "fp32_grad_acc",
    "fp32_grads_cc",
    "xla_use_bf16",
    "xla_downcast_bf16",
    "neuron_rt_stochastic_rounding_en",
)
"""Read with type=manual alone."""
PRECISION: dict[str, Key] = {
    "type": to("text", "precision.kind"),
    "master_weights": to("bool", "precision.kind"),
    "fp32_grad_acc": to("bool", "precision.gradients"),
    "fp32_grads_cc": to("bool", "precision.reduce"),
    "xla_use_bf16": to("digit", "precision.kind"),
    "xla_downcast_bf16": to("digit", "precision.kind"),
    "neuron_rt_stochastic_rounding_en": to("digit", "precision.kind"),
    "parallel_layers_reduce_dtype": ignored(
        "text", "tensor-parallel sums are of the dtype that is computed in", "bf16"
    ),
}
ALIGNMENT: dict[str, Key] = {
    **{
        f"dpo.{name}": refused("any", "preference training (DPO): " + ALIGN)
        for name in ("kl_beta", "loss_type", "max_prompt_length", "precompute_ref_log_probs", "truncation_mode")
    },
    "sft.packing": refused("any", SFT),
    **{
        f"orpo.{name}": refused("any", "preference training (ORPO): " + ALIGN)
        for name in ("beta", "max_prompt_length", "truncation_mode")
    },
    **{f"peft.lora_{name}": refused("any", LORA) for name in ("rank", "alpha", "dropout", "bias", "verbose")},
    "peft.target_modules": refused("any", LORA),
    **{
        f"peft.{name}": refused("any", LORA)
        for name in ("load_lora_from_ckpt", "save_lora_base", "merge_lora", "save_lora_config_adapter")
    },
    "peft.merge_sharded_lora": refused("any", LORA),
}
