"""The model section of NxDT's YAML (Hugging Face and Megatron models, optimizer, schedule, experts), and the complete
table. See keys.py for the rules."""

from trainyard.config.importers.key_table import KeyRule, ignore, ignore_all, maps_to, refuse, refuse_all
from trainyard.config.importers.nxdt.keys import (
    ALIGNMENT,
    DATA,
    DEVICE,
    EXP_MANAGER,
    FUSED,
    MOE,
    OWN_SHARD,
    PRECISION,
    STRATEGY,
    TOP,
    TRAINER,
)

PARTIAL_RECOMPUTE = "recompute is the same for every block of every stage; nearest: leave it out"

MODEL: dict[str, KeyRule] = {
    "model_config": maps_to("text", "model.vocab, model.heads, model.kv_heads, model.ffn"),
    "encoder_seq_length": maps_to("int", "data.seq_len"),
    "max_position_embeddings": maps_to("int", "model.max_positions"),
    "num_layers": maps_to("int", "model.layers"),
    "hidden_size": maps_to("int", "model.hidden"),
    "rope_theta": maps_to("number", "model.rope_theta"),
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
    **refuse_all(
        "any",
        PARTIAL_RECOMPUTE,
        "activations_checkpoint_layers_per_pipeline num_micro_batches_with_partial_activation_checkpoints",
    ),
    "disable_layer_norm_checkpointing": ignore("bool", "set by activations_checkpoint_recompute"),
    "do_layer_norm_weight_decay": ignore("bool", "norms and biases never decay here"),
    "save_logits": ignore("bool", "logits are computed in chunks", False),
    **ignore_all("bool", FUSED, "fusions.softmax fusions.flash_attention"),
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
    "normalization": maps_to("text", "model.family"),
    "layernorm_epsilon": maps_to("number", "model.norm_eps"),
    "make_vocab_size_divisible_by": ignore("int", "the vocabulary is padded only as layout.tp requires"),
    "persist_layer_norm": ignore("bool", FUSED),
    "share_embeddings_and_output_weights": maps_to("bool", "model.tie_embeddings"),
    "position_embedding_type": maps_to("text", "model.family"),
    "rotary_percentage": refuse("number", "RoPE rotates full heads; nearest: 1.0", 1, 1.0),
    "position_freq_base": maps_to("number", "model.rope_theta"),
    "position_abf_factor": maps_to("number", "model.rope_theta"),
    "positition_interpolation_factor": maps_to("number", "model.rope_scaling"),
    "position_interpolation_factor": maps_to("number", "model.rope_scaling"),
    "activation": maps_to("text", "model.family"),
    "transformer_block_type": refuse("text", "blocks are pre-norm; nearest: pre_ln", "pre_ln"),
    "has_bias": maps_to("bool", "model.family"),
    "sliding_window_size": ignore("int", "a window as long as the sequence covers all of it"),
    "fp32_residual_connection": refuse("bool", "the residual stream has the compute dtype; nearest: false", False),
    "fp16_lm_cross_entropy": refuse("bool", "the loss runs in fp32; nearest: false", False),
    "use_emha": refuse("bool", "unsupported attention; nearest: false", False),
    **ignore_all(
        "bool",
        FUSED,
        "gradient_accumulation_fusion bias_activation_fusion bias_dropout_add_fusion masked_softmax_fusion",
    ),
    "megatron_amp_o2": ignore("bool", "set by precision.type"),
    "precision": ignore("any", "set by precision.type"),
    "wrap_with_zero": ignore("bool", "set by distributed_strategy.zero1"),
    "optim.name": maps_to("text", "optimizer.kind"),
    "optim.lr": maps_to("number", "optimizer.lr"),
    "optim.weight_decay": maps_to("number", "optimizer.weight_decay"),
    "optim.betas": maps_to("list", "optimizer.beta1, optimizer.beta2"),
    "optim.eps": maps_to("number", "optimizer.eps"),
    "optim.capturable": ignore("bool", "the update never synchronizes with the host"),
    "optim.sched.name": maps_to("text", "schedule.kind"),
    "optim.sched.warmup_steps": maps_to("int", "schedule.warmup_steps"),
    "optim.sched.warmup_ratio": maps_to("number", "schedule.warmup_steps"),
    "optim.sched.constant_steps": maps_to("int", "schedule.decay_steps"),
    "optim.sched.min_lr": maps_to("number", "schedule.min_lr"),
    "optim.sched.max_steps": ignore("int", "trainer.max_steps replaces it, in NxDT too"),
    **refuse_all(
        "any",
        MOE,
        "moe.num_experts moe.frequency moe.dropout moe.moe_dropout moe.capacity_factor moe.dropless moe.glu_mlp "
        "moe.routing_algorithm moe.router_activation moe.sinkhorn_iterations moe.sinkhorn_tol moe.top_k "
        "moe.output_router_logits moe.router_aux_loss_coef moe.normalize_top_k_affinities moe.token_shuffle_group_size "
        "moe.token_shuffle_seed",
    ),
}

_SECTIONS = {
    "trainer": TRAINER,
    "exp_manager": EXP_MANAGER,
    "distributed_strategy": STRATEGY,
    "data": DATA,
    "model": MODEL,
    "precision": PRECISION,
    "model_alignment_strategy": ALIGNMENT,
}
NXDT_KEYS: dict[str, KeyRule] = TOP | {
    f"{section}.{name}": rule for section, rules in _SECTIONS.items() for name, rule in rules.items()
}
KEYS_FOUND_AT_ANY_DEPTH = {
    "ring_attention": "model.fusions.ring_attention",
    "context_parallel_size": "distributed_strategy.context_parallel_size",
    **{f"lora_{name}": f"model_alignment_strategy.peft.lora_{name}" for name in ("rank", "alpha", "dropout", "bias")},
    "kl_beta": "model_alignment_strategy.dpo.kl_beta",
    "wrap_with_zero": "model.wrap_with_zero",
}
"""Names that NxDT searches at any depth of the tree, with their regular keys."""
