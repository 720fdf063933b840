"""Unknown keys and options: the names that users of other systems bring lead to the key, and a guess never misleads."""

import re

import pytest

from tests.support import configs
from trainyard.config.errors import KEYS_COMMAND, suggest_key
from trainyard.config.foreign_keys import AXOLOTL, COMMON, HF_TRAINER, OLMO_CORE, TORCHTITAN, TRL
from trainyard.config.load import parse
from trainyard.config.schema_docs import schema_keys, without_tags
from trainyard.core.errors import UserError

NEAREST = {
    # misspelled, or in another section
    "model.hiden": "model.hidden",
    "tarin.steps": "train.steps",
    "train.Steps": "train.steps",
    "train.lr": "optimizer.lr",
    "train.warmup_steps": "schedule.warmup_steps",
    "optimizer.weightdecay": "optimizer.weight_decay",
    "optimiser.lr": "optimizer.lr",
    "layers": "model.layers",
    "checkpoint.save_every": "checkpoint.every",
    "data.sequence_len": "data.seq_len",
    "model.num_layer": "model.layers",
    "precision.kinds": "precision.kind",
    "recompute.module": "recompute.modules",
    "micro_batch": "train.micro_batch",
    # words of no system in particular
    "device.kind": "device.name",
    "device.type": "device.name",
    "accelerator": "device.name",
    "learning_rate": "optimizer.lr",
    "learnin_rate": "optimizer.lr",
    "lr": "optimizer.lr",
    "optimizer.learning_rate": "optimizer.lr",
    "batch_size": "train.global_batch",
    "train.batch_size": "train.global_batch",
    "epochs": "train.steps",
    "train.epochs": "train.steps",
    "steps": "train.steps",
    "max_iters": "train.steps",
    "seed": "train.seed",
    "dtype": "precision.kind",
    "grad_clip": "optimizer.max_grad_norm",
    "betas": "optimizer.beta1 and optimizer.beta2",
    "optimizer.betas": "optimizer.beta1 and optimizer.beta2",
    "warmup": "schedule.warmup_steps",
    "scheduler": "schedule.kind",
    "tp_size": "layout.tp",
    "layout.tensor_parallel": "layout.tp",
    "block_size": "data.seq_len",
    "dataset": "data.paths",
    "wandb": "log.loggers",
    "output_dir": "log.directory",
    "run_name": "log.name",
    # TrainingArguments
    "per_device_train_batch_size": "train.micro_batch",
    "gradient_accumulation_steps": "train.global_batch",
    "num_train_epochs": "train.steps",
    "max_steps": "train.steps",
    "adam_beta1": "optimizer.beta1",
    "adam_epsilon": "optimizer.eps",
    "lr_scheduler_type": "schedule.kind",
    "bf16": "precision.kind=bf16",
    "gradient_checkpointing": "recompute.kind=full",
    "torch_compile": "compile.enabled=true",
    "deepspeed": "layout.zero",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "logging_steps": "log.every",
    "eval_steps": "evaluate.every",
    "report_to": "log.loggers",
    "push_to_hub": "trainyard push",
    # config.json
    "model.hidden_size": "model.hidden",
    "model.num_hidden_layers": "model.layers",
    "model.num_attention_heads": "model.heads",
    "model.num_key_value_heads": "model.kv_heads",
    "model.intermediate_size": "model.ffn",
    "model.vocab_size": "model.vocab",
    "model.max_position_embeddings": "model.max_positions",
    "model.rms_norm_eps": "model.norm_eps",
    "model.tie_word_embeddings": "model.tie_embeddings",
    "model.n_embd": "model.hidden",
    "vocab_size": "model.vocab",
    # torchtitan
    "training.steps": "train.steps",
    "training.local_batch_size": "train.micro_batch",
    "training.max_norm": "optimizer.max_grad_norm",
    "optimizer.name": "optimizer.kind",
    "lr_scheduler.warmup_steps": "schedule.warmup_steps",
    "parallelism.tensor_parallel_degree": "layout.tp and layout.sequence_parallel=true",
    "parallelism.context_parallel_degree": "layout.cp",
    "parallelism.data_parallel_shard_degree": "layout.zero=3",
    "activation_checkpoint.mode": "recompute.kind",
    "checkpoint.interval": "checkpoint.every",
    "checkpoint.folder": "checkpoint.directory",
    "metrics.log_freq": "log.every",
    "compile.enable": "compile.enabled",
    "debug.seed": "train.seed",
    # NxD Training
    "trainer.max_steps": "train.steps",
    "trainer.gradient_clip_val": "optimizer.max_grad_norm",
    "distributed_strategy.tensor_model_parallel_size": "layout.tp",
    "distributed_strategy.zero1": "layout.zero",
    "data.global_batch_size": "train.global_batch",
    "model.optim.lr": "optimizer.lr",
    "exp_manager.exp_dir": "log.directory",
    "model.moe.num_experts": "model.experts",
    # Megatron-LM
    "num-layers": "model.layers",
    "tensor-model-parallel-size": "layout.tp",
    "micro-batch-size": "train.micro_batch",
    "train-iters": "train.steps",
    "clip-grad": "optimizer.max_grad_norm",
    "lr_warmup_iters": "schedule.warmup_steps",
    "use-distributed-optimizer": "layout.zero",
    "seq_length": "data.seq_len",
    "eval-iters": "evaluate.batches",
    # OLMo-core
    "d_model": "model.hidden",
    "model.n_kv_heads": "model.kv_heads",
    "rank_microbatch_size": "train.micro_batch",
    "max_duration": "train.steps",
    "save_folder": "checkpoint.directory",
    "train_module.max_sequence_length": "data.seq_len",
    # TRL, PEFT and Axolotl
    "assistant_only_loss": "data.chat.train_on=assistant",
    "completion_only_loss": "data.chat.train_on=completion",
    "data.max_length": "data.seq_len",
    "packing_strategy": "data.packing",
    "lora.r": "lora.rank",
    "lora.lora_alpha": "lora.alpha",
    "lora_r": "lora.rank",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "lora.target_modules": "lora.targets",
    "lora_target_modules": "lora.targets",
    "modules_to_save": "lora.train",
    "use_dora": "lora.dora",
    "lora.use_rslora": "lora.rank_stabilized",
    "neftune_noise_alpha": "train.embedding_noise",
    "base_model": "model.from_hf and checkpoint.init_from",
    "sequence_len": "data.seq_len",
    "sample_packing": "data.packing",
    "roles_to_train": "data.chat.train_on",
    "val_set_size": "data.validation_fraction",
    "lora_target_linear": "lora.targets=all-linear",
    "adapter": "lora.rank",
    "num_generations": "rollout.completions",
    "rollout.max_completion_length": "rollout.max_new_tokens",
    "rollout.reward_weights": "rollout.weights",
    "steps_per_generation": "rollout.updates",
    "num_iterations": "rollout.epochs",
    "policy.epsilon": "policy.clip",
    "policy.epsilon_high": "policy.clip_high",
    "policy.scale_rewards": "policy.scale",
    "importance_sampling_level": "policy.ratio",
    "max_tool_calling_iterations": "rollout.max_turns",
    "beta": "preference.beta",
    "desirable_weight": "preference.desirable_weight",
    "center_rewards_coefficient": "preference.center_weight",
}
INSTEAD = {
    "layout.dp": "start more ranks with --nproc",
    "dp": "start more ranks with --nproc",
    "layout.data_parallel_size": "start more ranks with --nproc",
    "gpus": "--nproc N starts N ranks",
    "nproc_per_node": "--nproc N starts N ranks",
    "fp16": "nearest: precision.kind=bf16",
    "num_workers": "one thread prefetches",
    "load_best_model_at_end": "the latest checkpoints are kept",
    "rotary-percent": "RoPE rotates full heads",
    "parallelism.disable_loss_parallel": "always vocabulary parallel",
    "use_vllm": "the model that trains writes the completions",
    "policy.beta": "of GRPO and RLOO: policy.kl",
}
UNKNOWN = ["a.b.c.d", "zzz", "model.zzz", "foo.bar", "train.qqqq", "xyz.kind", "train.x", "data.q"]


def line(key: str) -> str:
    with pytest.raises(UserError) as caught:
        parse({"model": configs.LLAMA, "train": {"steps": 3}, "data": {"seq_len": 16}}, [f"{key.replace('-', '_')}=1"])
    return str(caught.value)


@pytest.mark.parametrize("key", NEAREST)
def test_known_name_leads_to_its_key(key: str) -> None:
    found = line(key)
    assert re.match(
        rf"{re.escape(key.replace('-', '_'))}=1: unknown key; nearest: {re.escape(NEAREST[key])}( \(|$)", found
    ), found


@pytest.mark.parametrize("key", INSTEAD)
def test_name_without_a_key_says_what_to_do(key: str) -> None:
    assert INSTEAD[key] in line(key)


@pytest.mark.parametrize("key", UNKNOWN)
def test_nothing_is_suggested_for_an_unknown_name(key: str) -> None:
    assert line(key) == f"{key}=1: unknown key; {KEYS_COMMAND}"


def test_keys_of_the_tables_exist() -> None:
    keys = {without_tags(doc.name) for doc in schema_keys()} | {"model.from_hf"}
    tables = (COMMON, *HF_TRAINER.values(), *TORCHTITAN.values(), OLMO_CORE, *TRL.values(), *AXOLOTL.values())
    for name, (ours, note) in (row for table in tables for row in table.items()):
        targets = [target.partition("=")[0] for target in filter(None, ours.split(", "))]
        assert all(target in keys or target.startswith("trainyard ") for target in targets), name
        assert targets or note, name


def test_no_key_is_shadowed() -> None:
    """A key of the schema stands for itself, whatever it means elsewhere."""
    for key in {without_tags(doc.name) for doc in schema_keys()}:
        assert suggest_key(key) == f"nearest: {key}"
