"""A real Slurm cluster on this machine: munged, slurmctld, and a slurmd for each node in namespaces of its own.

A node has its own address, host name, process ids and shared memory, and the file system of this machine. Killing it is
a loss of power: all its processes end at once. Its cable can be cut and mended. Several clusters may run beside each
other, and a cluster ends with the process that started it, however that ends. Needs root and Debian's packages
slurmctld, slurmd, slurm-client, munge and iproute2, which scripts/prepare installs.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from trainyard.launch.launcher import reserved_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "ip", "unshare", "nsenter", "setpriv")
SYSTEM_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
END_WITH_PARENT = ["setpriv", "--pdeathsig", "KILL"]
MAX_CLUSTERS = 20
NODE_PROGRAMS = ("bash", "sleep", "slurmd", "unshare")
"""Run on every node."""
WAIT_S = 90
NODE_INIT = """
echo {name} > /proc/sys/kernel/hostname
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount --bind {directory}/hosts /etc/hosts
ip link set lo up
touch {directory}/{name}.booted
while :; do sleep 3600 & wait; done
"""
CONFIGURATION = """
ClusterName=trainyard
SlurmctldHost={host}({network}.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={directory}/munge.socket,cred_expire=5
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerNode=2000
MpiDefault=none
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
SlurmdTimeout=6
SlurmctldTimeout=10
KillWait=10
InactiveLimit=0
ReturnToService=2
JobRequeue=1
MinJobAge=86400
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=30
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def missing_for_cluster() -> str:
    """Why this machine cannot run a cluster; empty if it can."""
    missing = [name for name in PROGRAMS if not shutil.which(name, path=SYSTEM_PATH)]
    if missing:
        return f"needs {', '.join(missing)} (as root, make test installs them)"
    if os.geteuid() != 0:
        return "needs root for the network namespaces of the nodes"
    spaces = ["--net", "--uts", "--ipc", "--pid", "--mount"]
    probe = ["unshare", *spaces, "--fork", "sh", "-c", "ip link add name probe0 type bridge && echo works"]
    done = subprocess.run(probe, capture_output=True, text=True, check=False)  # some kernels give unshare exit code 1
    return "" if "works" in done.stdout else f"cannot create namespaces: {done.stderr.strip()}"


@contextmanager
def temporary_cluster(num_nodes: int) -> Iterator["SlurmCluster"]:
    """A cluster in a directory of its own. Both are gone afterwards."""
    directory = Path(tempfile.mkdtemp(prefix="slurm-"))  # sockets need a short path
    try:
        cluster = SlurmCluster(directory, num_nodes)
        try:
            yield cluster
        finally:
            cluster.stop()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def exit_on_sigterm() -> None:
    """Let SIGTERM end this process with its `finally` blocks, so that a script leaves no cluster behind."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


class SlurmCluster:
    """A running cluster with nodes n1, n2, ... Its directory must have a short path, because of the sockets in it."""

    def __init__(self, directory: Path, num_nodes: int) -> None:
        self.directory, self.names = directory, [f"n{index}" for index in range(1, num_nodes + 1)]
        self.configuration = directory / "slurm.conf"
        self.environment = {**os.environ, "PATH": SYSTEM_PATH, "SLURM_CONF": str(self.configuration)}
        self.inits: dict[str, int] = {}
        """Process 1 of each node, in the process ids of this machine."""
        self.namespace_holders: dict[str, subprocess.Popen[bytes]] = {}
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        directory.mkdir(parents=True, exist_ok=True)
        try:
            self._start_switch()
            self.network = self._connect_host()
            """The first three bytes of all addresses. This machine is .1, node K is .10+K."""
            self._write_configuration()
            self._start_munge()
            self._start_controller()
            for name in self.names:
                self.start_node(name)
            self._wait_for(lambda: len(self.idle_nodes()) == num_nodes, "idle nodes")
        except BaseException:
            self.stop()
            raise

    def run(self, *command: str, timeout: float = WAIT_S) -> str:
        """Run one of Slurm's commands and return its output."""
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=timeout, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def idle_nodes(self) -> list[str]:
        return self.run("sinfo", "-h", "-N", "-p", "main", "-t", "idle", "-o", "%N").split()

    def start_node(self, name: str) -> None:
        """Boot a node: namespaces, its cable to the switch, and slurmd."""
        booted = self.directory / f"{name}.booted"
        booted.unlink(missing_ok=True)
        init = NODE_INIT.format(name=name, directory=self.directory)
        spaces = ["--net", "--uts", "--ipc", "--pid", "--mount", "--mount-proc"]
        command = ["unshare", *spaces, "--fork", "--kill-child=KILL", "bash", "-c", init]
        holder = self.namespace_holders[name] = self._start(command)
        self._wait_for(booted.exists, f"{name} to boot")
        self.inits[name] = pid = int(Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()[0])
        number = self.names.index(name) + 1
        self._ip(f"link add p{number} netns {self.switch.pid} type veth peer name eth0 netns {pid}")
        self._in_switch(f"link set p{number} master br0 up")
        address = f"{self.network}.{10 + number}/24"
        self.in_node(name, ["ip", "addr", "add", address, "dev", "eth0"])
        self.in_node(name, ["ip", "link", "set", "eth0", "up"])
        self.in_node(name, ["slurmd", "-N", name, "-f", str(self.configuration)])

    def kill_node(self, name: str) -> None:
        """A loss of power: the kernel ends all processes of the node."""
        os.kill(self.inits.pop(name), signal.SIGKILL)
        self.namespace_holders.pop(name).wait()

    def cut_cable(self, name: str) -> None:
        self._in_switch(f"link set p{self.names.index(name) + 1} down")

    def mend_cable(self, name: str) -> None:
        self._in_switch(f"link set p{self.names.index(name) + 1} up")

    def processes(self, hidden: Sequence[str] = (*NODE_PROGRAMS, "slurmstepd")) -> list[int]:
        """All processes of all nodes, except process 1 of each, its sleep and Slurm's own."""
        found = []
        for init in self.inits.values():
            namespace = os.readlink(f"/proc/{init}/ns/pid")
            for path in Path("/proc").glob("[0-9]*"):
                with suppress(OSError):
                    if os.readlink(path / "ns/pid") == namespace and (path / "comm").read_text().strip() not in hidden:
                        found.append(int(path.name))
        return found

    def recover(self, cancel: bool = True) -> None:
        """Cancel all jobs, unless told otherwise, and start or reconnect nodes until all work."""
        if cancel:
            subprocess.run(["scancel", "--full", "-u", "root"], env=self.environment, capture_output=True, check=False)
        for name in self.names:
            if name not in self.inits:
                self.start_node(name)
            self.mend_cable(name)
        for name in self.names:
            subprocess.run(
                ["scontrol", "update", f"nodename={name}", "state=resume"],
                env=self.environment,
                capture_output=True,
                check=False,  # it may not be down
            )
        if cancel:
            self._wait_for(lambda: len(self.idle_nodes()) == len(self.names), "idle nodes")

    def restart_daemon(self, name: str, after_s: float) -> None:
        """Kill munged or slurmctld, and start it again after a while."""
        self._end(self.daemons[name])
        time.sleep(after_s)
        (self._start_munge if name == "munged" else self._start_controller)()

    def stop(self) -> None:
        """End everything that this cluster started."""
        for name in list(self.inits):
            self.kill_node(name)
        for process in self.daemons.values():
            self._end(process)

    def _end(self, process: "subprocess.Popen[bytes]") -> None:
        process.kill()
        process.wait()

    def _start(self, command: Sequence[str]) -> "subprocess.Popen[bytes]":
        """Start a process that ends with this one."""
        with (self.directory / "daemons.log").open("ab") as log:
            return subprocess.Popen(
                [*END_WITH_PARENT, *command],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _write_configuration(self) -> None:
        (self.directory / "state").mkdir(exist_ok=True)
        host = os.uname().nodename.split(".")[0]
        addresses = {name: f"{self.network}.{10 + index}" for index, name in enumerate(self.names, 1)}
        lines = [f"{address} {name}" for name, address in addresses.items()]
        own = ["127.0.0.1 localhost", f"{self.network}.1 {host}"]
        (self.directory / "hosts").write_text("\n".join([*own, *lines]) + "\n")
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={name} NodeAddr={address} Port=26818 CPUs=8 RealMemory=100000"
            for name, address in addresses.items()
        )
        with reserved_port() as port:
            text = CONFIGURATION.format(
                host=host, network=self.network, port=port, directory=self.directory, nodes=nodes
            )
        self.configuration.write_text(text)
        (self.directory / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # asks for nothing at start-up

    def _start_controller(self) -> None:
        self.daemons["slurmctld"] = self._start(["slurmctld", "-D"])
        self._wait_for_answer(["scontrol", "ping"])

    def _start_munge(self) -> None:
        key = self.directory / "munge.key"
        if not key.exists():
            key.touch(mode=0o600)
            key.write_bytes(os.urandom(1024))
        files = {name: self.directory / f"munge.{name}" for name in ("socket", "log", "seed")}
        options = [f"--{name}{'' if name == 'socket' else '-file'}={path}" for name, path in files.items()]
        command = ["munged", "--foreground", "--force", f"--key-file={key}", f"--pid-file={self.directory}/munged.pid"]
        self.daemons["munged"] = self._start([*command, *options])
        self._wait_for_answer(["munge", "-n", "-S", str(files["socket"])])

    def _wait_for_answer(self, command: list[str]) -> None:
        def answers() -> bool:
            return not subprocess.run(command, env=self.environment, capture_output=True, check=False).returncode

        self._wait_for(answers, " ".join(command))

    def _start_switch(self) -> None:
        """A bridge in a namespace of its own, where no firewall rule of this machine applies."""
        self.daemons["switch"] = self.switch = self._start(["unshare", "--net", "sleep", "infinity"])
        own = os.readlink("/proc/self/ns/net")
        self._wait_for(lambda: os.readlink(f"/proc/{self.switch.pid}/ns/net") != own, "the switch")
        self._in_switch("link add br0 type bridge")
        self._in_switch("link set br0 up")

    def _connect_host(self) -> str:
        """Connect this machine to the switch; the interface is gone when the switch is. Returns the network, which no
        other cluster of this machine has, because the name of an interface is unique."""
        for number in range(MAX_CLUSTERS):
            interface, network = f"trainyard{number}", f"10.213.{77 + number}"
            with suppress(AssertionError):  # another cluster has it
                self._ip(f"link add {interface} type veth peer name p0 netns {self.switch.pid}")
                self._in_switch("link set p0 master br0 up")
                self._ip(f"addr add {network}.1/24 dev {interface}")
                self._ip(f"link set {interface} up")
                return network
        raise AssertionError(f"no interface for a cluster; {MAX_CLUSTERS} are in use")

    def _daemon(self, command: Sequence[str]) -> None:
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=WAIT_S, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"

    def _ip(self, words: str) -> None:
        self._daemon(["ip", *words.split()])

    def _in_switch(self, words: str) -> None:
        self._daemon(["nsenter", "-t", str(self.switch.pid), "--net", "ip", *words.split()])

    def in_node(self, name: str, command: Sequence[str]) -> None:
        """Run a command in the namespaces of a node."""
        spaces = ["--mount", "--uts", "--ipc", "--net", "--pid"]
        self._daemon(["nsenter", "-t", str(self.inits[name]), *spaces, "--", *command])

    def _wait_for(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, f"waited {WAIT_S} s for {what}; see {self.directory}"
            time.sleep(0.05)
