"""`trainyard eval`: Evaluate a checkpoint of any format: loss, perplexity, bits per byte, tasks."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from rich import box
from rich.console import Console
from rich.table import Table
from typer import Argument, Context, Option

from trainyard.checkpoint.weights import WeightSource
from trainyard.cli.console import ProgressDisplay, fetch_inputs, interrupt_on_terminate, print_line
from trainyard.cli.options import Adapter, AsJson, HfConfig, JsonKey, Nproc, SourceLayout, TokenizerName
from trainyard.cli.ranks import check_nproc, launch_ranks
from trainyard.cli.run_config import load_source
from trainyard.config.schema import Config
from trainyard.core.errors import UserError
from trainyard.core.user_code import is_user_path
from trainyard.core.world import World
from trainyard.evaluate.eval_config import config_of_run, evaluation_config, keys_of_run, notes_of_run
from trainyard.families import ModelConfig, blueprint_of
from trainyard.families.hf_config import from_hf
from trainyard.formats.convert import parse_layout
from trainyard.formats.registry import FORMAT_DESCRIPTIONS, open_adapter, open_weights
from trainyard.formats.transfer import local_source
from trainyard.parallel.layout import Layout

HIDDEN = ("data", "bytes", "seconds", "by_position")
"""Results that are only in the JSON document, or in a column of their own."""
INTEGERS = ("tokens", "seq_len")
OVERRIDE = re.compile(rf"({'|'.join(Config.model_fields)})\.[\w.]+=")


def eval(
    context: Context,
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
    adapter: Adapter = None,
    nproc: Nproc = 1,
    stride: Annotated[
        int | None, Option(min=1, help="Tokens between the starts of windows. Default: data.seq_len, no overlap.")
    ] = None,
    by_position: Annotated[
        int | None, Option(min=1, metavar="N", help="Also the loss in each of N equal parts of a window.")
    ] = None,
    tokenizer: TokenizerName = None,
    json_key: JsonKey = "text",
    tasks: Annotated[
        str | None, Option(metavar="NAME,...", help="Tasks of lm-evaluation-harness, instead of DATA.")
    ] = None,
    include_path: Annotated[
        Path | None, Option(metavar="DIR", help="--tasks: a directory with YAML files of more tasks.")
    ] = None,
    num_fewshot: Annotated[
        int | None, Option(min=0, help="--tasks: examples in the prompt. Default: the task's.")
    ] = None,
    limit: Annotated[int | None, Option(min=1, help="--tasks: documents per task. Default: all.")] = None,
    config: HfConfig = None,
    source_layout: SourceLayout = "",
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

      trainyard eval runs/my-run valid.jsonl data.seq_len=4096 --by-position 8

      trainyard eval nxd/step_1000 valid.jsonl --config config.json

      trainyard eval runs/my-run valid.jsonl layout.tp=2 --nproc 4

      trainyard eval hf-model valid.jsonl --adapter runs/my-lora

      trainyard eval runs/my-run --tasks arc_easy,piqa --num-fewshot 0 --json
    """
    overrides = [argument for argument in arguments or [] if OVERRIDE.match(argument)]
    data = [path for argument in arguments or [] if argument not in overrides for path in data_paths(argument)]
    if data and tasks:
        raise UserError(f"{data[0]}: --tasks has its own data; give either DATA or --tasks")
    if tokenizer:
        overrides.append(f"data.tokenizer={tokenizer}")
    world = World.from_environment()
    check_nproc(nproc, world)
    data = fetch_inputs(data)
    ranks, hints = world.size * nproc, parse_layout("nxd", source_layout, "--source-layout")
    with ExitStack() as stack:
        stack.enter_context(interrupt_on_terminate())
        download = stack.enter_context(ProgressDisplay("download"))
        path = stack.enter_context(local_source(checkpoint, download.update))
        opened = open_weights(path, from_hf(config) if config else None, hints)
        if adapter:
            opened = replace(opened, weights=open_adapter(adapter, opened.weights, str(path)))
        run_keys = {} if tasks else keys_of_run(opened.weights)  # tasks have scores of their own
        run_config = evaluation_config(opened.weights, overrides, ranks, run_keys)
        sets = {} if data or tasks else validation_sets(checkpoint, opened.weights)
        Layout.from_config(run_config, ranks)  # report an impossible layout before any process starts
        if nproc > 1:
            # The ranks read what this process has downloaded; --tokenizer is among the overrides.
            changes = {"checkpoint": path, "arguments": [*data, *overrides], "tokenizer": None}
            return launch_ranks(context, nproc, run_config.device.name, world, changes)
        console = Console(highlight=False, stderr=as_json, quiet=world.rank > 0)
        for note in (*opened.notes, *notes_of_run(opened.weights, run_keys, overrides)):
            print_line(console, f"note: {note}")
        described = describe(run_config.model, run_config.precision.kind, world.size)
        print_line(console, f"{checkpoint}: {FORMAT_DESCRIPTIONS[opened.format]}, {described}")
        progress = EvalProgress(enabled=world.rank == 0)
        stack.callback(progress.close)
        from trainyard.evaluate.evaluator import CheckpointSource, evaluate_data
        from trainyard.parallel.mesh import shutdown_distributed

        source = CheckpointSource(path, opened, run_config, world, progress.update)
        report: dict[str, Any] = {"checkpoint": checkpoint, "format": opened.format}
        report |= {"precision": run_config.precision.kind}
        keys = {override.partition("=")[0] for override in overrides}
        named_tokenizer = run_config.data.tokenizer if "data.tokenizer" in keys else None
        if tasks:
            from trainyard.evaluate.lm_eval_model import run_tasks

            names = tasks.split(",")
            report |= run_tasks(source, names, include_path, num_fewshot, limit, named_tokenizer)
        else:
            reading = (named_tokenizer, stride, json_key, "data.seq_len" in keys, by_position)
            report |= {"stride": stride, "results": evaluate_data(source, sets or data, *reading)}
        shutdown_distributed()  # not after an error: other ranks may wait in the groups
    if world.rank == 0 and as_json:
        print(json.dumps(report, default=str))
    elif world.rank == 0:
        console.print(task_table(report["results"]) if tasks else results_table(report["results"]))
        for result in report["results"] if by_position else ():
            console.print(results_table(position_cells(result), "positions"))
    return 0


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
    if is_user_path(config.data.source) or config.train.objective:
        raise UserError(f"data.source={config.data.source}: reads evaluate.sets in training only; give DATA")
    return {name: fetch_inputs(paths) for name, paths in config.evaluate.sets.items()}


def describe(model: ModelConfig, precision: str, ranks: int) -> str:
    weights = f"{model.family} with {blueprint_of(model).parameter_count():,} weights"
    return f"{weights}; {precision}" + (f"; {ranks} ranks" if ranks > 1 else "")


class EvalProgress:
    """A progress bar for each phase: reading tensors, then the batches of each data set."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.display: ProgressDisplay | None = None

    def update(self, label: str, done: int, total: int) -> None:
        if not self.enabled:
            return
        if self.display is None or self.display.label != label:
            self.close()
            self.display = ProgressDisplay(label, items=True)
        self.display.update(done, total)
        if done == total:
            self.close()

    def close(self) -> None:
        if self.display:
            self.display.__exit__()
        self.display = None


def position_cells(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row per part of the windows of a data set."""
    names = ("loss", "perplexity", "tokens")
    return [{"data": f"{x['first']}-{x['last']}", **{name: x[name] for name in names}} for x in result["by_position"]]


def results_table(results: Sequence[Mapping[str, Any]], title: str = "data") -> Table:
    """A row per data set. Columns are those that any data set has."""
    columns = list(dict.fromkeys(name for result in results for name in result if name not in HIDDEN))
    table = Table(title, box=box.SIMPLE_HEAD)
    for name in columns:
        table.add_column(name.replace("_", " "), justify="right")
    for result in results:
        table.add_row(result["data"], *(_cell(name, result.get(name)) for name in columns))
    return table


def task_table(results: Mapping[str, Mapping[str, Any]]) -> Table:
    """A row per task and metric of lm-evaluation-harness."""
    table = Table("task", "metric", box=box.SIMPLE_HEAD)
    for name in ("value", "stderr"):
        table.add_column(name, justify="right")
    for task, metrics in results.items():
        for metric, value in metrics.items():
            if isinstance(value, float) and "_stderr" not in metric:
                error = metrics.get(metric.replace(",", "_stderr,"))
                table.add_row(task, metric.removesuffix(",none"), f"{value:.4f}", _cell("stderr", error))
    return table


def _cell(name: str, value: Any) -> str:
    if not isinstance(value, int | float):
        return "-"
    return f"{value:,}" if name in INTEGERS else f"{value:.6f}" if name == "loss" else f"{value:.4f}"
