"""Draw the loss curves of bench/numerics.py as SVG and print them as a table.

    python bench/curves.py bench/results/numerics-fp8.json --svg docs/lab/fp8.svg

The upper plot shows the loss of each run (mean of 20 steps), the lower one the deviation from the reference.
"""

import argparse
import json
from pathlib import Path

from numerics import moving_average

WIDTH, TOP, BOTTOM, LEFT, GAP = 760, 260, 150, 60, 50
COLORS = ("#1f2933", "#d9480f", "#1971c2")


def polyline(values: list[float], low: float, high: float, above: float, height: float, color: str) -> str:
    across = (WIDTH - LEFT - 20) / (len(values) - 1)
    points = " ".join(
        f"{LEFT + n * across:.1f},{above + height * (high - value) / (high - low):.1f}"
        for n, value in enumerate(values)
    )
    return f'<polyline fill="none" stroke="{color}" stroke-width="1.4" points="{points}"/>'


def svg_text(x: float, y: float, words: str, anchor: str = "start", color: str = COLORS[0]) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{color}">{words}</text>'


def grid_lines(low: float, high: float, above: float, height: float, form: str) -> list[str]:
    out = []
    for n in range(5):
        y = above + height * n / 4
        out.append(f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        out.append(svg_text(LEFT - 6, y + 4, form.format(high + (low - high) * n / 4), "end"))
    return out


def loss_curves_svg(losses: dict[str, list[float]], reference: str) -> str:
    smoothed = {label: moving_average(values) for label, values in losses.items()}
    base = smoothed[reference]
    apart = {label: [(a / b - 1) * 100 for a, b in zip(v, base, strict=True)] for label, v in smoothed.items()}
    high, low = max(max(v) for v in smoothed.values()), min(min(v) for v in smoothed.values())
    second = TOP + 2 * GAP
    rows = [*grid_lines(low, high, GAP, TOP, "{:.1f}"), *grid_lines(-1, 1, second, BOTTOM, "{:+.1f} %")]
    for n, (label, values) in enumerate(smoothed.items()):
        rows.append(polyline(values, low, high, GAP, TOP, COLORS[n]))
        rows.append(svg_text(WIDTH - 30, GAP + 20 + 18 * n, label, "end", COLORS[n]))
        rows.append(polyline(apart[label], -1, 1, second, BOTTOM, COLORS[n]))
    rows.append(svg_text(LEFT, GAP - 12, "loss, mean of 20 steps"))
    rows.append(svg_text(LEFT, second - 12, f"deviation from {reference}"))
    for n in range(6):
        x = LEFT + (WIDTH - LEFT - 20) * n / 5
        rows.append(svg_text(x, second + BOTTOM + 20, f"{len(base) * n // 5}", "middle"))
    rows.append(svg_text(WIDTH - 20, second + BOTTOM + 38, "step", "end"))
    size = f'width="{WIDTH}" height="{second + BOTTOM + GAP}"'
    style = 'font-family="sans-serif" font-size="12" style="background:white"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>', *rows, "</svg>", ""])


def markdown_table(losses: dict[str, list[float]], reference: str, rows: int = 10) -> str:
    smoothed = {label: moving_average(values) for label, values in losses.items()}
    out = ["| step | " + " | ".join(smoothed) + " |", "|---" * (len(smoothed) + 1) + "|"]
    steps = len(smoothed[reference])
    for n in range(1, rows + 1):
        at = steps * n // rows - 1
        base = smoothed[reference][at]
        cells = [
            f"{values[at]:.4f}" + ("" if label == reference else f" ({values[at] / base - 1:+.2%})")
            for label, values in smoothed.items()
        ]
        out.append(f"| {at + 1} | " + " | ".join(cells) + " |")
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--svg", type=Path)
    arguments = parser.parse_args()
    found = json.loads(arguments.file.read_text())
    print(markdown_table(found["losses"], found["reference"]))
    if arguments.svg:
        arguments.svg.write_text(loss_curves_svg(found["losses"], found["reference"]))


if __name__ == "__main__":
    main()
