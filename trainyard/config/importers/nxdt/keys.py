"""Every key that NxD Training (NxDT 1.6) reads from its YAML, and what it is here: the one table.

`to` names our keys, `ignored` says why a key has no effect, `refused` why it cannot be: what our models and runs do
not have is not silently left out. A key of theirs that is spelt wrongly in their own code is listed as they spell it.
"""

from trainyard.config.importers.key_table import KeyRule, ignore, maps_to, refuse

MOE = "mixture of experts: models are dense here; nearest: the dense model of the same family, without model.moe"
ALIGN = "only pre-training is done here; nearest: leave model_alignment_strategy out and train on packed text"
LORA = "low-rank adapters: all weights are trained here; nearest: leave model_alignment_strategy out"
SFT = "supervised fine-tuning on records of prompts and answers: " + ALIGN
DEVICE = "a setting of the device's own compiler or runtime; set its environment variable if it is wanted"
LOGGING = "logs are written in one way here: log.every, log.directory, log.tensorboard"
EPOCHS = "steps are what counts here, not epochs"
FUSED = "kernels are chosen by the device (device.kernels)"
MANUAL_ONLY = "read with precision.type=manual alone"
CHECKPOINT_FORMAT = "a matter of how their checkpoints are written; ours are whole, in fp32 where the run has fp32"
LOADING = "samples are made ahead by one thread, without state"
VALIDATION_SET = "no separate set: held-out samples are data.split's (Megatron) or data.validation_fraction's"

TOP: dict[str, KeyRule] = {
    "name": maps_to("text", "log.name"),
    "model_source": maps_to("text", "model.family"),
    "seed": maps_to("int", "train.seed"),
    "compiler_flags": ignore("text", DEVICE),
    "compiler_cache_url": ignore("text", DEVICE),
    "aync_exec_max_inflight_requests": ignore("int", DEVICE),
    "async_exec_max_inflight_requests": ignore("int", DEVICE),
    "bucket_size_collectives": maps_to("int", "layout.bucket_mib"),
    "neuron_rt_exec_timeout": ignore("int", DEVICE),
    "neuron_experimental_compress_rg": ignore("bool", DEVICE),
    "hydra": ignore("any", "settings of their launcher"),
    "defaults": refuse(
        "list", "composed of several files; give the composed one (their --cfg job --resolve prints it)"
    ),
}
TRAINER: dict[str, KeyRule] = {
    "devices": maps_to("int", "layout.ranks"),
    "num_nodes": maps_to("int", "layout.ranks"),
    "lnc": ignore("int", "devices counts logical cores already, which are the ranks"),
    "max_epochs": ignore("int", EPOCHS),
    "max_steps": maps_to("int", "train.steps"),
    "max_time": ignore("any", "a run ends after train.steps or by a signal", None),
    "log_every_n_steps": maps_to("int", "log.every"),
    "val_check_interval": maps_to("number", "evaluate.every"),
    "check_val_every_n_epoch": ignore("int", EPOCHS),
    "num_sanity_val_steps": ignore("int", "no trial evaluation before the first step"),
    "limit_val_batches": maps_to("number", "evaluate.batches"),
    "limit_test_batches": ignore("number", "no test set is run"),
    "gradient_clip_val": maps_to("number", "optimizer.max_grad_norm"),
    "sequential_move_factor": ignore("int", "each rank makes its own slice of the weights"),
    "accumulate_grad_batches": refuse("int", "follows from the batch sizes; nearest: leave it out", 1),
    **{
        name: ignore("any", "a setting of their trainer")
        for name in ("accelerator", "strategy", "logger", "enable_checkpointing", "enable_progress_bar", "benchmark")
    },
    "enable_model_summary": ignore("any", "a setting of their trainer"),
    "precision": ignore("any", "the precision section says it"),
}
EXP_MANAGER: dict[str, KeyRule] = {
    **{
        name: ignore("bool", LOGGING)
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
    "create_tensorboard_logger": maps_to("bool", "log.tensorboard"),
    "create_wandb_logger": ignore("bool", LOGGING, False),
    "wandb_logger_kwargs": ignore("mapping", LOGGING),
    "create_mlflow_logger": ignore("bool", LOGGING, False),
    "mlflow_logger_kwargs": ignore("mapping", LOGGING),
    "step_timing_kwargs": ignore("mapping", LOGGING),
    "summary_writer_kwargs": ignore("mapping", LOGGING),
    "explicit_log_dir": maps_to("text", "log.directory, log.name"),
    "exp_log_dir": maps_to("text", "log.directory, log.name"),
    "exp_dir": maps_to("text", "log.directory"),
    "name": maps_to("text", "log.name"),
    "version": ignore("any", "a run's directory is log.directory/NAME"),
    "files_to_copy": ignore("any", "a run keeps its config.yaml"),
    "resume_if_exists": maps_to("bool", "checkpoint.resume"),
    "resume_past_end": ignore("bool", "a finished run has no steps left to make", False),
    "resume_ignore_no_checkpoint": ignore("bool", "a run with nothing to resume begins"),
    "resume_from_checkpoint": maps_to("text", "checkpoint.init_from"),
    "create_checkpoint_callback": maps_to("bool", "checkpoint.every"),
    "disable_validation_on_resume": ignore("bool", "evaluation goes by the step number"),
    "max_time_per_run": ignore("any", "a run ends after train.steps or by a signal", None),
    "seconds_to_sleep": ignore("number", "nothing to wait for"),
    "ema.enable": refuse("bool", "averaged weights are not kept here; nearest: false", False),
    **{
        f"ema.{name}": ignore("any", "read with ema.enable alone")
        for name in ("decay", "apply_ema_every_n_steps", "start_step", "evaluate_ema_weights_instead")
    },
    "save_xser": ignore("bool", CHECKPOINT_FORMAT),
    "load_xser": ignore("bool", "which form a checkpoint has is found out"),
    "save_bf16": ignore("bool", CHECKPOINT_FORMAT, False),
    "async_checkpointing": ignore("bool", "steps go on while a checkpoint is written; checkpoint.blocking=true waits"),
    "ckpt_ptl_version": ignore("any", "which form a checkpoint has is found out"),
    "checkpoint_callback_params.monitor": ignore("text", "the newest are kept", "step", "global_step"),
    "checkpoint_callback_params.save_top_k": maps_to("int", "checkpoint.keep"),
    "checkpoint_callback_params.mode": ignore("text", "the newest are kept", "max"),
    "checkpoint_callback_params.save_last": ignore("bool", "a run that saves writes one at its end too"),
    "checkpoint_callback_params.filename": ignore("text", "checkpoints are named by their step"),
    "checkpoint_callback_params.dirpath": maps_to("text", "checkpoint.directory"),
    "checkpoint_callback_params.model_parallel_size": ignore("int", "follows from the layout"),
    "checkpoint_callback_params.every_n_epochs": ignore("int", EPOCHS, 0),
    "checkpoint_callback_params.every_n_train_steps": maps_to("int", "checkpoint.every"),
    "checkpoint_callback_params.train_time_interval": maps_to("mapping", "checkpoint.every_minutes"),
    "checkpoint_callback_params.save_on_train_epoch_end": ignore("bool", EPOCHS),
    "checkpoint_callback_params.save_nemo_on_train_end": ignore("bool", "Hugging Face form is written at the end"),
    "checkpoint_callback_params.use_master_weights_in_ckpt": ignore("bool", CHECKPOINT_FORMAT),
    "checkpoint_callback_params.enable_version_counter": ignore("bool", "checkpoints are named by their step"),
}
STRATEGY: dict[str, KeyRule] = {
    "tensor_model_parallel_size": maps_to("int", "layout.tp"),
    "pipeline_model_parallel_size": maps_to("int", "layout.pp"),
    "virtual_pipeline_model_parallel_size": maps_to("int", "layout.vpp"),
    "pipeline_model_parallel_split_rank": ignore("int", "for models with two towers", 0),
    "context_parallel_size": maps_to("int", "layout.cp"),
    "expert_model_parallel_size": refuse("int", MOE, 1),
    "token_shuffle_group_size": refuse("int", MOE, 1),
    "zero1": maps_to("bool", "layout.zero"),
    "sequence_parallel": maps_to("bool", "layout.sequence_parallel"),
    "kv_replicator": ignore("int", "follows from layout.tp and model.kv_heads"),
}
DATA: dict[str, KeyRule] = {
    "micro_batch_size": maps_to("int", "train.micro_batch"),
    "global_batch_size": maps_to("int", "train.global_batch"),
    "train_dir": maps_to("text", "data.source, data.paths"),
    "val_dir": ignore("text", VALIDATION_SET, None),
    "test_dir": ignore("text", "no test set is run"),
    "dev_choose_samples": refuse("int", SFT),
    "dataset_name": refuse("text", SFT),
    "subset_name": refuse("text", SFT),
    "prompt_name": refuse("text", SFT),
    "packing": refuse("bool", SFT, False),
    "use_sft_style_data_module": ignore("bool", "the paths say it: train_dir or data_prefix"),
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
    "validation_drop_last": ignore("bool", "evaluation takes whole batches"),
    "no_seqlen_plus_one_input_tokens": refuse("bool", "a sample has sequence + 1 tokens here; nearest: false", False),
    "pad_samples_to_global_batch_size": ignore("bool", "every batch is whole"),
    "drop_last": ignore("bool", "every batch is whole"),
    "fine_tuning": refuse("any", SFT, False),
    **{name: refuse("any", SFT) for name in ("train_ds", "validation_ds", "test_ds")},
    "tokenizer.library": maps_to("text", "data.tokenizer"),
    "tokenizer.type": maps_to("text", "data.tokenizer"),
    "tokenizer.model": maps_to("text", "data.tokenizer"),
    "tokenizer.vocab_file": maps_to("text", "data.vocab_file"),
    "tokenizer.merge_file": maps_to("text", "data.merges_file"),
    "tokenizer.delimiter": ignore("text", "for tables"),
    "tokenizer.sentencepiece_legacy": ignore("bool", "tokens are made already", False),
    "tokenizer.use_fast": ignore("bool", "one implementation"),
}
MANUAL_PRECISION_KEYS = (
    "master_weights",
    "fp32_grad_acc",
    "fp32_grads_cc",
    "xla_use_bf16",
    "xla_downcast_bf16",
    "neuron_rt_stochastic_rounding_en",
)
"""Read with type=manual alone."""
PRECISION: dict[str, KeyRule] = {
    "type": maps_to("text", "precision.kind"),
    "master_weights": maps_to("bool", "precision.kind"),
    "fp32_grad_acc": maps_to("bool", "precision.grad_dtype"),
    "fp32_grads_cc": maps_to("bool", "precision.reduce_dtype"),
    "xla_use_bf16": maps_to("digit", "precision.kind"),
    "xla_downcast_bf16": maps_to("digit", "precision.kind"),
    "neuron_rt_stochastic_rounding_en": maps_to("digit", "precision.kind"),
    "parallel_layers_reduce_dtype": ignore("text", "tensor-parallel sums are of the dtype that is computed in", "bf16"),
}
ALIGNMENT: dict[str, KeyRule] = {
    **{
        f"dpo.{name}": refuse("any", "preference training (DPO): " + ALIGN)
        for name in ("kl_beta", "loss_type", "max_prompt_length", "precompute_ref_log_probs", "truncation_mode")
    },
    "sft.packing": refuse("any", SFT),
    **{
        f"orpo.{name}": refuse("any", "preference training (ORPO): " + ALIGN)
        for name in ("beta", "max_prompt_length", "truncation_mode")
    },
    **{f"peft.lora_{name}": refuse("any", LORA) for name in ("rank", "alpha", "dropout", "bias", "verbose")},
    "peft.target_modules": refuse("any", LORA),
    **{
        f"peft.{name}": refuse("any", LORA)
        for name in ("load_lora_from_ckpt", "save_lora_base", "merge_lora", "save_lora_config_adapter")
    },
    "peft.merge_sharded_lora": refuse("any", LORA),
}
