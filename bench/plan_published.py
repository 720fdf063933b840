"""How far off `trainyard plan` is on runs whose speed is known: each predicted with constants fitted on the others.

python bench/plan_published.py        the table of docs/plan.md
"""

from statistics import median

from trainyard.plan.calibrate import RUN_SETS, fit_efficiency, leave_one_out


def main() -> None:
    for name in RUN_SETS:
        rows = leave_one_out(name)
        print(f"\n{name}: constants fitted on all runs: {constants(fit_efficiency(name))}\n")
        print("| run | measured, sequences/s | predicted without it | error | constants without it | source |")
        print("|---|---|---|---|---|---|")
        for row in rows:
            run = row.run
            speeds = f"{figure(run.sequences_per_second)} | {figure(row.predicted)} | {row.error:+.1%}"
            print(f"| {run.name} | {speeds} | {constants(row.constants)} | {run.source} |")
        errors = [abs(row.error) for row in rows]
        print(f"\nmedian error {median(errors):.1%}, worst {max(errors):.1%}")


def figure(speed: float) -> str:
    return f"{speed:,.0f}" if speed > 1000 else f"{speed:.4g}"


def constants(values: tuple[float, ...]) -> str:
    """Products, attention, memory, link, network."""
    return " ".join(f"{value:.2f}" for value in values)


if __name__ == "__main__":
    main()
