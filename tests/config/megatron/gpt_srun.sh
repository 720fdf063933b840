#!/bin/bash
#SBATCH <SLURM OPTIONS> --nodes=4 --exclusive --ntasks-per-node=8 --job-name=gpt
# The shape of Megatron-LM's script for 175B parameters: srun runs a command that is one word.
DIR=`pwd`
DATASET_1="<PATH TO THE FIRST DATASET>"
DATASET_2=${DATASET_2:-"<PATH TO THE SECOND DATASET>"}
DATASET="0.3 ${DATASET_1} 0.7 ${DATASET_2}"

options=" \
	--tensor-model-parallel-size 2 \
	--pipeline-model-parallel-size 2 \
        --num-layers 8 \
        --hidden-size 64 \
        --num-attention-heads 4 \
        --seq-length 32 \
        --max-position-embeddings 32 \
	--micro-batch-size 1 \
	--global-batch-size 16 \
	--rampup-batch-size 4 4 100 \
	--train-samples 1600 \
	--lr 6.0e-5 \
	--data-path ${DATASET} \
	--vocab-file <PATH TO vocab.json> \
	--merge-file <PATH TO merges.txt> \
	--save <PATH TO CHECKPOINTS> \
        --fp16 \
	--checkpoint-activations "

run_cmd="python -u ${DIR}/pretrain_gpt.py $@ ${options}"

srun -l \
     --container-image "registry/pytorch:1" \
     --container-mounts "<DIRECTORIES TO MOUNT>" \
     --output=$DIR/logs/%x_%j.log sh -c "${run_cmd}"
