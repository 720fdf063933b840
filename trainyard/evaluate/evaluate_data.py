"""Evaluates a checkpoint on data sets."""

from collections.abc import Sequence
from typing import Any

from trainyard.evaluate.checkpoint_source import CheckpointSource
from trainyard.evaluate.checkpoint_tokenizer import load_evaluation_tokenizer
from trainyard.evaluate.data_sets import DataOptions, open_data
from trainyard.evaluate.evaluator import Evaluator


def evaluate_data(
    source: CheckpointSource,
    data: Sequence[str],
    tokenizer: str | None = None,
    stride: int | None = None,
    text_key: str = "text",
    seq_len_is_given: bool = False,
) -> list[dict[str, Any]]:
    """The results of each data set. `tokenizer` names one; by default it comes with the checkpoint. The other arguments
    are those of DataOptions. All ranks call this."""
    config, weights = source.config, source.opened.weights
    loaded = load_evaluation_tokenizer(config, weights, source.path, tokenizer)
    options = DataOptions(config, loaded, stride, text_key, seq_len_is_given)
    opened = [open_data(argument, options) for argument in data]  # a wrong path is reported before weights are read
    evaluator = Evaluator(config, weights, source.world, on_progress=source.on_progress)
    return [evaluator.evaluate(each) for each in opened]
