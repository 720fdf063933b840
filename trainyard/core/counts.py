"""Numbers of things in messages: `1 file`, `2 files`."""


def counted(number: int, noun: str, form: str = "") -> str:
    """The number, formatted by `form` (such as `,`), and the noun in singular or plural: `1 batch`, `2 entries`."""
    if number == 1:
        return f"{number} {noun}"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{number:{form}} {noun[:-1]}ies"
    return f"{number:{form}} {noun}{'es' if noun.endswith(('ch', 's', 'x')) else 's'}"
