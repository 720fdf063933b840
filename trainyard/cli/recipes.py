"""`trainyard recipes`: what can be trained, one line each."""

from rich.console import Console
from rich.table import Table

from trainyard import models
from trainyard.config.load import load
from trainyard.config.recipes import recipe_names


def recipes() -> None:
    """List the recipes: what each trains, how large it is, what it needs.

    Try any of them here, tiny, with: trainyard train RECIPE --smoke
    """
    table = Table(box=None, pad_edge=False)
    for heading in ("recipe", "weights", "sequence", "global batch", "layout", "needs", "what"):
        table.add_column(
            heading, no_wrap=heading != "what", justify="right" if heading in ("weights", "sequence") else "left"
        )
    for name in recipe_names():
        config = load(name)
        weights = models.family_of(config.model).blueprint(config.model).parameter_count()
        size = f"{weights / 1e9:.2f}B" if weights > 1e9 else f"{weights / 1e6:.1f}M"
        axes = {key: getattr(config.layout, key) for key in ("tp", "pp", "cp", "zero")}
        layout = " ".join(f"{key}{value}" for key, value in axes.items() if value > (key != "zero")) or "-"
        batch = str(config.train.global_batch)
        table.add_row(name, size, str(config.data.seq_len), batch, layout, config.hardware, config.description)
    Console(width=None if Console().is_terminal else 200).print(table)
