"""Private or version-dependent torch names, each with the versions it holds for. No other package uses one.

One file per subject; callers use `compat.NAME`.
"""

from trainyard.compat.attention import ATTENTION_KERNELS, AttentionKernel, select_attention_kernel
from trainyard.compat.collectives import (
    all_gather,
    all_reduce,
    all_reduce_,
    completed_work,
    group_rank,
    init_fake_process_group,
    new_unsorted_group,
    reduce_scatter,
    register_group_name,
    sendrecv,
    supports_unsorted_groups,
    wait,
)
from trainyard.compat.inductor import (
    CompileCounts,
    GraphNotCompiled,
    GraphRequest,
    TracingBackend,
    compile_counts,
    default_inductor_dir,
    disable_autograd_cache,
    disable_automatic_dynamic_shapes,
    lower_for_strides,
    probe_cpu_isa,
)
from trainyard.compat.matmul import add_matmul_, has_fast_bf16_matmul, scaled_mm
from trainyard.compat.optim import foreach_norm, fused_adamw_, has_fused_adamw
from trainyard.compat.pipelining import supports_zero_bubble
from trainyard.compat.tracing import (
    DispatchMode,
    current_backward_node_id,
    custom_op_body,
    disable_fake_tensors,
    fake_tensor_mode,
    last_forward_node_id,
    register_device_module,
)

__all__ = [
    "ATTENTION_KERNELS",
    "AttentionKernel",
    "CompileCounts",
    "DispatchMode",
    "GraphNotCompiled",
    "GraphRequest",
    "TracingBackend",
    "add_matmul_",
    "all_gather",
    "all_reduce",
    "all_reduce_",
    "compile_counts",
    "completed_work",
    "current_backward_node_id",
    "custom_op_body",
    "default_inductor_dir",
    "disable_autograd_cache",
    "disable_automatic_dynamic_shapes",
    "disable_fake_tensors",
    "fake_tensor_mode",
    "foreach_norm",
    "fused_adamw_",
    "group_rank",
    "has_fast_bf16_matmul",
    "has_fused_adamw",
    "init_fake_process_group",
    "last_forward_node_id",
    "lower_for_strides",
    "new_unsorted_group",
    "probe_cpu_isa",
    "reduce_scatter",
    "register_device_module",
    "register_group_name",
    "scaled_mm",
    "select_attention_kernel",
    "sendrecv",
    "supports_unsorted_groups",
    "supports_zero_bubble",
    "wait",
]
