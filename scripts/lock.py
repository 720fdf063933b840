"""Write requirements.lock and requirements-test.lock from what is installed in this environment.

Run in a virtual environment where `pip install -e .[test,lint]` has just been done (make lock does). torch is pinned to
one release on purpose: plain `pip install torch==VERSION` takes a CPU build where one is at hand.
"""

import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
BUILD = ["hatchling", "editables"]


def closure(requirements: list[str]) -> dict[str, str]:
    """Every package that `requirements` pull in here, with its version."""
    found: dict[str, str] = {}
    todo = [(Requirement(text), "") for text in requirements]
    while todo:
        requirement, extra = todo.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        try:
            package = metadata.distribution(requirement.name)
        except metadata.PackageNotFoundError:
            continue  # an optional accelerator package that this machine's build does without
        name = package.metadata["Name"].lower().replace("_", "-")
        new = name not in found
        found[name] = package.version.split("+")[0]
        for text in package.requires or []:
            inner = Requirement(text)
            if new or any(inner.marker and inner.marker.evaluate({"extra": e}) for e in requirement.extras):
                todo += [(inner, e) for e in (requirement.extras or {""})]
    return found


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    run = closure(project["dependencies"] + BUILD)
    extras = project["optional-dependencies"]
    test = closure(project["dependencies"] + BUILD + extras["test"] + extras["lint"])
    for name, packages in (("requirements.lock", run), ("requirements-test.lock", test)):
        lines = ["# Made by scripts/lock.py: make lock"]
        lines += [f"{package}=={version}" for package, version in sorted(packages.items())]
        (ROOT / name).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
