"""Counts and sizes as text for people: `1 file`, `2 files`, `1.5 GiB`."""

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def counted(number: int, noun: str, form: str = "") -> str:
    """The number, formatted by `form` (such as `,`), and the noun in singular or plural: `1 batch`, `2 entries`."""
    if number == 1:
        return f"{number} {noun}"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{number:{form}} {noun[:-1]}ies"
    return f"{number:{form}} {noun}{'es' if noun.endswith(('ch', 's', 'x')) else 's'}"


def size_text(size: float) -> str:
    """A size in the unit in which it has one to three digits before the point: "2 B", "1.5 GiB"."""
    unit = 0
    while size >= 1024 and unit < len(UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:,.1f} {UNITS[unit]}" if unit else f"{size:,.0f} B"


def shortage_text(needed: int, free: int) -> str:
    """Says that less is free than needed. Sizes that would read the same are given to the byte."""
    texts = size_text(needed), size_text(free)
    if texts[0] == texts[1]:
        texts = f"{needed:,} B", f"{free:,} B"
    return f"needs {texts[0]}, but only {texts[1]} are free"
