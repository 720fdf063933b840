"""Reads a single file of torch.save with the weights of a Hugging Face model, at the top level or under a key."""

from pathlib import Path

from trainyard.core.errors import UserError
from trainyard.formats import hf
from trainyard.formats.format import CheckpointFormat
from trainyard.formats.io.torch_file import named_tensors, open_torch_file
from trainyard.formats.tensor_map import ShardedWeights
from trainyard.models import ModelConfig

SUFFIXES = (".pt", ".bin", ".pth", ".ckpt")


def open_weights_file(path: Path, model: ModelConfig) -> ShardedWeights:
    state = open_torch_file(path)
    for key in ("model", "state_dict", "model"):  # both {"model": ...} and {"state_dict": {"model": ...}}
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    tensors = named_tensors(state)
    if not tensors:
        raise UserError(f"{path}: holds no tensors by name")
    return hf.weights_from_tensors(model, tensors)


FORMAT = CheckpointFormat(
    "full",
    "a single file of Hugging Face weights",
    lambda path: path.is_file() and path.suffix in SUFFIXES,
    lambda path, model, hints: open_weights_file(path, model),
    stores_model=False,
)
