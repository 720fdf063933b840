"""Build the model of one rank: modules on the meta device first, then parameter values from any source."""

from collections.abc import Callable, Hashable, Mapping

import torch
from torch import Tensor, nn

from trainyard.core.errors import UserError
from trainyard.families import Blueprint, ModelConfig, blueprint_of, family_of
from trainyard.families.blueprint import layer_index
from trainyard.kernels.fp8_linear import Fp8Matrix
from trainyard.kernels.nf4 import Nf4Matrix
from trainyard.kernels.reference import Kernels
from trainyard.models.base import TransformerStage
from trainyard.models.init import ParameterValues
from trainyard.models.module_factory import Fp8Layers, ModuleFactory, import_module_class
from trainyard.parallel.axes import Axes
from trainyard.parallel.layout import StageSpec
from trainyard.parallel.tensor_parallel import Linear

FactoryClass = Callable[[Blueprint, Axes, Kernels, Fp8Layers | None], ModuleFactory]


def build_model(
    c: ModelConfig,
    device: torch.device | str = "cpu",
    axes: Axes | None = None,
    stage: StageSpec | None = None,
    kernels: Kernels | None = None,
    fp8: Fp8Layers | None = None,
    factory: FactoryClass = ModuleFactory,
) -> TransformerStage:
    """The model of one rank, or one pipeline stage of it. Buffers are on `device`; parameters have no memory yet."""
    blueprint = blueprint_of(c)
    axes = axes or Axes()
    _check_layer_kinds(c, blueprint)
    make = factory(blueprint, axes, kernels or Kernels(), fp8)
    make.linear_wrappers = c.linear.wrappers()
    if stage:
        make.layers = stage.layers
    try:
        model: TransformerStage = import_module_class(family_of(c).module)(c, make)
        _check_parameters(model, make)
    except UserError as error:
        raise UserError(f"model.family={c.family}: {error}") from None
    # `make.blocks` builds the layers of the stage only; embedding and head exist until here, so that the module of a
    # family knows nothing of stages.
    if stage:
        model.prune_to_stage(stage, blueprint)
    model.seed_linears()
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, buffer.to(device), persistent=False)
    return model


def _check_layer_kinds(c: ModelConfig, blueprint: Blueprint) -> None:
    """Refuse a configuration that calls layers with other parameters one kind: a plan would take one for the other."""
    if all(spec.layers is None for spec in blueprint.specs):
        return
    first_of_kind: dict[Hashable, int] = {}
    for layer in range(c.layers):
        first = first_of_kind.setdefault(c.layer_kind(layer), layer)
        if blueprint.block_specs(layer) != blueprint.block_specs(first):
            raise UserError(f"layers {first} and {layer} are of one kind, but have other rows in its blueprint")


def _check_parameters(model: nn.Module, make: ModuleFactory) -> None:
    """Refuse a module whose parameters are not those of its blueprint."""
    blueprint, built = make.blueprint, {None, *make.layers}
    expected = {name for name in blueprint.parameter_names() if layer_index(name) in built}
    for name, parameter in model.named_parameters():
        if name not in blueprint:
            raise UserError(f"its module has {name}, which its blueprint has not")
        expected.discard(name)
        shape = blueprint.local_shape(name, make.shard)
        if tuple(parameter.shape) != shape:
            raise UserError(
                f"{name} has the shape {list(parameter.shape)} in its module, {list(shape)} in its blueprint"
                + (f" at layout.tp={make.tp.size}" if make.tp.size > 1 else "")
            )
    if expected:
        raise UserError(f"its blueprint has {min(expected)}, which its module has not")


def assign_parameters(
    model: nn.Module, make_tensor: Callable[[str], Tensor], existing: dict[str, nn.Parameter] | None = None
) -> dict[str, nn.Parameter]:
    """Give every parameter its memory: from `existing` by name, else from `make_tensor`. Tied parameters stay tied.

    Returns the parameters by name.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    parameters = dict(existing or {})
    for module in list(model.modules()):
        for key, parameter in list(module.named_parameters(recurse=False)):
            name = names[parameter]
            if name not in parameters:
                tensor = make_tensor(name)
                parameters[name] = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor)
            module.register_parameter(key, parameters[name])
    return parameters


def store_weights(model: nn.Module, matrices: Mapping[str, Nf4Matrix | Fp8Matrix]) -> None:
    """Give linear layers the stored forms of their weights, by the weights' names. These are no parameters any more."""
    for name, module in model.named_modules():
        if isinstance(module, Linear) and (matrix := matrices.get(f"{name}.weight")):
            module.store(matrix)


def fill_parameters(model: nn.Module, values: ParameterValues, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Set the values of every parameter, for use without an optimizer."""
    assign_parameters(model, lambda name: values(name).to(dtype))
    return model
