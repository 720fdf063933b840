"""Evaluates a checkpoint on data sets."""

from collections.abc import Mapping, Sequence
from typing import Any

from trainyard.checkpoint.registry import read_model_files
from trainyard.data.loading.text_stream import tokenizer_spec
from trainyard.data.text.tokenizer import Tokenizer, load_tokenizer
from trainyard.evaluate.checkpoint_source import CheckpointSource
from trainyard.evaluate.data_sets import DataOptions, open_data
from trainyard.evaluate.evaluator import Evaluator
from trainyard.inference.text.tokenizer_files import load_model_tokenizer, model_end_ids


def evaluate_data(
    source: CheckpointSource,
    data: Sequence[str] | Mapping[str, Sequence[str]],
    tokenizer: str | None = None,
    stride: int | None = None,
    text_key: str = "text",
    seq_len_is_given: bool = False,
) -> list[dict[str, Any]]:
    """The results of each data set: of each argument, or of the arguments of each name. `tokenizer` names one; by
    default it comes with the checkpoint. The other arguments are those of DataOptions. All ranks call this."""
    config, weights = source.config, source.opened.weights
    if tokenizer:
        loaded: Tokenizer | None = load_tokenizer(tokenizer_spec(config)._replace(name=tokenizer))
    else:
        files = read_model_files(weights, source.path)
        loaded = load_model_tokenizer(files, config.data.end_of_text)
        if loaded and loaded.end_id is None and (end_ids := model_end_ids(files, weights.model)):
            loaded.end_id, loaded.special_ids = end_ids[0], loaded.special_ids | {end_ids[0]}
    options = DataOptions(config, loaded, stride, text_key, seq_len_is_given)
    sets = data if isinstance(data, Mapping) else {argument: [argument] for argument in data}
    # A wrong path is reported before weights are read.
    opened = [open_data(name, arguments, options) for name, arguments in sets.items()]
    evaluator = Evaluator(config, weights, source.world, on_progress=source.on_progress)
    return [evaluator.evaluate(each) for each in opened]
