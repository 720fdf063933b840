"""`trainyard data show`: print the samples of one step of a run."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from typer import Option

from trainyard.cli.commands.data.inspect import quote_for_terminal
from trainyard.cli.console import print_line
from trainyard.cli.options import RunDirectory
from trainyard.config.data_schema import DataSection
from trainyard.config.load import load
from trainyard.core.constants import IGNORE_INDEX
from trainyard.core.errors import UserError
from trainyard.core.quantities import counted
from trainyard.data.text.tokenizer import Tokenizer, load_tokenizer
from trainyard.metrics.json_lines import read_json_lines
from trainyard.metrics.loggers.base import EVENTS_FILE
from trainyard.parallel.layout import Layout

if TYPE_CHECKING:  # imports torch; mistakes in the command line do not wait for it
    from trainyard.core.batch import Batch

DEFAULT_SAMPLES = 8


def show(
    run: RunDirectory,
    step: Annotated[int, Option(metavar="N", help="Step whose samples to print; the first is 1.")],
    rank: Annotated[
        int | None, Option(min=0, metavar="R", help="Only the samples of this rank. Default: all ranks.")
    ] = None,
    limit: Annotated[int, Option(min=1, metavar="K", help="Samples to print.")] = DEFAULT_SAMPLES,
) -> None:
    """Print the samples that a run trains on in one step: index, source and text.

    The text is that of the run's tokenizer; without one, token ids. BERT samples are shown with their masks, followed
    by the masked tokens. Nothing is read but the configuration, the data and the tokenizer, so it works while the run
    trains, and for steps that are yet to come.

    Examples:

      trainyard data show runs/my-run --step 1200

      trainyard data show runs/my-run --step 1200 --rank 3 --limit 2
    """
    if not (run.expanduser() / "config.yaml").is_file():
        raise UserError(f"{run}: not a run directory: it has no config.yaml")
    directory = run.expanduser()
    config = load(directory / "config.yaml")
    if not 1 <= step <= config.train.steps:
        raise UserError(f"--step {step}: the run has steps 1 to {config.train.steps}")
    ranks = ranks_at(directory, step)
    if rank is not None and rank >= ranks:
        raise UserError(f"--rank {rank}: the run has ranks 0 to {ranks - 1}")
    from trainyard.data.loading.build import build_datasets
    from trainyard.data.loading.loader import BatchLoader
    from trainyard.train.micro_batches.split import rank_samples

    samples = slice(0, config.train.global_batch)
    if rank is not None:
        layout = Layout.from_config(config, ranks)
        samples = rank_samples(config.train.global_batch, layout.dp, layout.coords(rank)["dp"])
    total = samples.stop - samples.start
    shown = slice(samples.start, samples.start + min(limit, total))
    datasets, section = build_datasets(config), config.train
    loader = BatchLoader(datasets.train, section.global_batch, section.seed, datasets.needs_shuffle)
    batch, indices = loader.batch(step - 1, shown), loader.sample_indices(step - 1, shown).tolist()
    tokenizer = run_tokenizer(config.data, config.model.new_tokens, config.samples.tokenizer, directory)
    console = Console(highlight=False)
    of_rank = f" of rank {rank}" if rank is not None else ""
    print_line(
        console, f"step {step} of {config.train.steps}: {counted(total, 'sample')}{of_rank}, {len(indices)} shown"
    )
    for row, index in enumerate(indices):
        print_line(console, f"sample {index}: {loader.dataset.source(index)}", "bold")
        for line in sample_lines(batch, row, tokenizer):
            encoding = sys.stdout.encoding or "utf-8"
            print_line(console, f"  {line}".encode(encoding, "backslashreplace").decode(encoding))


def ranks_at(directory: Path, step: int) -> int:
    """The number of ranks with which the run made a step: that of its last start before it; 1 if it is not known."""
    starts = [event for event in read_json_lines(directory / EVENTS_FILE).records if event.get("event") == "start"]
    return next((int(event["ranks"]) for event in reversed(starts) if event["step"] < step), 1)


def run_tokenizer(
    data: DataSection, new_tokens: tuple[str, ...], of_samples: str | None, directory: Path
) -> Tokenizer | None:
    """The tokenizer of a run's data, or else the one that its text samples name or that its files hold; None if it is
    not known, or no longer where it was."""
    from trainyard.data.loading.text_stream import tokenizer_spec

    spec = tokenizer_spec(data, new_tokens)
    if data.source != "text" and data.tokenizer == "bytes":  # the default, which says nothing of tokens
        saved = [directory / "model" / "tokenizer.json", *sorted(directory.glob("checkpoints/*/tokenizer.json"))]
        files = [*([of_samples] if of_samples else []), *(str(path) for path in saved if path.is_file())]
        if not files:
            return None
        spec = spec._replace(name=files[0])
    try:
        return load_tokenizer(spec)
    except UserError as error:
        print(f"note: token ids, since the tokenizer cannot be read: {error}", file=sys.stderr)
        return None


def sample_lines(batch: "Batch", row: int, tokenizer: Tokenizer | None) -> list[str]:
    """The text or token ids of one sample and, of a BERT sample, its masked tokens and whether the second text follows
    the first."""
    tokens: list[int] = batch["tokens"][row].tolist()
    if "masked_positions" not in batch:
        return [token_text(tokens, tokenizer)]
    tokens = tokens[: int(batch["attention_mask"][row].sum())]
    positions, labels = batch["masked_positions"][row].tolist(), batch["labels"][row].tolist()
    masked = [
        f"{position} {token_text([label], tokenizer)}"
        for position, label in zip(positions, labels, strict=True)
        if label != IGNORE_INDEX
    ]
    relation = "a random text" if int(batch["next_sentence_labels"][row]) else "the text that follows"
    return [token_text(tokens, tokenizer), f"masked: {', '.join(masked)}", f"second text: {relation}"]


def token_text(tokens: list[int], tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return " ".join(map(str, tokens))
    return quote_for_terminal(tokenizer.decode([token for token in tokens if token < tokenizer.vocab_size]))
