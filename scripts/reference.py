"""Write docs/keys.md from the schema: every key with its type, default and meaning. A test keeps the file current."""

import sys
from pathlib import Path

from trainyard.config.schema_docs import schema_keys

HEAD = """# Configuration keys

Generated from the schema by scripts/reference.py. `model[FAMILY]` marks keys of one model family; in a file the
section is just `model`.

"""


def text() -> str:
    lines, section = [], ""
    for key in schema_keys():
        key_section = key.name.rsplit(".", 1)[0] if "." in key.name else "top level"
        if key_section != section:
            section = key_section
            lines += ["", f"## {section}", "", "| key | values | default | meaning |", "|---|---|---|---|"]
        default = "" if key.default in ("null", "", "[]") else f"`{key.default}`"
        lines.append(f"| `{key.name}` | {key.allowed} | {default} | {key.meaning} |")
    return HEAD + "\n".join(lines).strip() + "\n"


if __name__ == "__main__":
    Path(sys.argv[1] if len(sys.argv) > 1 else "docs/keys.md").write_text(text())
