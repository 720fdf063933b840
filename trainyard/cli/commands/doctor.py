"""`trainyard doctor`: Check this machine, or the nodes of a cluster, before a run."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from rich.console import Console
from typer import Option

from trainyard.cli.console import PhaseDisplay
from trainyard.cli.options import AsJson
from trainyard.cluster import slurm
from trainyard.cluster.doctor.node_findings import NodeFinding, compress_hosts
from trainyard.cluster.doctor.node_worker import finding_record, local_findings
from trainyard.cluster.doctor.slurm_workers import allocated_nodes, started_workers
from trainyard.cluster.doctor.survey import Survey, survey_nodes
from trainyard.core.errors import UserError
from trainyard.core.finding import Finding

MARKS = {"ok": ("ok", "green"), "warning": ("warn", "yellow"), "error": ("FAIL", "red")}


def doctor(
    directory: Annotated[Path, Option(help="Where runs are written (log.directory).")] = Path("runs"),
    nodes: Annotated[
        int | None, Option(metavar="N", help="Check N nodes of Slurm, and the network between them.")
    ] = None,
    partition: Annotated[str | None, Option(help="With --nodes: their partition. Unused inside an allocation.")] = None,
    sbatch_option: Annotated[
        list[str] | None,
        Option(
            "--sbatch", metavar="OPTION", help="With --nodes: an option of the allocation, as for sbatch; repeatable."
        ),
    ] = None,
    fix: Annotated[bool, Option("--fix", help="Offer to fix what earlier runs of this project left behind.")] = False,
    as_json: AsJson = False,
) -> int:
    """Check devices and who holds them, limits, memory, disk, clock, ports, locks and leftovers of earlier runs.

    Every problem comes with its fix. Exit code 1 if something would stop a run. With --nodes, all nodes of a Slurm
    allocation (the one around the command, or a new one) run these checks, and between them: a directory and locks that
    all share, the bandwidth of every link (TCP), and the difference of the clocks. Slow nodes are named.

    Examples:

      trainyard doctor

      trainyard doctor --nodes 16 --partition trn1

      trainyard doctor --nodes 4 --sbatch=--gpus-per-node=8 --json
    """
    directory = directory.expanduser()
    if nodes is not None:
        return doctor_nodes(directory, nodes, partition, sbatch_option or [], fix, as_json)
    if fix and not sys.stdin.isatty():
        raise UserError(
            "--fix: asks before each repair, but its input is not a terminal; nearest: run it in a terminal"
        )
    if partition or sbatch_option:
        raise UserError(f"{'--partition' if partition else '--sbatch'}: works with --nodes N only")
    findings = local_findings(directory)
    if as_json:
        print(json.dumps([finding_record(finding) for finding in findings]))
    else:
        print_findings([NodeFinding(finding) for finding in findings])
    if fix:
        repair(findings)
    return 1 if any(finding.level == "error" for finding in findings) else 0


def doctor_nodes(
    directory: Path, count: int, partition: str | None, options: Sequence[str], fix: bool, as_json: bool
) -> int:
    """Check `count` nodes of Slurm."""
    if count < 1:
        raise UserError(f"--nodes {count}: must be 1 or more")
    if fix:
        raise UserError(f"--nodes {count}: not with --fix; nearest: trainyard doctor --fix on the node")
    if not slurm.available():
        raise UserError(f"--nodes {count}: this machine has no Slurm; nearest: trainyard doctor")
    with PhaseDisplay() as report, allocated_nodes(count, partition, options, report) as allocation:
        with started_workers(allocation, report) as (step, addresses, lost):
            survey = survey_nodes(step, addresses, directory.absolute(), report)
        survey.findings += lost
    if as_json:
        print(json.dumps(survey_record(survey, allocation.nodes)))
    else:
        print_findings(survey.findings, len(allocation.nodes))
    return 1 if survey.failed else 0


def survey_record(survey: Survey, nodes: list[str]) -> dict[str, object]:
    """A survey of `nodes`, lost ones included, as JSON."""
    return {
        "nodes": nodes,
        "findings": [{**finding_record(item.finding), "nodes": item.nodes} for item in survey.findings],
        "links": [
            {"from": sender, "to": receiver, "bytes_per_second": rate}
            for (sender, receiver), rate in survey.rates.items()
        ],
        "clock_offsets_s": survey.clock_offsets,
    }


def print_findings(findings: Sequence[NodeFinding], num_nodes: int = 0) -> None:
    console = Console(highlight=False)
    for item in findings:
        finding = item.finding
        mark, color = MARKS[finding.level]
        console.print(f"[{color}]{mark:<5}[/]", end="")
        console.print(f"{finding.subject}{describe_nodes(item.nodes, num_nodes)}: ", end="", markup=False)
        console.print(finding.text, markup=False, soft_wrap=True)
        if finding.fix:
            console.print(f"     fix: {finding.fix}", markup=False, soft_wrap=True)


def describe_nodes(nodes: Sequence[str], num_nodes: int) -> str:
    """The nodes of a finding, in parentheses."""
    if not nodes:
        return ""
    return f" (all {num_nodes} nodes)" if len(nodes) == num_nodes > 1 else f" ({compress_hosts(nodes)})"


def repair(findings: list[Finding]) -> None:
    """Ask about each finding that this project may fix itself."""
    repairable = [finding for finding in findings if finding.repair]
    if not repairable:
        print("nothing to fix here: the other fixes are yours to apply")
    for finding in repairable:
        assert finding.repair
        print(f"{finding.subject}: {finding.text}")
        if input(f"  {finding.fix}? [y/N] ").strip().lower() in ("y", "yes"):
            print(f"  {finding.repair()}")
