"""Keep torch from reading its autograd index while graphs are traced without memory."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainyard.train.compile import inductor_cache

STAGING_PREFIX = ".staging-"
"""Prefix of temporary directories in the cache, followed by the process id."""
AUTOGRAD_INDEX = "aotautograd"
"""torch's index of forward and backward graphs together."""


class AutogradIndex:
    """torch's index of forward and backward graphs, written during the second pass but never read.

    torch would call the compiled code of an entry that it finds, which fake tensors do not survive. So torch gets a
    directory with links to everything in the cache except the index, and whatever it writes to the index is set aside
    before the next graph. (torch 2.11 asks for one graph several times in a trace.)
    """

    def __init__(self, cache_dir: Path) -> None:
        self.cache_dir = cache_dir
        self.staging: Path | None = None
        self.written: list[Path] = []
        """Files of the index after `redirected`."""

    @contextmanager
    def redirected(self) -> Iterator[None]:
        with tempfile.TemporaryDirectory(dir=self.cache_dir, prefix=f"{STAGING_PREFIX}{os.getpid()}-") as name:
            self.staging = Path(name)
            for path in self.cache_dir.iterdir():
                if path.name != AUTOGRAD_INDEX and not path.name.startswith("."):
                    (self.staging / path.name).symlink_to(path)
            os.environ[inductor_cache.TORCH_CACHE_VARIABLE] = name
            try:
                yield
                self.set_aside()
                self._publish()
            finally:
                os.environ[inductor_cache.TORCH_CACHE_VARIABLE] = str(self.cache_dir)
                self.staging = None

    def set_aside(self) -> None:
        """Hide what torch has written so far from its lookups."""
        if self.staging and (self.staging / AUTOGRAD_INDEX).exists():
            aside = Path(tempfile.mkdtemp(dir=self.staging, prefix=".aside-"))
            (self.staging / AUTOGRAD_INDEX).rename(aside / AUTOGRAD_INDEX)

    def _publish(self) -> None:
        """Move everything that torch wrote into the cache."""
        assert self.staging is not None
        for path in inductor_cache.list_files(self.staging):
            parts = path.relative_to(self.staging).parts
            target = self.cache_dir.joinpath(*(parts[1:] if parts[0].startswith(".aside-") else parts))
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, target)
            self.written.append(target)
