#!/bin/bash
# A Llama as later Megatron-LM scripts write it: arrays, comments in them, a positional path.
export CUDA_DEVICE_MAX_CONNECTIONS=1
CHECKPOINT_PATH=$1
DATA_PATH=$2 # path and prefix
DISTRIBUTED_ARGS=(
    --nproc_per_node 8
    --nnodes 2
)
MODEL_ARGS=(
    --num-layers 32 # blocks
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention --num-query-groups 8
    --seq-length 8192
    --max-position-embeddings 8192
    --normalization RMSNorm --swiglu --disable-bias-linear
    --position-embedding-type rope --rotary-base 500000
    --untie-embeddings-and-output-weights
    --attention-dropout 0.0 --hidden-dropout 0.0
)
TRAIN_ARGS=(
    --micro-batch-size 1
    --global-batch-size 128
    --train-iters 10000
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 200
    --bf16
    --use-distributed-optimizer
    --recompute-activations
)
MODEL_ARGS+=(--tokenizer-type Llama3Tokenizer --vocab-size 128256)
torchrun "${DISTRIBUTED_ARGS[@]}" examples/pretrain_gpt.py ${MODEL_ARGS[@]} "${TRAIN_ARGS[@]}" \
    --tensor-model-parallel-size 4 --sequence-parallel \
    --data-path $DATA_PATH --split 949,50,1 \
    --save $CHECKPOINT_PATH --save-interval 1000 "$@" > log.txt 2>&1
