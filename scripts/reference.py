"""Write docs/keys.md from the schema: every key, its default, what it means. A test holds the file to the schema."""

import sys
from pathlib import Path

from trainyard.config.load import schema_keys

HEAD = """# Every key

Made by scripts/reference.py from the schema. `model[FAMILY]` keys belong to that family; in a file it is just `model`.

"""


def text() -> str:
    lines, section = [], ""
    for each in schema_keys():
        here = each.name.rsplit(".", 1)[0] if "." in each.name else "top level"
        if here != section:
            section = here
            lines += ["", f"## {section}", "", "| key | takes | default | meaning |", "|---|---|---|---|"]
        default = "" if each.default in ("null", "", "[]") else f"`{each.default}`"
        lines.append(f"| `{each.name}` | {each.allowed} | {default} | {each.meaning} |")
    return HEAD + "\n".join(lines).strip() + "\n"


if __name__ == "__main__":
    Path(sys.argv[1] if len(sys.argv) > 1 else "docs/keys.md").write_text(text())
