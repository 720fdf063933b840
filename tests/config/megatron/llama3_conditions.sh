#!/bin/bash
# A Llama as the newest Megatron-LM scripts write it: flags under conditions, and a check that the program exists.
CHECKPOINT_PATH=${1:-"checkpoints/llama3"}
TOKENIZER_ARG=${2:-"MOCK"}
DATA_ARG=${3:-"MOCK"}
GPUS_PER_NODE=8
NUM_NODES=2
PRETRAIN_SCRIPT_PATH="pretrain_gpt.py"
DTYPE="fp8"
DATA_CACHE_PATH="${PWD}/cache"
mkdir -p "$DATA_CACHE_PATH"
DISTRIBUTED_ARGS=(--nproc_per_node $GPUS_PER_NODE --nnodes $NUM_NODES --node_rank ${NODE_RANK:-0})
MODEL_ARGS=(
    --use-mcore-models
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --seq-length 8192
    --max-position-embeddings 8192
    --position-embedding-type rope
    --rotary-base 1000000
    --rotary-percent 1.0
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --swiglu
    --apply-layernorm-1p
    --untie-embeddings-and-output-weights
    --disable-bias-linear
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 128
    --train-samples 1953125000
    --lr-decay-samples 1949218748
    --lr-warmup-samples 3906252
    --lr 0.00015
    --min-lr 0.00001
    --decoupled-lr 5.0e-4      # of embedding and output
    --decoupled-min-lr 4.5e-5
    --lr-decay-style cosine
    --bf16
    --grad-reduce-in-bf16
    --cross-entropy-loss-fusion
    --calculate-per-token-loss
    --manual-gc
    --empty-unused-memory-level 1
)
DTYPE_ARGS=()
if [[ "$DTYPE" == "fp8" ]]; then
    DTYPE_ARGS+=(
        "--fp8-format hybrid"
        "--fp8-amax-history-len 1024"
        "--fp8-amax-compute-algo max"
        "--fp8-param-gather"
    )
fi
TRAINING_ARGS+=("--use-distributed-optimizer" "--overlap-grad-reduce")
DATA_ARGS_LIST=()
if [[ "$TOKENIZER_ARG" == "MOCK" ]] || [[ "$DATA_ARG" == "MOCK" ]] || [[ -z "$TOKENIZER_ARG" ]]; then
    DATA_ARGS_LIST+=(
        "--mock-data"
        "--tokenizer-type NullTokenizer"
        "--vocab-size 128256"
        "--data-cache-path ${DATA_CACHE_PATH}"
        "--tiktoken-pattern v2"
        "--split '99,1,0'"
        "--no-mmap-bin-files"
    )
else
    DATA_ARGS_LIST+=(
        "--data-path $DATA_ARG"
        "--tokenizer-type HuggingFaceTokenizer"
        "--tokenizer-model $TOKENIZER_ARG"
        "--split '99,1,0'"
        "--vocab-size 128256"
    )
fi
if [ -f "$HOME/more_flags" ]; then
    TRAINING_ARGS+=(--manual-gc-interval 10)
fi
if [ ! -f "$PRETRAIN_SCRIPT_PATH" ]; then
    echo "Error: pretrain_gpt.py not found at $PRETRAIN_SCRIPT_PATH"
    exit 1
fi
torchrun ${DISTRIBUTED_ARGS[@]} \
    "$PRETRAIN_SCRIPT_PATH" \
    ${MODEL_ARGS[@]} ${TRAINING_ARGS[@]} ${DTYPE_ARGS[@]} \
    --tensor-model-parallel-size 1 --sequence-parallel \
    ${DATA_ARGS_LIST[@]} \
    --log-interval 1 --eval-iters 32 --eval-interval 100 --save-interval 1000 --profile --profile-step-start 4 \
    --save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH" --ckpt-format torch_dist
set +x
