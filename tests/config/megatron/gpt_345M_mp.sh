#! /bin/bash
# The numbers of Megatron-LM's distributed 345M example with model parallelism, in bf16.
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
MASTER_ADDR=${MASTER_ADDR:-localhost}
NNODES=${NNODES:-1}
WORLD_SIZE=$(($GPUS_PER_NODE*$NNODES))
DATA_PATH=${DATA_PATH:-data/my-gpt2_text_document}
CHECKPOINT_PATH=${CHECKPOINT_PATH:-"checkpoints/345m"}
LAYERS=$(( (WORLD_SIZE - 2) * 4 ))
DISTRIBUTED_ARGS="--nproc_per_node $GPUS_PER_NODE --nnodes $NNODES --master_addr $MASTER_ADDR"

if [ -n "$1" ]; then DATA_PATH=$1; fi

python -m torch.distributed.launch $DISTRIBUTED_ARGS \
       pretrain_gpt.py \
       --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel \
       --num-layers $LAYERS --hidden-size 1024 --num-attention-heads 16 \
       --micro-batch-size 4 --global-batch-size 16 \
       --seq-length 1024 --max-position-embeddings 1024 \
       --train-iters 500000 --lr-decay-iters 320000 \
       --save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH" \
       --data-path 0.3 $DATA_PATH 0.7 data/other_text_document \
       --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt \
       --split 949,50,1 --distributed-backend nccl \
       --lr 0.00015 --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 1e-2 --clip-grad 1.0 \
       --lr-warmup-fraction .01 \
       --activations-checkpoint-method uniform \
       --log-interval 100 --save-interval 10000 --eval-interval 1000 --eval-iters 10 --bf16
