"""`trainyard convert-nxd`: NxD's converter by its own flags, so that scripts written for it go on working.

Its booleans take a word, and any word but the empty one was true there, `False` included. Here they mean what they say.
"""

import argparse
from pathlib import Path
from typing import Any, NoReturn

import typer

from trainyard.checkpoint.convert import ConversionTarget, parse_bool
from trainyard.checkpoint.formats.hf import hf_tensors
from trainyard.checkpoint.formats.nxd.files import repack_nxd
from trainyard.checkpoint.io.storage import resolve_new_directory
from trainyard.checkpoint.io.torch_writer import TorchFileWriter
from trainyard.checkpoint.registry import OpenedCheckpoint, open_weights
from trainyard.cli.console import ProgressDisplay
from trainyard.cli.convert import run_conversion
from trainyard.cli.signals import interrupt_on_terminate
from trainyard.config.hf_config import from_hf
from trainyard.core.errors import UserError

CONTEXT_SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
DIRECTIONS = ("convert_from_full_state", "convert_to_full_state", "convert_from_xser", "convert_to_xser")
RENAMED_DIRECTIONS = {
    "convert_from_full_model": "convert_from_full_state",
    "convert_to_full_model": "convert_to_full_state",
}
"""What older scripts call two of them."""


class ConverterArgumentParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"convert-nxd: {message} (see trainyard convert-nxd --help)")


def convert_nxd(context: typer.Context) -> int:
    """The same with the flags of NxD's checkpoint_converter.py."""
    flags = build_parser().parse_args(context.args)
    chosen = {name for name in (*DIRECTIONS, *RENAMED_DIRECTIONS) if getattr(flags, name)}
    directions = {RENAMED_DIRECTIONS.get(name, name) for name in chosen}
    if len(directions) != 1:
        raise UserError(f"convert-nxd: one of --{', --'.join(DIRECTIONS)} is needed, not {len(directions)}")
    (direction,) = directions
    _reject_unsupported(flags)
    if direction in ("convert_from_xser", "convert_to_xser"):
        with ProgressDisplay("convert") as screen, interrupt_on_terminate():
            screen.update(0, 0)
            repack_nxd(flags.input_dir, flags.output_dir, xser=direction == "convert_to_xser")
        print(f"{flags.output_dir}: {'' if direction == 'convert_to_xser' else 'no '}xser")
        return 0
    model = from_hf(flags.config) if flags.config else None
    if model and flags.n_layers and flags.n_layers != model.layers:
        raise UserError(f"--n_layers {flags.n_layers}: {flags.config} has {model.layers} layers")
    given = _layout_from_flags(flags, model.num_kv_heads == model.heads if model else False)
    if direction == "convert_from_full_state":
        opened = open_weights(flags.input_dir, model)
        run_conversion(opened, flags.input_dir, flags.output_dir, ConversionTarget("nxd", given, xser=flags.save_xser))
    else:
        known = {key: value for key, value in given.items() if key not in ("qkv", "gate_up") and value not in (1, ())}
        if not flags.model_style:
            del known["style"]  # its files show
        opened = open_weights(flags.input_dir, model, known)
        _write_full_state(opened, flags.output_dir)
    return 0


def build_parser() -> ConverterArgumentParser:
    out = ConverterArgumentParser(prog="trainyard convert-nxd", description=__doc__, allow_abbrev=False)

    def flag(name: str, words: str, **rest: Any) -> None:
        out.add_argument(f"--{name}", help=words, **rest)

    def switch(name: str, words: str) -> None:
        flag(name, words, nargs="?", const=True, default=False, type=_parse_bool)

    flag("input_dir", "a file or directory of weights; for NxD's, its model directory", type=Path)
    flag("output_dir", "a directory that is new", type=Path, required=True)
    flag("hw_backend", "order of repeated kv heads", choices=("trn1", "trn2"), required=True)
    flag("config", "Hugging Face config.json", type=Path)
    flag("model_key", "key of the weights in a file", default="model")
    for name, words in (
        ("tp_size", "tensor-parallel ranks"),
        ("pp_size", "pipeline ranks"),
        ("ep_size", "expert ranks: 1"),
        ("virtual_pp_size", "virtual stages a rank"),
        ("kv_size_multiplier", "how often kv heads are repeated"),
    ):
        flag(name, words, type=int, default=1)
    flag("n_layers", "checked against --config", type=int, default=0)
    flag("pipeline_cuts", "last layer of each stage but the last, such as 9,19,29", default="")
    flag("model_style", "names of tensors (default: hf)", choices=("hf", "megatron"))
    switch("coalesce_qkv", "q, k and v in one matrix (as many kv heads as heads)")
    switch("qkv_linear", "q, k and v of NxD's GQA layer")
    switch("fuse_qkv", "the same, in one matrix")
    switch("load_xser", "found out from the files; accepted")
    switch("save_xser", "each tensor in a file of its own")
    switch("pad_attn_heads", "not supported")
    flag("i_tp_round_factor", "not supported", type=int, default=0)
    flag("hf_model_name", "not supported: nothing is downloaded here")
    flag("nxdt_yaml_config", "not supported: give --config")
    for name in (*DIRECTIONS, *RENAMED_DIRECTIONS):
        switch(
            name, f"as --{RENAMED_DIRECTIONS[name]}" if name in RENAMED_DIRECTIONS else "what to do: one of these four"
        )
    return out


def _parse_bool(word: str) -> bool:
    try:
        return parse_bool("", word or "false")
    except UserError:
        raise argparse.ArgumentTypeError(f"{word}: wanted true or false") from None


def _layout_from_flags(flags: argparse.Namespace, all_heads: bool) -> dict[str, Any]:
    """What the flags say of an NxD layout. Gate and up are one matrix in NxD's Llama, always."""
    qkv = "fused" if flags.fuse_qkv else "qkv_linear" if flags.qkv_linear else "separate"
    if flags.coalesce_qkv or (flags.model_style == "megatron" and all_heads):
        qkv = "coalesced"
    elif flags.model_style == "megatron":
        qkv = "qkv_linear"
    try:
        cuts = tuple(int(word) for word in flags.pipeline_cuts.split(",") if word)
    except ValueError:
        raise UserError(f"--pipeline_cuts {flags.pipeline_cuts}: wanted layer numbers such as 9,19,29") from None
    return {
        "tp": flags.tp_size,
        "pp": flags.pp_size,
        "vpp": flags.virtual_pp_size,
        "cuts": cuts,
        "kv_multiplier": flags.kv_size_multiplier,
        "kv_order": flags.hw_backend,
        "style": flags.model_style or "hf",
        "qkv": qkv,
        "gate_up": True,
    }


def _reject_unsupported(flags: argparse.Namespace) -> None:
    for name, plain, instead in (
        ("ep_size", 1, "experts are not supported"),
        ("i_tp_round_factor", 0, "padding of the MLP is not supported"),
        ("pad_attn_heads", False, "padding of heads is not supported"),
        ("hf_model_name", None, "nothing is downloaded here; give --input_dir"),
        ("nxdt_yaml_config", None, "give --config config.json"),
        ("model_key", "model", "weights are looked for under model, or bare"),
    ):
        if (value := getattr(flags, name)) != plain:
            raise UserError(f"--{name} {value}: {instead}")
    if not flags.input_dir:
        raise UserError("--input_dir: missing")


def _write_full_state(opened: OpenedCheckpoint, directory: Path) -> None:
    """One file of Hugging Face weights, as NxD's converter leaves it."""
    final = resolve_new_directory(directory)
    final.mkdir(exist_ok=True)
    writer = TorchFileWriter(final / "checkpoint.pt")
    try:
        with interrupt_on_terminate():
            for name, tensor in hf_tensors(opened.weights):
                writer.add(name, tensor)
            writer.close()
    except BaseException:
        writer.abandon()
        final.rmdir()
        raise
    print(f"{directory / 'checkpoint.pt'}: written (`trainyard convert` writes a Hugging Face directory instead)")
