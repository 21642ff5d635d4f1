"""Damaged input for every reader, on this and on an older commit: the table in fuzz.md.

    python -m benchmarks.fuzz --write                      # this commit's rows; those of the older one stay
    python -m benchmarks.fuzz --write --before DIRECTORY   # and those of the commit that is checked out there

The same mutations (`tests/fuzz.py`, numbered from 0) are made on both, in a process each.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FUZZER = HERE.parent / "tests" / "fuzz.py"
DATA, TABLE = HERE / "fuzz.json", HERE / "fuzz.md"
KINDS = {"crash": "crashes", "hang": "hangs", "silent": "silent losses"}


def run(commit: Path, mutations: int) -> dict[str, Any]:
    """What the fuzzer finds in the lockstep of that directory."""
    command = [sys.executable, str(FUZZER), str(mutations)]
    done = subprocess.run(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(commit)}, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    named = ["git", "-C", str(commit), "rev-parse", "--short", "HEAD"]
    found["commit"] = subprocess.run(named, capture_output=True, text=True, check=True).stdout.strip()
    found.pop("examples")
    return {"mutations": mutations, **found}


def table(data: dict[str, Any]) -> str:
    before, now = data["before"], data["now"]
    counted = [f"{word} {when}" for when in ("before", "now") for word in KINDS.values()]
    head = ["reader", "mutations", *counted]
    lines = [head, ["---"] * len(head)]
    for reader, counts in now["readers"].items():
        old = before["readers"][reader]
        lines.append([reader, str(now["mutations"]), *(str(part[kind]) for part in (old, counts) for kind in KINDS)])
    sites = [["once broken", "before", "now"], ["---"] * 3]
    sites += [[site, before["sites"][site], kind] for site, kind in now["sites"].items()]
    return (
        "# Damaged input\n\n"
        f"Made by `python -m benchmarks.fuzz --write`: {now['mutations']} mutations for every reader, the same before"
        f" (commit {before['commit']}, {before['mutations']} mutations) and now. A crash is a traceback or an exit"
        " status that has no meaning here, a hang takes more than 30 seconds, a silent loss is exit status 0 after data"
        " was lost or changed and nobody said so. Whoever reseals a file of a checkpoint can change its numbers unseen;"
        " those must only make sense.\n\n"
        f"{_rows(lines)}\n\nWhat is known to have broken something once (ok: told in one message, or harmless):\n\n"
        f"{_rows(sites)}\n"
    )


def _rows(lines: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=1000)
    parser.add_argument("--before", type=Path, metavar="DIRECTORY")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    data = json.loads(DATA.read_text()) if DATA.exists() else {}
    if options.before:
        data["before"] = run(options.before, options.mutations)
    data["now"] = run(HERE.parent, options.mutations)
    print(table(data))
    if options.write:
        DATA.write_text(json.dumps(data, indent=1) + "\n")
        TABLE.write_text(table(data))


if __name__ == "__main__":
    main()
