"""`trainyard inspect`: Report what a checkpoint contains."""

import json
import shutil
import textwrap
from collections import Counter
from math import prod
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from trainyard import models
from trainyard.checkpoint.checkpoint import Checkpoint
from trainyard.checkpoint.weights import unfused_tensors
from trainyard.cli.console import ProgressDisplay, interrupt_on_terminate
from trainyard.cli.options import AsJson, HfConfig, SourceLayout
from trainyard.core.errors import RunStopped
from trainyard.core.quantities import counted
from trainyard.families.hf_config import from_hf
from trainyard.formats.convert import parse_layout
from trainyard.formats.nxd.rank_files import NxdWeights
from trainyard.formats.peft.adapter import Adapter, read_adapter
from trainyard.formats.registry import (
    FORMAT_DESCRIPTIONS,
    OpenedCheckpoint,
    detect_format,
    open_weights,
    verify_checksums,
)
from trainyard.formats.transfer import local_source


def inspect(
    checkpoint: Annotated[str, Argument(metavar="CHECKPOINT", help="Path or URL; its format is detected.")],
    tensors: Annotated[bool, Option("--tensors", help="List every tensor with its shape and dtype.")] = False,
    check: Annotated[bool, Option("--check", help="Read everything: checksums and non-finite values.")] = False,
    config: HfConfig = None,
    source_layout: SourceLayout = "",
    as_json: AsJson = False,
) -> None:
    """Report format, model, step, layout, dtypes and size of a checkpoint of any format that convert reads.

    Tensors have trainyard's names. With --check, a corrupt file or a value that is not finite ends with exit code 2 or
    1.

    Examples:

      trainyard inspect runs/my-run

      trainyard inspect torchtitan/step-1000 --config config.json --tensors
    """
    hints = parse_layout("nxd", source_layout, "--source-layout")
    model = from_hf(config) if config else None
    with (
        interrupt_on_terminate(),
        ProgressDisplay("download") as progress,
        local_source(checkpoint, progress.update) as path,
    ):
        if isinstance(path, Path) and detect_format(path) == "peft":
            inspect_adapter(read_adapter(path), checkpoint, tensors, check, as_json)
            return
        checksums = "all checksums agree" if check and verify_checksums(path) else "it has no checksums"
        opened = open_weights(path, model, hints)
        facts = describe(opened)
        if as_json:
            listed = {"tensors": list_tensors(opened)} if tensors else {}
            print(json.dumps({"path": checkpoint, "format": opened.format, **facts, **listed}))
        else:
            print(f"{checkpoint}: {FORMAT_DESCRIPTIONS[opened.format]}")
            for name, value in facts.items():
                print_fact(name, value)
            for name, (dtype, shape) in list_tensors(opened).items() if tensors else ():
                print(f"  {name:<40}{dtype:<10}{shape}")
        if check:
            check_values(opened, checkpoint)
            if not as_json:
                print(f"{checkpoint}: all values are finite; {checksums}")


def inspect_adapter(adapter: Adapter, label: str, tensors: bool, check: bool, as_json: bool) -> None:
    """Report an adapter, whose base need not be there."""
    config = adapter.config
    targets = ("target_modules", "target_parameters", "modules_to_save")
    keys = ("r", "lora_alpha", "use_rslora", "use_dora", *targets, "peft_version")
    listed = {
        name: (str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in adapter.tensors.items()
    }
    facts = {
        "base": adapter.base,
        "adapter": {key: config[key] for key in keys if config.get(key)},
        "modules": len(adapter.modules),
        "weights": sum(prod(shape) for _, shape in listed.values()),
        "bytes": sum(prod(tensor.shape) * tensor.dtype.itemsize for tensor in adapter.tensors.values()),
        "dtypes": dict(Counter(dtype for dtype, _ in listed.values())),
    }
    if as_json:
        print(json.dumps({"path": label, "format": "peft", **facts, **({"tensors": listed} if tensors else {})}))
    else:
        print(f"{label}: {FORMAT_DESCRIPTIONS['peft']}")
        for name, value in facts.items():
            print_fact(name, value)
        for name, (dtype, shape) in listed.items() if tensors else ():
            print(f"  {name:<70}{dtype:<10}{shape}")
    bad = [name for name, tensor in adapter.tensors.items() if check and not tensor.read().isfinite().all()]
    if bad:
        raise RunStopped(f"{label}: values that are not finite in {counted(len(bad), 'tensor')}; the first is {bad[0]}")


def describe(opened: OpenedCheckpoint) -> dict[str, Any]:
    """Facts about a checkpoint by name."""
    weights = opened.weights
    blueprint = models.blueprint_of(weights.model)
    slices = unfused_tensors(weights.model)
    dtypes = Counter(str(weights.dtype(name)).removeprefix("torch.") for name in slices)
    facts: dict[str, Any] = {
        "model": weights.model.model_dump(mode="json", exclude_none=True),
        "weights": blueprint.parameter_count(),
        "bytes": sum(piece.numel * weights.dtype(name).itemsize for name, piece in slices.items()),
        "dtypes": dict(dtypes),
        "optimizer_state": opened.open_state is not None,
    }
    if isinstance(weights, Checkpoint):
        manifest = weights.manifest
        keys = ("step", "updates", "consumed_samples", "time", "versions")
        facts |= {key: manifest[key] for key in keys if key in manifest}
        layout = weights.config.layout.model_dump(mode="json", exclude_none=True)
        facts |= {"files": len(weights.files), "layout": layout}
    if isinstance(weights, NxdWeights):
        facts |= {"layout": vars(weights.layout)}
    return facts | ({"notes": list(opened.notes)} if opened.notes else {})


def list_tensors(opened: OpenedCheckpoint) -> dict[str, tuple[str, list[int]]]:
    """Dtype and shape of every tensor by name."""
    dtype = opened.weights.dtype
    slices = unfused_tensors(opened.weights.model)
    return {name: (str(dtype(name)).removeprefix("torch."), list(piece.sizes)) for name, piece in slices.items()}


def print_fact(name: str, value: Any) -> None:
    if isinstance(value, list):
        for item in value:
            print(f"  {name.removesuffix('s')}: {item}")
        return
    if isinstance(value, dict):
        value = " ".join(f"{key}={item}" for key, item in value.items())
    elif isinstance(value, bool):
        value = "yes" if value else "no"
    elif isinstance(value, int):
        value = f"{value:,}"
    width = shutil.get_terminal_size().columns
    line = f"  {name.replace('_', ' ')}: {value}"
    print(textwrap.fill(line, width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False))


def check_values(opened: OpenedCheckpoint, label: str) -> None:
    """Read all weights. Raises RunStopped for values that are not finite."""
    weights = opened.weights
    bad = [name for name, piece in unfused_tensors(weights.model).items() if not weights.read(piece).isfinite().all()]
    if bad:
        raise RunStopped(f"{label}: values that are not finite in {counted(len(bad), 'tensor')}; the first is {bad[0]}")
