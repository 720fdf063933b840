"""What one stage of a full-size recipe is to XLA: the graph of a micro batch, forward and backward, lowered to HLO.

Weights are placeholders, shapes without memory, so nothing of it can run; the other ranks are names in the groups of
collectives. Any rank of 512 can be had so, on a laptop.
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

from tests.xla.replicas import mesh_of
from trainyard import models
from trainyard.config.schema import Config
from trainyard.devices.neuron.xla_device import XlaDevice
from trainyard.parallel import recompute
from trainyard.parallel.axes import Axes
from trainyard.parallel.context_parallel import ContextAxis
from trainyard.parallel.layout import Layout
from trainyard.parallel.tensor_parallel import TensorAxis
from trainyard.train.cross_entropy import make_head_loss
from trainyard.train.losses import make_loss
from trainyard.train.optim.flat_state import DTYPES

VARIABLES = {"XLA_ALWAYS_ALLREDUCE": "1"}
"""Else torch_xla leaves out the sums of a process that is alone."""
NAMES = {"bf16": "bfloat16", "f32": "float32", "s32": "int32"}
BYTES = {"bf16": 2, "f32": 4, "s32": 4}
COLLECTIVE = re.compile(r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-\w+)\(")
SAYS = re.compile(r" = \(?(?P<dtype>\w+)\[(?P<shape>[\d,]*)\].*replica_groups={(?P<groups>{.*?})}")
"""Of a collective. Sums give a pair, of which the second is what the next one waits for."""


class Crossing(NamedTuple):
    """A collective of the graph."""

    kind: str
    dtype: str
    size: int
    """Bytes of the larger one of what goes in and what comes out."""
    ranks: int


class Lowered(NamedTuple):
    digest: str
    crossings: Counter[Crossing]
    groups: set[str]
    """Every list of groups that is in the graph."""


def lower(config: Config, ranks: list[int]) -> list[Lowered]:
    """The graph of each of these ranks."""
    device = XlaDevice()
    device.prepare(False, precision=config.precision.kind)
    assert config.layout.ranks
    layout = Layout.from_config(config, config.layout.ranks)
    stages = [_build(config, layout, rank, device) for rank in ranks]
    device.flush()  # constants such as a rank's number are sent: from now on they are inputs
    return [_trace(config, model, device) for model in stages]


def _build(config: Config, layout: Layout, rank: int, device: XlaDevice) -> models.TransformerStage:
    mesh = mesh_of(layout, rank, device)
    (stage,) = layout.stages_on(mesh.coords["pp"])
    axes = Axes(
        TensorAxis(mesh.tp, config.layout.sequence_parallel), ContextAxis(mesh.cp, config.layout.cp_method, True)
    )
    model = models.build_model(config.model, device.torch_device, axes, stage, device.kernels())
    recompute.apply_recompute(list(model.layers.children()), config.recompute)
    return model.train()


def _trace(config: Config, model: models.TransformerStage, device: XlaDevice) -> Lowered:
    torch_xla._XLAC._set_all_reduce_token(str(device.torch_device), None)  # each collective waits for the one before it
    compute = DTYPES[config.precision.compute_dtype]
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    weights = models.assign_parameters(model, lambda name: placeholder(shapes[name], compute))
    rows = (config.train.micro_batch, config.data.seq_len // config.layout.cp)
    batch = {name: placeholder(rows, torch.int32) for name in ("tokens", "labels")}
    batch |= {"sample_ids": placeholder(rows[:1], torch.int32), "rng_key": placeholder((2,), torch.int32)}
    between = (rows[0], rows[1] // (model.tp.size if model.tp.sequence_parallel else 1), config.model.hidden)
    given = None if model.is_first else placeholder(between, compute).requires_grad_()
    output = model(batch, given)
    if model.is_last:
        loss = make_loss(config.model.family, make_head_loss(device.kernels(), None, None, device.max_logits_bytes))
        results = [total for total, _ in loss.terms(output, batch).values()]
        results[0].backward()
    else:
        results = [output]
        output.backward(placeholder(between, compute))
    results += [weight.grad for weight in weights.values()] + ([] if given is None else [given.grad])
    return read(torch_xla._XLAC._get_xla_tensors_hlo(results), torch_xla._XLAC._get_xla_tensors_hlo_proto(results))


def placeholder(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return xla_builder.create_placeholder_tensor(shape, dtype)


def read(text: str, proto: bytes) -> Lowered:
    crossings: Counter[Crossing] = Counter()
    groups: set[str] = set()
    for line in text.splitlines():
        if kind := COLLECTIVE.search(line):
            found = SAYS.search(line)
            assert found, line
            groups.add(found["groups"])
            ranks = len(found["groups"].split("}")[0].split(","))
            out = prod(int(side) for side in found["shape"].split(",") if side) * BYTES[found["dtype"]]
            size = out * ranks if kind[1] == "reduce-scatter" else out
            crossings[Crossing(kind[1].replace("-", "_"), NAMES[found["dtype"]], size, ranks)] += 1
    return Lowered(hashlib.sha256(proto).hexdigest(), crossings, groups)
