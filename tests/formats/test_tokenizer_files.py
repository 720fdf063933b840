"""The tokenizer stays with the model through runs, checkpoints and conversions, and AutoTokenizer reads it."""

import json
import os
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.checkpoint.saved_runs import run_training
from tests.formats.test_convert import contents, convert
from tests.formats.test_nxd import GQA, RandomWeights, llama
from tests.support import configs
from trainyard import Trainer
from trainyard.cli.commands.convert import convert as convert_command
from trainyard.core.errors import UserError
from trainyard.data.text.tokenizer import TokenizerSpec, hf_tokenizer_files, load_tokenizer
from trainyard.formats import hf
from trainyard.formats.hf import write_hf

TEXT = "Ä tokenizer  reads\n\tthe same\u2028text <|endoftext|> twice: 1,234.5 €"


def train_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    return tokenizer


@pytest.fixture(scope="module")
def hf_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory with a tokenizer as transformers saves it."""
    directory = tmp_path_factory.mktemp("source") / "hf"
    write_hf(directory, RandomWeights(llama(**GQA, vocab=512)))
    fast = PreTrainedTokenizerFast(tokenizer_object=train_tokenizer(), eos_token="<|endoftext|>")
    fast.chat_template = "{{ messages }}"
    fast.save_pretrained(directory)
    (directory / "generation_config.json").write_text('{"eos_token_id": 0, "temperature": 0.5}')
    return directory


def tokenizer_of(directory: Path) -> dict[str, bytes]:
    weights = ("model.safetensors", "config.json", hf.CHECKSUM_FILE)
    return {name: data for name, data in contents(directory).items() if name not in weights}


def test_the_tokenizer_survives_native_and_nxd_checkpoints(hf_model: Path, tmp_path: Path) -> None:
    convert(hf_model, tmp_path / "native", "native", "tp=2")
    convert(tmp_path / "native", tmp_path / "again", "native", "dp=2")
    convert(tmp_path / "again", tmp_path / "nxd", "nxd", "tp=2")
    convert(tmp_path / "nxd", tmp_path / "back", "hf")
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json"} <= tokenizer_of(hf_model).keys()
    assert tokenizer_of(tmp_path / "back") == tokenizer_of(hf_model)
    expected, found = (AutoTokenizer.from_pretrained(path) for path in (hf_model, tmp_path / "back"))
    assert found(TEXT)["input_ids"] == expected(TEXT)["input_ids"]
    assert (found.eos_token_id, found.chat_template) == (expected.eos_token_id, expected.chat_template)


def test_the_tokenizer_next_to_the_given_config_is_copied(hf_model: Path, tmp_path: Path) -> None:
    """For weights without one, such as those that NxD saves."""
    convert(hf_model, tmp_path / "nxd", "nxd", "tp=2")
    for path in (tmp_path / "nxd").iterdir():
        if path.is_file():
            path.unlink()
    convert_command(str(tmp_path / "nxd"), str(tmp_path / "back"), config=hf_model / "config.json")
    assert tokenizer_of(tmp_path / "back") == tokenizer_of(hf_model)


def test_a_run_exports_the_tokenizer_of_the_model_it_started_from(hf_model: Path, tmp_path: Path) -> None:
    """From init_from to the checkpoints and to model/, and after resuming from a checkpoint."""
    model = json.loads(llama(**GQA, vocab=512).model_dump_json())
    checkpoint = {"init_from": str(hf_model), "every": 1, "export_hf": True}
    sections = {"checkpoint": checkpoint, "log": {"directory": str(tmp_path)}}
    Trainer(configs.tiny_config(model, **sections, train={"steps": 1})).run()
    shutil.rmtree(tmp_path / "run" / "model")
    sections["checkpoint"] = {"resume": "auto", "every": 1, "export_hf": True}
    summary, _ = run_training(configs.tiny_config(model, **sections, train={"steps": 2}))
    assert tokenizer_of(summary.directory / "model") == tokenizer_of(hf_model)
    assert tokenizer_of(convert(summary.directory, tmp_path / "converted", "hf")) == tokenizer_of(hf_model)


def test_a_resumed_run_names_a_damaged_tokenizer_file(hf_model: Path, tmp_path: Path) -> None:
    """The weights are intact and are used; the tokenizer comes from the model that the run started from."""
    model = json.loads(llama(**GQA, vocab=512).model_dump_json())
    checkpoint = {"init_from": str(hf_model), "every": 1, "export_hf": True}
    sections = {"checkpoint": checkpoint, "log": {"directory": str(tmp_path)}}
    Trainer(configs.tiny_config(model, **sections, train={"steps": 1})).run()
    path = tmp_path / "run" / "checkpoints" / "step_00000001" / "tokenizer.json"
    path.write_bytes(path.read_bytes()[:-1] + b" ")
    checkpoint["resume"] = "auto"
    summary, messages = run_training(configs.tiny_config(model, **sections, train={"steps": 2}))
    assert any(f"{path}: corrupt: its checksum differs" in message for message in messages)
    assert any("resuming from step 1" in message for message in messages)
    assert tokenizer_of(summary.directory / "model") == tokenizer_of(hf_model)


def write_tokenizer(kind: str, directory: Path) -> dict[str, str]:
    """The data section of a tokenizer."""
    tokenizer = train_tokenizer()
    if kind == "bytes":
        return {"tokenizer": "bytes"}
    if kind == "gpt2":
        tokenizer.model.save(str(directory))
        files = {"vocab_file": str(directory / "vocab.json"), "merges_file": str(directory / "merges.txt")}
        return {"tokenizer": "gpt2", **files}
    tokenizer.save(str(directory / kind))
    return {"tokenizer": str(directory / kind)}


@pytest.mark.parametrize("kind", ["bytes", "gpt2", "tokenizer.json", "other-name.json"])
def test_transformers_reads_the_tokenizer_that_a_run_used(kind: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT * 20)
    section = write_tokenizer(kind, tmp_path)
    data = {"source": "text", "paths": [str(tmp_path / "text.txt")], **section}
    sections: dict[str, Any] = {"checkpoint": {"export_hf": True}, "log": {"directory": str(tmp_path)}}
    model = {**configs.LLAMA, "vocab": 512}
    summary = Trainer(configs.tiny_config(model, data=data, train={"steps": 1}, **sections)).run()
    assert summary.exported_weights
    found = AutoTokenizer.from_pretrained(summary.exported_weights)
    spec = TokenizerSpec(section["tokenizer"], section.get("vocab_file"), section.get("merges_file"))
    tokenizer = load_tokenizer(spec)
    for text in (TEXT.replace("<|endoftext|>", ""), " a", "a  b\r\n", "\x00\u00ad"):
        ids = found(text)["input_ids"]
        assert ids == tokenizer.encode([text])[0].tolist()
        assert found.decode(ids) == text
    assert found.eos_token_id == tokenizer.end_id
    assert (
        json.loads((summary.exported_weights / "generation_config.json").read_text())["eos_token_id"]
        == found.eos_token_id
    )


def test_a_corrupt_tokenizer_is_not_converted(hf_model: Path, tmp_path: Path) -> None:
    native = convert(hf_model, tmp_path / "native", "native")
    (native / "tokenizer.json").write_bytes((native / "tokenizer.json").read_bytes()[:-1])
    with pytest.raises(UserError, match=r"native/tokenizer\.json: corrupt: its checksum differs"):
        convert(native, tmp_path / "out", "hf")
    (native / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"native/tokenizer\.json: corrupt: No such file"):
        convert(native, tmp_path / "out", "hf")


@pytest.mark.parametrize("name", ["../tokenizer.json", "model.safetensors", "/etc/passwd"])
def test_a_checkpoint_names_no_other_files(name: str, hf_model: Path, tmp_path: Path) -> None:
    """A commit file from elsewhere must not make a conversion read or write files outside of it."""
    native = convert(hf_model, tmp_path / "native", "native")
    manifest = json.loads((native / "complete.json").read_text().split("\n")[0])
    text = json.dumps({**manifest, "model_files": {name: "00000000"}})
    (native / "complete.json").write_text(f"{text}\n{zlib.crc32(text.encode()):08x}\n")
    with pytest.raises(UserError, match=r"complete\.json: corrupt: names a file"):
        convert(native, tmp_path / "out", "hf")


def test_all_files_of_an_export_are_on_disk_before_it_gets_its_name(
    hf_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a directory with complete weights and an empty config.json after a power failure."""
    synced: set[str] = set()

    def record(fd: int) -> None:
        synced.add(Path(os.readlink(f"/proc/self/fd/{fd}")).name)

    monkeypatch.setattr(os, "fsync", record)
    files = hf.read_model_files(hf_model)
    write_hf(tmp_path / "out", RandomWeights(llama(**GQA), torch.bfloat16), max_shard_bytes=2000, model_files=files)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "model.safetensors.index.json", "tokenizer.json", "generation_config.json"} <= names
    assert names <= synced


def test_a_sentencepiece_model_is_left_to_transformers(tmp_path: Path) -> None:
    import sentencepiece

    (tmp_path / "text.txt").write_text("a few words to train on\n" * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text.txt"), model_prefix=str(tmp_path / "tokenizer"), vocab_size=16, minloglevel=2
    )
    assert hf_tokenizer_files(TokenizerSpec(str(tmp_path / "tokenizer.model"))) == {}
