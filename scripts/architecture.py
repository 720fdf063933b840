"""Draw docs/internals/architecture.svg: the packages of the tree, spine (green) and wings, and which imports which.

    python scripts/architecture.py

Reads the imports of all files. An arrow that follows from two others is left out (transitive reduction). Fails if
packages import each other in a circle. tests/test_docs.py fails if the picture is stale.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "trainyard"
TARGET = ROOT / "docs" / "internals" / "architecture.svg"

SPINE = {
    "checkpoint": "shards of ranks, commit file",
    "compat": "private torch APIs",
    "config": "YAML, schema, recipes",
    "core": "errors, files, RNG",
    "data": "formats, order, loader",
    "devices": "cpu, cuda, neuron, xla",
    "families": "model families as data",
    "kernels": "reference, Triton, fp8",
    "models": "blueprint, llama, gpt, bert",
    "parallel": "layout, tp, cp, pp, ZeRO",
    "train": "losses, optimizers, step",
}
"""What a training step needs."""
WINGS = {
    "cli": "one file per command",
    "cluster": "Slurm, ParallelCluster, doctor",
    "dashboard": "page, report, model card",
    "evaluate": "any checkpoint, any data",
    "formats": "checkpoints of other systems",
    "importers": "NxD Training, Megatron-LM",
    "inference": "generate, serve",
    "launch": "ranks of a host",
    "metrics": "run files, loggers, spans",
    "preflight": "plan, audit, precompile, ...",
    "prepare": "tokenize, pack, extract",
    "run": "trainer, parts, saving",
    "remote": "Hub, S3, web, caches",
}
"""What surrounds it. A new package needs a line in one of the two."""
PURPOSE = SPINE | WINGS
SPINE_FILL, WING_FILL = "#dbe8d3", "#eef3f8"
BOX_WIDTH, BOX_HEIGHT, GAP_X, GAP_Y, MARGIN = 150, 46, 18, 42, 24
FONT = 'font-family="Helvetica, Arial, sans-serif"'


def package_imports() -> dict[str, set[str]]:
    """Return the packages that each package imports."""
    packages = {path.name: set[str]() for path in SOURCE.iterdir() if (path / "__init__.py").exists()}
    for name, imports in packages.items():
        for path in (SOURCE / name).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                modules = []
                if isinstance(node, ast.Import):
                    modules = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and node.module:
                    modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
                for module in modules:
                    root, _, rest = module.partition(".")
                    target = rest.partition(".")[0]
                    if root == "trainyard" and target in packages and target != name:
                        imports.add(target)
    return packages


def levels(graph: dict[str, set[str]]) -> dict[str, int]:
    """Return the length of the longest import chain below each package."""
    found: dict[str, int] = {}
    while len(found) < len(graph):
        ready = [name for name in graph if name not in found and graph[name] <= found.keys()]
        if not ready:
            raise SystemExit(
                f"packages import each other in a circle: {', '.join(sorted(graph.keys() - found.keys()))}"
            )
        found |= {name: 1 + max((found[target] for target in graph[name]), default=-1) for name in ready}
    return found


def reachable(graph: dict[str, set[str]], name: str) -> set[str]:
    return graph[name].union(*(reachable(graph, target) for target in graph[name]))


def draw() -> str:
    graph = package_imports()
    if missing := graph.keys() ^ PURPOSE.keys():
        raise SystemExit(f"PURPOSE does not match the tree: {', '.join(sorted(missing))}")
    level = levels(graph)
    arrows = {
        name: {t for t in targets if not any(t in reachable(graph, other) for other in targets if other != t)}
        for name, targets in graph.items()
    }
    rows = [sorted(name for name in graph if level[name] == row) for row in range(max(level.values()), -1, -1)]
    widest = max(map(len, rows))
    width = 2 * MARGIN + widest * BOX_WIDTH + (widest - 1) * GAP_X
    height = 2 * MARGIN + len(rows) * BOX_HEIGHT + (len(rows) - 1) * GAP_Y
    center = {}
    for row, names in enumerate(rows):
        start = (width - len(names) * BOX_WIDTH - (len(names) - 1) * GAP_X) / 2
        for column, name in enumerate(names):
            x = start + column * (BOX_WIDTH + GAP_X) + BOX_WIDTH / 2
            center[name] = (x, MARGIN + row * (BOX_HEIGHT + GAP_Y))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" {FONT}>',
        f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>',
        '<defs><marker id="a" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="6" markerHeight="6" orient="auto">'
        '<path d="M0 0L10 5L0 10z" fill="#7b8794"/></marker></defs>',
        '<g fill="none" stroke="#7b8794" stroke-width="1.2" marker-end="url(#a)">',
    ]
    for name in sorted(arrows):
        for target in sorted(arrows[name]):
            (x1, y1), (x2, y2) = center[name], center[target]
            y1 += BOX_HEIGHT
            middle = GAP_Y * 0.6
            lines.append(f'<path d="M{x1:g} {y1:g}C{x1:g} {y1 + middle:g} {x2:g} {y2 - middle:g} {x2:g} {y2 - 1:g}"/>')
    lines.append("</g>")
    for name in sorted(center):
        x, y = center[name]
        lines += [
            f'<rect x="{x - BOX_WIDTH / 2:g}" y="{y:g}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6" '
            f'fill="{SPINE_FILL if name in SPINE else WING_FILL}" stroke="#33475b" stroke-width="1.2"/>',
            f'<text x="{x:g}" y="{y + 19:g}" text-anchor="middle" font-size="14" font-weight="bold">{name}</text>',
            f'<text x="{x:g}" y="{y + 36:g}" text-anchor="middle" font-size="11" fill="#33475b">{PURPOSE[name]}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    TARGET.write_text(draw())
