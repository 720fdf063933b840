"""Every key of every config.json, changed in turn: the file is refused in one line, or means the model that it is in
transformers. Nothing is accepted and wrong."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tests.support import configs
from tests.support.hf_reference import MOE_VARIANTS, VARIANTS, hf_forward, hf_model
from trainyard import models
from trainyard.checkpoint.weights import local_values
from trainyard.core.errors import UserError
from trainyard.families import find_family
from trainyard.families.hf_config import from_hf
from trainyard.formats.hf import open_hf

FAMILY_OF = {name: family for name, (family, _) in {**VARIANTS, **MOE_VARIANTS}.items()}
OTHERS = (True, 2, 0.5, "full_attention")
"""What a key without a value may become."""


def other_values(key: str, value: Any) -> Iterator[Any]:
    """Values that a key might have instead."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, 2 * value, 0)
    elif isinstance(value, float):
        yield from (0.5 * value + 0.125, 0.0)
    elif isinstance(value, str):
        yield from ("gelu", "relu") if "act" in key else ("other",)
    elif isinstance(value, list) and value:
        yield from (value[::-1], value[:-1], [])
    elif isinstance(value, dict):
        for inner, item in value.items():
            yield from ({**value, inner: other} for other in other_values(inner, item))
        yield {**value, "rope_type": "linear", "factor": 2.0}
        yield {**value, "partial_rotary_factor": 0.5}
    elif value is None:
        yield from OTHERS


def mutations(data: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for key, value in data.items():
        if key not in ("architectures", "dtype", "model_type", "transformers_version"):
            yield f"{key} missing", {other: item for other, item in data.items() if other != key}
            for other in other_values(key, value):
                yield f"{key}={other}", {**copy.deepcopy(data), key: other}


def build_reference(data: dict[str, Any], family: str) -> nn.Module | None:
    """The model of transformers with random values; None if it makes none of this file."""
    torch.manual_seed(1)
    try:
        config = transformers.AutoConfig.for_model(**copy.deepcopy(data))
        config._attn_implementation = "eager"
        model: nn.Module = getattr(transformers, find_family(family).hf.architecture)(config)
    except Exception:  # whatever its validation and its modules raise
        return None
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def difference(data: dict[str, Any], family: str, directory: Path) -> float | None:
    """Largest difference between the logits here and there; None if transformers makes no model of the file, UserError
    if we refuse it."""
    file = directory / "config.json"
    file.write_text(json.dumps(data))
    from_hf(data)
    if (reference := build_reference(data, family)) is None:
        return None
    batch = configs.tiny_batch("bert" if find_family(family).has_masked_positions else "llama")
    try:
        with torch.no_grad():
            expected, _ = hf_forward(family, reference, batch)
        reference.save_pretrained(directory)  # type: ignore[operator]
    except Exception:  # a file that transformers builds, but cannot run
        return None
    file.write_text(json.dumps(data))
    weights = open_hf(directory)
    values = local_values(weights)
    ours = models.fill_parameters(models.build_model(weights.model), lambda name: values(name).clone()).eval()
    with torch.no_grad():
        return float((ours(batch).logits() - expected).abs().max())


@pytest.mark.nightly
@pytest.mark.parametrize("variant", FAMILY_OF)
def test_no_changed_key_is_accepted_and_wrong(variant: str, tmp_path: Path) -> None:
    data = json.loads(hf_model(variant).config.to_json_string())
    wrong, same = {}, 0
    for name, changed in mutations(data):
        for file in tmp_path.glob("*"):
            file.unlink()
        try:
            found = difference(changed, FAMILY_OF[variant], tmp_path)
        except UserError:
            continue
        same += found is not None
        if found is not None and not found < 1e-3:
            wrong[name] = found
    assert not wrong
    assert same > 10
