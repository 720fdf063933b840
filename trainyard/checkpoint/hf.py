"""Hugging Face directories in and out: config.json and safetensors, one file or sharded with an index."""

import json
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from trainyard import devices, models
from trainyard.config.hf import from_hf as config_from_hf
from trainyard.config.hf import to_hf as config_to_hf
from trainyard.errors import UserError
from trainyard.models.names import from_hf, to_hf


def save_hf(
    directory: Path,
    config: models.AnyModel,
    values: models.Values,
    dtype: torch.dtype = torch.float32,
    write: bool = True,
) -> None:
    """Write weights that transformers' from_pretrained reads. The directory appears whole or not at all.

    Where `values` brings ranks together, all call this and one has `write`.
    """
    family = models.family(config)
    tensors: dict[str, Tensor] = {}
    for name, tensor in to_hf(family.blueprint(config), family.names(config), values):
        if write:
            tensors[name] = tensor.to("cpu", dtype)
    if not write:
        return
    part = directory.with_name(f".{directory.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
    (part / "config.json").write_text(
        json.dumps(config_to_hf(config, str(dtype).removeprefix("torch.")), indent=2) + "\n", encoding="utf-8"
    )
    shutil.rmtree(directory, ignore_errors=True)
    part.rename(directory)


def load_hf(directory: str | Path) -> tuple[models.AnyModel, models.Values]:
    """The configuration and the values of a Hugging Face directory; tensors are read when they are asked for."""
    root = Path(directory).expanduser()
    config = config_from_hf(root)
    return config, values_of(root, config)


def load_model(directory: str | Path, device: str = "auto") -> tuple[models.AnyModel, nn.Module]:
    """A model ready for use (evaluation mode, fp32), and its configuration, from a Hugging Face directory."""
    config, values = load_hf(directory)
    handle = devices.select(device).handle
    model = models.build(config, handle)
    return config, models.fill(model, lambda name: values(name).to(handle)).eval()


def values_of(directory: Path, config: models.AnyModel) -> models.Values:
    family = models.family(config)
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        where: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    else:
        where = dict.fromkeys(_names(directory / "model.safetensors"), "model.safetensors")

    def read(name: str) -> Tensor:
        with _open(directory / where[name]) as file:
            return file.get_tensor(name)

    return from_hf(family.blueprint(config), family.names(config), where, read)


def _names(path: Path) -> list[str]:
    with _open(path) as file:
        return list(file.keys())


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; a Hugging Face directory with safetensors was expected") from None
    except SafetensorError as error:
        raise UserError(f"{path}: not a readable safetensors file: {error}") from None
