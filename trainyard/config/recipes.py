"""Recipes: configuration files that ship with trainyard, found by name."""

from pathlib import Path

import trainyard
from trainyard.core.errors import UserError
from trainyard.core.user_code import nearest_name


def recipes_directory() -> Path:
    """Return the directory of the recipes: inside an installed package, or next to the package in a checkout."""
    package = Path(trainyard.__file__).parent
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


def recipe_names() -> list[str]:
    return sorted(path.stem for path in recipes_directory().glob("*.yaml"))


def find_config(source: str | Path, directory: Path = Path()) -> Path:
    """Return the path of a configuration file, of the one in a run directory, or of the recipe with that name.

    Relative paths start at `directory`."""
    path = directory / Path(source).expanduser()
    if path.is_file():
        return path
    if str(source) in recipe_names():
        return recipes_directory() / f"{source}.yaml"
    if path.is_dir():
        if (path / "config.yaml").is_file():
            return path / "config.yaml"
        names = ", ".join(recipe_names())
        raise UserError(f"{source}: a directory without config.yaml, not a run directory; recipes: {names}")
    hint = nearest_name(str(source), recipe_names()).replace("nearest", "nearest recipe")
    raise UserError(f"{source}: no such file or recipe{hint or ' (trainyard recipes lists those)'}")
