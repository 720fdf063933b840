"""Command-line options that several commands share."""

import glob
import os
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from trainyard.config.recipes import recipe_names
from trainyard.core.errors import UserError


def complete_source(incomplete: str) -> list[str]:
    """Recipe names, files and directories that start with `incomplete`, for the shell."""
    names = [name for name in recipe_names() if name.startswith(incomplete)]
    return names + [f"{path}/" if os.path.isdir(path) else path for path in sorted(glob.glob(f"{incomplete}*"))]


MAX_WORKERS_PER_CORE = 32
"""More would take minutes to start."""


def check_workers(workers: int | None) -> int | None:
    cores = os.cpu_count() or 1
    if workers and workers > MAX_WORKERS_PER_CORE * cores:
        raise UserError(f"--workers {workers}: too many for the {cores} cores of this machine; nearest: {cores}")
    return workers


def require_directory(run: Path) -> Path:
    if not run.is_dir():
        raise UserError(f"{run}: no such run directory")
    return run


CONFIG_SOURCE_HELP = "YAML file (trainyard's or NxD Training's), run directory or recipe name."

ConfigSource = Annotated[
    str, Argument(metavar="FILE|RECIPE|RUN", help=CONFIG_SOURCE_HELP, autocompletion=complete_source)
]
Overrides = Annotated[
    list[str] | None,
    Argument(metavar="KEY=VALUE", help="Keys to override, such as optimizer.lr=1e-4; values are YAML."),
]
Smoke = Annotated[
    bool, Option("--smoke", help="Shrink the file to a run of seconds with the same structure and features.")
]
AsJson = Annotated[bool, Option("--json", help="Print one JSON document instead of text.")]
Workers = Annotated[
    int | None, Option("--workers", min=1, callback=check_workers, help="Worker processes. Default: one per core.")
]

Nproc = Annotated[int, Option("--nproc", min=1, help="Ranks to start on this host, one process each.")]
CheckpointSource = Annotated[
    str, Argument(metavar="CKPT", help="Run directory, or a checkpoint of any format: a path, URL or OWNER/NAME.")
]
Adapter = Annotated[
    str | None,
    Option("--adapter", metavar="PATH", help="LoRA adapter of CKPT: a PEFT folder, or a run or checkpoint of LoRA."),
]
HfConfig = Annotated[
    Path | None, Option("--config", metavar="FILE", help="Hugging Face config.json, for a checkpoint without one.")
]
SourceLayout = Annotated[
    str,
    Option("--source-layout", metavar="KEY=VALUE,...", help="What NxD files do not record, such as kv_order, by_head."),
]
RunDirectory = Annotated[Path, Argument(metavar="RUN", help="Run directory.")]
ExistingRun = Annotated[
    Path, Argument(metavar="RUN", help="Run directory, such as runs/my-run.", callback=require_directory)
]

DeviceName = Annotated[str, Option("--device", help="auto, cpu, cuda or neuron.")]
TensorParallel = Annotated[int, Option("--tp", min=1, help="Ranks that share the model (tensor parallelism).")]
InferenceDtype = Annotated[
    Literal["fp32", "bf16", "fp16"] | None, Option("--dtype", help="Default: bf16 on accelerators, fp32 on the CPU.")
]
Fp8Weights = Annotated[
    bool, Option("--fp8-weights", help="Keep weight matrices in fp8: half the memory, results differ slightly.")
]
BatchInvariant = Annotated[
    bool, Option("--batch-invariant", help="The same bits for a prompt whatever else is in the batch; slower.")
]
MaxSeqLen = Annotated[
    int | None, Option("--max-seq-len", min=2, help="Longest prompt plus new tokens. Default: the model's limit.")
]
Host = Annotated[str, Option("--host", help="Address to listen on. Any address but loopback needs a token.")]
Port = Annotated[int, Option("--port", min=0, max=65535, help="Port to listen on; 0: any free one.")]

Inputs = Annotated[list[str], Option("--input", help="File, glob, directory or URL; repeatable.", show_default=False)]
TokenizerName = Annotated[
    str | None,
    Option("--tokenizer", help="tokenizer.json, SentencePiece .model, a directory with one, OWNER/NAME, or 'bytes'."),
]
VocabFile = Annotated[str | None, Option("--vocab-file", help="vocab.json of GPT-2 or vocab.txt of BERT (WordPiece).")]
MergeFile = Annotated[str | None, Option("--merge-file", help="merges.txt of GPT-2.")]
EndOfText = Annotated[str | None, Option("--end-of-text", help="Token that ends a document. Default: the tokenizer's.")]
JsonKey = Annotated[str, Option("--json-key", help="JSON key or column that holds the text.")]
Strict = Annotated[
    bool, Option("--strict", help="Stop at the first unreadable record instead of skipping and counting it.")
]
ContainerImage = Annotated[
    str | None, Option("--container-image", help="Image with trainyard that the ranks run in: a name, .sqsh or .sif.")
]
ContainerMounts = Annotated[
    str | None,
    Option("--container-mounts", help="More directories for the container, such as /data:/data,/cache:/cache."),
]
ContainerRuntime = Annotated[
    str | None, Option("--container-runtime", help="pyxis or apptainer. Default: apptainer for .sif, else pyxis.")
]
Overwrite = Annotated[bool, Option("--overwrite", help="Replace existing output.")]


def worker_count(workers: int | None) -> int:
    """Return the number of worker processes: `--workers`, or all cores."""
    return workers or os.cpu_count() or 1


def split_keys(json_keys: list[str] | None) -> list[str]:
    """Split repeated `--json-keys` values, which may also be separated by commas or spaces. Default: `text`."""
    return [key for value in json_keys or ["text"] for key in value.replace(",", " ").split()]
