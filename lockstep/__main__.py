"""`lockstep` and `python -m lockstep`."""

from __future__ import annotations

import os
import signal
from types import FrameType

from lockstep.launched import is_launched


def main() -> int:
    """Run a command; the exit status. Ctrl-C is in our hands before anything that takes time is imported."""
    if not is_launched():
        signal.signal(signal.SIGINT, _stop_at_once)
    from lockstep.cli import main

    return main()


def _stop_at_once(number: int, frame: FrameType | None) -> None:
    """Ctrl-C where there is nothing to finish first.

    An exception would do for most of Python, but is lost where it meets a callback of JAX's, as for collecting garbage.
    What is written is written to the side and renamed, and other processes end with this one.
    """
    os.write(2, b"\nlockstep: stopped at once; what was saved before is intact.\n")
    os._exit(128 + number)


if __name__ == "__main__":
    raise SystemExit(main())
