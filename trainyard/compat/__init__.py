"""Private or version-dependent torch names, each with the versions it holds for. No other package uses one.

One file per subject; callers use `compat.NAME`. pyproject.toml lets this file re-export what it imports.
"""

from trainyard.compat.attention import (
    ATTENTION_KERNELS,
    AttentionKernel,
    fused_attention_kernel,
    has_varlen_flash,
    pad_columns,
    select_attention_kernel,
    varlen_flash,
    varlen_flash_backward,
)
from trainyard.compat.collectives import (
    WAIT_TENSOR,
    all_gather,
    all_reduce,
    all_reduce_,
    all_to_all,
    completed_work,
    group_rank,
    init_fake_process_group,
    new_unsorted_group,
    reduce_scatter,
    register_group_name,
    sendrecv,
    wait,
)
from trainyard.compat.inductor import (
    CompileCounts,
    GraphNotCompiled,
    GraphRequest,
    TracingBackend,
    allow_recompiles,
    compile_counts,
    default_inductor_dir,
    disable_autograd_cache,
    disable_automatic_dynamic_shapes,
    lower_for_strides,
    on_compile,
    probe_cpu_isa,
    skip_rng_state_of_attention,
)
from trainyard.compat.matmul import (
    add_matmul_,
    bmm_to_fp32,
    grouped_mm,
    has_fast_bf16_matmul,
    has_grouped_mm,
    mm_to_fp32,
    scaled_mm,
)
from trainyard.compat.memory import dump_memory_snapshot, record_memory_history
from trainyard.compat.optim import foreach_norm, fused_adamw_, has_fused_adamw
from trainyard.compat.sharding import placement_on_other_mesh
from trainyard.compat.tracing import (
    DispatchMode,
    EagerDispatchMode,
    call_as_plain_tensor,
    current_backward_node_id,
    custom_op_body,
    disable_fake_tensors,
    disable_torch_functions,
    fake_tensor_mode,
    has_memory,
    last_forward_node_id,
    register_device_module,
    run_backward,
    tensor_without_memory,
    unknown_size,
)
from trainyard.compat.version import has_recorder_pipe_by_default, supports_unsorted_groups, supports_zero_bubble
