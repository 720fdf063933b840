"""`trainyard convert-nxd`: Convert checkpoints with the flags of NxD's checkpoint_converter.py.

Existing scripts keep working. Boolean flags take a value: the reference treats any non-empty one as true, even `False`;
here `False` means false.
"""

import argparse
from pathlib import Path
from typing import Any, NoReturn

import typer

from trainyard.cli.commands.convert import run_conversion
from trainyard.cli.console import ProgressDisplay, interrupt_on_terminate, prefetch_weights
from trainyard.core.atomic_files import atomic_directory
from trainyard.core.errors import UserError
from trainyard.core.world import ONE_RANK
from trainyard.families.hf_config import from_hf
from trainyard.formats.convert import ConversionTarget, parse_bool
from trainyard.formats.hf import hf_tensors
from trainyard.formats.io.torch_writer import TorchFileWriter
from trainyard.formats.nxd.rank_files import repack_nxd
from trainyard.formats.registry import OpenedCheckpoint, open_weights
from trainyard.formats.transfer import check_links
from trainyard.remote.local_copies import local_weights
from trainyard.remote.storage import resolve_new_directory

CONTEXT_SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Typer passes all arguments through to argparse, which accepts the reference's flag syntax."""
DIRECTIONS = ("convert_from_full_state", "convert_to_full_state", "convert_from_xser", "convert_to_xser")
RENAMED_DIRECTIONS = {
    "convert_from_full_model": "convert_from_full_state",
    "convert_to_full_model": "convert_to_full_state",
}
"""Names that older versions of the reference use."""


class ConverterArgumentParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"convert-nxd: {message} (see trainyard convert-nxd --help)")


def convert_nxd(context: typer.Context) -> None:
    """Convert checkpoints with the flags of NxD's checkpoint_converter.py."""
    flags = build_parser().parse_args(context.args)
    selected = {name for name in (*DIRECTIONS, *RENAMED_DIRECTIONS) if getattr(flags, name)}
    directions = {RENAMED_DIRECTIONS.get(name, name) for name in selected}
    if len(directions) != 1:
        raise UserError(f"convert-nxd: exactly one of --{', --'.join(DIRECTIONS)} is needed, not {len(directions)}")
    (direction,) = directions
    _reject_unsupported(flags)
    if flags.hf_model_name:
        _download_model(flags, direction)
    if not flags.input_dir:
        raise UserError("--input_dir: missing")
    check_links(flags.input_dir)
    if direction in ("convert_from_xser", "convert_to_xser"):
        with ProgressDisplay("convert") as progress, interrupt_on_terminate():
            progress.update(0, 0)
            repack_nxd(flags.input_dir, flags.output_dir, xser=direction == "convert_to_xser")
        print(f"{flags.output_dir}: {'' if direction == 'convert_to_xser' else 'no '}xser")
        return
    model = from_hf(flags.config) if flags.config else None
    if model and flags.n_layers and flags.n_layers != model.layers:
        raise UserError(f"--n_layers {flags.n_layers}: {flags.config} has {model.layers} layers")
    layout = _layout_from_flags(flags, model.num_kv_heads == model.heads if model else False)
    if direction == "convert_from_full_state":
        opened = open_weights(flags.input_dir, model)
        target = ConversionTarget("nxd", layout, xser=flags.save_xser)
        run_conversion(opened, flags.input_dir, flags.output_dir, target, config=flags.config)
    else:
        hints = {key: value for key, value in layout.items() if key not in ("qkv", "gate_up") and value not in (1, ())}
        for key, given in (("style", flags.model_style), ("kv_order", flags.hw_backend)):
            if not given:
                del hints[key]  # the files reveal it, and a note says what was inferred
        opened = open_weights(flags.input_dir, model, hints)
        for note in opened.notes:
            print(f"note: {note}")
        _write_full_state(opened, flags.output_dir)


def build_parser() -> ConverterArgumentParser:
    parser = ConverterArgumentParser(prog="trainyard convert-nxd", description=__doc__, allow_abbrev=False)

    def flag(name: str, description: str, **options: Any) -> None:
        parser.add_argument(f"--{name}", help=description, **options)

    def switch(name: str, description: str) -> None:
        flag(name, description, nargs="?", const=True, default=False, type=_parse_bool)

    flag("input_dir", "file or directory with weights; for NxD checkpoints, the model directory", type=Path)
    flag("output_dir", "new output directory", type=Path, required=True)
    flag("hw_backend", "order of repeated kv heads (default: trn1)", choices=("trn1", "trn2"))
    flag("config", "Hugging Face config.json", type=Path)
    flag("model_key", "key of the weights in a file", default="model")
    for name, description in (
        ("tp_size", "tensor-parallel ranks"),
        ("pp_size", "pipeline ranks"),
        ("ep_size", "expert-parallel ranks"),
        ("virtual_pp_size", "virtual stages per rank"),
        ("kv_size_multiplier", "number of copies of each kv head"),
    ):
        flag(name, description, type=int, default=1)
    flag("n_layers", "checked against --config", type=int, default=0)
    flag("pipeline_cuts", "last layer of each stage except the last, such as 9,19,29", default="")
    flag("model_style", "tensor names (default: hf)", choices=("hf", "megatron"))
    switch("coalesce_qkv", "q, k and v in one matrix (requires as many kv heads as heads)")
    switch("qkv_linear", "q, k and v of NxD's GQA layer")
    switch("fuse_qkv", "like qkv_linear, in one matrix")
    switch("load_xser", "accepted and ignored: detected from the files")
    switch("save_xser", "one file per tensor")
    switch("pad_attn_heads", "not supported")
    flag("i_tp_round_factor", "not supported", type=int, default=0)
    flag("hf_model_name", "model of the Hub, or a directory, instead of --input_dir (--convert_from_full_state only)")
    flag("nxdt_yaml_config", "not supported: use --config")
    for name in DIRECTIONS:
        switch(name, "direction; exactly one of these four")
    for name, current in RENAMED_DIRECTIONS.items():
        switch(name, f"same as --{current}")
    return parser


def _parse_bool(value: str) -> bool:
    try:
        return parse_bool("", value or "false")
    except UserError:
        raise argparse.ArgumentTypeError(f"{value}: expected true or false") from None


def _layout_from_flags(flags: argparse.Namespace, is_mha: bool) -> dict[str, Any]:
    """Return the NxD layout that the flags describe. NxD's Llama always fuses gate and up.

    `is_mha` is true if the model has as many kv heads as heads.
    """
    qkv = "fused" if flags.fuse_qkv else "qkv_linear" if flags.qkv_linear else "separate"
    if flags.coalesce_qkv or (flags.model_style == "megatron" and is_mha):
        qkv = "coalesced"
    elif flags.model_style == "megatron":
        qkv = "qkv_linear"
    try:
        cuts = tuple(int(layer) for layer in flags.pipeline_cuts.split(",") if layer)
    except ValueError:
        raise UserError(f"--pipeline_cuts {flags.pipeline_cuts}: expected layer numbers such as 9,19,29") from None
    return {
        "tp": flags.tp_size,
        "pp": flags.pp_size,
        "ep": flags.ep_size,
        "vpp": flags.virtual_pp_size,
        "pipeline_cuts": cuts,
        "kv_multiplier": flags.kv_size_multiplier,
        "kv_order": flags.hw_backend or "trn1",
        "style": flags.model_style or "hf",
        "qkv": qkv,
        "gate_up": True,
    }


def _reject_unsupported(flags: argparse.Namespace) -> None:
    for name, default, reason in (
        ("i_tp_round_factor", 0, "padding of the MLP is not supported"),
        ("pad_attn_heads", False, "padding of heads is not supported"),
        ("nxdt_yaml_config", None, "use --config config.json"),
        ("model_key", "model", "weights must be under the key model, or at the top level"),
    ):
        if (value := getattr(flags, name)) != default:
            raise UserError(f"--{name} {value}: {reason}")


def _download_model(flags: argparse.Namespace, direction: str) -> None:
    """Set --input_dir, and --config if it is missing, to a copy of --hf_model_name."""
    if direction != "convert_from_full_state" or flags.input_dir:
        other = f"--input_dir {flags.input_dir}" if flags.input_dir else f"--{direction}"
        raise UserError(f"--hf_model_name {flags.hf_model_name}: not with {other}; only with --convert_from_full_state")
    prefetch_weights(flags.hf_model_name, ONE_RANK)
    flags.input_dir = local_weights(flags.hf_model_name)
    config = flags.input_dir / "config.json"
    flags.config = flags.config or (config if config.is_file() else None)


def _write_full_state(opened: OpenedCheckpoint, directory: Path) -> None:
    """Write one file of Hugging Face weights, like NxD's converter."""
    with interrupt_on_terminate(), atomic_directory(resolve_new_directory(directory)) as temporary:
        writer = TorchFileWriter(temporary / "checkpoint.pt")
        try:
            for name, tensor in hf_tensors(opened.weights):
                writer.add(name, tensor)
            writer.close()
        finally:
            writer.abandon()
    print(f"{directory / 'checkpoint.pt'}: written (`trainyard convert` writes a Hugging Face directory instead)")
