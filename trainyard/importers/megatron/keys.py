"""Flags of Megatron-LM that the import knows: those of versions 2 and 3, of the AWS reference, and the newer ones that
GPT, Llama and Mixtral scripts use. The value type also tells how many words a flag takes; `switch` takes none."""

from trainyard.importers.key_table import KeyRule, copies_to, ignore, maps_to, refuse, split_names

MOE = "of mixtures of experts only Mixtral's are read" + "; nearest: leave it out"
FUSED = "the device chooses kernels (device.kernels)"
COMMUNICATION = "gradient communication is set by layout.zero, layout.bucket_mib and precision.reduce_dtype"
LOSS_SCALING = "for fp16, which is imported as bf16"
FP8_SCALING = "scales are those of the current step (precision.fp8_scaling)"
GARBAGE = "the garbage collector runs between steps"
PROFILER = "the profile section and trainyard trace measure a run"
LOGS = "logged to metrics.jsonl and TensorBoard, or not measured"
LOADING = "one stateless thread prefetches samples"
OTHER_PROGRAM = "for another program of Megatron-LM"
PARTIAL_RECOMPUTE = (
    "recompute is the same for every block of every stage; nearest: --recompute-granularity full, or leave it out"
)
REMOVED = "removed from Megatron-LM too; nearest: "
SEPARATE_SETS = "separate validation and test sets are not supported; nearest: "
SOFTMAX = "softmax runs in fp32"
SCHEDULE = "the schedule depends only on the step"
ANY_LAYOUT = "checkpoints are complete and load at any layout"
LEAVE_OUT = "; nearest: leave it out"

MAPPED: dict[str, KeyRule] = {
    "num-layers": copies_to("int", "model.layers"),
    "hidden-size": copies_to("int", "model.hidden"),
    "ffn-hidden-size": maps_to("int", "model.ffn"),
    "num-attention-heads": copies_to("int", "model.heads"),
    "group-query-attention": maps_to("switch", "model.kv_heads"),
    "num-query-groups": maps_to("int", "model.kv_heads"),
    "kv-channels": maps_to("int", "model.head_dim"),
    "max-position-embeddings": maps_to("int", "model.max_positions"),
    "seq-length encoder-seq-length": maps_to("int", "data.seq_len"),
    "layernorm-epsilon norm-epsilon": maps_to("number", "model.norm_eps"),
    "normalization position-embedding-type": maps_to("text", "model.family"),
    "swiglu use-rotary-position-embeddings no-position-embedding disable-bias-linear": maps_to(
        "switch", "model.family"
    ),
    "rotary-base": maps_to("number", "model.rope_theta"),
    "rotary-seq-len-interpolation-factor rope-scaling-factor": maps_to("number", "model.rope_scaling"),
    "use-rope-scaling": maps_to("switch", "model.rope_scaling"),
    "untie-embeddings-and-output-weights": maps_to("switch", "model.tie_embeddings"),
    "openai-gelu no-bias-gelu-fusion": maps_to("switch", "model.activation"),
    "hidden-dropout": maps_to("number", "model.hidden_dropout, model.embedding_dropout"),
    "attention-dropout": maps_to("number", "model.attention_dropout"),
    "init-method-std": copies_to("number", "model.init_std"),
    "num-experts": maps_to("int", "model.experts"),
    "moe-router-topk": maps_to("int", "model.top_k"),
    "moe-router-pre-softmax": maps_to("switch", "model.normalize_top_k"),
    "moe-aux-loss-coeff": maps_to("number", "model.balance_loss"),
    "moe-router-load-balancing-type": maps_to("text", "model.balance_loss"),
    "moe-z-loss-coeff": maps_to("number", "model.z_loss"),
    "moe-expert-capacity-factor": maps_to("number", "model.capacity_factor"),
    "moe-ffn-hidden-size": maps_to("int", "model.ffn"),
    "vocab-size": maps_to("int", "model.vocab"),
    "vocab-file": maps_to("text", "data.vocab_file"),
    "merge-file": maps_to("text", "data.merges_file"),
    "tokenizer-type tokenizer-model": maps_to("text", "data.tokenizer"),
    "data-path": maps_to("words", "data.paths, data.weights"),
    "split": maps_to("text", "data.split"),
    "mock-data": maps_to("switch", "data.source"),
    "dataloader-type": maps_to("text", "data.order"),
    "reset-position-ids reset-attention-mask": maps_to("switch", "data.document_mask"),
    "eod-mask-loss": maps_to("switch", "data.mask_eod_loss"),
    "micro-batch-size": maps_to("int", "train.micro_batch"),
    "global-batch-size": maps_to("int", "train.global_batch"),
    "train-iters train-samples": maps_to("int", "train.steps"),
    "seed": copies_to("int", "train.seed", 1234),
    "optimizer": maps_to("text", "optimizer.kind"),
    "lr": copies_to("number", "optimizer.lr"),
    "weight-decay": copies_to("number", "optimizer.weight_decay", 0.01),
    "clip-grad": copies_to("number", "optimizer.max_grad_norm", 1.0),
    "adam-beta1": copies_to("number", "optimizer.beta1", 0.9),
    "adam-beta2": copies_to("number", "optimizer.beta2", 0.999),
    "adam-eps": copies_to("number", "optimizer.eps", 1e-8),
    "min-lr": copies_to("number", "schedule.min_lr", 0.0),
    "lr-decay-style": maps_to("text", "schedule.kind"),
    "lr-decay-iters lr-decay-samples lr-wsd-decay-iters": maps_to("int", "schedule.decay_steps"),
    "lr-warmup-iters lr-warmup-samples": maps_to("int", "schedule.warmup_steps"),
    "lr-warmup-fraction": maps_to("number", "schedule.warmup_steps"),
    "bf16 fp16 fp8-hybrid": maps_to("switch", "precision.kind"),
    "fp8-format": maps_to("text", "precision.kind"),
    "accumulate-allreduce-grads-in-fp32": maps_to("switch", "precision.grad_dtype"),
    "grad-reduce-in-bf16": maps_to("switch", "precision.reduce_dtype"),
    "tensor-model-parallel-size": copies_to("int", "layout.tp", 1),
    "pipeline-model-parallel-size": copies_to("int", "layout.pp", 1),
    "num-layers-per-virtual-pipeline-stage": maps_to("int", "layout.vpp"),
    "context-parallel-size": copies_to("int", "layout.cp", 1),
    "expert-model-parallel-size": copies_to("int", "layout.ep", 1),
    "sequence-parallel": maps_to("switch", "layout.sequence_parallel"),
    "use-distributed-optimizer": maps_to("switch", "layout.zero"),
    "checkpoint-activations recompute-activations": maps_to("switch", "recompute.kind"),
    "activations-checkpoint-method recompute-granularity": maps_to("text", "recompute.kind"),
    "save save-xser": maps_to("text", "checkpoint.directory"),
    "load load-xser": maps_to("text", "checkpoint.resume, checkpoint.init_from"),
    "save-interval": copies_to("int", "checkpoint.every", 0),
    "keep-last-checkpoint-only": maps_to("switch", "checkpoint.keep"),
    "finetune": maps_to("switch", "checkpoint.init_from"),
    "eval-interval": maps_to("int", "evaluate.every"),
    "eval-iters": maps_to("int", "evaluate.batches"),
    "log-interval": copies_to("int", "log.every", 100),
    "tensorboard-dir wandb-project": maps_to("text", "log.loggers"),
}
REFUSED: dict[str, KeyRule] = {
    "moe-router-score-function": refuse("text", MOE, "softmax"),
    "moe-shared-expert-intermediate-size": refuse("int", MOE),
    "expert-tensor-parallel-size": refuse("int", "experts are not tensor parallel; nearest: 1", 1),
    "moe-layer-freq": refuse("text", MOE, "1"),
    "rotary-percent": refuse("number", "RoPE rotates full heads; nearest: 1.0", 1, 1.0),
    "init-method-xavier-uniform": refuse("switch", "initial weights are normally distributed" + LEAVE_OUT),
    "apply-residual-connection-post-layernorm": refuse("switch", "blocks are pre-norm" + LEAVE_OUT),
    "apply-layernorm-1p": refuse("switch", "norm weights are not offset by 1" + LEAVE_OUT),
    "squared-relu": refuse("switch", "unsupported activation; nearest: --swiglu"),
    "qk-layernorm": refuse("switch", "queries and keys are not normalized" + LEAVE_OUT),
    "multi-latent-attention": refuse("switch", "unsupported attention" + LEAVE_OUT),
    "multi-query-attention": refuse("switch", "an old name; nearest: --group-query-attention --num-query-groups 1"),
    "window-size": refuse("words", "attention covers the full sequence" + LEAVE_OUT),
    "add-qkv-bias": refuse("switch", "our Llama has no biases" + LEAVE_OUT),
    "fp32-residual-connection": refuse("switch", "the residual stream has the compute dtype" + LEAVE_OUT),
    "fp16-lm-cross-entropy": refuse("switch", "the loss runs in fp32" + LEAVE_OUT),
    "pipeline-model-parallel-split-rank decoder-seq-length": refuse("int", "for encoder-decoder models" + LEAVE_OUT),
    "activations-checkpoint-num-layers recompute-num-layers": refuse("int", PARTIAL_RECOMPUTE, 1),
    "recompute-method": refuse("text", PARTIAL_RECOMPUTE, "uniform"),
    "decoupled-lr decoupled-min-lr": refuse(
        "number", "embedding and output projection have the learning rate of the other weights" + LEAVE_OUT
    ),
    "sgd-momentum": refuse("number", "for --optimizer sgd, which is not supported" + LEAVE_OUT),
    "batch-size": refuse("int", REMOVED + "--micro-batch-size"),
    "warmup": refuse("int", REMOVED + "--lr-warmup-fraction"),
    "model-parallel-size": refuse("int", REMOVED + "--tensor-model-parallel-size"),
    "train-data-path": refuse("words", SEPARATE_SETS + "--data-path"),
    "valid-data-path test-data-path": refuse("words", SEPARATE_SETS + "--split"),
    "no-save-optim": refuse("switch", "checkpoints always include the optimizer state" + LEAVE_OUT),
    "lora-rank": refuse("int", "adapters are a section of their own; nearest: lora.rank, in the imported file"),
    "exit-interval": refuse("int", "a run ends after train.steps; nearest: a smaller --train-iters"),
}
IGNORED: dict[str, KeyRule] = {
    "rampup-batch-size": ignore("words", "the global batch size is constant, from the first step", None),
    "moe-grouped-gemm moe-permute-fusion moe-router-fusion moe-per-layer-logging moe-use-legacy-grouped-gemm "
    "moe-pad-expert-input-to-capacity": ignore("switch", FUSED),
    "moe-token-dispatcher-type moe-router-dtype moe-token-drop-policy": ignore("text", FUSED),
    "make-vocab-size-divisible-by": ignore("int", "the vocabulary is padded only as layout.tp requires"),
    "exit-duration-in-mins": ignore("int", "a run ends after train.steps or by a signal", None),
    "data-impl": ignore("text", "only memory-mapped .bin and .idx are read", "mmap", "infer"),
    "weight-decay-incr-style": ignore("text", "weight decay is constant", "constant"),
    "log-params-norm": ignore("switch", "always logged"),
    "no-load-optim": ignore("switch", "checkpoint.init_from loads only weights"),
    "data-cache-path": ignore("text", "there are no index files"),
    "empty-unused-memory-level": ignore("int", "the device manages its memory"),
    "distributed-backend": ignore("text", "the backend follows from the device"),
    "distribute-checkpointed-activations distribute-saved-activations": ignore(
        "switch", "layout.sequence_parallel does this"
    ),
    "no-query-key-layer-scaling apply-query-key-layer-scaling attention-softmax-in-fp32": ignore("switch", SOFTMAX),
    "no-rope-fusion no-masked-softmax-fusion no-bias-dropout-fusion no-bias-swiglu-fusion use-flash-attn "
    "no-persist-layer-norm no-gradient-accumulation-fusion use-mcore-models use-legacy-models tp-comm-overlap "
    "cross-entropy-loss-fusion onnx-safe": ignore("switch", FUSED),
    "transformer-impl attention-backend cross-entropy-fusion-impl": ignore("text", FUSED),
    "fp8-amax-compute-algo": ignore("text", FP8_SCALING),
    "fp8-amax-history-len fp8-interval fp8-margin": ignore("int", FP8_SCALING),
    "fp8-param-gather": ignore("switch", FP8_SCALING),
    "calculate-per-token-loss": ignore("switch", "the loss is always the mean over the tokens of the global batch"),
    "manual-gc": ignore("switch", GARBAGE),
    "manual-gc-interval": ignore("int", GARBAGE),
    "profile use-pytorch-profiler": ignore("switch", PROFILER),
    "profile-step-start profile-step-end": ignore("int", PROFILER),
    "profile-ranks": ignore("words", PROFILER),
    "tiktoken-pattern": ignore("text", "the data is already tokenized"),
    "overlap-grad-reduce overlap-param-gather no-contiguous-buffers-in-local-ddp "
    "use-contiguous-buffers-in-local-ddp no-async-tensor-model-parallel-allreduce "
    "no-scatter-gather-tensors-in-pipeline no-overlap-p2p-communication": ignore("switch", COMMUNICATION),
    "DDP-impl ddp-bucket-size": ignore("text", COMMUNICATION),
    "local_rank local-rank distributed-timeout-minutes": ignore("int", "set by torchrun's environment"),
    "use-cpu-initialization lazy-mpu-init": ignore("switch", "each rank initializes its own shard"),
    "loss-scale initial-loss-scale min-loss-scale loss-scale-window hysteresis": ignore("number", LOSS_SCALING),
    "log-num-zeros-in-grad log-timers-to-tensorboard log-batch-size-to-tensorboard log-memory-to-tensorboard "
    "log-validation-ppl-to-tensorboard log-throughput no-log-learnig-rate-to-tensorboard "
    "no-log-loss-scale-to-tensorboard": ignore("switch", LOGS),
    "tensorboard-log-interval tensorboard-queue-size timing-log-level": ignore("int", LOGS),
    "wandb-exp-name wandb-save-dir": ignore("text", LOGS),
    "override-lr-scheduler override-opt_param-scheduler use-checkpoint-lr-scheduler "
    "use-checkpoint-opt_param-scheduler": ignore("switch", SCHEDULE),
    "no-save-rng no-load-rng": ignore("switch", "the RNG is a function of seed and step"),
    "ckpt-format dist-ckpt-format": ignore("text", ANY_LAYOUT),
    "use-dist-ckpt auto-detect-ckpt-format async-save": ignore("switch", ANY_LAYOUT),
    "mmap-warmup no-mmap-bin-files no-create-attention-mask-in-dataloader": ignore("switch", LOADING),
    "num-workers": ignore("int", LOADING),
    "exit-signal-handler adlr-autoresume": ignore("switch", "a signal makes a run save and exit"),
    "adlr-autoresume-interval vocab-extra-ids retriever-seq-length num-classes img-dim num-channels patch-dim "
    "ict-head-size biencoder-projection-dim": ignore("int", OTHER_PROGRAM),
    "mask-prob short-seq-prob sample-rate query-in-block-prob": ignore("number", OTHER_PROGRAM),
    "bert-no-binary-head use-one-sent-docs": ignore("switch", OTHER_PROGRAM),
    "gpt-dataset-generation-only": ignore("text", OTHER_PROGRAM),
}
MEGATRON_FLAGS = split_names({**MAPPED, **REFUSED, **IGNORED})
"""Rules by flag without dashes."""
