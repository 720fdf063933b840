"""The batch script of a run: readable, and complete without trainyard's help to understand it.

Ranks may run in a container: of Pyxis, a plugin of Slurm that adds options to srun, or of Apptainer. Training and
compiling run in it; the supervisor runs on the host, because it calls srun and scontrol.
"""

import re
import shlex
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainyard.cluster.jobs import LOG_DIRECTORY
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


@dataclass(frozen=True)
class BatchOptions:
    """Resources of a job, by the names of sbatch's options."""

    nodes: str
    """Number of nodes, or a range such as 2-4."""
    partition: str | None = None
    time: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    gpus_per_node: int | None = None
    exclusive: bool = True
    """Whole nodes: all their CPUs and memory."""
    nproc: int = 1
    """Ranks on each node. A job that shares nodes gets a CPU for each."""
    notice_s: int = 120
    """Seconds before the time limit at which the run saves and the job is requeued; 0: no notice."""
    extra: tuple[str, ...] = ()
    """Other options of sbatch. They replace our choice of memory and CPUs."""
    modules: tuple[str, ...] = ()
    """Environment modules to load."""
    setup: str = ""
    """Lines of the site, such as exports, that run before Python starts."""
    container: Container | None = None

    def directives(self, name: str, directory: Path) -> list[list[str]]:
        """The options of sbatch, each as its words."""
        named = ("partition", "time", "account", "qos", "constraint", "reservation")
        extra = [split_option(text) for text in self.extra]
        given = {words[0].partition("=")[0] for words in extra}
        directives = [f"--job-name={name}", f"--nodes={self.nodes}"]
        if self.nodes.isdigit():  # with a range, Slurm takes this for the total of the fewest nodes, and gives those
            directives.append("--ntasks-per-node=1")
        directives += [f"--{key}={value}" for key in named if (value := getattr(self, key))]
        directives += [f"--gpus-per-node={self.gpus_per_node}"] if self.gpus_per_node else []
        if self.exclusive:
            # Where Slurm schedules memory, a job gets its default, often 2 GB, even on a node of its own.
            directives += ["--exclusive", *(["--mem=0"] if not given & MEMORY_OPTIONS else [])]
        elif not given & CPU_OPTIONS:
            directives.append(f"--cpus-per-task={self.nproc}")
        log = str(directory / LOG_DIRECTORY).replace("%", "%%")
        directives += [
            "--requeue",
            *([f"--signal=B:USR1@{self.notice_s}"] if self.notice_s else []),
            "--open-mode=append",
            f"--output={log}/%j.log",
        ]
        for directive in directives:
            if not directive.isprintable():
                raise UserError(f"{directive!r}: has a character that sbatch does not read")
        return [*([directive] for directive in directives), *extra]


MEMORY_OPTIONS = {"--mem", "--mem-per-cpu", "--mem-per-gpu"}
CPU_OPTIONS = {"--cpus-per-task", "-c", "--cpus-per-gpu", "--ntasks", "-n", "--ntasks-per-node"}
LOAD_MODULES = """\
type module > /dev/null 2>&1 || . /etc/profile  # a function of login shells
module load {names} || exit"""

RESTART_IF_KILLED = """\
child= code=137 starts=0
trap 'kill -TERM $child 2>/dev/null || :' TERM
trap 'export {noticed}=1; kill -USR1 $child 2>/dev/null || :' USR1
while [ $code = 137 -o $code = 138 ] && [ $((starts += 1)) -le {max_starts} ]; do
    {command} &
    child=$!
    while code=0; wait $child || code=$?; kill -0 $child 2>/dev/null; do :; done  # a signal ends wait, not the child
done
exit $code"""
"""137: killed by SIGKILL. 138: by the notice, before the command was ready for it."""
NOTICED_VARIABLE = "TRAINYARD_NOTICED"
"""Environment variable of the supervisor: the notice before the time limit has come."""


def render_script(
    name: str,
    directory: Path,
    options: BatchOptions,
    commands: Iterable[Sequence[str]],
    purpose: str,
    max_starts: int,
) -> str:
    """A script that runs commands on the first node of the job, one after the other. The last one gets the signals that
    Slurm sends to the script, and is started up to `max_starts` times if something kills it, such as the kernel for
    lack of memory."""
    *first, last = [shlex.join(command) for command in commands]
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {shlex.join(words)}" for words in options.directives(name, directory)),
        "",
        f"# {purpose}",
        *(LOAD_MODULES.format(names=shlex.join(options.modules)).splitlines() if options.modules else []),
        *([options.setup.rstrip("\n"), ""] if options.setup else []),
        "set -euo pipefail",
        "ulimit -S -n $(ulimit -H -n)  # sockets and files: a rank has some for every other rank",
        "ulimit -S -l $(ulimit -H -l)  # locked memory: network adapters and devices map it",
        "",
        *first,
        *RESTART_IF_KILLED.format(command=last, max_starts=max_starts, noticed=NOTICED_VARIABLE).splitlines(),
    ]
    return "\n".join(lines) + "\n"


def split_option(text: str) -> list[str]:
    """The words of an option of sbatch, such as --comment=a b or --exclude n1."""
    if not re.match(r"--?[A-Za-z]", text) or not text.isprintable():
        raise UserError(f"--sbatch {text!r}: must be one option of sbatch, such as --sbatch=--comment=text")
    option, _, value = text.partition(" ")
    if "=" in option or not value:
        return [text]
    if value.startswith("-"):
        raise UserError(f"--sbatch {text!r}: must be one option; repeat --sbatch for each")
    return [option, value]


def read_setup(path: Path) -> str:
    """The lines of a file for batch scripts. Raises UserError if they would change the lines that follow them."""
    try:
        text = path.read_text()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise UserError(f"--setup {path}: cannot be read: {reason}") from None
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("#SBATCH"):
            raise UserError(f"--setup {path}: line {number}: sbatch reads no options there; nearest: --sbatch=--OPTION")
    done = subprocess.run(["/bin/bash", "-n"], input=text, capture_output=True, text=True, check=False)
    if done.stderr:  # also for a here-document without an end
        raise UserError(f"--setup {path}: {done.stderr.splitlines()[0].removeprefix('/bin/bash: ')}")
    return text
