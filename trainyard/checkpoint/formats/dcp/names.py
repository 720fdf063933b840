"""The tensor names in checkpoints of torch.distributed.checkpoint: those of Hugging Face, and torchtitan's.

torchtitan rotates neighboring elements of a query or key, Hugging Face an element of the first half with one of the
second. The rows of these matrices are in another order accordingly.
"""

import re
from dataclasses import replace
from typing import Literal

from torch import Tensor

from trainyard import models
from trainyard.checkpoint.formats import hf
from trainyard.checkpoint.formats.tensor_map import StoredTensor, check_all_stored, unfused_tensors
from trainyard.checkpoint.io.lazy_tensor import LazyTensor
from trainyard.core.errors import UserError
from trainyard.core.tensor_slice import TensorIndex

DcpNames = Literal["hf", "torchtitan", "torchtitan-0.2"]
EARLIER_NAMES = ((re.compile(r"\.qkv_linear\."), "."), (re.compile(r"^lm_head\b"), "output"))
"""What differs in the names of torchtitan up to 0.2."""
ROTATED_NAME = re.compile(r"layers\.\d+\.attention\.(qkv_linear\.)?w[qk]\.weight")


def dcp_tensors(model: models.ModelConfig, names: DcpNames) -> tuple[StoredTensor, ...]:
    """Every tensor of a state dict with these names, tied ones included: dcp.load asks for them."""
    if names == "hf":
        tensors = hf.stored_tensors(model)
        by_name = {stored.name: stored for stored in tensors}
        tied = models.family_of(model).hf.names(model).tied
        return *tensors, *(rename(by_name[original], copy) for copy, original in tied.items())
    table = models.family_of(model).torchtitan_names
    if table is None:
        raise UserError(f"--layout names={names}: no names of torchtitan for {model.family}; nearest: names=hf")
    unfused, out = unfused_tensors(model), []
    has_tied_head = models.family_of(model).blueprint(model).tied_head is not None
    for ours, theirs in table.items():
        for layer in range(model.layers if "*" in ours else 1):
            name, torchtitan_name = (f"{text.replace('*', str(layer))}.weight" for text in (ours, theirs))
            if name == "output.weight" and has_tied_head:
                name = "embedding.weight"
            if name in unfused:  # not a row of the blueprint for other layers
                out.append(StoredTensor(torchtitan_name, 0, (unfused[name],)))
    check_all_stored(model, out, "torchtitan's names")
    return tuple(out) if names == "torchtitan" else tuple(rename(stored, earlier_name(stored.name)) for stored in out)


def rename(stored: StoredTensor, name: str) -> StoredTensor:
    return replace(stored, name=name)


def earlier_name(name: str) -> str:
    """The name of the same tensor in torchtitan 0.2."""
    for pattern, text in EARLIER_NAMES:
        name = pattern.sub(text, name)
    return name


class RotaryRows(LazyTensor):
    """A query or key matrix of torchtitan, with its rows in Hugging Face's order."""

    def __init__(self, tensor: LazyTensor, head_size: int) -> None:
        self._tensor, self._head_size, self.shape, self.dtype = tensor, head_size, tensor.shape, tensor.dtype

    def read(self, index: TensorIndex | None = None) -> Tensor:
        rows, *columns = index or tuple(slice(0, size) for size in self.shape)
        first, size = rows.start // self._head_size * self._head_size, self._head_size
        stop = -(-rows.stop // size) * size
        heads = self._tensor.read((slice(first, stop), *columns))
        heads = heads.reshape(-1, size // 2, 2, heads.shape[1]).transpose(1, 2).reshape(heads.shape)
        return heads[rows.start - first : rows.stop - first]


def torchtitan_rows(tensor: Tensor, head_size: int) -> Tensor:
    """A query or key matrix in Hugging Face's order, with its rows in torchtitan's order."""
    return tensor.view(-1, 2, head_size // 2, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
