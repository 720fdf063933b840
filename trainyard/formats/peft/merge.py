"""Merges adapters into the weights of their model, which any format can then be written from."""

import torch
from torch import Tensor

from trainyard.checkpoint.weights import WeightSource, unfused_tensors
from trainyard.core.errors import UserError
from trainyard.core.tensor_slice import TensorSlice
from trainyard.families.linear_wrappers.lora import a_of_layers
from trainyard.formats.peft.adapter import lora_options, with_lora
from trainyard.models import blueprint_of


class MergedWeights:
    """The weights of a model whose adapters are merged into it, as a WeightSource of the model without them.

    A merged matrix is W + s B A in fp32, with the rows scaled to the trained norms for DoRA, and is rounded once:
    rounding the update first would lose most of it in bf16.
    """

    def __init__(self, adapted: WeightSource, dtype: torch.dtype | None = None) -> None:
        """`dtype` None keeps those of the model's weights."""
        options = lora_options(adapted.model)
        if options is None:
            raise UserError("--merge: the source has no adapter; nearest: without --merge")
        self.adapted, self._options, self._dtype = adapted, options, dtype
        self.model = with_lora(adapted.model, None)
        self._a_of = a_of_layers(blueprint_of(adapted.model))
        self.notes: tuple[str, ...] = getattr(adapted, "notes", ())

    def dtype(self, name: str) -> torch.dtype:
        return self._dtype or self.adapted.dtype(name)

    def read(self, piece: TensorSlice) -> Tensor:
        layer, tensors = piece.name.removesuffix(".weight"), unfused_tensors(self.adapted.model)
        if layer not in self._a_of:
            return self.adapted.read(piece).to(self.dtype(piece.name))

        def rows_of(name: str) -> Tensor:
            tensor = tensors[name]
            return self.adapted.read(tensor.narrow(0, first_row, last_row)).float()

        # Whole rows, because the norm of a row is that of all its elements.
        first_row, last_row = piece.offsets[0], piece.offsets[0] + piece.sizes[0]
        a = self.adapted.read(tensors[self._a_of[layer]]).float()
        merged = rows_of(piece.name) + self._options.scale * (rows_of(f"{layer}.lora_B") @ a)
        if self._options.dora:
            magnitude = rows_of(f"{layer}.lora_magnitude")
            merged *= (magnitude / torch.linalg.vector_norm(merged, dim=1)).unsqueeze(1)
        columns = slice(piece.offsets[1], piece.offsets[1] + piece.sizes[1])
        return merged[:, columns].to(self.dtype(piece.name))
