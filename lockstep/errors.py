"""What can go wrong, each with the exit status of the command line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class LockstepError(Exception):
    """A fault that is explained to the user in one message, without a traceback."""

    status = 1


class UsageError(LockstepError):
    """Bad usage or bad configuration, found before anything is created."""

    status = 2


class Untrusted(UsageError):
    """A file names code, and nobody said that it may be run."""


class EnvironmentFault(LockstepError):
    """The environment broke its contract."""

    status = 3


class NumericFault(LockstepError):
    """Learning produced something that is not a number."""

    status = 4


class Differs(LockstepError):
    """Bits that must be the same are not."""

    status = NumericFault.status


class FileFault(LockstepError):
    """A file can't be written or is damaged."""

    status = 5


class ProcessLost(LockstepError):
    """A process that the run needs died or hangs."""

    status = 6


class InUse(LockstepError):
    """Another process works in the run directory."""

    status = 7


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """' Did you mean ...?' with the names most like `name`, each after `prefix`; or nothing."""
    lower = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower(), lower, n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(repr(prefix + lower[match]) for match in close)}?" if close else ""
