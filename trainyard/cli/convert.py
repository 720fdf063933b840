"""`trainyard convert`: convert a checkpoint to another format or layout."""

import time
from pathlib import Path
from threading import Lock
from typing import Annotated, Literal

import torch
from typer import Argument, Option

from trainyard import models
from trainyard.checkpoint.compare_logits import compare_logits
from trainyard.checkpoint.convert import DTYPE_CHOICES, ConversionTarget, convert_checkpoint, parse_layout, total_bytes
from trainyard.checkpoint.formats.tensor_map import unfused_tensors
from trainyard.checkpoint.registry import FORMAT_DESCRIPTIONS, OpenedCheckpoint, open_weights
from trainyard.cli.console import ProgressDisplay
from trainyard.cli.signals import interrupt_on_terminate
from trainyard.config.hf_config import from_hf
from trainyard.core.errors import RunStopped, UserError

UNRECORDED_LAYOUT_KEYS = ("kv_order", "by_head")
"""Layout properties that NxD files do not reveal."""


def convert(
    source: Annotated[str, Argument(metavar="SRC", help="Checkpoint; its format is detected.")],
    target: Annotated[Path, Argument(metavar="DST", help="New output directory.")],
    to: Annotated[Literal["hf", "nxd", "native"], Option("--to", help="Output format.")] = "hf",
    layout: Annotated[
        str, Option("--layout", metavar="KEY=VALUE,...", help="nxd, native: output layout, such as tp=8,pp=4.")
    ] = "",
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"] | None, Option("--dtype", help="Default: that of the source.")
    ] = None,
    xser: Annotated[bool, Option("--xser", help="nxd: one file per tensor.")] = False,
    config: Annotated[
        Path | None, Option("--config", metavar="FILE", help="Hugging Face config.json, for a source without one.")
    ] = None,
    source_layout: Annotated[
        str,
        Option("--source-layout", metavar="KEY=VALUE,...", help="What NxD files may not reveal: kv_order, by_head."),
    ] = "",
    weights_only: Annotated[bool, Option("--weights-only", help="native: omit the optimizer state.")] = False,
    check: Annotated[bool, Option("--check", help="Run both models and print the largest logit difference.")] = False,
) -> int:
    """Convert a checkpoint to Hugging Face, NxD or native format, at any layout, one tensor at a time.

    Reads native checkpoints and run directories (also URLs); Hugging Face directories (safetensors, .bin, sharded or
    not); NxD and NxDT, old and new, xser or not; Megatron-LM iter_*/mp_rank_*; optimum-neuron shards; one .pt file of
    weights. Foreign pickles are parsed as data; nothing in them executes.

    --layout keys for nxd: tp, pp, vpp, pipeline_cuts (3:7), kv_multiplier, qkv (separate, coalesced, qkv_linear,
    fused), gate_up, kv_order (trn1, trn2), style (hf, megatron), by_head, vocab. For native: tp, pp, vpp, cp, dp,
    pipeline_cuts.

    Examples:

      trainyard convert runs/my-run hf-model

      trainyard convert hf-model nxd-model --to nxd --layout tp=32,pp=8 --check

      trainyard convert nxd/step_1000 hf-model --config config.json

      trainyard convert megatron/ start --to native --layout tp=2
    """
    hints = parse_layout("nxd", source_layout, "--source-layout")
    opened = open_weights(source, from_hf(config) if config else None, hints)
    spec = ConversionTarget(to, parse_layout(to, layout), DTYPE_CHOICES[dtype] if dtype else None, xser, weights_only)
    if xser and to != "nxd":
        raise UserError(f"--xser: requires --to nxd, not {to}")
    for note in opened.notes:
        print(f"note: {note}")
    run_conversion(opened, source, target, spec)
    if check:
        check_logits(opened, target, spec)
    return 0


def run_conversion(opened: OpenedCheckpoint, source: str | Path, target: Path, spec: ConversionTarget) -> None:
    """Convert with a progress bar and print a summary."""
    model = opened.weights.model
    weights = models.family_of(model).blueprint(model).parameter_count()
    print(f"{source}: {FORMAT_DESCRIPTIONS[opened.format]}, {model.family} with {weights:,} weights", flush=True)
    if spec.format == "native":
        with_state = opened.open_state and not spec.weights_only
        print("with optimizer state" if with_state else "weights only: resume with checkpoint.weights_only=true")
    total, done, start = total_bytes(opened, spec), 0, time.monotonic()
    lock = Lock()  # several threads write files
    with ProgressDisplay("convert") as progress, interrupt_on_terminate():

        def on_bytes(count: int) -> None:
            nonlocal done
            with lock:
                done += count
                progress.update(done, total)

        convert_checkpoint(opened, Path(source), target, spec, on_bytes)
    seconds = max(time.monotonic() - start, 1e-9)
    print(f"{target}: {done / 2**20:,.1f} MiB in {seconds:.1f} s ({done / 2**20 / seconds:,.0f} MiB/s)")


def check_logits(opened: OpenedCheckpoint, target: Path, spec: ConversionTarget) -> None:
    """Print the largest logit difference between source and target; any difference without rounding is an error."""
    weights = opened.weights
    hints = {key: spec.layout[key] for key in UNRECORDED_LAYOUT_KEYS if key in spec.layout}
    result = compare_logits(weights, open_weights(target, weights.model, hints).weights)
    print(f"largest logit difference {result.max_difference:.3g} (logits up to {result.max_logit:.3g})", flush=True)
    dtypes = {weights.dtype(name) for name in unfused_tensors(weights.model)}
    exact = spec.dtype is None or all(torch.promote_types(dtype, spec.dtype) == spec.dtype for dtype in dtypes)
    if result.max_difference > 0 and exact:
        source = f"the {opened.format} source"
        raise RunStopped(f"{target}: differs from {source} although nothing was rounded; this is a bug")
