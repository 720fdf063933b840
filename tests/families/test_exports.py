"""What `convert` writes as a Hugging Face directory is a model of transformers: loaded whole, it is the original one,
and generates the same tokens there and here."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.families.test_llama_like import convert
from tests.inference.test_generate import END, VOCAB, expected_tokens, load, random_prompts, run_prompts
from tests.support.hf_reference import MOE_VARIANTS, VARIANTS, hf_model, known_keys

NEW_TOKENS = 12
SIZES = {"vocab_size": VOCAB, "eos_token_id": END, "bos_token_id": END, "initializer_range": 0.1, "init_std": 0.1}
FAMILIES = {name: family for name, (family, _) in {**VARIANTS, **MOE_VARIANTS}.items() if family != "bert"}
"""By variant."""
FIRST = {family: name for name, family in reversed(FAMILIES.items())}.values()
"""The first variant of each family."""


@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=[pytest.mark.nightly] * (name not in FIRST)) for name in FAMILIES]
)
def test_transformers_loads_an_export_and_generates_the_same_tokens(variant: str, tmp_path: Path) -> None:
    """A batch of two holds prompts of one token, of a few, and of more than any window."""
    original = hf_model(variant, **known_keys(variant, SIZES))
    original.save_pretrained(tmp_path / "start")
    convert(tmp_path / "start", tmp_path / "hf", "hf")
    exported, report = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(report.values()), report
    prompts = random_prompts(1, 9, 40)
    tokens = torch.tensor(prompts[2:])
    with torch.no_grad():
        torch.testing.assert_close(exported.eval()(tokens).logits, original(tokens).logits)
    expected = [expected_tokens(original, prompt, max_new_tokens=NEW_TOKENS) for prompt in prompts]
    assert run_prompts(load(tmp_path / "hf", max_batch=2), prompts, max_new_tokens=NEW_TOKENS) == expected
