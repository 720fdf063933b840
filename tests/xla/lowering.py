"""Lower one micro batch of a full-size stage, forward and backward, to HLO.

Weights are placeholders without memory, so nothing can run, and the other ranks appear only in the groups of
collectives. This lowers any of 512 ranks on a laptop.
"""

import hashlib
import re
from collections import Counter
from math import prod
from typing import NamedTuple

import torch
import torch_xla
import torch_xla.core.xla_builder as xla_builder
from torch import Tensor

from tests.xla.replicas import make_mesh
from trainyard import models
from trainyard.config.schema import Config
from trainyard.devices.neuron.xla_device import XlaDevice
from trainyard.parallel import recompute
from trainyard.parallel.axes import Axes
from trainyard.parallel.context_parallel import ContextAxis
from trainyard.parallel.layout import Layout
from trainyard.parallel.tensor_parallel import TensorAxis
from trainyard.train.cross_entropy import make_head_loss
from trainyard.train.loss import make_loss
from trainyard.train.optim.flat_state import DTYPES

VARIABLES = {"XLA_ALWAYS_ALLREDUCE": "1"}
"""Without it, torch_xla omits all-reduces in a single process."""
NAMES = {"bf16": "bfloat16", "f32": "float32", "s32": "int32"}
BYTES = {"bf16": 2, "f32": 4, "s32": 4}
COLLECTIVE = re.compile(r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-\w+)\(")
COLLECTIVE_DETAILS = re.compile(r" = \(?(?P<dtype>\w+)\[(?P<shape>[\d,]*)\].*replica_groups={(?P<groups>{.*?})}")
"""Matches a collective. An all-reduce returns a pair whose second value is the token that orders the next one."""


class CollectiveOp(NamedTuple):
    """A collective in the graph."""

    kind: str
    dtype: str
    size: int
    """Bytes of its input or output, whichever is larger."""
    ranks: int


class LoweredGraph(NamedTuple):
    """The HLO of a stage."""

    digest: str
    collectives: Counter[CollectiveOp]
    groups: set[str]
    """All replica groups in the graph."""


def lower(config: Config, ranks: list[int]) -> list[LoweredGraph]:
    """Lower the stage of each of these ranks."""
    device = XlaDevice()
    device.prepare(False, precision=config.precision.kind)
    assert config.layout.ranks
    layout = Layout.from_config(config, config.layout.ranks)
    stages = [_build(config, layout, rank, device) for rank in ranks]
    device.flush()  # transfers constants such as rank indices, which become inputs of later graphs
    return [_trace(config, model, device) for model in stages]


def _build(config: Config, layout: Layout, rank: int, device: XlaDevice) -> models.TransformerStage:
    mesh = make_mesh(layout, rank, device)
    (stage,) = layout.stages_on(mesh.coords["pp"])
    axes = Axes(
        TensorAxis(mesh.tp, config.layout.sequence_parallel), ContextAxis(mesh.cp, config.layout.cp_method, True)
    )
    model = models.build_model(config.model, device.torch_device, axes, stage, device.kernels())
    recompute.apply_recompute(list(model.layers.children()), config.recompute)
    return model.train()


def _trace(config: Config, model: models.TransformerStage, device: XlaDevice) -> LoweredGraph:
    torch_xla._XLAC._set_all_reduce_token(str(device.torch_device), None)  # each collective waits for the previous one
    compute = DTYPES[config.precision.compute_dtype]
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    weights = models.assign_parameters(model, lambda name: placeholder(shapes[name], compute))
    tokens_shape = (config.train.micro_batch, config.data.seq_len // config.layout.cp)
    batch = {name: placeholder(tokens_shape, torch.int32) for name in ("tokens", "labels")}
    batch |= {"sample_ids": placeholder(tokens_shape[:1], torch.int32), "rng_key": placeholder((2,), torch.int32)}
    hidden_shape = (
        tokens_shape[0],
        tokens_shape[1] // (model.tp.size if model.tp.sequence_parallel else 1),
        config.model.hidden,
    )
    stage_input = None if model.is_first else placeholder(hidden_shape, compute).requires_grad_()
    output = model(batch, stage_input)
    if model.is_last:
        head_loss = make_head_loss(device.kernels(), None, None, device.kind.max_logits_bytes)
        loss = make_loss(models.family_of(config.model).loss, head_loss)
        results = [total for total, _ in loss.terms(output, batch).values()]
        results[0].backward()
    else:
        results = [output]
        output.backward(placeholder(hidden_shape, compute))
    results += [weight.grad for weight in weights.values()] + ([] if stage_input is None else [stage_input.grad])
    return parse_hlo(torch_xla._XLAC._get_xla_tensors_hlo(results), torch_xla._XLAC._get_xla_tensors_hlo_proto(results))


def placeholder(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return xla_builder.create_placeholder_tensor(shape, dtype)


def parse_hlo(text: str, proto: bytes) -> LoweredGraph:
    collectives: Counter[CollectiveOp] = Counter()
    groups: set[str] = set()
    for line in text.splitlines():
        if kind := COLLECTIVE.search(line):
            details = COLLECTIVE_DETAILS.search(line)
            assert details, line
            groups.add(details["groups"])
            ranks = len(details["groups"].split("}")[0].split(","))
            out = prod(int(dim) for dim in details["shape"].split(",") if dim) * BYTES[details["dtype"]]
            size = out * ranks if kind[1] == "reduce-scatter" else out
            collectives[CollectiveOp(kind[1].replace("-", "_"), NAMES[details["dtype"]], size, ranks)] += 1
    return LoweredGraph(hashlib.sha256(proto).hexdigest(), collectives, groups)
