#!/bin/bash
# The shape of Megatron-LM's script for Mixtral.
CHECKPOINT_PATH=$1
TOKENIZER_MODEL=$2
DATA_PATH=$3
MODEL_ARGS=(
    --use-mcore-models --disable-bias-linear --seq-length 4096 --max-position-embeddings 32768
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --attention-dropout 0.0 --hidden-dropout 0.0 --normalization RMSNorm --position-embedding-type rope
    --swiglu --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 8
    --no-position-embedding --rotary-base 1000000
)
MOE_ARGS=(
    --num-experts 8
    --moe-router-topk 2
    --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 1e-2
    --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall
)
torchrun --nproc_per_node 8 --nnodes ${SLURM_NNODES:-"4"} pretrain_gpt.py ${MODEL_ARGS[@]} ${MOE_ARGS[@]} \
    --tokenizer-type Llama2Tokenizer --tokenizer-model ${TOKENIZER_MODEL} --data-path $DATA_PATH --split 99990,8,2 \
    --micro-batch-size 1 --global-batch-size 256 --lr 1e-4 --train-iters 500 --bf16 \
    --pipeline-model-parallel-size 4 --expert-model-parallel-size 8 --use-distributed-optimizer \
    --save $CHECKPOINT_PATH --load $CHECKPOINT_PATH --tensorboard-dir "${CHECKPOINT_PATH}/tensorboard"
