"""`trainyard eval`: Evaluate a checkpoint of any format: loss, perplexity, bits per byte, tasks."""

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from typer import Argument, Option

from trainyard import devices
from trainyard.checkpoint.convert import parse_layout
from trainyard.checkpoint.formats.tensor_map import WeightSource
from trainyard.checkpoint.registry import FORMAT_DESCRIPTIONS, OpenedCheckpoint, open_weights
from trainyard.checkpoint.transfer import local_source
from trainyard.cli.console import ProgressDisplay, print_line
from trainyard.cli.downloads import fetch_inputs
from trainyard.cli.eval_console import EvalProgress, results_table, task_table
from trainyard.cli.options import AsJson, JsonKey, TokenizerName
from trainyard.cli.run_config import load_source
from trainyard.cli.signals import interrupt_on_terminate
from trainyard.config.schema import Config
from trainyard.core.errors import UserError
from trainyard.core.user_code import is_user_path
from trainyard.core.world import World
from trainyard.evaluate.checkpoint_source import CheckpointSource
from trainyard.evaluate.eval_config import config_of_run, evaluation_config, keys_of_run, notes_of_run
from trainyard.families import family_of
from trainyard.families.hf_config import from_hf
from trainyard.launch.launcher import launch
from trainyard.parallel.layout import Layout

OVERRIDE = re.compile(rf"({'|'.join(Config.model_fields)})\.[\w.]+=")


def eval(
    checkpoint: Annotated[
        str, Argument(metavar="CKPT", help="Checkpoint or run, a path or URL; its format is detected.")
    ],
    arguments: Annotated[
        list[str] | None,
        Argument(
            metavar="DATA|KEY=VALUE",
            help="Text (JSON lines, .txt, Parquet), PREFIX of .bin and .idx, packed rows, HDF5, a glob of these, or a "
            "YAML file with data.paths. Keys to override, such as layout.tp=2.",
        ),
    ] = None,
    nproc: Annotated[int, Option("--nproc", min=1, help="Ranks to start on this host, one process each.")] = 1,
    stride: Annotated[
        int | None,
        Option("--stride", min=1, help="Tokens between the starts of windows. Default: data.seq_len, no overlap."),
    ] = None,
    tokenizer: TokenizerName = None,
    json_key: JsonKey = "text",
    tasks: Annotated[
        str | None, Option("--tasks", metavar="NAME,...", help="Tasks of lm-evaluation-harness, instead of DATA.")
    ] = None,
    include_path: Annotated[
        Path | None, Option("--include-path", metavar="DIR", help="--tasks: a directory with YAML files of more tasks.")
    ] = None,
    num_fewshot: Annotated[
        int | None, Option("--num-fewshot", min=0, help="--tasks: examples in the prompt. Default: the task's.")
    ] = None,
    limit: Annotated[int | None, Option("--limit", min=1, help="--tasks: documents per task. Default: all.")] = None,
    config: Annotated[
        Path | None, Option("--config", metavar="FILE", help="Hugging Face config.json, for a checkpoint without one.")
    ] = None,
    source_layout: Annotated[
        str,
        Option(
            "--source-layout", metavar="KEY=VALUE,...", help="What NxD files do not record, such as kv_order, by_head."
        ),
    ] = "",
    as_json: AsJson = False,
) -> int:
    """Evaluate a checkpoint of any format that convert reads, without conversion, on one rank or many. Without DATA,
    evaluate a run on its evaluate.sets.

    Prints loss, perplexity, tokens and bits per byte of each data set: sums over tokens divided once, in fp64, equal at
    every batch size and layout. Text and token files are streams of documents, of which each token but the first is
    scored once; data.document_mask=true and data.mask_eod_loss=true score each document separately. BERT reports both
    terms of its loss. Your metrics are evaluate.metrics.NAME=module:function. A run is evaluated with its own
    train.loss, evaluate.metrics and masks, unless you override them (train.loss=null).

    --tasks runs lm-evaluation-harness (pip install 'trainyard[lm-eval]').

    Examples:

      trainyard eval runs/my-run valid.jsonl test.jsonl

      trainyard eval runs/my-run

      trainyard eval hf-model data/wiki data.seq_len=1024 --stride 512

      trainyard eval nxd/step_1000 valid.jsonl --config config.json

      trainyard eval runs/my-run valid.jsonl layout.tp=2 --nproc 4

      trainyard eval runs/my-run --tasks arc_easy,piqa --num-fewshot 0 --json
    """
    overrides = [argument for argument in arguments or [] if OVERRIDE.match(argument)]
    data = [path for argument in arguments or [] if argument not in overrides for path in data_paths(argument)]
    if data and tasks:
        raise UserError(f"{data[0]}: --tasks has its own data; give either DATA or --tasks")
    if tokenizer:
        overrides.append(f"data.tokenizer={tokenizer}")
    world = World.from_environment()
    if nproc > 1 and world.local_size > 1:
        raise UserError(f"--nproc {nproc}: this process is one of {world.local_size} ranks on this host already")
    data = fetch_inputs(data)
    ranks, hints = world.size * nproc, parse_layout("nxd", source_layout, "--source-layout")
    with ExitStack() as stack:
        stack.enter_context(interrupt_on_terminate())
        download = stack.enter_context(ProgressDisplay("download"))
        path = stack.enter_context(local_source(checkpoint, download.update))
        opened = open_weights(path, from_hf(config) if config else None, hints)
        run_keys = {} if tasks else keys_of_run(opened.weights)  # tasks have scores of their own
        run_config = evaluation_config(opened.weights, overrides, ranks, run_keys)
        sets = {} if data or tasks else validation_sets(checkpoint, opened.weights)
        Layout.from_config(run_config, ranks)  # report an impossible layout before any process starts
        if nproc > 1:
            options = {"--stride": stride, "--json-key": json_key, "--tasks": tasks, "--include-path": include_path}
            options |= {"--num-fewshot": num_fewshot, "--limit": limit, "--config": config}
            options |= {"--source-layout": source_layout or None}
            flags = [text for name, value in options.items() if value is not None for text in (name, str(value))]
            flags += ["--json"] if as_json else []
            environment = devices.select(run_config.device.name).rank_environment()
            return launch(["eval", str(path), *data, *overrides, *flags], nproc, environment, hosts=world)
        console = Console(highlight=False, stderr=as_json, quiet=world.rank > 0)
        notes = [*opened.notes, *notes_of_run(opened.weights, run_keys, overrides)]
        print_header(console, checkpoint, opened, notes, run_config, world)
        progress = stack.enter_context(EvalProgress(enabled=world.rank == 0))
        stack.enter_context(distributed_shutdown())
        source = CheckpointSource(path, opened, run_config, world, progress.update)
        report: dict[str, Any] = {"checkpoint": checkpoint, "format": opened.format}
        report |= {"precision": run_config.precision.kind}
        keys = {override.partition("=")[0] for override in overrides}
        named_tokenizer = run_config.data.tokenizer if "data.tokenizer" in keys else None
        if tasks:
            from trainyard.evaluate.harness import run_tasks

            names = tasks.split(",")
            report |= run_tasks(source, names, include_path, num_fewshot, limit, named_tokenizer)
        else:
            from trainyard.evaluate.evaluate_data import evaluate_data

            reading = (named_tokenizer, stride, json_key, "data.seq_len" in keys)
            report |= {"stride": stride, "results": evaluate_data(source, sets or data, *reading)}
    if world.rank == 0:
        table = task_table(report["results"]) if tasks else results_table(report["results"])
        print_results(console, report, table, as_json)
    return 0


@contextmanager
def distributed_shutdown() -> Iterator[None]:
    """Destroy the process groups after the block, if it succeeds: otherwise other ranks may wait in them."""
    from trainyard.parallel.mesh import shutdown_distributed

    yield
    shutdown_distributed()


def data_paths(argument: str) -> tuple[str, ...]:
    """The data sets that an argument stands for: itself, or those of a blend in a YAML file."""
    if not argument.endswith((".yaml", ".yml")):
        return (argument,)
    paths = load_source(argument).data.paths
    if not paths:
        raise UserError(f"{argument}: its data.paths names no data")
    return paths


def validation_sets(checkpoint: str, weights: WeightSource) -> dict[str, list[str]]:
    """The files of each of evaluate.sets of the run that wrote a checkpoint."""
    config = config_of_run(weights)
    if config is None or not config.evaluate.sets:
        raise UserError(
            f"{checkpoint}: the run has no evaluate.sets; give DATA or --tasks, such as "
            f"trainyard eval {checkpoint} valid.jsonl"
        )
    if is_user_path(config.data.source):
        raise UserError(f"data.source={config.data.source}: reads evaluate.sets in training only; give DATA")
    return {name: fetch_inputs(paths) for name, paths in config.evaluate.sets.items()}


def print_header(
    console: Console, name: str, opened: OpenedCheckpoint, notes: list[str], config: Config, world: World
) -> None:
    for note in notes:
        print_line(console, f"note: {note}")
    model, ranks = config.model, f"; {world.size} ranks" if world.size > 1 else ""
    weights = f"{model.family} with {family_of(model).blueprint(model).parameter_count():,} weights"
    print_line(console, f"{name}: {FORMAT_DESCRIPTIONS[opened.format]}, {weights}; {config.precision.kind}{ranks}")


def print_results(console: Console, report: dict[str, Any], table: Any, as_json: bool) -> None:
    if as_json:
        print(json.dumps(report, default=str))
    else:
        console.print(table)
