"""`trainyard data show`: print samples with what of them is trained."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text
from typer import Argument, Option

from trainyard.cli.commands.data.inspect import quote_for_terminal
from trainyard.cli.console import print_line, terminal_safe
from trainyard.cli.options import TokenizerName
from trainyard.config.data_schema import DataSection
from trainyard.config.load import load
from trainyard.core.constants import IGNORE_INDEX
from trainyard.core.errors import UserError
from trainyard.core.quantities import counted
from trainyard.data.text.marked_text import PairTexts, TextWithLosses, marked_pairs, marked_text
from trainyard.data.text.tokenizer import Tokenizer, TokenizerSpec, load_tokenizer
from trainyard.metrics.json_lines import read_json_lines
from trainyard.metrics.loggers.base import EVENTS_FILE
from trainyard.parallel.layout import Layout

if TYPE_CHECKING:  # imports torch; mistakes in the command line do not wait for it
    from trainyard.data.loading.dataset import Dataset
    from trainyard.data.samples import Sample

DEFAULT_SAMPLES = 8
LONGEST_SAMPLE = 1 << 30


def show(
    target: Annotated[str, Argument(metavar="RUN|CONFIG|FILE", help="Run, configuration, or file of conversations.")],
    step: Annotated[int | None, Option(metavar="N", help="The samples of this step of a run; the first is 1.")] = None,
    sample: Annotated[int, Option(min=0, metavar="N", help="Without --step: the sample with this number.")] = 0,
    rank: Annotated[
        int | None, Option(min=0, metavar="R", help="Only the samples of this rank. Default: all ranks.")
    ] = None,
    limit: Annotated[
        int | None, Option(min=1, metavar="K", help="Samples to print. Default: 8 of a step, else 1.")
    ] = None,
    tokenizer: TokenizerName = None,
) -> None:
    """Print samples as a model is trained on them: source, text, and which tokens have a loss.

    In a terminal, tokens with a loss are green, elsewhere they are in [[ ]]. The text is that of the run's tokenizer;
    without one, token ids. BERT samples are shown with their masks, followed by the masked tokens. Nothing is read but
    the configuration, the data and the tokenizer, so it works while a run trains, and for steps that are yet to come.

    Examples:

      trainyard data show chats.jsonl --tokenizer Qwen/Qwen3-0.6B --sample 3

      trainyard data show my.yaml --sample 3

      trainyard data show runs/my-run --step 1200 --rank 3 --limit 2
    """
    console = Console(highlight=False)
    path = Path(target).expanduser()
    if path.is_file() and path.suffix not in (".yaml", ".yml"):
        _show_samples(console, *_open_file(target, tokenizer), sample, limit or 1, True)
        return
    if not path.is_file() and (step is not None or path.is_dir()) and not (path / "config.yaml").is_file():
        raise UserError(f"{target}: not a run directory: it has no config.yaml")
    is_run = path.is_dir()
    config = load(path / "config.yaml" if is_run else target)
    loaded = run_tokenizer(config.data, config.model.new_tokens, config.samples.tokenizer, path)
    masks = config.data.has_flag("has_documents")  # all tokens of the others are trained
    from trainyard.data.loading.build import build_datasets

    if step is None:
        _show_samples(console, build_datasets(config).train, loaded, sample, limit or 1, masks)
        return
    if not 1 <= step <= config.train.steps:
        raise UserError(f"--step {step}: the run has steps 1 to {config.train.steps}")
    ranks = ranks_at(path, step)
    if rank is not None and rank >= ranks:
        raise UserError(f"--rank {rank}: the run has ranks 0 to {ranks - 1}")
    from trainyard.data.loading.loader import BatchLoader
    from trainyard.train.micro_batches.split import rank_samples

    samples = slice(0, config.train.global_batch)
    if rank is not None:
        layout = Layout.from_config(config, ranks)
        samples = rank_samples(config.train.global_batch, layout.dp, layout.coords(rank)["dp"])
    total = samples.stop - samples.start
    shown = slice(samples.start, samples.start + min(limit or DEFAULT_SAMPLES, total))
    datasets, section = build_datasets(config), config.train
    loader = BatchLoader(
        datasets.train, section.global_batch, section.seed, datasets.needs_shuffle, config.data.buckets
    )
    indices = loader.sample_indices(step - 1, shown)
    of_rank = f" of rank {rank}" if rank is not None else ""
    print_line(
        console, f"step {step} of {config.train.steps}: {counted(total, 'sample')}{of_rank}, {len(indices)} shown"
    )
    _print_samples(console, loader.dataset, loaded, indices, masks)


def _open_file(target: str, tokenizer: str | None) -> "tuple[Dataset, Tokenizer]":
    """A file of conversations or of pairs of answers, with the keys of a configuration at their defaults."""
    from trainyard.data.formats.documents import read_records, record_slices
    from trainyard.data.formats.preferences import KEYS
    from trainyard.data.loading.conversation_samples import open_conversations
    from trainyard.data.loading.data_files import match_files
    from trainyard.data.loading.packing import PaddedSamples, PairSamples

    slices = record_slices(match_files((target,), directories=True))
    first = next((record for each in slices for _, record in read_records(each)), {})
    is_pair = not isinstance(first, str) and all(key in first for key in KEYS)
    source = "preference" if is_pair else "chat"
    data = DataSection(source=source, paths=(target,), tokenizer=tokenizer or "bytes", seq_len=LONGEST_SAMPLE)
    documents = open_conversations(data, data.paths, None)
    longest, loaded = int(documents.lengths.max()), load_tokenizer(TokenizerSpec(data.tokenizer))
    if is_pair:
        return PairSamples(documents, longest, 0, packing=False), loaded
    return PaddedSamples(documents, longest, 0), loaded


def _show_samples(
    console: Console, dataset: "Dataset", tokenizer: Tokenizer | None, first: int, limit: int, masks: bool
) -> None:
    if first >= len(dataset):
        raise UserError(f"--sample {first}: there are samples 0 to {len(dataset) - 1}")
    _print_samples(console, dataset, tokenizer, np.arange(first, min(first + limit, len(dataset))), masks)


def _print_samples(
    console: Console, dataset: "Dataset", tokenizer: Tokenizer | None, indices: NDArray[np.int64], masks: bool
) -> None:
    batch = dataset.samples(indices)
    for row, index in enumerate(indices.tolist()):
        print_line(console, f"sample {index}: {dataset.source(index)}", "bold")
        for line in sample_lines(batch, row, tokenizer, console.is_terminal if masks else None):
            if isinstance(line, Text):
                console.print(line, soft_wrap=not console.is_terminal)
            else:
                print_line(console, f"  {line}")


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
    if not data.has_flag("makes_tokens") and data.tokenizer == "bytes":  # the default, which says nothing of tokens
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


def sample_lines(batch: "Sample", row: int, tokenizer: Tokenizer | None, colored: bool | None) -> list[str | Text]:
    """The text or token ids of one sample and, of a BERT sample, its masked tokens and whether the second text follows
    the first. `colored` shows what has a loss, by colors or brackets; None: not at all."""
    tokens: list[int] = batch["tokens"][row].tolist()
    labels: list[int] = batch["labels"][row].tolist()
    if "pair_keys" in batch:
        return pair_lines(marked_pairs(tokens, labels, batch["document_ids"][row].tolist(), tokenizer), bool(colored))
    if "masked_positions" not in batch:
        masked_text = colored is not None
        return (
            causal_lines(tokens, labels, tokenizer, bool(colored)) if masked_text else [token_text(tokens, tokenizer)]
        )
    tokens = tokens[: int(batch["attention_mask"][row].sum())]
    masked = [
        f"{position} {token_text([label], tokenizer)}"
        for position, label in zip(batch["masked_positions"][row].tolist(), labels, strict=True)
        if label != IGNORE_INDEX
    ]
    relation = "a random text" if int(batch["next_sentence_labels"][row]) else "the text that follows"
    return [token_text(tokens, tokenizer), f"masked: {', '.join(masked)}", f"second text: {relation}"]


def causal_lines(tokens: list[int], labels: list[int], tokenizer: Tokenizer | None, colored: bool) -> list[str | Text]:
    """The text with what has a loss, and counts."""
    shown = marked_text(tokens, labels, tokenizer)
    share = 100 * shown.num_trained / max(shown.num_tokens, 1)
    counts = f"{counted(shown.num_tokens, 'token', ',')}, {shown.num_trained:,} trained ({share:.1f}%)"
    return [_with_losses(shown, colored), counts]


def pair_lines(pairs: list[PairTexts], colored: bool) -> list[str | Text]:
    """Of each pair what both answers begin with, and then the rest of each."""
    lines: list[str | Text] = []
    for number, pair in enumerate(pairs, 1):
        lines += [f"pair {number} of {len(pairs)}"] if len(pairs) > 1 else []
        for name, text in pair._asdict().items():
            trained = f", {text.num_trained:,} trained" if name != "prompt" else ""
            lines += [f"{name}: {counted(text.num_tokens, 'token', ',')}{trained}", _with_losses(text, colored)]
    return lines


def _with_losses(shown: TextWithLosses, colored: bool) -> Text:
    text = Text()
    for part, is_trained in shown.parts:
        visible = _visible(part)
        marked = f"[[{visible}]]" if is_trained and not colored else visible
        text.append(marked, "bold green" if is_trained else "")
    return text


def _visible(text: str) -> str:
    """Text in which line breaks are line breaks and shown, and other control characters are escaped."""
    return "\\n\n".join(terminal_safe(line, sys.stdout.encoding or "utf-8") for line in text.split("\n"))


def token_text(tokens: list[int], tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return " ".join(map(str, tokens))
    text = quote_for_terminal(tokenizer.decode([token for token in tokens if token < tokenizer.vocab_size]))
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)
