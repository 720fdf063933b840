"""`trainyard serve`: answer OpenAI's API with a checkpoint, to look at a model while it trains."""

import os
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from trainyard.cli.signals import interrupt_on_terminate
from trainyard.core.errors import RunStopped, UserError

TOKEN_VARIABLE = "TRAINYARD_SERVE_TOKEN"
PENDING_PER_SLOT = 4
"""Sequences that may wait or run, for each place in the batch."""


def serve(
    checkpoint: Annotated[str, Argument(metavar="CHECKPOINT", help="Path of a checkpoint or of a run directory.")],
    host: Annotated[
        str, Option("--host", help="Address to listen on. Others than loopback need a token.")
    ] = "127.0.0.1",
    port: Annotated[int, Option("--port", min=0, max=65535, help="Port to listen on; 0: any free one.")] = 8000,
    max_batch: Annotated[int, Option("--max-batch", min=1, help="Sequences computed together.")] = 64,
    max_seq_len: Annotated[
        int | None,
        Option("--max-seq-len", min=2, help="Longest prompt plus new tokens. Default: what the model was made for."),
    ] = None,
    dtype: Annotated[str, Option("--dtype", help="Of weights and cache: auto, fp32 or bf16.")] = "auto",
    device: Annotated[str, Option("--device", help="As the key device.name.")] = "auto",
    tp: Annotated[int, Option("--tp", min=1, help="Ranks that share each layer.")] = 1,
    model_name: Annotated[
        str | None, Option("--model-name", metavar="NAME", help="Name in the API. Default: that of the directory.")
    ] = None,
    token_file: Annotated[
        Path | None,
        Option("--token-file", metavar="FILE", help=f"File with the bearer token. Default: ${TOKEN_VARIABLE}, if set."),
    ] = None,
) -> int:
    """Serve a checkpoint with OpenAI's API: completions and chats, with streaming and continuous batching.

    It is made to look at a model while it trains, for a few users. It does not replace a serving stack such as vLLM:
    convert the checkpoint to Hugging Face files for that. Ctrl-C ends it; requests in flight get a few seconds.

    Examples:

      trainyard serve runs/my-run

      trainyard serve runs/my-run --port 0 --model-name my-model

      trainyard serve exports/hf --host 0.0.0.0 --token-file token.txt
    """
    from trainyard.inference.chat import ChatTemplate
    from trainyard.serve.app import create_app
    from trainyard.serve.served_model import ServedModel
    from trainyard.serve.server import ModelServer, base_url, bind_socket, is_loopback
    from trainyard.serve.worker import SchedulerWorker

    token = read_token(token_file)
    if not token and not is_loopback(host):
        raise UserError(f"--host {host}: others can reach it, so it needs a token: --token-file or ${TOKEN_VARIABLE}")
    with interrupt_on_terminate(), bind_socket(host, port) as bound:
        from trainyard.inference.load import load_for_inference

        loaded = load_for_inference(
            checkpoint, device=device, dtype=dtype, max_batch=max_batch, max_seq_len=max_seq_len, tp=tp
        )
        tokenizer = loaded.tokenizer
        if tokenizer is None:
            raise UserError(f"{checkpoint}: has no tokenizer; put its tokenizer.json into the directory")
        worker = SchedulerWorker(loaded.scheduler, PENDING_PER_SLOT * max_batch)
        template = ChatTemplate(loaded.chat_template)
        name = model_name or Path(checkpoint).resolve().name
        end_ids = frozenset({tokenizer.end_id})
        model = ServedModel(name, tokenizer, worker, loaded.max_seq_len, template, end_ids)
        server = ModelServer(
            create_app(model, token), worker, lambda: print(f"serving {name} at {base_url(bound)}", flush=True)
        )
        server.run_on(bound)
    if worker.failure:
        raise RunStopped(f"the engine failed: {worker.failure}")
    return 0


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
