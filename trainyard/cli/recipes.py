"""`trainyard recipes`: list the built-in recipes."""

from rich.console import Console
from rich.table import Table

from trainyard import models
from trainyard.config.load import load
from trainyard.config.recipes import recipe_names


def recipes() -> None:
    """List the built-in recipes: model size, batch, layout and hardware of each.

    Run any of them on this machine, shrunk to seconds, with: trainyard train RECIPE --smoke
    """
    table = Table(box=None, pad_edge=False)
    for heading in ("recipe", "weights", "seq_len", "global batch", "layout", "hardware", "description"):
        right = heading in ("weights", "seq_len")
        table.add_column(heading, no_wrap=heading != "description", justify="right" if right else "left")
    for name in recipe_names():
        config = load(name)
        weights = models.family_of(config.model).blueprint(config.model).parameter_count()
        size = f"{weights / 1e9:.2f}B" if weights > 1e9 else f"{weights / 1e6:.1f}M"
        axes = {key: getattr(config.layout, key) for key in ("tp", "pp", "cp", "zero")}
        layout = " ".join(f"{key}{value}" for key, value in axes.items() if value > (key != "zero")) or "-"
        batch = str(config.train.global_batch)
        table.add_row(name, size, str(config.data.seq_len), batch, layout, config.hardware, config.description)
    Console(width=None if Console().is_terminal else 200).print(table)
