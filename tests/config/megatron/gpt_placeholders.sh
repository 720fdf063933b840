#!/bin/bash
# The shape of Megatron-LM's scripts with values that the reader replaces.
GPUS_PER_NODE=8
NNODES=1

CHECKPOINT_PATH=<Specify path>
VOCAB_FILE=${VOCAB_FILE:-<path to vocab>/vocab.json}
DATA_PATH=<Specify path and file prefix>_text_document

DISTRIBUTED_ARGS="
    --nproc_per_node $GPUS_PER_NODE \
    --nnodes $NNODES
"
GPT_ARGS="
    --tensor-model-parallel-size 2 \
    --num-layers 4 \
    --hidden-size 64 \
    --num-attention-heads 4 \
    --seq-length 32 \
    --max-position-embeddings 32 \
    --micro-batch-size 2 \
    --global-batch-size 16 \
    --lr 0.0001 \
    --train-iters 100 \
    --fp16
"

torchrun $DISTRIBUTED_ARGS pretrain_gpt.py \
    $GPT_ARGS \
    --data-path $DATA_PATH --vocab-file $VOCAB_FILE --merge-file merges.txt \
    --distributed-backend nccl \
    --save $CHECKPOINT_PATH \
    --load $CHECKPOINT_PATH < /dev/null > log 2>&1
