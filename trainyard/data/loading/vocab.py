"""The vocabulary that samples need, read from the data itself."""

import numpy as np

from trainyard.config.schema import Config
from trainyard.data.formats.megatron_bin import MegatronTokens
from trainyard.data.formats.remote_tokens import RemoteTokens
from trainyard.data.loading.build import tokenizer_spec
from trainyard.data.loading.data_files import match_files, remote_files, token_prefixes
from trainyard.data.text.tokenizer import load_tokenizer

TOKENS_PER_READ = 1 << 26
UINT16_VOCAB = 1 << 16


def data_vocab_size(config: Config) -> int:
    """The smallest model.vocab for data.paths: the tokenizer's size, or the largest token id plus 1 (all are read); for
    16-bit tokens behind URLs, the largest vocabulary that has such tokens."""
    data = config.data
    if data.source == "text":
        return load_tokenizer(tokenizer_spec(config)).vocab_size
    remote = remote_files(data)
    if data.source == "hdf5":
        from trainyard.data.formats.bert_hdf5_remote import open_bert_hdf5

        pairs = open_bert_hdf5(match_files(data.paths, remote=remote), data.seq_len, data.max_predictions, UINT16_VOCAB)
        return pairs.vocab_size
    if data.source == "arrow":
        from trainyard.data.formats.arrow_dataset import ArrowDataset

        packed = ArrowDataset(match_files(data.paths, directories=True, remote=remote), data.seq_len)
        return 1 + max(int(arrays["input_ids"].max()) for arrays in packed.batch_arrays)
    largest = 1
    for prefix in token_prefixes(data.paths, remote):
        tokens = MegatronTokens(prefix).tokens
        if isinstance(tokens, RemoteTokens) and tokens.dtype.itemsize == 2:
            largest = max(largest, UINT16_VOCAB - 1)
            continue
        for start in range(0, len(tokens), TOKENS_PER_READ):
            largest = max(largest, int(np.max(tokens[start : start + TOKENS_PER_READ])))
    return largest + 1
