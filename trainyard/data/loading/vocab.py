"""The vocabulary that samples need, read from the data itself."""

import numpy as np

from trainyard.config.schema import Config
from trainyard.data.formats.megatron_bin import MegatronTokens
from trainyard.data.loading.build import match_files, token_prefixes, tokenizer_spec
from trainyard.data.text.tokenizer import load_tokenizer

TOKENS_PER_READ = 1 << 26


def data_vocab_size(config: Config) -> int:
    """The smallest model.vocab for data.paths: the tokenizer's size, or the largest token id plus 1 (all are read)."""
    data = config.data
    if data.source == "text":
        return load_tokenizer(tokenizer_spec(config)).vocab_size
    if data.source == "hdf5":
        from trainyard.data.formats.bert_hdf5_cache import BertHdf5Dataset

        return BertHdf5Dataset(match_files(data.paths), data.seq_len, data.max_predictions).vocab_size
    if data.source == "arrow":
        from trainyard.data.formats.arrow_dataset import ArrowDataset

        packed = ArrowDataset(match_files(data.paths, directories=True), data.seq_len)
        return 1 + max(int(arrays["input_ids"].max()) for arrays in packed.batch_arrays)
    largest = 1
    for prefix in token_prefixes(data.paths):
        tokens = MegatronTokens(prefix).tokens
        for start in range(0, len(tokens), TOKENS_PER_READ):
            largest = max(largest, int(np.max(tokens[start : start + TOKENS_PER_READ])))
    return largest + 1
