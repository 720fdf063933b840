"""`trainyard convert`: a checkpoint from anywhere, to where it is wanted."""

import time
from pathlib import Path
from threading import Lock
from typing import Annotated, Literal

import torch
import typer

from trainyard import models
from trainyard.checkpoint.compare_logits import compare_logits
from trainyard.checkpoint.convert import DTYPE_CHOICES, ConversionTarget, parse_layout, total_bytes
from trainyard.checkpoint.convert import convert_checkpoint as carry_over
from trainyard.checkpoint.formats.tensor_map import unfused_shapes
from trainyard.checkpoint.registry import FORMAT_DESCRIPTIONS, OpenedCheckpoint, open_weights
from trainyard.cli.console import ProgressDisplay
from trainyard.cli.signals import interrupt_on_terminate
from trainyard.config.hf_config import from_hf
from trainyard.core.errors import RunStopped, UserError


def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A checkpoint; which form it has is found out.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="A directory that is new.")],
    to: Annotated[Literal["hf", "nxd", "native"], typer.Option("--to", help="The form to write.")] = "hf",
    layout: Annotated[
        str, typer.Option("--layout", metavar="KEY=VALUE,...", help="nxd, native: how it is cut, such as tp=8,pp=4.")
    ] = "",
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"] | None, typer.Option("--dtype", help="Default: as the source has it.")
    ] = None,
    xser: Annotated[bool, typer.Option("--xser", help="nxd: each tensor in a file of its own.")] = False,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="Hugging Face config.json, for a source that has none."),
    ] = None,
    source_layout: Annotated[
        str,
        typer.Option(
            "--source-layout", metavar="KEY=VALUE,...", help="What an NxD source may not show: kv_order, by_head."
        ),
    ] = "",
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="native: leave the optimizer's state behind.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Run both sides and print the largest logit difference.")
    ] = False,
) -> int:
    """Bring a checkpoint of any known form to Hugging Face's, NxD's or our own, at any layout, tensor by tensor.

    Read are: our checkpoints and runs, at URLs too; Hugging Face directories (safetensors, .bin, sharded or not); NxD
    and NxDT, old and new, xser or not; Megatron-LM iter_*/mp_rank_*; optimum-neuron's shards; one .pt file of weights.
    Foreign pickles are read as data: nothing in them runs.

    --layout for nxd: tp, pp, vpp, cuts (3:7), kv_multiplier, qkv (separate, coalesced, qkv_linear, fused), gate_up,
    kv_order (trn1, trn2), style (hf, megatron), by_head, vocab. For native: tp, pp, vpp, cp, dp, cuts.

    Examples:

      trainyard convert runs/my-run hf-model

      trainyard convert hf-model nxd-model --to nxd --layout tp=32,pp=8,kv_order=trn2 --xser --check

      trainyard convert nxd/step_1000 hf-model --config config.json

      trainyard convert megatron/ start --to native --layout tp=2
    """
    hints = parse_layout("nxd", source_layout, "--source-layout")
    opened = open_weights(source, from_hf(config) if config else None, hints)
    wanted = ConversionTarget(to, parse_layout(to, layout), DTYPE_CHOICES[dtype] if dtype else None, xser, weights_only)
    if xser and to != "nxd":
        raise UserError(f"--xser: goes with --to nxd, not {to}")
    for note in opened.notes:
        print(f"note: {note}")
    run_conversion(opened, source, target, wanted)
    if check:
        check_logits(opened, target, wanted)
    return 0


def run_conversion(opened: OpenedCheckpoint, source: str | Path, target: Path, wanted: ConversionTarget) -> None:
    """Convert, with a bar, and say what was done."""
    weights = models.family_of(opened.weights.model).blueprint(opened.weights.model).parameter_count()
    print(
        f"{source}: {FORMAT_DESCRIPTIONS[opened.format]}, {opened.weights.model.family} with {weights:,} weights",
        flush=True,
    )
    if wanted.format == "native":
        kept = opened.open_state and not wanted.weights_only
        print("with the optimizer's state" if kept else "weights alone: resume with checkpoint.weights_only=true")
    total, done, start = total_bytes(opened, wanted), 0, time.monotonic()
    one_by_one = Lock()  # files are written by several threads
    with ProgressDisplay("convert") as screen, interrupt_on_terminate():

        def wrote(count: int) -> None:
            nonlocal done
            with one_by_one:
                done += count
                screen.update(done, total)

        carry_over(opened, Path(source), target, wanted, wrote)
    seconds = max(time.monotonic() - start, 1e-9)
    print(f"{target}: {done / 2**20:,.1f} MiB in {seconds:.1f} s ({done / 2**20 / seconds:,.0f} MiB/s)")


def check_logits(opened: OpenedCheckpoint, target: Path, wanted: ConversionTarget) -> None:
    weights = opened.weights
    unseen = {key: wanted.layout[key] for key in ("kv_order", "by_head") if key in wanted.layout}  # all else shows
    found = compare_logits(weights, open_weights(target, weights.model, unseen).weights)
    print(f"largest logit difference {found.max_difference:.3g} (logits up to {found.max_logit:.3g})", flush=True)
    dtypes = {weights.dtype(part) for part in unfused_shapes(weights.model)}
    kept = wanted.dtype is None or all(torch.promote_types(each, wanted.dtype) == wanted.dtype for each in dtypes)
    if found.max_difference > 0 and kept:
        raise RunStopped(
            f"{target}: not the model that {opened.format} holds; nothing was rounded, so this is a defect"
        )
