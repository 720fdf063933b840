"""The two ways a run ends badly on purpose: a user's mistake, and a run that must not go on."""


class UserError(ValueError):
    """Something the user can mend. Shown as one line (key or file, what was found, what would work); exit code 2."""


class RunStopped(RuntimeError):
    """The run ended itself, for instance after too many non-finite steps in a row. Shown as one line; exit code 1."""


def one_line(error: BaseException) -> str:
    """What another library says, fit for the line of a UserError."""
    return " ".join(str(error).split())
