"""The model section of NxDT's YAML (Hugging Face and Megatron models, optimizer, schedule, experts); the whole table.

Cut off nxdt_keys.py for length: the same kind of table, the same rules.
"""

from trainyard.config.importers.key_table import KeyRule, ignore, maps_to, refuse
from trainyard.config.importers.nxdt.keys import (
    ALIGNMENT,
    DATA,
    DEVICE,
    EXP_MANAGER,
    FUSED,
    MOE,
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
    "qkv_linear": ignore("bool", "key and value heads are spread over tensor-parallel ranks as the sizes ask"),
    "fuse_qkv": maps_to("bool", "model.fuse_qkv"),
    "transpose_nki_inputs": ignore("bool", DEVICE),
    "pipeline_cuts": maps_to("list", "layout.pipeline_cuts"),
    "use_cpu_initialization": ignore("bool", "each rank makes its own slice of the weights"),
    "weight_init_only": maps_to("bool", "checkpoint.init_from"),
    "activations_checkpoint_granularity": maps_to("text", "recompute.kind"),
    "activations_checkpoint_recompute": maps_to("list", "recompute.kind, recompute.modules"),
    "activations_checkpoint_recompute_mlp": maps_to("bool", "recompute.kind, recompute.modules"),
    "activations_checkpoint_method": refuse("text", PARTIAL_RECOMPUTE, "uniform"),
    "activations_checkpoint_num_layers": refuse("int", PARTIAL_RECOMPUTE, 1),
    "activations_checkpoint_layers_per_pipeline": refuse("any", PARTIAL_RECOMPUTE),
    "num_micro_batches_with_partial_activation_checkpoints": refuse("any", PARTIAL_RECOMPUTE),
    "disable_layer_norm_checkpointing": ignore("bool", "activations_checkpoint_recompute says it"),
    "do_layer_norm_weight_decay": ignore("bool", "norms and biases never decay here"),
    "save_logits": ignore("bool", "logits exist a piece at a time", False),
    "fusions.softmax": ignore("bool", FUSED),
    "fusions.flash_attention": ignore("bool", FUSED),
    "fusions.ring_attention": maps_to("bool", "layout.cp_method"),
    "ffn_hidden_size": maps_to("int", "model.ffn"),
    "num_attention_heads": maps_to("int", "model.heads"),
    "num_kv_heads": maps_to("int", "model.kv_heads"),
    "init_method_std": maps_to("number", "model.init_std"),
    "use_scaled_init_method": maps_to("bool", "model.scaled_init"),
    "hidden_dropout": maps_to("number", "model.hidden_dropout, model.embedding_dropout"),
    "attention_dropout": maps_to("number", "model.attention_dropout"),
    "ffn_dropout": ignore(
        "number", "no dropout between the matrices of an MLP; hidden_dropout is on its output", 0, 0.0
    ),
    "kv_channels": maps_to("int", "model.head_dim"),
    "apply_query_key_layer_scaling": ignore(
        "bool", "softmax is in fp32, where dividing and multiplying back is nothing"
    ),
    "normalization": maps_to("text", "model.family"),
    "layernorm_epsilon": maps_to("number", "model.norm_eps"),
    "make_vocab_size_divisible_by": ignore("int", "the vocabulary is padded as layout.tp needs, and no more"),
    "persist_layer_norm": ignore("bool", FUSED),
    "share_embeddings_and_output_weights": maps_to("bool", "model.tie_embeddings"),
    "position_embedding_type": maps_to("text", "model.family"),
    "rotary_percentage": refuse("number", "rotary positions turn whole heads; nearest: 1.0", 1, 1.0),
    "position_freq_base": maps_to("number", "model.rope_theta"),
    "position_abf_factor": maps_to("number", "model.rope_theta"),
    "positition_interpolation_factor": maps_to("number", "model.rope_scaling"),
    "position_interpolation_factor": maps_to("number", "model.rope_scaling"),
    "activation": maps_to("text", "model.family"),
    "transformer_block_type": refuse("text", "blocks have their norms before each part; nearest: pre_ln", "pre_ln"),
    "has_bias": maps_to("bool", "model.family"),
    "sliding_window_size": ignore("int", "a window as long as the sequence sees all of it"),
    "fp32_residual_connection": refuse("bool", "the residual stream has the computing dtype; nearest: false", False),
    "fp16_lm_cross_entropy": refuse("bool", "the loss is in fp32; nearest: false", False),
    "use_emha": refuse("bool", "one kind of attention; nearest: false", False),
    **{
        name: ignore("bool", FUSED)
        for name in (
            "gradient_accumulation_fusion",
            "bias_activation_fusion",
            "bias_dropout_add_fusion",
            "masked_softmax_fusion",
        )
    },
    "megatron_amp_o2": ignore("bool", "precision.type says it"),
    "precision": ignore("any", "precision.type says it"),
    "wrap_with_zero": ignore("bool", "distributed_strategy.zero1 says it"),
    "optim.name": maps_to("text", "optimizer.kind"),
    "optim.lr": maps_to("number", "optimizer.lr"),
    "optim.weight_decay": maps_to("number", "optimizer.weight_decay"),
    "optim.betas": maps_to("list", "optimizer.beta1, optimizer.beta2"),
    "optim.eps": maps_to("number", "optimizer.eps"),
    "optim.capturable": ignore("bool", "the update never asks the host"),
    "optim.sched.name": maps_to("text", "schedule.kind"),
    "optim.sched.warmup_steps": maps_to("int", "schedule.warmup_steps"),
    "optim.sched.warmup_ratio": maps_to("number", "schedule.warmup_steps"),
    "optim.sched.constant_steps": maps_to("int", "schedule.decay_steps"),
    "optim.sched.min_lr": maps_to("number", "schedule.min_lr"),
    "optim.sched.max_steps": ignore("int", "trainer.max_steps replaces it, there as here"),
    **{
        f"moe.{name}": refuse("any", MOE)
        for name in (
            "num_experts",
            "frequency",
            "dropout",
            "moe_dropout",
            "capacity_factor",
            "dropless",
            "glu_mlp",
            "routing_algorithm",
            "router_activation",
            "sinkhorn_iterations",
            "sinkhorn_tol",
            "top_k",
            "output_router_logits",
            "router_aux_loss_coef",
            "normalize_top_k_affinities",
            "token_shuffle_group_size",
            "token_shuffle_seed",
        )
    },
}

NXDT_KEYS: dict[str, KeyRule] = {
    **TOP,
    **{
        f"{section}.{name}": key
        for section, keys in (
            ("trainer", TRAINER),
            ("exp_manager", EXP_MANAGER),
            ("distributed_strategy", STRATEGY),
            ("data", DATA),
            ("model", MODEL),
            ("precision", PRECISION),
            ("model_alignment_strategy", ALIGNMENT),
        )
        for name, key in keys.items()
    },
}
KEYS_FOUND_AT_ANY_DEPTH = {
    "ring_attention": "model.fusions.ring_attention",
    "context_parallel_size": "distributed_strategy.context_parallel_size",
    **{f"lora_{name}": f"model_alignment_strategy.peft.lora_{name}" for name in ("rank", "alpha", "dropout", "bias")},
    "kl_beta": "model_alignment_strategy.dpo.kl_beta",
    "wrap_with_zero": "model.wrap_with_zero",
}
"""Names that NxDT looks for at any depth of the tree, with the places where they belong."""
