"""Private torch names, each with the version range it was seen to hold for. The only file that may use one."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend


def foreach_norm(tensors: list[Tensor]) -> Tensor:
    """The 2-norm of each tensor in fp32, in one pass over memory (torch 2.11 to 2.14; used by clip_grad_norm_ too)."""
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32))


def fused_adamw_(
    weight: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    updates: Tensor,
    lr: Tensor,
    scale: Tensor,
    ok: Tensor,
    decay: float,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """torch's one-pass AdamW on fp32 tensors (torch 2.11 to 2.14; behind torch.optim.AdamW(fused=True)).

    Gradients are multiplied by `scale` (in place); nothing changes where `ok` is false. `updates` counts this one too.
    """
    torch._fused_adamw_(
        [weight],
        [gradient],
        [first],
        [second],
        [],
        [updates],
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
        grad_scale=1 / scale,
        found_inf=1 - ok.float(),
    )


def add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, where total may be fp32 and the others bf16: summed in the product's own last step, so that the
    product is never rounded or written (the out_dtype of addmm: GPUs, torch 2.11 to 2.14)."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.add_(a @ b)


VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])


def splits_backward() -> bool:
    """Whether pipelining's zero-bubble schedules work with autograd functions of one's own: seen to fail on torch 2.11
    (their nodes lack the metadata it asks for) and to work on 2.13."""
    return VERSION >= (2, 13)


def keeps_order() -> bool:
    """Whether a process group can have its ranks in another order than their numbers: torch 2.13, not 2.11."""
    return VERSION >= (2, 13)


def ordered_group(ranks: list[int], timeout: timedelta) -> dist.ProcessGroup:
    """A process group whose ranks keep their order (`sort_ranks`: torch 2.13 and 2.14)."""
    return dist.new_group(ranks, timeout=timeout, sort_ranks=False)


def fake_world(backend: str, rank: int, ranks: int) -> None:
    """This process as one of many that do not exist: groups are made, messages go nowhere (torch 2.11 to 2.14)."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group(backend, store=FakeStore(), rank=rank, world_size=ranks)


# Functional collectives on plain local tensors (torch 2.11 to 2.14). Each starts the work and gives a tensor that must
# go through `wait` before it is read, so that the caller decides what overlaps.


def all_reduce(x: Tensor, group: str, op: str = "sum") -> Tensor:
    return torch.ops._c10d_functional.all_reduce(x.contiguous(), op, group)


def all_reduce_(x: Tensor, group: str) -> Tensor:
    """In place, on a contiguous tensor."""
    return torch.ops._c10d_functional.all_reduce_(x, "sum", group)


def all_gather(x: Tensor, size: int, group: str) -> Tensor:
    """[n, ...] on each of `size` ranks to [size * n, ...], in the order of ranks."""
    if not _by_sums(x):
        return torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), size, group)
    out = x.new_zeros(size, *x.shape)
    out[group_rank(group)] = x
    wait(all_reduce_(out.view(-1).view(torch.uint8), group))  # bytes and zeros: bits stay as they are
    return out.flatten(0, 1)


def reduce_scatter(x: Tensor, size: int, group: str) -> Tensor:
    """[size * n, ...] to this rank's [n, ...] of the sum."""
    if not _by_sums(x):
        return torch.ops._c10d_functional.reduce_scatter_tensor(x.contiguous(), "sum", size, group)
    return wait(all_reduce(x, group)).chunk(size)[group_rank(group)].clone()


def _by_sums(x: Tensor) -> bool:
    """Whether ranks gather and scatter by plain sums: on a CPU, outside compiled code (whose graph must not know the
    rank). With gloo's own gathers and scatters under way its threads corrupted memory or hung, once in some ten
    thousand (torch 2.13 and 2.14); sums never did."""
    return x.is_cpu and not torch.compiler.is_compiling()


def permute(x: Tensor, to: int, source: int, size: int, group: str) -> Tensor:
    """Send `x` to rank `to` of the group and get the same shape from rank `source`."""
    flat = x.contiguous().view(-1)
    send, receive = [0] * size, [0] * size
    send[to] = receive[source] = flat.numel()
    return torch.ops._c10d_functional.all_to_all_single(flat, receive, send, group)


def wait(x: Tensor) -> Tensor:
    return torch.ops._c10d_functional.wait_tensor(x)


def group_rank(group: str) -> int:
    """This process's rank in the group of that name (torch 2.11 to 2.14; what functional collectives resolve by)."""
    return torch._C._distributed_c10d._resolve_process_group(cast(Any, group)).rank()


# torch's fused attention kernels with their log-sum-exp, behind scaled_dot_product_attention (torch 2.11 to 2.14).
# Queries [B, H, T, K], keys and values [B, G, S, K] with G a divisor of H, the last dim without gaps; log-sum-exp
# [B, H, T] in fp32; bias [B, 1, T, S]. A backward takes `out` and `lse` over more keys than it is given, and then gives
# these keys' part of the gradients: it makes weights again as exp(score - lse), and all else it needs is the row sum of
# dout * out.


class AttentionKernel(NamedTuple):
    forward: Callable[[Tensor, Tensor, Tensor, bool, Tensor | None], tuple[Tensor, Tensor]]
    """(q, k, v, causal, bias) to out and lse. `causal` is for as many queries as keys and no bias."""
    backward: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool, Tensor | None], tuple[Tensor, Tensor, Tensor]
    ]
    """(dout, q, k, v, out, lse, causal, bias) to the gradients of q, k and v."""


def attention_kernel(q: Tensor, k: Tensor, causal: bool, biased: bool) -> AttentionKernel | None:
    """The kernel that scaled_dot_product_attention would take here, if it is one that gives its log-sum-exp."""
    if q.is_cuda and (q.shape[-1] % 8 or q.shape[2] == k.shape[2] == 1):
        return None  # the first is padded before the kernel is called, the second refused when it is
    bias = q.new_empty(k.shape[2]).expand(*q.shape[:3], -1) if biased else None
    # As if for training: some kernels have no backward for what their forward takes.
    choice = torch._fused_sdp_choice(q.detach().requires_grad_(), k, k, bias, 0.0, causal, enable_gqa=True)
    return _KERNELS.get((q.is_cuda, choice))


def _flash_on_cpu(q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias)


def _flash_on_cpu_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse, 0.0, causal, attn_mask=bias
    )


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    assert bias is None
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    return out, lse


def _flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    assert bias is None
    state = torch.empty(0, dtype=torch.uint64, device=q.device)  # of dropout
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        dout, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal, state, state
    )


def _cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    bias = None if bias is None else bias.expand(-1, q.shape[1], -1, -1)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, bias, True, 0.0, causal)
    return out, lse.squeeze(-1)


def _cudnn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    bias = None if bias is None else bias.expand(-1, q.shape[1], -1, -1)
    lse, state = lse.contiguous().unsqueeze(-1), torch.empty(0, dtype=torch.int64, device=q.device)
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse, state, state, bias, None, None, q.shape[2], k.shape[2], 0.0, causal
    )


_KERNELS = {
    (False, SDPBackend.FLASH_ATTENTION.value): AttentionKernel(_flash_on_cpu, _flash_on_cpu_backward),
    (True, SDPBackend.FLASH_ATTENTION.value): AttentionKernel(_flash, _flash_backward),
    (True, SDPBackend.CUDNN_ATTENTION.value): AttentionKernel(_cudnn, _cudnn_backward),
}


def scaled_mm(
    left: Tensor, right: Tensor, left_inverse: Tensor, right_inverse: Tensor, bias: Tensor | None, fast: bool
) -> Tensor:
    """left @ right of fp8 matrices times their inverse scales, plus bias, in bf16 (seen with torch 2.13 on a CPU).

    `left` has its rows in one piece and `right` its columns, of multiples of 16. Scales are fp32, [1, 1] both or [M, 1]
    and [1, N]. Not both in e5m2. `fast` is less exact: sums stay in the tensor cores' 22 bits.
    """
    return torch._scaled_mm(
        left,
        right,
        scale_a=left_inverse,
        scale_b=right_inverse,
        bias=bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )
