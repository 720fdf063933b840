"""LoRA adapters beside one model: every sequence of a batch uses one of them, or none.

The A of all adapters of a layer are one matrix, and so are their B. x A^T is computed for all adapters, and what does
not belong to the adapter of a row is zeroed before the product with B. Two matmuls of one static shape serve any
mixture, so a compiled or captured step stays valid, and adapters of different ranks and targets need no padding. The
cost is that of one adapter with the sum of the ranks: little for some adapters, too much for hundreds.

B batch, T tokens, D input features, N output features, C columns: the ranks of all parts of all adapters.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from trainyard.checkpoint.weights import WeightSource
from trainyard.core.errors import UserError
from trainyard.core.splits import ModelShard
from trainyard.families.linear_wrappers.lora import EXPERTS
from trainyard.formats.peft.adapter import lora_options
from trainyard.inference.cached_attention import CacheState
from trainyard.models import ModelConfig, blueprint_of
from trainyard.models.sharding import local_tensor
from trainyard.parallel.tensor_parallel import Linear


class LayerAdapters(NamedTuple):
    """This rank's part of all adapters of a layer."""

    a_CD: Tensor
    b_NC: Tensor
    """Multiplied by the scale of each adapter. A part of a fused weight has zeros in the rows of the others."""
    owner_C: Tensor
    """The number of the adapter that each column belongs to, from 1 on."""


class AdapterStack:
    """The adapters of a model, by name; their numbers follow the order of the names."""

    def __init__(
        self, adapters: Mapping[str, WeightSource], model: ModelConfig, shard: ModelShard, dtype: torch.dtype
    ) -> None:
        """`adapters` are models with LoRA layers (`open_adapter`), of which only these are read."""
        self.names, self.dtype, self.shard = tuple(adapters), dtype, shard
        self._base = blueprint_of(model)
        self._adapted = []
        for name, weights in adapters.items():
            options = lora_options(weights.model)
            assert options
            if options.dora or options.train:
                what = "has trained norms (DoRA)" if options.dora else f"trains {options.train[0]} as it is"
                raise UserError(
                    f"--adapter {name}: {what}, which requests for other models must not see; "
                    f"nearest: convert --merge, and serve that"
                )
            if EXPERTS in options.targets:  # the rows of an expert come from sequences of several adapters
                raise UserError(f"--adapter {name}: adapts experts; nearest: convert --merge, and serve that")
            blueprint = blueprint_of(model.model_copy(update={"linear": weights.model.linear}))
            if any("kv_b.lora_" in spec.name for spec in blueprint.specs):  # decoding multiplies it into all queries
                raise UserError(
                    f"--adapter {name}: adapts kv_b of latent attention; nearest: convert --merge, and serve that"
                )
            self._adapted.append((name, weights, blueprint, options))

    def layer(self, layer: str) -> LayerAdapters | None:
        """The adapters of a layer, such as `layers.3.attention.qkv`; None if there are none."""
        first_row, rows = {}, 0
        for piece in self._base.local_slices(f"{layer}.weight", self.shard):
            first_row[piece.name.removesuffix("weight")], rows = rows, rows + piece.sizes[0]
        found, columns, owners = [], [], list[int]()
        for number, (name, weights, blueprint, options) in enumerate(self._adapted, 1):
            if f"{layer}.lora_A" not in blueprint:
                continue
            a, b = (
                local_tensor(blueprint, f"{layer}.{part}", self.shard, weights.read).float()
                for part in ("lora_A", "lora_B")
            )
            if not (a.isfinite().all() and b.isfinite().all()):
                raise UserError(f"--adapter {name}: {layer} has weights that are not finite")
            start = 0
            for piece in blueprint.local_slices(f"{layer}.lora_B", self.shard):
                wide, end = b.new_zeros(rows, options.rank), start + piece.sizes[0]
                row = first_row[piece.name.removesuffix("lora_B")]
                wide[row : row + piece.sizes[0]] = b[start:end] * options.scale
                columns.append(wide)
                start = end
            found.append(a)
            owners += [number] * len(a)
        if not found:
            return None
        owner_C = torch.tensor(owners, dtype=torch.int32)
        return LayerAdapters(torch.cat(found).to(self.dtype), torch.cat(columns, 1).to(self.dtype), owner_C)


class AdaptedLinear(Linear):
    """A linear layer that adds the update of each row's adapter."""

    a_CD: Tensor
    b_NC: Tensor
    owner_C: Tensor

    def __init__(self, linear: Linear, state: CacheState, adapters: LayerAdapters) -> None:
        super().__init__(linear.weight, linear.bias, linear.kernels, linear.fp8)
        self.state = state
        for name, tensor in adapters._asdict().items():
            self.register_buffer(name, tensor, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self._update(x)

    def matmul(self, x: Tensor) -> Tensor:
        return super().matmul(x) + self._update(x)

    def _update(self, x_BTD: Tensor) -> Tensor:
        adapters, state = self.state.adapters, self.state
        adapter_B = adapters[: len(x_BTD)] if state.decoding else adapters[state.slots]
        h_BTC = self.kernels.linear(x_BTD, self.a_CD, None)
        # Not a product: 0 times an infinite value is none of this row's business.
        h_BTC = torch.where(self.owner_C == adapter_B[:, None, None], h_BTC, 0.0)
        return self.kernels.linear(h_BTC, self.b_NC, None)
