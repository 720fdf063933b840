"""`trainyard serve`: answer OpenAI's API with a checkpoint, to look at a model while it trains."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from trainyard.cli.commands.inference.generate import (
    CheckpointSource,
    DeviceName,
    InferenceDtype,
    MaxSeqLen,
    TensorParallel,
)
from trainyard.cli.options import TokenizerName
from trainyard.cli.signals import interrupt_on_terminate
from trainyard.core.errors import RunStopped, UserError

if TYPE_CHECKING:  # imports torch; `serve --help` does not wait for it
    from trainyard.inference.load import InferenceOptions
    from trainyard.serve.served_model import ServedModel

TOKEN_VARIABLE = "TRAINYARD_SERVE_TOKEN"
PENDING_PER_SLOT = 4
"""Sequences that may wait or run, for each place in the batch."""


def serve(
    source: CheckpointSource,
    host: Annotated[
        str, Option("--host", help="Address to listen on. Others than loopback need a token.")
    ] = "127.0.0.1",
    port: Annotated[int, Option("--port", min=0, max=65535, help="Port to listen on; 0: any free one.")] = 8000,
    model_name: Annotated[
        str | None, Option("--model-name", metavar="NAME", help="Name in the API. Default: that of the directory.")
    ] = None,
    token_file: Annotated[
        Path | None,
        Option("--token-file", metavar="FILE", help=f"File with the bearer token. Default: ${TOKEN_VARIABLE}, if set."),
    ] = None,
    max_batch: Annotated[int, Option("--max-batch", min=1, help="Sequences that are computed together.")] = 64,
    max_seq_len: MaxSeqLen = None,
    tp: TensorParallel = 1,
    device: DeviceName = "auto",
    dtype: InferenceDtype = None,
    tokenizer: TokenizerName = None,
) -> int:
    """Serve a checkpoint with OpenAI's API: completions and chats, with streaming and continuous batching.

    It is made to look at a model while it trains, for a few users. It does not replace a serving stack such as vLLM:
    convert the checkpoint to Hugging Face files for that. Ctrl-C ends it; requests in flight get a few seconds.

    Examples:

      trainyard serve runs/my-run

      trainyard serve runs/my-run --port 0 --model-name my-model

      trainyard serve hf-model --host 0.0.0.0 --token-file token.txt
    """
    from trainyard.serve.app import create_app
    from trainyard.serve.server import ModelServer, base_url, bind_socket, is_loopback

    if tp > 1:
        raise UserError(f"--tp {tp}: serve runs on one rank; trainyard generate has --tp")
    token = read_token(token_file)
    if not token and not is_loopback(host):
        raise UserError(f"--host {host}: others can reach it, so it needs a token: --token-file or ${TOKEN_VARIABLE}")
    with interrupt_on_terminate(), bind_socket(host, port) as bound:
        from trainyard.inference.load import InferenceOptions

        model = load_model(source, model_name, InferenceOptions(device, dtype, max_batch, max_seq_len), tokenizer)
        url = base_url(bound)
        ready = f"serving {model.name} at {url}"
        server = ModelServer(create_app(model, token), model.worker, lambda: print(ready, flush=True))
        server.run_on(bound)
    if model.worker.failure:
        raise RunStopped(f"the engine failed: {model.worker.failure}")
    return 0


def load_model(source: str, name: str | None, options: "InferenceOptions", tokenizer: str | None) -> "ServedModel":
    from trainyard.inference.load import load_for_inference
    from trainyard.serve.served_model import ServedModel
    from trainyard.serve.worker import SchedulerWorker

    loaded = load_for_inference(source, options, tokenizer)
    if loaded.tokenizer is None:
        raise UserError(f"{source}: has no tokenizer; give --tokenizer")
    return ServedModel(
        name or Path(source).resolve().name,
        loaded.tokenizer,
        SchedulerWorker(loaded.scheduler, PENDING_PER_SLOT * options.max_batch),
        loaded.max_seq_len,
        loaded.chat_template,
        loaded.end_ids,
        loaded.encode_prompt,
    )


def read_token(file: Path | None) -> str | None:
    """The token that clients must send. Raises UserError if the file has none."""
    if file is None:
        return os.environ.get(TOKEN_VARIABLE, "").strip() or None
    try:
        token = file.expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise UserError(f"--token-file {file}: {reason}") from None
    if not token or len(token.split()) > 1:
        raise UserError(f"--token-file {file}: must hold one token without spaces")
    return token
