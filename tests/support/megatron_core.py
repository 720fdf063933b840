"""The samples that megatron-core itself gives for a configuration."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from trainyard.config.schema import Config


def core_samples(config: Config, cache: Path) -> np.ndarray:
    """Training inputs [samples, seq_len]. No part of data.split may be without documents: megatron-core would loop."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    data, num_samples = config.data, config.train.steps * config.train.global_batch
    settings = GPTDatasetConfig(
        random_seed=config.train.seed,
        sequence_length=data.seq_len,
        blend=(list(data.paths), list(data.weights) or None),
        split=data.split,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        tokenizer=SimpleNamespace(vocab_size=None, eod=-5, pad=-6, unique_identifiers={}),
        path_to_cache=str(cache),
    )
    started = not torch.distributed.is_initialized()
    if started:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        train = BlendedMegatronDatasetBuilder(GPTDataset, [num_samples, 1, 1], lambda: True, settings).build()[0]
        return np.stack([train[index]["tokens"].numpy() for index in range(num_samples)])
    finally:
        if started:
            torch.distributed.destroy_process_group()
