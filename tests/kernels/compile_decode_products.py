"""Compile the product kernel of decode steps for a Hopper GPU, without one. Run by test_decode_compile.py in a process
of its own, because other tests need Triton's interpreter.

Prints a line for each dtype of the weights and each shape, M, rows and K: bytes of shared memory, and whether loads of
weights precede the wait for the kernel before.
"""

from itertools import product

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from trainyard.kernels.triton.decode.skinny_linear import _several_rows_kernel, linear_config

POINTERS = {
    **dict.fromkeys(("x", "out", "residual"), "*bf16"),
    **dict.fromkeys(("squares", "partial", "row_scale"), "*fp32"),
    "counters": "*i32",
}
SCALARS = {"M": "i32", "N": "i32", "eps": "fp32"}


ROWS_OF_X = 32, 64
WEIGHTS = (6144, 2048), (2048, 2048), (11008, 2048), (2048, 5504), (32256, 2048)


def compile_kernel(weight_dtype: str, M: int, rows: int, K: int) -> None:
    config = linear_config(M, rows, K, torch.bfloat16, weight_dtype != "bf16").fit(K, torch.bfloat16)
    constants = {
        "K": K, "ACTIVATION": "none", "SQUARES": 32, "HAS_SCALE": weight_dtype != "bf16",
        "HAS_BIAS": False, "HAS_RESIDUAL": True, "HAS_NEXT_NORM": False,
        "BLOCK_M": max(16, triton.next_power_of_2(M)), "BLOCK_N": triton.next_power_of_2(config.block_n),
        "BLOCK_K": config.block_k, "TILE_N": config.block_n, "SPLIT_K": config.split_k, "PDL": True,
        **dict.fromkeys(("bias", "next_norm_weight", "scaled", "next_squares")),
    }  # fmt: skip
    names = _several_rows_kernel.arg_names
    types = {**POINTERS, **SCALARS, "weight": f"*{weight_dtype}"}
    source = ASTSource(
        fn=_several_rows_kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(names)
            if types.get(name, "").startswith("*")
        },
    )
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "launch_pdl": True}
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    before_wait = kernel.asm["ptx"].partition("griddepcontrol.wait")[0]
    print(weight_dtype, M, rows, K, kernel.metadata.shared, "cp.async" in before_wait)


if __name__ == "__main__":
    for dtype, M, shape in product(("bf16", "fp8e4nv"), ROWS_OF_X, WEIGHTS):
        compile_kernel(dtype, M, *shape)
