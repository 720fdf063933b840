"""`trainyard recipes`: List the built-in recipes."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainyard.config.load import load
from trainyard.config.recipes import recipe_names
from trainyard.families import blueprint_of

PLAIN_WIDTH = 200
"""Columns without a terminal."""
MIN_DESCRIPTION_WIDTH = 40
"""Columns that a description needs next to the numbers; in a narrower terminal the descriptions follow the table."""
HEADINGS = ("recipe", "weights", "seq", "batch", "layout", "hardware")


def recipes() -> None:
    """List the built-in recipes: model size, batch, layout and hardware of each.

    Run any of them on this machine, shrunk to seconds, with: trainyard train RECIPE --smoke
    """
    rows = [_recipe_row(name) for name in recipe_names()]
    console = Console(width=None if Console().is_terminal else PLAIN_WIDTH, highlight=False)
    width = sum(max(map(len, column)) + 2 for column in list(zip(*rows, strict=True))[: len(HEADINGS)])
    on_one_line = width + MIN_DESCRIPTION_WIDTH <= console.width
    table = Table(box=None, pad_edge=False, padding=(0, 2 if on_one_line else 1, 0, 0))
    for heading in (*HEADINGS, *(["description"] if on_one_line else [])):
        right = heading in ("weights", "seq", "batch")
        table.add_column(heading, no_wrap=heading != "description", justify="right" if right else "left")
    for *cells, description in rows:
        table.add_row(*cells, *([description] if on_one_line else []))
    console.print(table)
    if not on_one_line:
        console.print()
        for name, *_, description in rows:
            console.print(Text(f"{name}: {description}", overflow="fold"))


def _recipe_row(name: str) -> tuple[str, ...]:
    config = load(name)
    weights = blueprint_of(config.model).parameter_count()
    size = f"{weights / 1e9:.2f}B" if weights > 1e9 else f"{weights / 1e6:.1f}M"
    axes = {key: getattr(config.layout, key) for key in ("tp", "pp", "cp", "zero")}
    layout = " ".join(f"{key}{value}" for key, value in axes.items() if value > (key != "zero")) or "-"
    batch = str(config.train.global_batch)
    return name, size, str(config.data.seq_len), batch, layout, config.hardware, config.description
