"""Megatron-LM's command line, flag by flag: the arguments of version 2 and 3, of the AWS reference, and those of later
versions that dense GPT and Llama scripts use. A flag takes as many words as `takes` says; `switch` takes none."""

from trainyard.config.importers.key_table import KeyRule, ignore, maps_to, refuse

MOE = "mixture of experts: models are dense here; nearest: leave it out"
FUSED = "kernels are chosen by the device (device.kernels)"
COMMUNICATION = "how gradients travel is layout.zero, layout.bucket_mib and precision.reduce_dtype"
LOSS_SCALING = "for fp16, which is not there"
LOGS = "metrics.jsonl and TensorBoard have it, or it is not measured"
LOADING = "samples are made ahead by one thread, without state"
OTHER_PROGRAM = "for another program of Megatron-LM's"
PARTIAL_RECOMPUTE = (
    "recompute is the same for every block of every stage; nearest: --recompute-granularity full, or leave it out"
)

MAPPED: dict[str, KeyRule] = {
    "num-layers": maps_to("int", "model.layers"),
    "hidden-size": maps_to("int", "model.hidden"),
    "ffn-hidden-size": maps_to("int", "model.ffn"),
    "num-attention-heads": maps_to("int", "model.heads"),
    "group-query-attention": maps_to("switch", "model.kv_heads"),
    "num-query-groups": maps_to("int", "model.kv_heads"),
    "kv-channels": maps_to("int", "model.head_dim"),
    "max-position-embeddings": maps_to("int", "model.max_positions"),
    "seq-length": maps_to("int", "data.seq_len"),
    "encoder-seq-length": maps_to("int", "data.seq_len"),
    "layernorm-epsilon": maps_to("number", "model.norm_eps"),
    "norm-epsilon": maps_to("number", "model.norm_eps"),
    "normalization": maps_to("text", "model.family"),
    "swiglu": maps_to("switch", "model.family"),
    "position-embedding-type": maps_to("text", "model.family"),
    "use-rotary-position-embeddings": maps_to("switch", "model.family"),
    "no-position-embedding": maps_to("switch", "model.family"),
    "disable-bias-linear": maps_to("switch", "model.family"),
    "rotary-base": maps_to("number", "model.rope_theta"),
    "rotary-seq-len-interpolation-factor": maps_to("number", "model.rope_scaling"),
    "use-rope-scaling": maps_to("switch", "model.rope_scaling"),
    "rope-scaling-factor": maps_to("number", "model.rope_scaling"),
    "untie-embeddings-and-output-weights": maps_to("switch", "model.tie_embeddings"),
    "openai-gelu": maps_to("switch", "model.activation"),
    "no-bias-gelu-fusion": maps_to("switch", "model.activation"),
    "hidden-dropout": maps_to("number", "model.hidden_dropout, model.embedding_dropout"),
    "attention-dropout": maps_to("number", "model.attention_dropout"),
    "init-method-std": maps_to("number", "model.init_std"),
    "vocab-size": maps_to("int", "model.vocab"),
    "vocab-file": maps_to("text", "data.vocab_file"),
    "merge-file": maps_to("text", "data.merges_file"),
    "tokenizer-type": maps_to("text", "data.tokenizer"),
    "tokenizer-model": maps_to("text", "data.tokenizer"),
    "data-path": maps_to("words", "data.paths, data.weights"),
    "split": maps_to("text", "data.split"),
    "dataloader-type": maps_to("text", "data.order"),
    "reset-position-ids": maps_to("switch", "data.document_mask"),
    "reset-attention-mask": maps_to("switch", "data.document_mask"),
    "eod-mask-loss": maps_to("switch", "data.mask_eod_loss"),
    "micro-batch-size": maps_to("int", "train.micro_batch"),
    "global-batch-size": maps_to("int", "train.global_batch"),
    "train-iters": maps_to("int", "train.steps"),
    "train-samples": maps_to("int", "train.steps"),
    "seed": maps_to("int", "train.seed"),
    "optimizer": maps_to("text", "optimizer.kind"),
    "lr": maps_to("number", "optimizer.lr"),
    "weight-decay": maps_to("number", "optimizer.weight_decay"),
    "clip-grad": maps_to("number", "optimizer.max_grad_norm"),
    "adam-beta1": maps_to("number", "optimizer.beta1"),
    "adam-beta2": maps_to("number", "optimizer.beta2"),
    "adam-eps": maps_to("number", "optimizer.eps"),
    "min-lr": maps_to("number", "schedule.min_lr"),
    "lr-decay-style": maps_to("text", "schedule.kind"),
    "lr-decay-iters": maps_to("int", "schedule.decay_steps"),
    "lr-decay-samples": maps_to("int", "schedule.decay_steps"),
    "lr-wsd-decay-iters": maps_to("int", "schedule.decay_steps"),
    "lr-warmup-iters": maps_to("int", "schedule.warmup_steps"),
    "lr-warmup-samples": maps_to("int", "schedule.warmup_steps"),
    "lr-warmup-fraction": maps_to("number", "schedule.warmup_steps"),
    "bf16": maps_to("switch", "precision.kind"),
    "fp8-format": maps_to("text", "precision.kind"),
    "fp8-hybrid": maps_to("switch", "precision.kind"),
    "accumulate-allreduce-grads-in-fp32": maps_to("switch", "precision.grad_dtype"),
    "grad-reduce-in-bf16": maps_to("switch", "precision.reduce_dtype"),
    "tensor-model-parallel-size": maps_to("int", "layout.tp"),
    "pipeline-model-parallel-size": maps_to("int", "layout.pp"),
    "num-layers-per-virtual-pipeline-stage": maps_to("int", "layout.vpp"),
    "context-parallel-size": maps_to("int", "layout.cp"),
    "sequence-parallel": maps_to("switch", "layout.sequence_parallel"),
    "use-distributed-optimizer": maps_to("switch", "layout.zero"),
    "checkpoint-activations": maps_to("switch", "recompute.kind"),
    "activations-checkpoint-method": maps_to("text", "recompute.kind"),
    "recompute-activations": maps_to("switch", "recompute.kind"),
    "recompute-granularity": maps_to("text", "recompute.kind"),
    "save": maps_to("text", "checkpoint.directory"),
    "save-xser": maps_to("text", "checkpoint.directory"),
    "load": maps_to("text", "checkpoint.resume, checkpoint.init_from"),
    "load-xser": maps_to("text", "checkpoint.resume, checkpoint.init_from"),
    "save-interval": maps_to("int", "checkpoint.every"),
    "keep-last-checkpoint-only": maps_to("switch", "checkpoint.keep"),
    "finetune": maps_to("switch", "checkpoint.init_from"),
    "eval-interval": maps_to("int", "evaluate.every"),
    "eval-iters": maps_to("int", "evaluate.batches"),
    "log-interval": maps_to("int", "log.every"),
    "tensorboard-dir": maps_to("text", "log.tensorboard"),
}
REFUSED: dict[str, KeyRule] = {
    "fp16": refuse("switch", "half precision with loss scaling is not there; nearest: --bf16"),
    "rampup-batch-size": refuse("words", "the global batch is the same in every step; nearest: leave it out"),
    "num-experts": refuse("words", MOE),
    "expert-model-parallel-size": refuse("int", MOE, 1),
    **{
        name: refuse("words", MOE)
        for name in ("moe-router-topk", "moe-router-load-balancing-type", "moe-aux-loss-coeff", "moe-grouped-gemm")
    },
    "rotary-percent": refuse("number", "rotary positions turn whole heads; nearest: 1.0", 1, 1.0),
    "init-method-xavier-uniform": refuse(
        "switch", "weights are drawn from a normal distribution; nearest: leave it out"
    ),
    "apply-residual-connection-post-layernorm": refuse("switch", "norms come before each part; nearest: leave it out"),
    "apply-layernorm-1p": refuse("switch", "norms have plain weights; nearest: leave it out"),
    "squared-relu": refuse("switch", "not an activation here; nearest: --swiglu"),
    "qk-layernorm": refuse("switch", "queries and keys have no norm of their own; nearest: leave it out"),
    "multi-latent-attention": refuse("switch", "one kind of attention; nearest: leave it out"),
    "multi-query-attention": refuse("switch", "an old name; nearest: --group-query-attention --num-query-groups 1"),
    "window-size": refuse("words", "attention sees the whole sequence; nearest: leave it out"),
    "add-qkv-bias": refuse("switch", "Llama has no biases here; nearest: leave it out"),
    "fp32-residual-connection": refuse("switch", "the residual stream has the computing dtype; nearest: leave it out"),
    "fp16-lm-cross-entropy": refuse("switch", "the loss is in fp32; nearest: leave it out"),
    "pipeline-model-parallel-split-rank": refuse("int", "for models with two towers; nearest: leave it out"),
    "activations-checkpoint-num-layers": refuse("int", PARTIAL_RECOMPUTE, 1),
    "recompute-num-layers": refuse("int", PARTIAL_RECOMPUTE, 1),
    "recompute-method": refuse("text", PARTIAL_RECOMPUTE, "uniform"),
    "sgd-momentum": refuse("number", "for --optimizer sgd, which is not there; nearest: leave it out"),
    "batch-size": refuse("int", "gone from Megatron-LM too; nearest: --micro-batch-size"),
    "warmup": refuse("int", "gone from Megatron-LM too; nearest: --lr-warmup-fraction"),
    "model-parallel-size": refuse("int", "gone from Megatron-LM too; nearest: --tensor-model-parallel-size"),
    "decoder-seq-length": refuse("int", "for models with two towers; nearest: leave it out"),
    "train-data-path": refuse("words", "sets of their own for validation and test are not read; nearest: --data-path"),
    "valid-data-path": refuse("words", "sets of their own for validation and test are not read; nearest: --split"),
    "test-data-path": refuse("words", "sets of their own for validation and test are not read; nearest: --split"),
    "mock-data": refuse("switch", "nearest: leave it out and use data.source=synthetic"),
    "no-save-optim": refuse("switch", "a checkpoint is whole; nearest: leave it out"),
    "lora-rank": refuse("int", "all weights are trained here; nearest: leave it out"),
    "exit-interval": refuse("int", "a run ends after train.steps; nearest: a smaller --train-iters"),
}


def _ignore_all(takes: str, why: str, *names: str) -> dict[str, KeyRule]:
    return {name: ignore(takes, why) for name in names}


IGNORED: dict[str, KeyRule] = {
    "make-vocab-size-divisible-by": ignore("int", "the vocabulary is padded as layout.tp needs, and no more"),
    "exit-duration-in-mins": ignore("int", "a run ends after train.steps or by a signal", None),
    "data-impl": ignore("text", "memory-mapped .bin and .idx are read", "mmap", "infer"),
    "distribute-checkpointed-activations": ignore("switch", "layout.sequence_parallel does that"),
    "distribute-saved-activations": ignore("switch", "layout.sequence_parallel does that"),
    "no-query-key-layer-scaling": ignore("switch", "softmax is in fp32"),
    "apply-query-key-layer-scaling": ignore("switch", "softmax is in fp32"),
    "attention-softmax-in-fp32": ignore("switch", "softmax is in fp32"),
    "log-params-norm": ignore("switch", "always"),
    "weight-decay-incr-style": ignore("text", "weight decay is the same in every step", "constant"),
    "no-rope-fusion": ignore("switch", FUSED),
    **_ignore_all("switch", FUSED, "no-masked-softmax-fusion", "no-bias-dropout-fusion", "no-bias-swiglu-fusion"),
    **_ignore_all("switch", FUSED, "use-flash-attn", "no-persist-layer-norm", "no-gradient-accumulation-fusion"),
    **_ignore_all("switch", FUSED, "use-mcore-models", "use-legacy-models", "tp-comm-overlap", "onnx-safe"),
    **_ignore_all("text", FUSED, "transformer-impl", "attention-backend"),
    **_ignore_all(
        "switch", COMMUNICATION, "overlap-grad-reduce", "overlap-param-gather", "no-contiguous-buffers-in-local-ddp"
    ),
    **_ignore_all(
        "switch", COMMUNICATION, "no-async-tensor-model-parallel-allreduce", "no-scatter-gather-tensors-in-pipeline"
    ),
    **_ignore_all("switch", COMMUNICATION, "use-contiguous-buffers-in-local-ddp", "no-overlap-p2p-communication"),
    **_ignore_all("text", COMMUNICATION, "DDP-impl", "ddp-bucket-size"),
    **_ignore_all("text", "the device's own is used", "distributed-backend"),
    **_ignore_all("int", "torchrun's environment says it", "local_rank", "local-rank", "distributed-timeout-minutes"),
    **_ignore_all("switch", "each rank makes its own slice of the weights", "use-cpu-initialization", "lazy-mpu-init"),
    **_ignore_all(
        "number", LOSS_SCALING, "loss-scale", "initial-loss-scale", "min-loss-scale", "loss-scale-window", "hysteresis"
    ),
    **_ignore_all(
        "switch", LOGS, "log-num-zeros-in-grad", "log-timers-to-tensorboard", "log-batch-size-to-tensorboard"
    ),
    **_ignore_all("switch", LOGS, "log-memory-to-tensorboard", "log-validation-ppl-to-tensorboard", "log-throughput"),
    **_ignore_all("switch", LOGS, "no-log-learnig-rate-to-tensorboard", "no-log-loss-scale-to-tensorboard"),
    **_ignore_all("int", LOGS, "tensorboard-log-interval", "tensorboard-queue-size", "timing-log-level"),
    **_ignore_all("text", LOGS, "wandb-project", "wandb-exp-name", "wandb-save-dir"),
    **_ignore_all(
        "switch", "the schedule is a function of the step", "override-lr-scheduler", "override-opt_param-scheduler"
    ),
    **_ignore_all("switch", "the schedule is a function of the step", "use-checkpoint-lr-scheduler"),
    **_ignore_all("switch", "the schedule is a function of the step", "use-checkpoint-opt_param-scheduler"),
    **_ignore_all("switch", "there is no random state", "no-save-rng", "no-load-rng"),
    **_ignore_all("switch", "checkpoint.init_from takes weights alone", "no-load-optim"),
    **_ignore_all("text", "checkpoints are whole and fit any layout", "ckpt-format", "dist-ckpt-format"),
    **_ignore_all(
        "switch", "checkpoints are whole and fit any layout", "use-dist-ckpt", "auto-detect-ckpt-format", "async-save"
    ),
    **_ignore_all("switch", LOADING, "mmap-warmup", "no-create-attention-mask-in-dataloader"),
    **_ignore_all("int", LOADING, "num-workers"),
    **_ignore_all("text", "there are no index files", "data-cache-path"),
    **_ignore_all("int", "memory is the device's matter", "empty-unused-memory-level"),
    **_ignore_all("switch", "a signal ends a run with a checkpoint", "exit-signal-handler", "adlr-autoresume"),
    **_ignore_all(
        "int",
        OTHER_PROGRAM,
        "adlr-autoresume-interval",
        "vocab-extra-ids",
        "retriever-seq-length",
        "num-classes",
        "img-dim",
    ),
    **_ignore_all("int", OTHER_PROGRAM, "num-channels", "patch-dim", "ict-head-size", "biencoder-projection-dim"),
    **_ignore_all("number", OTHER_PROGRAM, "mask-prob", "short-seq-prob", "sample-rate", "query-in-block-prob"),
    **_ignore_all("switch", OTHER_PROGRAM, "bert-no-binary-head", "use-one-sent-docs"),
    **_ignore_all("text", OTHER_PROGRAM, "gpt-dataset-generation-only"),
}
MEGATRON_FLAGS: dict[str, KeyRule] = {**MAPPED, **REFUSED, **IGNORED}
