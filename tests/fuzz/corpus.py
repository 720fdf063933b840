"""Small valid files in every format that trainyard reads, which the fuzzer damages."""

import json
import shutil
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
from pyarrow import parquet

from tests.support.configs import tiny_config
from tests.support.forkserver import ForkServer
from tests.support.hf_folders import TEXTS, save_hf_folder
from tests.support.token_files import write_documents
from trainyard.prepare.arrow_writer import ArrowDatasetWriter
from trainyard.run.trainer import Trainer

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}>{{ message.content | trim }}"
    "{{ eos_token if loop.last else '\\n' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Uses a filter, a condition, a loop and special tokens."""


def write_corpus(directory: Path, server: ForkServer) -> Path:
    """Write one of each; returns `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    write_documents(directory / "tokens", [[[1, 2, 3], [4]], [[5, 6]], [[7]]])
    (directory / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:4]))
    parquet.write_table(pa.table({"text": TEXTS[:4]}), directory / "text.parquet")
    with ArrowDatasetWriter(directory / "packed", {"input_ids": "int32"}) as writer:
        writer.add({"input_ids": np.arange(64, dtype=np.int32).reshape(4, 16)})
    _write_bert(directory / "bert.hdf5")
    save_hf_folder(directory / "hf", "llama")
    _set_json(directory / "hf/tokenizer_config.json", chat_template=CHAT_TEMPLATE)
    done = server.run(["convert", directory / "hf", directory / "nxd", "--to", "nxd", "--layout", "tp=2"])
    assert done.returncode == 0, done.stderr
    log = {"directory": str(directory), "name": "run", "loggers": [], "every": 1}
    Trainer(tiny_config(train={"steps": 2}, checkpoint={"every": 2}, log=log)).run()
    configs = Path(__file__).parents[1] / "config"
    for name in ("nxdt/hf_llama3_8B.yaml", "megatron/gpt_345M_mp.sh"):
        shutil.copy(configs / name, directory)
    (directory / "own.yaml").write_text((directory / "run/config.yaml").read_text())
    return directory


def _write_bert(path: Path) -> None:
    mask = (np.arange(8) < np.array([[8], [5], [2]])).astype("i1")
    with h5py.File(path, "w") as file:
        file["input_ids"] = np.arange(24, dtype="i4").reshape(3, 8) * mask
        file["input_mask"] = mask
        file["segment_ids"] = np.zeros((3, 8), "i1")
        file["masked_lm_positions"] = np.array([[1, 2], [3, 0], [1, 0]], "i4")
        file["masked_lm_ids"] = np.array([[5, 6], [7, 0], [8, 0]], "i4")
        file["next_sentence_labels"] = np.array([0, 1, 0], "i1")


def _set_json(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
