"""Windows of a stream, and which data an evaluation refuses."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.evaluate.conftest import HfFolder, evaluate_one
from tests.support.examples import examples
from tests.support.token_files import write_documents
from trainyard.core.constants import IGNORE_INDEX
from trainyard.core.errors import UserError
from trainyard.data.loading.token_samples import ContiguousTokens
from trainyard.evaluate.data_sets import TokenWindows


@given(st.integers(2, 90), st.integers(1, 20), st.data())
@examples(200)
def test_every_token_but_the_first_is_scored_once(num_tokens: int, seq_len: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, seq_len))
    stream = ContiguousTokens("x", np.arange(num_tokens), np.zeros(1, np.int64))
    windows = TokenWindows(stream, seq_len, num_tokens, stride=stride)
    sample = windows.samples(np.arange(len(windows)))
    scored = sample["labels"] != IGNORE_INDEX
    assert sample["labels"][scored].tolist() == list(range(1, num_tokens))
    assert (sample["tokens"][scored] == sample["labels"][scored] - 1).all()
    context = np.broadcast_to(np.arange(seq_len), scored.shape)[scored] + 1
    # All tokens have at least the context of the guide: the whole window minus the stride, or all tokens before them.
    assert (context >= np.minimum(np.arange(1, num_tokens), seq_len - stride + 1)).all()


def test_a_stream_shorter_than_a_window(hf_folder: HfFolder, tmp_path: Path) -> None:
    write_documents(tmp_path / "x", [[[5, 6, 7]]])
    result = evaluate_one(hf_folder("llama")[0], tmp_path / "x")
    assert (result["tokens"], result["seq_len"]) == (2, 128)


def test_data_that_does_not_fit_is_one_line(
    hf_folder: HfFolder, text_file: Path, hdf5_file: Path, tmp_path: Path
) -> None:
    llama, bert = hf_folder("llama")[0], hf_folder("bert")[0]
    write_documents(tmp_path / "one", [[[5]]])
    write_documents(tmp_path / "large", [[[5, 299, 300]]])
    for checkpoint, data, options, message in (
        (llama, tmp_path / "none.jsonl", {}, "none.jsonl: no such file"),
        (llama, hdf5_file, {}, "masked sentence pairs, but llama is a causal model"),
        (bert, text_file, {}, "BERT is evaluated on masked sentence pairs in HDF5"),
        (llama, tmp_path / "one", {}, "has no token to predict"),
        (llama, tmp_path / "large", {}, "token 300 at 2, but model.vocab=300"),
        (llama, text_file, {"stride": 129}, "--stride 129: must be 1 to data.seq_len=128"),
        (llama, text_file, {"tokenizer": "missing.json"}, "data.tokenizer=missing.json: no such file"),
        (llama, text_file, {"text_key": "body"}, "line 1: no text under 'body'"),
    ):
        with pytest.raises(UserError, match=message):
            evaluate_one(checkpoint, data, **options)  # type: ignore[arg-type]


def test_text_needs_a_tokenizer(hf_folder: HfFolder, text_file: Path, tmp_path: Path) -> None:
    directory = tmp_path / "no-tokenizer"
    directory.mkdir()
    for name in ("config.json", "model.safetensors"):
        (directory / name).symlink_to(hf_folder("llama")[0] / name)
    with pytest.raises(UserError, match="the checkpoint has no tokenizer for text; pass --tokenizer"):
        evaluate_one(directory, text_file)
    found = evaluate_one(directory, text_file, tokenizer=str(hf_folder("llama")[0]))
    expected = evaluate_one(hf_folder("llama")[0], text_file)
    assert (found["loss"], found["bytes"]) == (expected["loss"], expected["bytes"])
