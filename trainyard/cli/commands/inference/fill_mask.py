"""`trainyard fill-mask`: Fill [MASK] with the BERT model of a checkpoint."""

import json
from typing import Annotated

from rich.console import Console
from rich.table import Table
from typer import Argument, Option

from trainyard.cli.console import prefetch_weights
from trainyard.cli.options import AsJson, CheckpointSource, DeviceName, TokenizerName
from trainyard.core.world import ONE_RANK


def fill_mask(
    source: CheckpointSource,
    texts: Annotated[list[str], Argument(metavar="TEXT...", help="Text with [MASK], one or several times.")],
    top: Annotated[int, Option(min=1, help="Candidates to print for each mask.")] = 5,
    device: DeviceName = "auto",
    tokenizer: TokenizerName = None,
    as_json: AsJson = False,
) -> None:
    """Print the most likely tokens for each [MASK] of a text, with a BERT model of any checkpoint format.

    Example:

      trainyard fill-mask runs/bert "The capital of France is [MASK]."
    """
    from trainyard import devices
    from trainyard.inference.fill_mask import MaskFiller

    prefetch_weights(source, ONE_RANK)
    filler = MaskFiller(source, devices.select(device), tokenizer)
    results = [(text, filler.fill(text, top)) for text in texts]
    if as_json:
        entries = [
            {"text": text, "masks": [[vars(candidate) for candidate in mask] for mask in masks]}
            for text, masks in results
        ]
        print(json.dumps(entries, ensure_ascii=False, indent=1))
        return
    console = Console(highlight=False)
    for text, masks in results:
        console.print(text, markup=False)
        table = Table(box=None, pad_edge=False)
        for column in ("mask", "token", "probability"):
            table.add_column(column, justify="right" if column == "probability" else "left")
        for number, mask in enumerate(masks, 1):
            for candidate in mask:
                table.add_row(str(number), candidate.text, f"{candidate.probability:.4f}")
        console.print(table)
