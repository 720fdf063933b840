"""`trainyard doctor --nodes`: findings of several nodes, and the network between them, also on a real Slurm cluster."""

import json
import os
import signal
import sys
import threading
import time
from itertools import combinations
from pathlib import Path
from subprocess import PIPE, CompletedProcess, Popen
from subprocess import run as run_process
from typing import Any

import pytest

from tests.support.forkserver import ForkServer
from tests.support.slurm_cluster import SlurmCluster
from trainyard.cluster.doctor.file_system import SharedDirectoryProbe, shared_directory_finding
from trainyard.cluster.doctor.network import (
    Link,
    clock_offset,
    hopeless_nodes,
    link_findings,
    open_listener,
    receive_stream,
    send_stream,
    serve_clock,
    tournament,
)
from trainyard.cluster.doctor.node_findings import compress_hosts, merge_findings
from trainyard.cluster.doctor.node_worker import MessageReader, encode_message
from trainyard.cluster.doctor.slurm_workers import allocated_nodes, is_useless, started_workers
from trainyard.cluster.doctor.survey import clock_findings, survey_nodes
from trainyard.core.finding import Finding

TIMEOUT_S = 180
TOKEN = bytes(range(16))


def names(count: int) -> list[str]:
    return [f"n{index}" for index in range(1, count + 1)]


@pytest.mark.parametrize("count", range(9))
def test_tournament_pairs_all_nodes_once_and_each_at_most_once_in_a_round(count: int) -> None:
    rounds = tournament(names(count))
    assert len(rounds) == (count - 1 if count % 2 == 0 and count else count)
    for pairs in rounds:
        busy = [node for pair in pairs for node in pair]
        assert len(busy) == len(set(busy))
    met = sorted(tuple(sorted(pair)) for pairs in rounds for pair in pairs)
    assert met == sorted(tuple(sorted(pair)) for pair in combinations(names(count), 2))


def rates(count: int, slow: dict[Link, float | None] | None = None) -> dict[Link, float | None]:
    """Links of about 10 Gbit/s."""
    links = [(one, other) for one in names(count) for other in names(count) if one != other]
    usual: dict[Link, float | None] = {link: 1.25e9 * (1 + 0.001 * index) for index, link in enumerate(links)}
    return usual | (slow or {})


def node_links(node: str, count: int, rate: float | None, ends: tuple[int, ...] = (0, 1)) -> dict[Link, float | None]:
    return {link: rate for link in rates(count) if any(link[end] == node for end in ends)}


def problems(count: int, slow: dict[Link, float | None]) -> list[tuple[str, str]]:
    found = link_findings(names(count), rates(count, slow))
    return [(finding.level, finding.text) for finding in found if finding.level != "ok"]


@pytest.mark.parametrize("count", [2, 3, 4, 16])
def test_healthy_links_are_one_line(count: int) -> None:
    (finding,) = link_findings(names(count), rates(count))
    assert finding.text.startswith(f"{count * (count - 1)} links")
    assert finding.text.endswith("slowest 10 Gbit/s, n1 to n2")


@pytest.mark.parametrize("count", [3, 4, 16])
def test_slow_node_is_named(count: int) -> None:
    ((level, text),) = problems(count, node_links("n2", count, 6e6))
    assert (level, text.partition(",")[0]) == ("warning", "n2 sends and receives at 0.048 Gbit/s on all its links")
    ((_, text),) = problems(count, node_links("n3", count, 6e6, (0,)))
    assert text.startswith("n3 sends at 0.048 Gbit/s on all its links")


def test_slow_link_is_named() -> None:
    for count in (2, 4):
        ((level, text),) = problems(count, {("n1", "n2"): 1e8})
        assert (level, text.partition(",")[0]) == ("warning", "n1 sends to n2 at 0.8 Gbit/s")


def test_node_that_cannot_be_reached_is_named() -> None:
    ((level, text),) = problems(4, node_links("n3", 4, None))
    assert (level, text) == ("error", "n3 reaches no other node, and none reaches it")
    assert problems(2, node_links("n1", 2, None)) == [("error", "none of n[1-2] reaches another one")]
    assert problems(4, {("n1", "n2"): None}) == [("error", "n1 does not reach n2")]


def test_measurement_gives_up_on_a_node_only_if_working_nodes_do_not_reach_it() -> None:
    measured = {("n1", "n4"): None, ("n2", "n3"): 1e9, ("n1", "n3"): None}
    assert hopeless_nodes(measured) == set()  # n4 may be the cause of one failure
    assert hopeless_nodes({**measured, ("n1", "n2"): None}) == {"n1"}


@pytest.mark.parametrize(
    ("hosts", "text"),
    [
        (["n1", "n2", "n4", "login"], "login,n[1-2,4]"),
        (["n08", "n09", "n10"], "n[08-10]"),
        (["n9", "n10"], "n[9-10]"),
        (["a1"], "a1"),
        (["queue-st-1", "queue-dy-1"], "queue-st-1,queue-dy-1"),
    ],
)
def test_hosts_are_written_as_slurm_does(hosts: list[str], text: str) -> None:
    assert compress_hosts(hosts) == text


def node_findings(node: str, **changed: Finding) -> list[Finding]:
    number = int(node[1:])
    usual = {
        "versions": Finding("versions", "ok", "Python 3.11.7, torch 2.13.0"),
        "memory": Finding("memory", "ok", f"{20 + number}.5 of 64.0 GiB free"),
        "name": Finding("host name", "ok", f"{node} is 10.0.0.{number + 8}"),
        "gpu": Finding("gpu 7", "ok", f"NVIDIA H200, 140 GiB, {number} MiB in use"),
        "driver": Finding("neuron driver", "ok", "loaded, 16 chips, in use by 0"),
    }
    return [finding for finding in (usual | changed).values() if finding.text]


def merged_lines(**by_node: list[Finding]) -> list[tuple[str, str, str]]:
    merged = merge_findings(by_node)
    return [(compress_hosts(item.nodes), item.finding.level, item.finding.text) for item in merged]


def test_equal_findings_are_merged() -> None:
    assert merged_lines(**{node: node_findings(node) for node in names(4)}) == [
        ("n[1-4]", "ok", "Python 3.11.7, torch 2.13.0"),
        ("n[1-4]", "ok", "21.5 to 24.5 of 64.0 GiB free"),
        ("n[1-4]", "ok", "each node is 10.0.0.9 to 10.0.0.12"),
        ("n[1-4]", "ok", "NVIDIA H200, 140 GiB, 1 to 4 MiB in use"),
        ("n[1-4]", "ok", "loaded, 16 chips, in use by 0"),
    ]


def test_what_differs_names_its_nodes() -> None:
    odd = node_findings(
        "n3",
        versions=Finding("versions", "ok", "Python 3.11.7, torch 2.12.0"),
        memory=Finding("memory", "warning", "0.5 of 64.0 GiB free", "end it"),
        gpu=Finding("gpu 7", "ok", ""),
        driver=Finding("neuron driver", "ok", "loaded, 15 chips, in use by 0"),
    )
    lines = merged_lines(**{node: odd if node == "n3" else node_findings(node) for node in names(4)})
    assert ("n3", "warning", "n3 has torch 2.12.0, where most nodes have torch 2.13.0") in lines
    assert ("n3", "warning", "0.5 of 64.0 GiB free") in lines
    assert ("n3", "warning", "not found on n3; 3 nodes have it") in lines
    assert ("n3", "ok", "loaded, 15 chips, in use by 0") in lines
    assert ("n[1-2,4]", "ok", "loaded, 16 chips, in use by 0") in lines


def test_messages_of_several_nodes_may_be_mixed() -> None:
    long, short = {"text": "x y " * 1000}, ["z"]
    lines = encode_message("n1", long).splitlines(keepends=True)
    assert max(map(len, lines)) < 1000
    lines[1:1] = ["module loaded\n", *encode_message("n2", short).splitlines(keepends=True)]
    reader = MessageReader()
    assert [message for line in lines if (message := reader.read_line(line))] == [("n2", short), ("n1", long)]


def test_stream_is_measured_and_strangers_are_ignored() -> None:
    with open_listener() as listener:
        address = ("127.0.0.1", listener.getsockname()[1])

        def connect() -> None:
            send_stream(address, bytes(16))
            send_stream(address, TOKEN)

        sender = threading.Thread(target=connect)
        sender.start()
        assert receive_stream(listener, TOKEN) > 1e6
        sender.join()
        with pytest.raises(OSError, match="timed out"):
            receive_stream(listener, TOKEN)


def test_clock_offset() -> None:
    with open_listener() as listener:
        server = threading.Thread(target=serve_clock, args=(listener, TOKEN, 1))
        server.start()
        offset = clock_offset(("127.0.0.1", listener.getsockname()[1]), TOKEN, lambda: time.time() + 100)
        server.join()
    assert offset == pytest.approx(100, abs=0.1)


def test_wrong_clock_is_named() -> None:
    assert clock_findings({"n1": 0.0, "n2": 0.004, "n3": -0.002})[0].text == "differ by 6.0 ms at most"
    (finding,) = clock_findings({"n1": 0.0, "n2": 5.0, "n3": 5.1})
    assert (finding.level, finding.text) == ("warning", "n1 is 5.0 s behind the other nodes")


def test_directory_that_is_not_shared(tmp_path: Path) -> None:
    first, other = SharedDirectoryProbe(), SharedDirectoryProbe()
    (tmp_path / "elsewhere").mkdir()
    path = first.create(str(tmp_path))
    elsewhere = other.look(str(tmp_path / "elsewhere"), is_last=False)
    here = other.look(path, is_last=True)
    assert here == {"seen": True, "refused": True}
    assert first.finish() == {"seen": True}
    assert not Path(path).exists()

    def finding(look: Any, seen: bool = True) -> tuple[str, str]:
        result = shared_directory_finding("/runs", names(3), {"n2": here, "n3": look}, seen)
        return result.level, result.text

    assert finding(here) == ("ok", "/runs: all nodes see the same files and locks")
    assert finding(elsewhere) == ("error", "/runs: n3 does not see a file that n1 created")
    assert finding(here, seen=False) == ("error", "/runs: n1 does not see a file that n3 created")
    assert finding({"seen": True, "refused": False})[0] == "warning"


def test_states_of_nodes() -> None:
    assert all(map(is_useless, ("DOWN*", "IDLE+DRAIN", "DOWN+DRAIN")))
    assert not any(map(is_useless, ("IDLE", "MIXED", "IDLE+CLOUD+POWERED_DOWN", "ALLOCATED")))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nodes", "0"], "--nodes 0: must be 1 or more"),
        (["--nodes", "4"], "--nodes 4: this machine has no Slurm"),
        (["--nodes", "4", "--fix"], "--nodes 4: not with --fix"),
        (["--partition", "main"], "--partition: works with --nodes N only"),
    ],
)
def test_bad_input_is_one_line(cli: ForkServer, options: list[str], message: str) -> None:
    done = cli.run(["doctor", *options], env={**os.environ, "PATH": "/nowhere"})
    assert done.returncode == 2
    assert done.stderr.startswith(f"trainyard: {message}")
    assert done.stderr.count("\n") == 1


def start_doctor(slurm: SlurmCluster, *options: object, prefix: tuple[str, ...] = ()) -> Popen[str]:
    command = [*prefix, sys.executable, "-m", "trainyard", "doctor", *map(str, options)]
    return Popen(command, env=slurm.environment, stdout=PIPE, stderr=PIPE, text=True)


def run_doctor(slurm: SlurmCluster, *options: object, prefix: tuple[str, ...] = ()) -> CompletedProcess[str]:
    process = start_doctor(slurm, *options, prefix=prefix)
    output, errors = process.communicate(timeout=TIMEOUT_S)
    return CompletedProcess(process.args, process.returncode, output, errors)


def assert_nothing_is_left(slurm: SlurmCluster, directory: Path) -> None:
    deadline = time.monotonic() + 60
    while slurm.processes() or slurm.run("squeue", "--noheader", "--states", "running,pending"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert list(directory.iterdir()) == []


def test_nodes_of_a_cluster(slurm: SlurmCluster, tmp_path: Path) -> None:
    done = run_doctor(slurm, "--nodes", 4, "--directory", tmp_path, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["nodes"] == names(4)
    assert len(report["links"]) == 12
    assert all(link["bytes_per_second"] > 0 for link in report["links"])
    assert max(map(abs, report["clock_offsets_s"].values())) < 1
    by_subject = {finding["subject"]: finding for finding in report["findings"] if finding["level"] == "ok"}
    assert by_subject["versions"]["nodes"] == names(4)
    assert by_subject["host name"]["text"] == f"each node is {slurm.network}.11 to {slurm.network}.14"
    assert by_subject["shared directory"]["text"].endswith("all nodes see the same files and locks")
    assert_nothing_is_left(slurm, tmp_path)


@pytest.mark.nightly
def test_nodes_of_the_allocation_around_the_command(slurm: SlurmCluster, tmp_path: Path) -> None:
    salloc = ("salloc", "--nodes=3", "--quiet")
    done = run_doctor(slurm, "--nodes", 2, "--directory", tmp_path, prefix=salloc)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "versions (all 2 nodes): " in done.stdout
    assert "bandwidth: 2 links" in done.stdout
    refused = run_doctor(slurm, "--nodes", 4, prefix=salloc)
    assert "has 3; nearest: --nodes 3" in refused.stderr
    assert_nothing_is_left(slurm, tmp_path)


@pytest.mark.nightly
def test_slow_node_of_a_cluster_is_named(slurm: SlurmCluster, tmp_path: Path) -> None:
    limit = ["rate", "50mbit", "burst", "32kbit", "latency", "400ms"]
    slurm.in_node("n3", ["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *limit])
    try:
        done = run_doctor(slurm, "--nodes", 4, "--directory", tmp_path)
    finally:
        slurm.in_node("n3", ["tc", "qdisc", "del", "dev", "eth0", "root"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bandwidth: n3 sends at 0.04" in done.stdout
    assert_nothing_is_left(slurm, tmp_path)


@pytest.mark.nightly
def test_node_without_cable_is_named(slurm: SlurmCluster, tmp_path: Path) -> None:
    slurm.cut_cable("n3")
    start = time.monotonic()
    done = run_doctor(slurm, "--nodes", 4, "--directory", tmp_path)
    assert time.monotonic() - start < 60
    assert done.returncode == 1, done.stdout + done.stderr
    assert "node (n3): n3 does not answer: " in done.stdout
    assert "versions (n[1-2,4]): " in done.stdout
    assert "bandwidth: 6 links" in done.stdout
    assert "trainyard: starting on 4 nodes" in done.stderr
    again = run_doctor(slurm, "--nodes", 4)  # Slurm knows by now, or will soon
    assert again.returncode in (1, 2)
    assert "n3" in again.stdout + again.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
def test_node_that_is_lost_during_the_survey_is_named(
    slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in slurm.environment.items():
        monkeypatch.setenv(name, value)

    def cut(stage: str) -> None:
        if "round 2" in stage:
            slurm.cut_cable("n2")

    with allocated_nodes(4, None, [], cut) as allocation, started_workers(allocation, cut) as (step, addresses, lost):
        survey = survey_nodes(step, addresses, tmp_path, cut)
    assert [item.nodes for item in lost] == [("n2",)]
    assert len([rate for rate in survey.rates.values() if rate]) >= 6
    assert set(survey.clock_offsets) == {"n1", "n3", "n4"}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
def test_node_that_only_slurm_reaches_is_named(slurm: SlurmCluster, tmp_path: Path) -> None:
    routes = [f"unreachable {slurm.network}.{host}" for host in (11, 12, 14)]
    for route in routes:
        slurm.in_node("n3", ["ip", "route", "add", *route.split()])
    try:
        done = run_doctor(slurm, "--nodes", 4, "--directory", tmp_path)
    finally:
        for route in routes:
            slurm.in_node("n3", ["ip", "route", "del", *route.split()])
    assert done.returncode == 1, done.stdout + done.stderr
    assert "network: n3 reaches no other node, and none reaches it" in done.stdout
    assert "versions (all 4 nodes): " in done.stdout
    assert "bandwidth: 6 links" in done.stdout
    assert_nothing_is_left(slurm, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_command_gives_the_nodes_back(slurm: SlurmCluster, tmp_path: Path, number: int) -> None:
    process = start_doctor(slurm, "--nodes", 4, "--directory", tmp_path)
    deadline = time.monotonic() + 30
    while not slurm.processes():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    assert errors.splitlines()[-1] == "trainyard: interrupted"
    assert_nothing_is_left(slurm, tmp_path)


@pytest.mark.nightly
def test_environment_that_a_node_does_not_have(slurm: SlurmCluster, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nif os.uname().nodename == 'n4':\n    raise SystemExit(3)\n")
    environment = {**slurm.environment, "PYTHONPATH": f"{tmp_path}:{slurm.environment.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "trainyard", "doctor", "--nodes", "4", "--directory", str(tmp_path)]
    done = run_process(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "node (n4): n4 does not answer: " in done.stdout
    assert "versions (n[1-3]): " in done.stdout
