"""The exceptions that end a run on purpose: a user's mistake, and a run that must not continue."""

import errno


class UserError(ValueError):
    """A mistake that the user can fix. Shown as one line (key or file, value found, value that works); exit code 2."""


class DirectoryInUse(UserError):
    """Another process trains in the directory. It may be about to end, if its job has been replaced by this one."""


class RunStopped(RuntimeError):
    """The run stopped itself, for example after too many non-finite steps in a row. Shown as one line; exit code 1."""


class NotWritable(RunStopped):
    """A file system is full or read-only. It may be so for a moment only: a job tries again."""


def one_line(error: BaseException) -> str:
    """The message of another library's exception on one line, for use inside a UserError."""
    return " ".join(str(error).split())


def is_disk_full(error: object) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def is_not_writable(error: object) -> bool:
    """True for an error of a full or read-only file system."""
    return is_disk_full(error) or (isinstance(error, OSError) and error.errno == errno.EROFS)
