"""The model section of NxDT's YAML (Hugging Face and Megatron models, optimizer, schedule, experts); the whole table.

Cut off nxdt_keys.py for length: the same kind of table, the same rules.
"""

from trainyard.config.importers.key_table import Key, ignored, refused, to
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

PARTLY = "recompute is the same for every block of every stage; nearest: leave it out"

MODEL: dict[str, Key] = {
    "model_config": to("text", "model.vocab, model.heads, model.kv_heads, model.ffn"),
    "encoder_seq_length": to("int", "data.sequence"),
    "max_position_embeddings": to("int", "model.max_positions"),
    "num_layers": to("int", "model.layers"),
    "hidden_size": to("int", "model.hidden"),
    "rope_theta": to("number", "model.rope_theta"),
    "qkv_linear": ignored("bool", "key and value heads are spread over tensor-parallel ranks as the sizes ask"),
    "fuse_qkv": to("bool", "model.fuse_qkv"),
    "transpose_nki_inputs": ignored("bool", DEVICE),
    "pipeline_cuts": to("list", "layout.cuts"),
    "use_cpu_initialization": ignored("bool", "each rank makes its own slice of the weights"),
    "weight_init_only": to("bool", "checkpoint.start"),
    "activations_checkpoint_granularity": to("text", "recompute.kind"),
    "activations_checkpoint_recompute": to("list", "recompute.kind, recompute.parts"),
    "activations_checkpoint_recompute_mlp": to("bool", "recompute.kind, recompute.parts"),
    "activations_checkpoint_method": refused("text", PARTLY, "uniform"),
    "activations_checkpoint_num_layers": refused("int", PARTLY, 1),
    "activations_checkpoint_layers_per_pipeline": refused("any", PARTLY),
    "num_micro_batches_with_partial_activation_checkpoints": refused("any", PARTLY),
    "disable_layer_norm_checkpointing": ignored("bool", "activations_checkpoint_recompute says it"),
    "do_layer_norm_weight_decay": ignored("bool", "norms and biases never decay here"),
    "save_logits": ignored("bool", "logits exist a piece at a time", False),
    "fusions.softmax": ignored("bool", FUSED),
    "fusions.flash_attention": ignored("bool", FUSED),
    "fusions.ring_attention": to("bool", "layout.context"),
    "ffn_hidden_size": to("int", "model.ffn"),
    "num_attention_heads": to("int", "model.heads"),
    "num_kv_heads": to("int", "model.kv_heads"),
    "init_method_std": to("number", "model.init_std"),
    "use_scaled_init_method": to("bool", "model.scaled_init"),
    "hidden_dropout": to("number", "model.hidden_dropout, model.embedding_dropout"),
    "attention_dropout": to("number", "model.attention_dropout"),
    "ffn_dropout": ignored(
        "number", "no dropout between the matrices of an MLP; hidden_dropout is on its output", 0, 0.0
    ),
    "kv_channels": to("int", "model.head_dim"),
    "apply_query_key_layer_scaling": ignored(
        "bool", "softmax is in fp32, where dividing and multiplying back is nothing"
    ),
    "normalization": to("text", "model.family"),
    "layernorm_epsilon": to("number", "model.norm_eps"),
    "make_vocab_size_divisible_by": ignored("int", "the vocabulary is padded as layout.tp needs, and no more"),
    "persist_layer_norm": ignored("bool", FUSED),
    "share_embeddings_and_output_weights": to("bool", "model.tied"),
    "position_embedding_type": to("text", "model.family"),
    "rotary_percentage": refused("number", "rotary positions turn whole heads; nearest: 1.0", 1, 1.0),
    "position_freq_base": to("number", "model.rope_theta"),
    "position_abf_factor": to("number", "model.rope_theta"),
    "positition_interpolation_factor": to("number", "model.rope_scaling"),
    "position_interpolation_factor": to("number", "model.rope_scaling"),
    "activation": to("text", "model.family"),
    "transformer_block_type": refused("text", "blocks have their norms before each part; nearest: pre_ln", "pre_ln"),
    "has_bias": to("bool", "model.family"),
    "sliding_window_size": ignored("int", "a window as long as the sequence sees all of it"),
    "fp32_residual_connection": refused("bool", "the residual stream has the computing dtype; nearest: false", False),
    "fp16_lm_cross_entropy": refused("bool", "the loss is in fp32; nearest: false", False),
    "use_emha": refused("bool", "one kind of attention; nearest: false", False),
    **{
        name: ignored("bool", FUSED)
        for name in (
            "gradient_accumulation_fusion",
            "bias_activation_fusion",
            "bias_dropout_add_fusion",
            "masked_softmax_fusion",
        )
    },
    "megatron_amp_o2": ignored("bool", "precision.type says it"),
    "precision": ignored("any", "precision.type says it"),
    "wrap_with_zero": ignored("bool", "distributed_strategy.zero1 says it"),
    "optim.name": to("text", "optimizer.kind"),
    "optim.lr": to("number", "optimizer.lr"),
    "optim.weight_decay": to("number", "optimizer.weight_decay"),
    "optim.betas": to("list", "optimizer.beta1, optimizer.beta2"),
    "optim.eps": to("number", "optimizer.eps"),
    "optim.capturable": ignored("bool", "the update never asks the host"),
    "optim.sched.name": to("text", "schedule.kind"),
    "optim.sched.warmup_steps": to("int", "schedule.warmup"),
    "optim.sched.warmup_ratio": to("number", "schedule.warmup"),
    "optim.sched.constant_steps": to("int", "schedule.decay_steps"),
    "optim.sched.min_lr": to("number", "schedule.floor"),
    "optim.sched.max_steps": ignored("int", "trainer.max_steps replaces it, there as here"),
    **{
        f"moe.{name}": refused("any", MOE)
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

TABLE: dict[str, Key] = {
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
ANYWHERE = {
    "ring_attention": "model.fusions.ring_attention",
    "context_parallel_size": "distributed_strategy.context_parallel_size",
    **{f"lora_{name}": f"model_alignment_strategy.peft.lora_{name}" for name in ("rank", "alpha", "dropout", "bias")},
    "kl_beta": "model_alignment_strategy.dpo.kl_beta",
    "wrap_with_zero": "model.wrap_with_zero",
}
"""Names that NxDT looks for at any depth of the tree, with the places where they belong."""
