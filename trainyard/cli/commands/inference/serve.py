"""`trainyard serve`: Answer OpenAI's API with a checkpoint, to look at a model while it trains."""

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Context, Option

from trainyard.cli.console import interrupt_on_terminate, prefetch_weights
from trainyard.cli.options import (
    BatchInvariant,
    CheckpointSource,
    DeviceName,
    Fp8Weights,
    Host,
    InferenceDtype,
    MaxSeqLen,
    Port,
    TensorParallel,
    TokenizerName,
)
from trainyard.cli.ranks import launch_tensor_parallel, starts_tensor_parallel
from trainyard.core.errors import RunStopped, UserError
from trainyard.core.world import World

if TYPE_CHECKING:  # imports torch; `serve --help` does not wait for it
    from trainyard.inference.load import InferenceModel, InferenceOptions
    from trainyard.inference.serve.served_model import ServedModel
    from trainyard.inference.serve.worker import SchedulerWorker

TOKEN_VARIABLE = "TRAINYARD_SERVE_TOKEN"
PENDING_PER_SLOT = 4
"""Sequences that may wait or run, for each place in the batch."""


def serve(
    context: Context,
    source: CheckpointSource,
    adapter: Annotated[
        list[str] | None,
        Option(
            metavar="NAME=PATH",
            help="LoRA adapter of CKPT that requests choose as model NAME: a PEFT folder, or a run or checkpoint of "
            "LoRA; repeatable.",
        ),
    ] = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    model_name: Annotated[
        str | None, Option(metavar="NAME", help="Name in the API. Default: that of the directory.")
    ] = None,
    token_file: Annotated[
        Path | None, Option(metavar="FILE", help=f"File with the bearer token. Default: ${TOKEN_VARIABLE}, if set.")
    ] = None,
    max_batch: Annotated[int, Option(min=1, help="Maximum number of sequences per batch.")] = 64,
    max_seq_len: MaxSeqLen = None,
    tp: TensorParallel = 1,
    device: DeviceName = "auto",
    dtype: InferenceDtype = None,
    fp8_weights: Fp8Weights = False,
    batch_invariant: BatchInvariant = False,
    tokenizer: TokenizerName = None,
) -> int:
    """Serve a checkpoint with OpenAI's API: completions and chats, with streaming and continuous batching.

    It is made to look at a model while it trains, for a few users. It does not replace a serving stack such as vLLM:
    convert the checkpoint to Hugging Face files for that. Ctrl-C ends it; requests in flight get a few seconds.

    Examples:

      trainyard serve runs/my-run

      trainyard serve runs/my-run --port 0 --model-name my-model

      trainyard serve hf-model --adapter poet=runs/poet --adapter coder=peft

      trainyard serve hf-model --host 0.0.0.0 --token-file token.txt
    """
    from trainyard.core.sockets import base_url, bind_socket, is_loopback, read_token
    from trainyard.inference.serve.app import create_app
    from trainyard.inference.serve.server import ModelServer

    token = read_token(token_file, TOKEN_VARIABLE)
    if not token and not is_loopback(host):
        raise UserError(f"--host {host}: others can reach it, so it needs a token: --token-file or ${TOKEN_VARIABLE}")
    name = model_name or Path(source).resolve().name
    adapters = parse_adapters(adapter or [], name)
    world = World.from_environment()
    prefetch_weights(source, world)
    with interrupt_on_terminate(), bind_socket(host, port if world.rank == 0 else 0) as bound:
        if starts_tensor_parallel(tp, world):
            bound.close()  # the first rank binds it again
            return launch_tensor_parallel(context, source, tp, device, world)
        from trainyard.inference.load import InferenceOptions

        options = InferenceOptions(
            device,
            dtype,
            max_batch,
            max_seq_len,
            fp8_weights=fp8_weights,
            batch_invariant=batch_invariant,
            shares_prefixes=True,
            adapters=adapters,
        )
        if world.rank > 0:
            follow_first_rank(source, options, tokenizer, world)
            return 0
        models = load_models(source, name, options, tokenizer, world)
        worker = models[0].worker
        ready = f"serving {', '.join(model.name for model in models)} at {base_url(bound, '/v1')}"
        server = ModelServer(create_app(models, token, host), worker, lambda: print(ready, flush=True))
        server.run_on(bound)
    if worker.failure:
        raise RunStopped(f"the engine failed: {worker.failure}")
    return 0


def parse_adapters(arguments: list[str], model_name: str) -> dict[str, str]:
    """The paths of `--adapter NAME=PATH`, by name."""
    found: dict[str, str] = {}
    for argument in arguments:
        name, separator, path = argument.partition("=")
        if not (name and separator and path):
            nearest = f"{Path(argument.strip('=')).name}={argument.strip('=')}"
            raise UserError(f"--adapter {argument}: expected NAME=PATH; nearest: --adapter {nearest}")
        if name in (*found, model_name):
            raise UserError(f"--adapter {argument}: {name} is another model already; nearest: {name}-2={path}")
        found[name] = path
    return found


def load_models(
    source: str, name: str, options: "InferenceOptions", tokenizer: str | None, world: World
) -> list["ServedModel"]:
    """The model, and then one for each adapter."""
    from trainyard.inference.load import load_for_inference
    from trainyard.inference.serve.served_model import ServedModel

    loaded = load_for_inference(source, options, tokenizer, world)
    if loaded.tokenizer is None:
        raise UserError(f"{source}: has no tokenizer; give --tokenizer")
    worker = create_worker(loaded, PENDING_PER_SLOT * options.max_batch, world)
    models = [ServedModel(name, loaded, loaded.tokenizer, worker)]
    for number, adapter in enumerate(loaded.adapters, 1):
        adapted = loaded.with_adapter(adapter)
        models.append(ServedModel(adapter, adapted, adapted.tokenizer or loaded.tokenizer, worker, number))
    return models


def create_worker(loaded: "InferenceModel", max_pending: int, world: World) -> "SchedulerWorker":
    """The worker of one rank, or of the first of several, which the others follow."""
    from trainyard.inference.serve.worker import SchedulerWorker

    if world.size == 1:
        return SchedulerWorker(loaded.scheduler, max_pending)
    from trainyard.inference.broadcast_scheduler import BroadcastScheduler
    from trainyard.parallel.mesh import shutdown_distributed

    leader = BroadcastScheduler(loaded.scheduler, loaded.mesh.store)

    def close() -> None:
        leader.close()
        shutdown_distributed()

    # After a fault, the other ranks may be inside a collective that this one never joins.
    return SchedulerWorker(leader, max_pending, max_faults=1, close=close)


def follow_first_rank(source: str, options: "InferenceOptions", tokenizer: str | None, world: World) -> None:
    """Compute what the first rank computes, until it closes. The launcher sends signals to all ranks; the first one
    decides when they end."""
    from trainyard.inference.broadcast_scheduler import follow
    from trainyard.inference.load import load_for_inference
    from trainyard.parallel.mesh import shutdown_distributed

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    loaded = load_for_inference(source, options, tokenizer, world)
    follow(loaded.scheduler, loaded.mesh.store)
    shutdown_distributed()
