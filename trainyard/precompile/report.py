"""How a precompilation went, in words. The three totals read as neuron_parallel_compile's do."""

from trainyard.precompile.precompile import PrecompileReport


def precompile_summary(report: PrecompileReport) -> list[str]:
    total, failed = len(report.graphs), len(report.failed_graphs)
    cached = report.count("cached")
    lines = [
        f"{cached} found in the cache, {report.count('compiled')} compiled in {report.seconds:.1f} s: {report.cache_dir}",
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
        lines.append("What failed is not in the cache: precompile again tries it again, and train would compile it.")
    return lines
