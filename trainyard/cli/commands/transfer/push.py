"""`trainyard push`: Upload a run or checkpoint to the Hub (with a model card) or to S3."""

import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal

from typer import Argument, Option

from trainyard import models
from trainyard.checkpoint.checkpoint import Checkpoint
from trainyard.cli.commands.convert import convert_with_progress
from trainyard.cli.console import ProgressDisplay, interrupt_on_terminate
from trainyard.cli.options import HfConfig
from trainyard.config.load import load
from trainyard.core.errors import UserError
from trainyard.core.quantities import counted, size_text
from trainyard.dashboard.model_card import MARKER, CardFacts, make_card, read_run
from trainyard.dashboard.plan_comparison import compare
from trainyard.families.hf_config import from_hf
from trainyard.formats.convert import DTYPE_CHOICES, ConversionTarget
from trainyard.formats.peft.adapter import Adapter, lora_options, read_adapter
from trainyard.formats.registry import OpenedCheckpoint, detect_format, open_weights, verify_checksums
from trainyard.formats.transfer import FINAL_FILES, files_to_upload, local_source
from trainyard.preflight.plan.compare_measured import ComparisonRow
from trainyard.remote.hub_upload import CARD, parse_target, upload_directory
from trainyard.remote.location import HubLocation, parse_hub_location
from trainyard.remote.store_upload import upload_with_manifest


def push(
    source: Annotated[str, Argument(metavar="RUN|CKPT", help="Run directory or checkpoint of any format.")],
    target: Annotated[
        str, Argument(metavar="DST", help="hf://OWNER/NAME[@BRANCH], or a URL such as s3://bucket/name.")
    ],
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"] | None, Option(help="Hub: dtype of weights. Default: as they are.")
    ] = None,
    public: Annotated[bool, Option("--public", help="Hub: create a public repository. Default: private.")] = False,
    message: Annotated[str | None, Option("--message", "-m", help="Hub: message of the commit.")] = None,
    plan: Annotated[bool, Option("--plan/--no-plan", help="Hub: compare the plan with the run in the card.")] = True,
    config: HfConfig = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Object stores: replace existing files.")] = False,
    dry_run: Annotated[bool, Option("--dry-run", help="Print the files, and the card; upload nothing.")] = False,
) -> None:
    """Upload a run or checkpoint.

    To the Hub, weights are converted to Hugging Face format (of a LoRA run, its adapter to PEFT's) and committed with
    tokenizer and model card in one commit. The card has data, steps, tokens, evaluation, planned and measured figures,
    and the configuration without paths; the license is yours to add. A card that you edited stays if you remove its
    marker line. The token comes from HF_TOKEN or `hf auth login`.

    To a store, files are copied as they are; trainyard-manifest.json with sizes and hashes comes last, and `trainyard
    get` checks them. All files of checkpoints and exported models are compared with their checksums first.

    Examples:

      trainyard push runs/my-run hf://my-name/my-model --dtype bf16

      trainyard push runs/my-run s3://bucket/my-run

      trainyard push runs/my-run/checkpoints/step_00000100 s3://bucket/step
    """
    location = parse_hub_location(target)
    with interrupt_on_terminate():
        if not location:
            _push_to_store(Path(source).expanduser(), target, overwrite, dry_run)
            return
        location = parse_target(target, location)
        with ExitStack() as stack:
            download = stack.enter_context(ProgressDisplay("download"))
            path = stack.enter_context(local_source(_weights_of(source), download.update))
            if isinstance(path, Path) and detect_format(path) == "peft":
                _push_adapter(read_adapter(path), location, message, public, dry_run)
                return
            verify_checksums(path)
            opened = open_weights(path, from_hf(config) if config else None)
            directory = Path(stack.enter_context(TemporaryDirectory(prefix="trainyard-"))) / "model"
            facts = _facts(source, opened, location, plan)
            if dry_run:
                print(make_card(facts))
                print(f"{location}: nothing is uploaded")
                return
            target_format = "peft" if lora_options(opened.weights.model) else "hf"
            spec = ConversionTarget(target_format, {}, DTYPE_CHOICES[dtype] if dtype else None)
            convert_with_progress(opened, path, directory, spec)
            (directory / CARD).write_text(make_card(facts), encoding="utf-8")
            summary = message or (f"Step {facts.step:,} of {facts.name}" if facts.step else f"Add {facts.name}")
            start = time.monotonic()
            url, wrote_card = upload_directory(directory, location, summary, not public, MARKER)
            size = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
    if not wrote_card:
        print(f"note: {location} has a {CARD} of its own, which stays")
    print(f"{location}: {size_text(size)} in {time.monotonic() - start:.1f} s; {url}")


def _push_adapter(adapter: Adapter, location: HubLocation, message: str | None, public: bool, dry_run: bool) -> None:
    """Upload the folder of an adapter as it is; its base need not be there."""
    files = files_to_upload(adapter.directory)
    size = sum(path.stat().st_size for path in files.values())
    if dry_run:
        print("".join(f"{path.stat().st_size:>15,}  {name}\n" for name, path in files.items()), end="")
        print(f"{location}: {counted(len(files), 'file')}, {size_text(size)}; nothing is uploaded")
        return
    url, _ = upload_directory(adapter.directory, location, message or "Add an adapter", not public, MARKER)
    print(f"{location}: {size_text(size)}; {url}")


def _weights_of(source: str) -> str:
    """The run itself, or the weights that it has exported if it has no checkpoint."""
    exported = Path(source).expanduser() / "model"
    return str(exported) if (exported / "config.json").is_file() and not _has_checkpoint(source) else source


def _has_checkpoint(source: str) -> bool:
    from trainyard.checkpoint.checkpoint import latest_checkpoint
    from trainyard.remote.storage import open_storage

    return latest_checkpoint(open_storage(source)) is not None


def _facts(source: str, opened: OpenedCheckpoint, location: HubLocation, with_plan: bool) -> CardFacts:
    weights = opened.weights
    run_directory = Path(source).expanduser()
    run = read_run(run_directory)
    config = load(run_directory / "config.yaml") if run else None
    step = samples = None
    if isinstance(weights, Checkpoint):
        config, step = config or weights.config, weights.step or None
        samples = weights.manifest.get("consumed_samples")
    elif run and config:
        step, samples = run.step, (run.step or 0) * config.train.global_batch
    rows: list[ComparisonRow] = []
    if run and with_plan:
        try:
            compared = compare(run_directory)["rows"]
            rows = [ComparisonRow(row["name"], row["predicted"], row["measured"]) for row in compared]
        except UserError as error:
            print(f"note: the card has no plan: {error}")
    count = models.blueprint_of(weights.model).parameter_count()
    return CardFacts(location.repo.rpartition("/")[2], weights.model, count, config, step, samples, run, rows)


def _push_to_store(source: Path, target: str, overwrite: bool, dry_run: bool) -> None:
    if "://" not in target:
        raise UserError(f"{target}: expected hf://OWNER/NAME or a URL such as s3://bucket/name")
    files = files_to_upload(source)
    size = sum(path.stat().st_size for path in files.values())
    if dry_run:
        for name, path in files.items():
            print(f"{path.stat().st_size:>15,}  {name}")
        print(f"{target}: {counted(len(files), 'file')}, {size_text(size)}; nothing is uploaded")
        return
    start = time.monotonic()
    with ProgressDisplay("upload") as progress:
        done = upload_with_manifest(files, target, FINAL_FILES, overwrite, progress.update)
    seconds, count = max(time.monotonic() - start, 1e-9), counted(len(files), "file")
    print(f"{target}: {count}, {size_text(done)} in {seconds:.1f} s ({size_text(done / seconds)}/s)")
