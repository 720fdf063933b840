"""Adapters in the commands: inspect, push, and convert with --merge, to PEFT's folder and from it."""

import json
import re
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import Call, fail, succeed
from tests.formats.test_peft import lora_run, our_logits, peft_model, save
from tests.support.hf_reference import hf_model


def test_commands_on_an_adapter(call: Call, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    hf_model("llama-gqa").save_pretrained(tmp_path / "base")
    adapted = peft_model(base=str(tmp_path / "base"))
    save(adapted, tmp_path / "adapter")
    capfd.readouterr()  # the progress bars of transformers
    out = succeed(call("inspect", "adapter", "--tensors", "--check"))
    assert "adapter: a PEFT adapter\n" in out
    assert "adapter: r=4 lora_alpha=6 target_modules=" in out
    assert re.search(r"base_model\.model\.model\.layers\.1\.mlp\.up_proj\.lora_B\.weight +float32 +\[80, 4\]", out)
    facts = json.loads(succeed(call("inspect", "adapter", "--json")))
    assert (facts["format"], facts["modules"], facts["dtypes"]) == ("peft", 14, {"float32": 28})
    assert "adapter_model.safetensors" in succeed(call("push", "adapter", "hf://me/adapter", "--dry-run"))
    out = succeed(call("convert", "adapter", "merged", "--merge", "--check-bits"))
    difference = re.search(r"largest logit difference (\S+) between merged model and base with adapter", out)
    assert difference
    assert float(difference[1]) < 2e-5
    tokens = torch.arange(24).view(2, 12)
    merged = type(hf_model("llama-gqa")).from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(merged(tokens).logits, adapted(tokens).logits, atol=2e-5, rtol=1e-5)
    capfd.readouterr()
    succeed(call("convert", "adapter", "again", "--to", "peft", "--check"))
    files = [(tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("adapter", "again")]
    assert files[0] == files[1]
    fail(call("convert", "adapter", "bad"), "--to hf: has no place for adapters; nearest: --merge, or --to peft")
    fail(call("convert", "base", "bad", "--merge"), "--merge: the source has no adapter; nearest: ")
    fail(call("convert", "base", "bad", "--to", "peft"), "--to peft: the model has no LoRA adapter; nearest: --to hf")
    fail(call("convert", "base", "bad", "--base", "base"), "--base base: base is no adapter")
    (tmp_path / "base").rename(tmp_path / "moved")
    fail(call("convert", "adapter", "bad", "--merge"), "adapter: its base model .*/base cannot be opened: ")
    succeed(call("convert", "adapter", "from-moved", "--merge", "--base", "moved", "--to", "native"))


def test_a_run_is_merged_from_its_checkpoint(call: Call, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trainer = lora_run(tmp_path, every=3)
    directory = trainer.run().directory
    capfd.readouterr()
    out = succeed(call("convert", directory, "merged", "--merge", "--dtype", "bf16"))
    difference = re.search(r"largest logit difference (\S+) between merged model and base with adapter", out)
    assert difference
    assert 1e-5 < float(difference[1]) < 0.05
    succeed(call("convert", directory, "adapter", "--to", "peft"))
    files = [path / "adapter_model.safetensors" for path in (tmp_path / "adapter", directory / "adapter")]
    assert files[0].read_bytes() == files[1].read_bytes()
    out = succeed(call("convert", directory, "exact", "--merge"))
    tokens = torch.arange(24).view(2, 12)
    merged = type(hf_model("llama-gqa")).from_pretrained(tmp_path / "exact").eval()
    torch.testing.assert_close(merged(tokens).logits, our_logits(trainer.model, tokens), atol=2e-5, rtol=1e-5)
