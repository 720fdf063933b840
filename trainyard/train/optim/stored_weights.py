"""Frozen weights of linear layers in 4 or 8 bits: how a rank makes its part of one, and how many bytes it takes.

The values are those of the full, unfused matrices in nf4, and of the full matrices in fp8, whatever the layout: ranks
first exchange the largest magnitudes of their blocks, or of their rows. They follow from the weights that a run starts
from, so that a resumed run makes the same.
"""

from torch import Tensor

from trainyard.core.errors import UserError
from trainyard.core.splits import ModelShard
from trainyard.families.blueprint import Blueprint, ParamSpec
from trainyard.kernels.fp8_linear import Fp8Matrix
from trainyard.kernels.frozen_linear import quantize_frozen
from trainyard.kernels.nf4 import BLOCK, GROUP, NF4, Nf4Matrix, block_absmax, concatenate_nf4, quantize_nf4
from trainyard.parallel.mesh import Mesh

StoredMatrix = Nf4Matrix | Fp8Matrix
TABLE_BYTES = 4 * (len(NF4) + 256)


def quantize_weight(blueprint: Blueprint, name: str, weight: Tensor, mesh: Mesh, fp8_scaling: str) -> StoredMatrix:
    """The stored form of this rank's shard of a weight. All tensor-parallel ranks call this together."""
    spec = blueprint.spec(name)
    try:
        if spec.storage == "nf4":
            return _quantize_nf4(blueprint, name, weight, mesh)
        is_split = mesh.tp.size > 1 and (fp8_scaling == "tensor" or spec.tp_dim == 1)
        return quantize_frozen(weight, fp8_scaling, *([mesh.tp.all_reduce_max] if is_split else []))
    except UserError as error:
        raise UserError(f"lora.base={spec.storage}: {name}: {error}; nearest: null, or another layout.tp") from None


def _quantize_nf4(blueprint: Blueprint, name: str, weight: Tensor, mesh: Mesh) -> Nf4Matrix:
    """Each unfused part on its own: a block's absmax is quantized next to those of the full part."""
    shards = mesh.tp.all_gather(block_absmax(weight)[None])
    slices = [blueprint.local_slices(name, ModelShard(mesh.tp.size, rank)) for rank in range(mesh.tp.size)]
    parts, start = [], 0
    for index, own in enumerate(slices[mesh.tp.rank]):
        rows, columns = own.global_shape
        absmax = shards.new_empty(rows, columns // BLOCK)
        for shard, pieces in zip(shards, slices, strict=True):
            piece, first = pieces[index], sum(piece.sizes[0] for piece in pieces[:index])
            (row, column), (height, width) = piece.offsets, piece.sizes
            target = absmax[row : row + height, column // BLOCK : (column + width) // BLOCK]
            target.copy_(shard[first : first + height])
        parts.append(quantize_nf4(weight[start : start + own.sizes[0]], absmax, *own.offsets))
        start += own.sizes[0]
    return concatenate_nf4(parts) if len(parts) > 1 else parts[0]


def stored_bytes(spec: ParamSpec, shape: tuple[int, ...], fp8_scaling: str) -> int:
    """Bytes of a rank's shard, of this shape, of a weight that is kept in 4 or 8 bits."""
    rows, columns = shape
    if spec.storage == "fp8":
        return rows * columns + 4 * (rows if fp8_scaling == "row" else 1)
    parts = [part.size for part in spec.fused_parts] or [spec.shape[0]]
    groups = sum(-(-size * (spec.shape[1] // BLOCK) // GROUP) for size in parts)
    return rows * (columns // 2 + columns // BLOCK + 4) + 8 * groups + TABLE_BYTES


def bits_per_weight(storage: str) -> float:
    """About how many bits a weight takes."""
    return {"nf4": 4.13, "fp8": 8.0}[storage]
