"""Evaluation of checkpoints against the losses that transformers computes for the same models."""

import json
import math
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.evaluate.conftest import HfFolder, evaluate_one
from tests.support.forkserver import ForkServer
from tests.support.hf_folders import TEXTS, VOCAB, copy_without_end_token, edit_json, hf_stream_loss, make_tokenizer
from trainyard.core.errors import UserError

SEQ_LEN = 24


def stream_of_texts() -> torch.Tensor:
    tokenizer = make_tokenizer()
    return torch.tensor([token for text in TEXTS for token in [*tokenizer.encode(text), tokenizer.eos_token_id]])


@pytest.mark.parametrize("parts", [1, 4, 5])
def test_loss_by_position(hf_folder: HfFolder, text_file: Path, parts: int) -> None:
    """The parts of windows of 24 tokens, of which the last is partial, against transformers' losses token by token."""
    directory, model = hf_folder("llama")
    tokens = stream_of_texts()
    losses, counts = [0.0] * SEQ_LEN, [0] * SEQ_LEN
    for start in range(0, len(tokens) - 1, SEQ_LEN):
        window, labels = tokens[start : start + SEQ_LEN], tokens[start + 1 : start + SEQ_LEN + 1]
        with torch.no_grad():
            logits = model(input_ids=window[None]).logits[0, : len(labels)]
        for position, loss in enumerate(cross_entropy(logits, labels, reduction="none").tolist()):
            losses[position] += loss
            counts[position] += 1
    result = evaluate_one(directory, text_file, f"data.seq_len={SEQ_LEN}", by_position=parts)
    rows = result["by_position"]
    assert [row["first"] for row in rows] == [-(-SEQ_LEN * part // parts) for part in range(parts)]
    for row in rows:
        positions = slice(row["first"], row["last"] + 1)
        assert row["tokens"] == sum(counts[positions])
        assert row["loss"] == pytest.approx(sum(losses[positions]) / row["tokens"], rel=1e-6)
        assert row["perplexity"] == pytest.approx(math.exp(row["loss"]))
    assert rows[-1]["last"] == SEQ_LEN - 1
    assert not any("position" in name for name in result.keys() - {"by_position"})
    assert result["loss"] == pytest.approx(sum(losses) / sum(counts), rel=1e-6)


def test_loss_by_position_needs_next_tokens(hf_folder: HfFolder, hdf5_file: Path) -> None:
    directory, _ = hf_folder("bert")
    with pytest.raises(UserError, match="--by-position 2: needs a loss of next tokens"):
        evaluate_one(directory, hdf5_file, by_position=2)


@pytest.mark.parametrize("family", ["llama", "gpt"])
@pytest.mark.parametrize("stride", [None, 10])
def test_text_has_the_loss_of_transformers(
    hf_folder: HfFolder, text_file: Path, family: str, stride: int | None
) -> None:
    directory, model = hf_folder(family)
    tokens = stream_of_texts()
    total, count = hf_stream_loss(model, tokens, SEQ_LEN + 1, stride or SEQ_LEN)
    result = evaluate_one(directory, text_file, f"data.seq_len={SEQ_LEN}", stride=stride)
    assert result["tokens"] == count == len(tokens) - 1
    assert result["loss"] == pytest.approx(total / count, rel=1e-6)
    assert result["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-5)
    # The end token of a document has a loss but no text; the first token of the stream is not scored.
    num_bytes = sum(len(text.encode()) for text in TEXTS) - len(make_tokenizer().decode(tokens[0]).encode())
    assert result["bytes"] == num_bytes
    assert result["bits_per_byte"] == pytest.approx(total / math.log(2) / num_bytes, rel=1e-6)


def test_the_model_has_the_end_token_that_its_tokenizer_lacks(
    hf_folder: HfFolder, text_file: Path, tmp_path: Path
) -> None:
    def score(directory: Path) -> tuple[float, int, int]:
        found = evaluate_one(directory, text_file)
        return found["loss"], found["tokens"], found["bytes"]

    expected = score(hf_folder("llama")[0])
    copy_without_end_token(hf_folder("llama")[0], copy := tmp_path / "copy")
    assert score(copy) == expected
    edit_json(copy / "config.json", eos_token_id=None)
    with pytest.raises(UserError, match=r"data\.end_of_text") as refused:
        score(copy)
    assert "tokenizer.json" not in str(refused.value)  # it was copied to a temporary directory
    edit_json(copy / "generation_config.json", eos_token_id=[0, 1])
    assert score(copy) == expected


def test_batch_size_does_not_change_the_result(hf_folder: HfFolder, text_file: Path) -> None:
    directory, _ = hf_folder("llama")
    results = [
        evaluate_one(directory, text_file, f"data.seq_len={SEQ_LEN}", f"train.micro_batch={size}")
        for size in (1, 3, 64)
    ]
    assert len({result["tokens"] for result in results}) == 1
    assert [result["loss"] for result in results] == pytest.approx([results[0]["loss"]] * 3, rel=2e-7)


def test_documents_by_themselves(hf_folder: HfFolder, tmp_path: Path) -> None:
    """With both document keys, each document has the loss that it has alone."""
    directory, model = hf_folder("llama")
    tokenizer, total, count = make_tokenizer(), 0.0, 0
    texts = TEXTS[:3]  # all of them fit into one window
    (tmp_path / "valid.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    for text in texts:
        tokens = torch.tensor([*tokenizer.encode(text), tokenizer.eos_token_id])
        document_total, document_count = hf_stream_loss(model, tokens, 128, 128)
        total, count = total + document_total, count + document_count
    keys = ("data.seq_len=128", "data.document_mask=true", "data.mask_eod_loss=true")
    result = evaluate_one(directory, tmp_path / "valid.jsonl", *keys, text_key="body")
    assert (result["tokens"], result["loss"]) == (count, pytest.approx(total / count, rel=1e-6))


def test_token_files_of_megatron_core(hf_folder: HfFolder, tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    directory, model = hf_folder("gpt")
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, VOCAB, length) for length in (5, 1, 70, 33)]
    builder = IndexedDatasetBuilder(str(tmp_path / "x.bin"), dtype=np.uint16)
    for document in documents:
        builder.add_document(torch.from_numpy(document), [len(document)])
    builder.finalize(str(tmp_path / "x.idx"))
    total, count = hf_stream_loss(model, torch.from_numpy(np.concatenate(documents)), SEQ_LEN + 1, SEQ_LEN)
    result = evaluate_one(directory, tmp_path / "x", f"data.seq_len={SEQ_LEN}")
    assert (result["tokens"], result["loss"]) == (108, pytest.approx(total / count, rel=1e-6))
    decoded = make_tokenizer().decode(np.concatenate([documents[0][1:], *documents[1:]]), skip_special_tokens=True)
    assert result["bytes"] == pytest.approx(len(decoded.encode()), rel=0.02)  # invalid UTF-8 depends on neighbors


def test_bert_has_both_loss_terms_of_transformers(hf_folder: HfFolder, hdf5_file: Path) -> None:
    directory, model = hf_folder("bert")
    with h5py.File(hdf5_file) as file:
        arrays = {name: torch.from_numpy(file[name][:].astype(np.int64)) for name in file}
    labels = torch.full_like(arrays["input_ids"], -100)
    counted = arrays["masked_lm_positions"] > 0
    rows = torch.arange(len(labels))[:, None].expand_as(counted)
    labels[rows[counted], arrays["masked_lm_positions"][counted]] = arrays["masked_lm_ids"][counted]
    with torch.no_grad():
        out = model(
            input_ids=arrays["input_ids"],
            attention_mask=arrays["input_mask"],
            token_type_ids=arrays["segment_ids"],
            labels=labels,
            next_sentence_label=arrays["next_sentence_labels"],
        )
    result = evaluate_one(directory, hdf5_file)
    assert result["loss"] == pytest.approx(out.loss.item(), rel=1e-6)
    nsp = cross_entropy(out.seq_relationship_logits, arrays["next_sentence_labels"]).item()
    assert (result["nsp"], result["mlm"]) == pytest.approx((nsp, out.loss.item() - nsp), rel=1e-5)
    assert (result["tokens"], result["seq_len"]) == (int(counted.sum()), 32)
    assert "bits_per_byte" not in result


def test_packed_rows(hf_folder: HfFolder, text_file: Path, tmp_path: Path, cli: ForkServer) -> None:
    """Each label of a row counts, with the row as its context."""
    directory, model = hf_folder("llama")
    options = ["--output", tmp_path / "rows", "--seq-len", SEQ_LEN, "--tokenizer", directory]
    done = cli.run(["data", "pack", *map(str, (text_file, *options))])
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "rows").glob("*.arrow")
    total, count = 0.0, 0
    for row in pa.ipc.open_stream(file).read_all().to_pylist():
        tokens, labels = (torch.tensor([row[name]]) for name in ("input_ids", "labels"))
        with torch.no_grad():
            loss = model(tokens, labels=labels).loss
        scored = int((labels[:, 1:] != -100).sum())
        total, count = total + loss.item() * scored, count + scored
    result = evaluate_one(directory, tmp_path / "rows")
    assert (result["tokens"], result["loss"]) == (count, pytest.approx(total / count, rel=1e-6))
    assert result["seq_len"] == SEQ_LEN


@pytest.mark.parametrize(
    "convert",
    [["--to", "native", "--layout", "tp=2,pp=2"], ["--to", "nxd", "--layout", "tp=2,pp=2"], ["--to", "dcp"]],
    ids=["native", "nxd", "dcp"],
)
def test_every_format_has_the_same_loss(
    hf_folder: HfFolder, text_file: Path, tmp_path: Path, cli: ForkServer, convert: list[str]
) -> None:
    directory, _ = hf_folder("llama")
    done = cli.run(["convert", str(directory), str(tmp_path / "other"), *convert])
    assert done.returncode == 0, done.stderr
    expected, found = (
        evaluate_one(path, text_file, f"data.seq_len={SEQ_LEN}") for path in (directory, tmp_path / "other")
    )
    for result in (expected, found):
        del result["seconds"]
    assert found == expected


def test_user_metrics(hf_folder: HfFolder, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "eval_metrics.py").write_text(
        "def top_one(output, batch):\n"
        "    counts = batch['labels'] != -100\n"
        "    return ((output.logits().argmax(-1) == batch['labels']) & counts).sum(), counts.sum()\n"
    )
    monkeypatch.chdir(tmp_path)
    directory, model = hf_folder("llama")
    key = "evaluate.metrics.top_one=eval_metrics:top_one"
    result = evaluate_one(directory, text_file, "data.seq_len=128", key)
    tokens = stream_of_texts()
    hits: Any = 0
    for start in range(0, len(tokens) - 1, 128):
        window = tokens[start : start + 129]
        with torch.no_grad():
            hits += (model(window[None, :-1]).logits[0].argmax(-1) == window[1:]).sum().item()
    assert result["top_one"] == pytest.approx(hits / (len(tokens) - 1), rel=1e-9)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.split=1,1,1"], "data.split=1,1,1: an evaluation reads all of DATA in order"),
        (["layout.zero=1"], "layout.zero=1: an evaluation has no optimizer state"),
        (["data.seq_len=1000"], "longer than model.max_positions=128"),
    ],
)
def test_keys_without_a_meaning_are_refused(
    hf_folder: HfFolder, text_file: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        evaluate_one(hf_folder("llama")[0], text_file, *overrides)
