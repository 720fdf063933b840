"""Containers for the ranks of a job: Pyxis, a plugin of Slurm that adds options to srun, or Apptainer.

Training and compiling run in the container. The supervisor runs on the host, because it calls srun and scontrol.
"""

from dataclasses import dataclass
from pathlib import Path

from trainyard.core.errors import UserError

RUNTIMES = ("pyxis", "apptainer")


@dataclass(frozen=True)
class Container:
    """An image that has trainyard, and how to start Python in it."""

    image: str
    runtime: str
    mounts: str = ""
    """Other directories, such as /data:/data,/cache:/cache."""

    @classmethod
    def from_options(cls, image: str | None, mounts: str | None, runtime: str | None) -> "Container | None":
        """The container of --container-image, --container-mounts and --container-runtime; None without an image."""
        if not image:
            for name, value in (("mounts", mounts), ("runtime", runtime)):
                if value:
                    raise UserError(f"--container-{name} {value}: needs --container-image")
            return None
        runtime = runtime or ("apptainer" if image.endswith(".sif") else "pyxis")
        if runtime not in RUNTIMES:
            raise UserError(f"--container-runtime {runtime}: must be one of {', '.join(RUNTIMES)}")
        return cls(image, runtime, mounts or "")

    def options(self) -> list[str]:
        """The options from which `trainyard supervise` makes this container again."""
        mounts = ["--container-mounts", self.mounts] if self.mounts else []
        return ["--container-image", self.image, *mounts, "--container-runtime", self.runtime]

    def step_options(self, directory: Path) -> list[str]:
        """Options of srun."""
        if self.runtime != "pyxis":
            return []
        mounts = f"--container-mounts={self._mounts(directory)}"
        return [f"--container-image={self.image}", mounts, f"--container-workdir={Path.cwd()}"]

    def python(self, directory: Path) -> list[str]:
        """The words that start Python in a task of srun."""
        if self.runtime == "pyxis":
            return ["python3"]
        # --nv: the driver of NVIDIA's GPUs, where the host has one
        binds = ["--bind", self._mounts(directory), "--pwd", str(Path.cwd())]
        return ["apptainer", "exec", "--nv", *binds, self.image, "python3"]

    def _mounts(self, directory: Path) -> str:
        """The run directory and the current one, under their own names, and those of the user."""
        own = [str(path) for path in dict.fromkeys((directory, Path.cwd()))]
        for path in own:
            if set(path) & set(":,"):
                raise UserError(f"{path}: a container cannot mount a directory with : or , in its name")
        return ",".join([*(f"{path}:{path}" for path in own), *([self.mounts] if self.mounts else [])])
