"""`trainyard convert`: Convert checkpoints between Hugging Face, NxD, DCP and native formats."""

import json
import math
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import gettempdir
from threading import Lock
from typing import Annotated, Literal

import torch
from typer import Argument, Option

from trainyard import models
from trainyard.checkpoint.weights import unfused_tensors
from trainyard.cli.console import ProgressDisplay, interrupt_on_terminate
from trainyard.cli.options import HfConfig, SourceLayout
from trainyard.core.disk_space import check_space
from trainyard.core.errors import RunStopped, UserError, one_line
from trainyard.core.quantities import counted, size_text
from trainyard.families.hf_config import from_hf
from trainyard.formats.compare import compare_logits
from trainyard.formats.convert import (
    DTYPE_CHOICES,
    ConversionTarget,
    TargetFormat,
    convert_checkpoint,
    first_different_tensor,
    parse_layout,
    total_bytes,
)
from trainyard.formats.hf import stored_tensors
from trainyard.formats.peft.merge import MergedWeights
from trainyard.formats.registry import FORMAT_DESCRIPTIONS, OpenedCheckpoint, detect_format, open_weights
from trainyard.formats.transfer import check_new_target, local_source, local_target
from trainyard.remote.location import is_url

UNRECORDED_LAYOUT_KEYS = ("kv_order", "by_head")
"""Layout properties that NxD files do not reveal."""


def convert(
    source: Annotated[str, Argument(metavar="SRC", help="Checkpoint, a path or URL; its format is detected.")],
    target: Annotated[str, Argument(metavar="DST", help="New output directory, a path or URL.")],
    to: Annotated[TargetFormat, Option(help="Output format.")] = "hf",
    layout: Annotated[
        str, Option(metavar="KEY=VALUE,...", help="nxd, native, dcp: output layout, such as tp=8,pp=4.")
    ] = "",
    dtype: Annotated[Literal["fp32", "bf16", "fp16"] | None, Option(help="Default: that of the source.")] = None,
    xser: Annotated[bool, Option("--xser", help="nxd: one file per tensor.")] = False,
    config: HfConfig = None,
    source_layout: SourceLayout = "",
    merge: Annotated[bool, Option("--merge", help="Merge the LoRA adapter of SRC into its model, in fp32.")] = False,
    base: Annotated[
        str | None, Option(metavar="MODEL", help="Model of an adapter SRC. Default: the one that it names.")
    ] = None,
    weights_only: Annotated[bool, Option("--weights-only", help="native: omit the optimizer state.")] = False,
    check: Annotated[
        bool, Option("--check", help="Run both models, and load the result's config.json with transformers.")
    ] = False,
    check_bits: Annotated[bool, Option("--check-bits", help="Compare every weight bit for bit afterwards.")] = False,
    dry_run: Annotated[bool, Option("--dry-run", help="Check everything and print what would be written.")] = False,
) -> None:
    """Convert a checkpoint to Hugging Face, NxD, DCP or native format, at any layout, one tensor at a time.

    Reads native checkpoints and run directories; Hugging Face directories (safetensors, .bin, sharded or not); NxD and
    NxDT, old and new, xser or not; Megatron-LM iter_*/mp_rank_* and torch_dist; torch.distributed.checkpoint (DCP),
    such as torchtitan's; optimum-neuron shards; PEFT adapters; one .pt file of weights. Foreign pickles are parsed as
    data; nothing in them executes. SRC and DST may be URLs such as s3://bucket/model; other formats than native are
    copied through TMPDIR.

    --layout keys for nxd: tp, pp, ep, vpp, pipeline_cuts (3:7), kv_multiplier, qkv (separate, coalesced, qkv_linear,
    fused), gate_up, kv_order (trn1, trn2), style (hf, megatron), by_head, vocab. For native: tp, pp, vpp, cp, dp,
    pipeline_cuts. For dcp: names (hf, torchtitan, torchtitan-0.2).

    Examples:

      trainyard convert runs/my-run hf-model

      trainyard convert hf-model nxd-model --to nxd --layout tp=32,pp=8 --check

      trainyard convert nxd/step_1000 hf-model --config config.json

      trainyard convert megatron/ start --to native --layout tp=2

      trainyard convert runs/my-lora-run merged --merge

      trainyard convert s3://bucket/run/step-9 s3://bucket/hf --config config.json
    """
    hints = parse_layout("nxd", source_layout, "--source-layout")
    spec = ConversionTarget(to, parse_layout(to, layout), DTYPE_CHOICES[dtype] if dtype else None, xser, weights_only)
    if xser and to != "nxd":
        raise UserError(f"--xser: requires --to nxd, not {to}")
    model = from_hf(config) if config else None
    with ExitStack() as stack:
        stack.enter_context(interrupt_on_terminate())
        download, upload = (stack.enter_context(ProgressDisplay(label)) for label in ("download", "upload"))
        path = stack.enter_context(local_source(source, download.update))
        if base and detect_format(Path(path)) != "peft":
            raise UserError(f"--base {base}: {source} is no adapter")
        opened = open_weights(path, model, {**hints, "base": base} if base else hints)
        for note in opened.notes:
            print(f"note: {note}")
        adapted = opened.weights
        if merge:
            opened = replace(opened, weights=MergedWeights(adapted, spec.dtype), open_state=None)
        if dry_run:
            print_plan(opened, source, target, spec)
            return
        directory = stack.enter_context(local_target(target, upload.update))
        run_conversion(opened, path, directory, spec, (source, target), config)
        if merge or check or check_bits:
            known = {key: spec.layout[key] for key in UNRECORDED_LAYOUT_KEYS if key in spec.layout}
            known |= {"base": base} if base else {}
            converted = open_weights(directory, None if to == "peft" else opened.weights.model, known)
            if merge:
                result = compare_logits(adapted, converted.weights)
                print(
                    f"largest logit difference {result.max_difference:.3g} between merged model and base with adapter "
                    f"(logits up to {result.max_logit:.3g})",
                    flush=True,
                )
            if check:
                check_logits(opened, converted, target, spec)
                if to == "hf":
                    check_config_json(directory, target)
            if check_bits:
                check_equal_bits(opened, converted, target, spec)
    if is_url(target):
        print(f"{target}: uploaded")


def print_source(opened: OpenedCheckpoint, source: str, spec: ConversionTarget) -> None:
    model = opened.weights.model
    weights = models.blueprint_of(model).parameter_count()
    print(f"{source}: {FORMAT_DESCRIPTIONS[opened.format]}, {model.family} with {weights:,} weights", flush=True)
    if spec.format == "native":
        with_state = opened.open_state and not spec.weights_only
        print("with optimizer state" if with_state else "weights only: resume with checkpoint.weights_only=true")


def print_plan(opened: OpenedCheckpoint, source: str, target: str, spec: ConversionTarget) -> None:
    """Print what a conversion would write. Refuses what the conversion would refuse."""
    print_source(opened, source, spec)
    size = total_bytes(opened, spec)
    check_new_target(target)
    check_space(Path(gettempdir() if is_url(target) else target), size)
    layout = "".join(f" {key}={value}" for key, value in spec.layout.items())
    print(f"{target}: would be {FORMAT_DESCRIPTIONS[spec.format]}{layout}, {size_text(size)}; nothing is written")


def run_conversion(
    opened: OpenedCheckpoint,
    source: str | Path,
    target: Path,
    spec: ConversionTarget,
    labels: tuple[str, str] | None = None,
    config: Path | None = None,
) -> None:
    """Convert with a progress bar and print a summary. `labels` are the user's words for source and target, `config`
    the config.json next to which the tokenizer may be."""
    source_label, target_label = labels or (str(source), str(target))
    print_source(opened, source_label, spec)
    start = time.monotonic()
    with interrupt_on_terminate():
        done = convert_with_progress(opened, source, target, spec, config)
    seconds = max(time.monotonic() - start, 1e-9)
    print(f"{target_label}: {size_text(done)} in {seconds:.1f} s ({size_text(done / seconds)}/s)")


def convert_with_progress(
    opened: OpenedCheckpoint, source: str | Path, target: Path, spec: ConversionTarget, config: Path | None = None
) -> int:
    """Convert with a progress bar, if the disk has room. Returns the bytes written."""
    total, done = total_bytes(opened, spec), 0
    lock = Lock()  # several threads write files
    check_space(target, total)
    with ProgressDisplay("convert") as progress:

        def on_bytes(count: int) -> None:
            nonlocal done
            with lock:
                done += count
                progress.update(done, total)

        convert_checkpoint(opened, Path(source), target, spec, on_bytes, config)
    return done


def check_logits(opened: OpenedCheckpoint, converted: OpenedCheckpoint, target: str, spec: ConversionTarget) -> None:
    """Print the largest logit difference between source and target; any difference without rounding is an error."""
    weights = opened.weights
    result = compare_logits(weights, converted.weights)
    print(f"largest logit difference {result.max_difference:.3g} (logits up to {result.max_logit:.3g})", flush=True)
    source = f"the {opened.format} source"
    if math.isnan(result.max_logit):
        raise RunStopped(f"--check: logits of {source} are NaN and cannot be compared; nearest: --check-bits")
    dtypes = {weights.dtype(name) for name in unfused_tensors(weights.model)}
    exact = spec.dtype is None or all(torch.promote_types(dtype, spec.dtype) == spec.dtype for dtype in dtypes)
    if result.max_difference > 0 and exact:
        raise RunStopped(f"{target}: differs from {source} although nothing was rounded; this is a bug")
    if math.isinf(result.max_difference):
        raise RunStopped(f"{target}: some logits are finite in {source} only; nearest: a --dtype of wider range")


def check_config_json(directory: Path, target: str) -> None:
    """Load the written config.json with transformers, if that is installed, and compare the shapes of its model with
    the written tensors; print the result in one line. Raises RunStopped if transformers refuses it."""
    try:
        import transformers
    except ImportError:
        print("config.json: not checked with transformers, which is not installed", flush=True)
        return
    version, config = f"transformers {transformers.__version__}", json.loads((directory / "config.json").read_text())
    if config["model_type"] not in transformers.CONFIG_MAPPING:
        print(f"config.json: not checked: {version} has no model_type={config['model_type']}", flush=True)
        return
    try:
        loaded = transformers.AutoConfig.from_pretrained(directory)
        with torch.device("meta"):
            model = getattr(transformers, config["architectures"][0])(loaded)
    except Exception as error:  # of any kind: transformers validates with several libraries
        raise RunStopped(f"{target}/config.json: {version} does not load it: {one_line(error)}") from None
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    for stored in stored_tensors(from_hf(directory)):
        if shapes.get(stored.name, stored.shape) != stored.shape:
            raise RunStopped(f"{target}/config.json: {version} expects {stored.name} of {list(shapes[stored.name])}")
    print(f"config.json: {version} loads it", flush=True)


def check_equal_bits(
    opened: OpenedCheckpoint, converted: OpenedCheckpoint, target: str, spec: ConversionTarget
) -> None:
    """Raise RunStopped unless the target holds every value of the source, rounded to the requested dtype."""
    if name := first_different_tensor(opened, converted, spec):
        raise RunStopped(f"{target}: {name} differs from the {opened.format} source; this is a bug")
    count = len(unfused_tensors(opened.weights.model))
    print(f"all {counted(count, 'tensor')} are equal bit for bit{' after rounding' if spec.dtype else ''}", flush=True)
