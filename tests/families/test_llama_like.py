"""Families that share Llama's block, each through every format that has it, bit for bit."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.hf_reference import LLAMA_LIKE, MOE_VARIANTS, hf_model
from trainyard.core.errors import UserError
from trainyard.families import family_of
from trainyard.formats.convert import ConversionTarget, convert_checkpoint, parse_layout
from trainyard.formats.registry import open_weights


def convert(source: Path, target: Path, kind: str, layout: str = "") -> None:
    conversion = ConversionTarget(kind, parse_layout(kind, layout))  # type: ignore[arg-type]
    convert_checkpoint(open_weights(source), source, target, conversion, lambda size: None)


@pytest.mark.parametrize("variant", [*LLAMA_LIKE, *MOE_VARIANTS, "qwen3_next-odd"])
def test_formats_round_trip_bit_exact(variant: str, tmp_path: Path) -> None:
    hf_model(variant).save_pretrained(tmp_path / "start")
    original = load_file(tmp_path / "start" / "model.safetensors")
    formats = [("native", "tp=2,pp=2"), ("dcp", "")]
    if family_of(open_weights(tmp_path / "start").weights.model).nxd_styles:
        formats.append(("nxd", "tp=2,kv_multiplier=1"))
    else:
        with pytest.raises(UserError, match="NxD checkpoints hold models of llama"):
            convert(tmp_path / "start", tmp_path / "nxd", "nxd", "tp=2")
    for kind, layout in formats:
        convert(tmp_path / "start", tmp_path / kind, kind, layout)
        if kind != "native":
            (tmp_path / kind / "config.json").write_bytes((tmp_path / "start" / "config.json").read_bytes())
        convert(tmp_path / kind, tmp_path / f"{kind}-hf", "hf")
        back = load_file(tmp_path / f"{kind}-hf" / "model.safetensors")
        assert back.keys() == original.keys()
        assert all(torch.equal(back[name], tensor) for name, tensor in original.items())
