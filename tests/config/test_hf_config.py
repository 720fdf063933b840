"""config.json of transformers: what is read is written back, and hostile values are refused at once."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.support.forkserver import ForkServer
from trainyard.families.hf_config import from_hf, to_hf

IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@pytest.mark.parametrize("kind", ["LlamaConfig", "GPT2Config", "BertConfig"])
@pytest.mark.parametrize(
    "ids",
    [
        {},
        {"bos_token_id": 5, "eos_token_id": 7, "pad_token_id": 9},
        {"eos_token_id": [7, 8]},
        {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
    ],
)
def test_special_token_ids_are_kept(kind: str, ids: dict[str, Any], tmp_path: Path) -> None:
    """Guards against the defaults of transformers (1 and 2 for Llama) in place of the model's own ids."""
    original = getattr(transformers, kind)(**ids)
    original.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(to_hf(from_hf(tmp_path))))
    written = transformers.AutoConfig.from_pretrained(tmp_path)
    assert [getattr(written, key) for key in IDS] == [getattr(original, key) for key in IDS]


def test_a_config_of_a_billion_layers_is_refused_at_once(cli: ForkServer, tmp_path: Path) -> None:
    config = to_hf(from_hf(transformers.LlamaConfig(vocab_size=8, hidden_size=8, num_attention_heads=2).to_dict()))
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**9}))
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    done = cli.run(["convert", ".", "out"], cwd=tmp_path, timeout=240)
    assert done.returncode == 2
    assert done.stderr == (
        "trainyard: config.json: num_hidden_layers=1000000000: Input should be less than or equal to 10000\n"
    )
