"""Where this user's caches are."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from trainyard.core.disk_space import closest_existing


def user_cache(*names: str, environ: Mapping[str, str] = os.environ, is_writable: bool = False) -> Path:
    """A directory in the trainyard folder of the user's cache, which XDG_CACHE_HOME names.

    As the XDG specification says, an empty or relative value counts as unset: nothing lands in whatever directory a
    command was started in. A user without a home directory, as in some containers, has a cache among temporary files;
    with `is_writable`, so has one who may not write to it.
    """
    home = Path(environ.get("XDG_CACHE_HOME", ""))
    if not home.is_absolute():
        home = Path(os.path.expanduser("~/.cache"))  # stays as it is without a home directory
    if not home.is_absolute() or (is_writable and not os.access(closest_existing(home), os.W_OK)):
        home = Path(tempfile.gettempdir()) / f"trainyard-{os.getuid()}"
    return home.joinpath("trainyard", *names)
