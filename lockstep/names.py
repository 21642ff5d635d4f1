"""`module:name`, such as `my_envs:Target-v0`: the one place where something is imported because it was named.

Importing a module runs it. Whoever types a name wants that. A name out of a file is imported only where the file is
trusted; everybody else looks into modules that are imported already.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from types import ModuleType

from lockstep.errors import Untrusted, UsageError


def module_of(name: str) -> str:
    """The part before the colon; nothing where there is none."""
    return name.rpartition(":")[0]


def imported(name: str) -> ModuleType:
    """The module of `module:name`, which must have been imported by now."""
    module = sys.modules.get(module_of(name))
    if module is None:
        raise UsageError(
            f"'{name}': the module '{module_of(name)}' is not imported. Import it before, or type the name:"
            f" `lockstep train {name}`."
        )
    return module


def load(name: str) -> None:
    """Import the module of `module:name`, if it has one; from the working directory where nobody else has it.

    For names that were typed or are trusted.
    """
    if ":" not in name:
        return
    with contextlib.suppress(OSError):  # it may be gone
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
    try:
        importlib.import_module(module_of(name))
    except (Exception, SystemExit) as cause:
        why = f"{type(cause).__name__}: {cause}"
        raise UsageError(
            f"'{name}': the module '{module_of(name)}' can't be imported: {why}. It is looked for in"
            f" the working directory, {os.getcwd()}, too; elsewhere: PYTHONPATH=FOLDER lockstep ..."
        ) from cause


def load_from(file: str, name: str, trusted: bool) -> None:
    """The same for a name that stands in a file: what is not imported yet is imported only with trust."""
    if ":" not in name or sys.modules.get(module_of(name)) is not None:
        return
    if not trusted:
        raise Untrusted(
            f"'{name}' in {file} asks for the module '{module_of(name)}', and importing it would run it."
            " If you trust whoever wrote that, say --trust, or trust=True in Python."
        )
    load(name)
