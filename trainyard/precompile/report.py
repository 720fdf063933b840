"""How a precompilation went, in words. The three totals read as neuron_parallel_compile's do."""

from trainyard.precompile.precompile import Report


def closing(report: Report) -> list[str]:
    total, failed = len(report.graphs), len(report.failed)
    cached = report.count("cached")
    lines = [
        f"{cached} found in the cache, {report.count('compiled')} compiled in {report.seconds:.1f} s: {report.place}",
        f"Total graphs: {total}",
        f"Total successful compilations: {total - failed}",
        f"Total failed compilations: {failed}",
    ]
    for graph in report.failed:
        lines.append(f"failed: {graph.name}: {graph.problem or 'not finished'}")
        if graph.log:
            lines.append(f"  log: {graph.log}")
    lines += [f"not collected: {problem}" for problem in report.problems]
    if failed or report.problems:
        lines.append("What failed is not in the cache: precompile again tries it again, and train would compile it.")
    return lines
