"""Summary of a precompilation for people. The three totals have the wording of neuron_parallel_compile."""

from trainyard.precompile.precompile import PrecompileReport


def precompile_summary(report: PrecompileReport) -> list[str]:
    total, failed = len(report.graphs), len(report.failed_graphs)
    cached, compiled = report.count("cached"), report.count("compiled")
    lines = [
        f"{cached} found in the cache, {compiled} compiled in {report.seconds:.1f} s: {report.cache_dir}",
        f"Total graphs: {total}",
        f"Total successful compilations: {total - failed}",
        f"Total failed compilations: {failed}",
    ]
    for graph in report.failed_graphs:
        lines.append(f"failed: {graph.name}: {graph.problem or 'not finished'}")
        if graph.log:
            lines.append(f"  log: {graph.log}")
    lines += [f"not collected: {problem}" for problem in report.problems]
    if failed or report.problems:
        lines.append("Failed graphs are not in the cache: run precompile again to retry them, or train compiles them.")
    return lines
