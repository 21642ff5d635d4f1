"""metrics.csv: one row per update, each with a seal, so that damage can be told from what the run wrote.

The seal of a row is a hash of the columns' names, of the seal of the row before, and of the row's own text.
"""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TextIO

from lockstep import files
from lockstep.run.directory import METRICS, write_file

FIRST = ("update", "steps", "seconds", "steps_per_second", "episodes", "return_mean", "return_std", "length_mean")
SECOND = ("kl", "entropy", "explained_variance")
LAST = ("eval_return", "time_collect", "time_communicate", "time_update", "time_evaluate", "seal", "digest")

SEAL = re.compile(r"\bs[0-9a-f]{16}\b")  # begins with a letter, so that nothing takes it for a number
END = "\r\n"
COUNT = re.compile("[0-9]{1,18}")
NAMED = 5  # places that a message names, at most

Row = Mapping[str, float | int | str]


class Line(NamedTuple):
    """A line of the file, without what ends it."""

    number: int
    text: str
    has_end: bool


class Damage(NamedTuple):
    """A line that does not hold what was written there."""

    line: int
    update: int  # whose row belongs there; 0: the names of the columns

    def __str__(self) -> str:
        return (
            f"line {self.line} ({f'where update {self.update} belongs' if self.update else 'the names of the columns'})"
        )


class Metrics(NamedTuple):
    """What there is of a run's metrics.csv."""

    columns: list[str]
    rows: list[dict[str, str]]  # those that are as they were written, or are not sealed
    damage: list[Damage]
    is_unfinished: bool  # whether the last row was not written to its end

    def notes(self, run: Path) -> list[str]:
        """What a reader should know of the file besides its rows."""
        path, unsealed = run / METRICS, [row["update"] for row in self.rows if not row.get("seal")]
        notes = [f"'{path}' is damaged in {describe(self.damage)}."] if self.damage else []
        if self.is_unfinished:
            notes.append(f"the last row of '{path}' was not written to its end, and is left out.")
        if unsealed:
            notes.append(
                f"'{path}' has rows without a seal, up to update {unsealed[-1]}: an older lockstep wrote them, and"
                " damage to them can't be seen."
            )
        return notes


def describe(damage: list[Damage]) -> str:
    """Which lines are damaged: changed, inserted, or behind one that was removed."""
    return _some(list(map(str, damage)))


class MetricsFile:
    """A run's metrics.csv, while it trains. On resume, rows after the checkpoint of so many `updates` are cut off.

    What is lost of the rows before is told by `warn`, and the file as it was found is kept beside.
    """

    def __init__(self, run: Path, updates: int, warn: Callable[[str], None]) -> None:
        self._run, self._warn = run, warn
        found = read_metrics(run)
        rows = [row for row in found.rows if int(row["update"]) <= updates]
        found = found._replace(rows=rows, damage=[place for place in found.damage if place.update <= updates])
        if updates:
            self._tell(found, updates)
        self._columns: list[str] = []
        self._seal = ""
        self._file = self._write_all(found.columns if rows else [], rows)

    def write(self, row: Row) -> None:
        if not {*row, "seal"} <= set(self._columns):
            self._add_columns(row)
        cells = [_text(row.get(name, "")) for name in self._columns]
        line, self._seal = _sealed(self._columns, self._seal, cells)
        self._file.write(line)
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _add_columns(self, names: Collection[str]) -> None:
        """Rows that are there already have nothing in them."""
        if not self._columns:
            self._columns = _in_order(names)
            self._file.write(_line(self._columns))
            return
        self._file.close()
        found = read_metrics(self._run)
        self._keep_if_damaged(found)
        self._file = self._write_all(_in_order({*found.columns, *names}), found.rows)

    def _tell(self, found: Metrics, updates: int) -> None:
        for note in found.notes(self._run):
            self._warn(note)
        if gaps := _gaps((int(row["update"]) for row in found.rows), updates):
            self._warn(f"'{self._run / METRICS}' has no rows of these updates, which the run made: {_some(gaps)}.")
        self._keep_if_damaged(found)

    def _keep_if_damaged(self, found: Metrics) -> None:
        if found.damage:
            keep_beside(self._run, self._warn)

    def _write_all(self, columns: list[str], rows: list[dict[str, str]]) -> TextIO:
        """The whole file anew, open for more."""
        lines, self._columns, self._seal = [_line(columns)] if columns else [], columns, ""
        for row in rows:
            cells = [row.get(name, "") for name in columns]
            if row.get("seal"):
                line, self._seal = _sealed(columns, self._seal, cells)
            else:
                line = _line(cells)
            lines.append(line)
        write_file(self._run / METRICS, _bytes("".join(lines)))
        return (self._run / METRICS).open("a", newline="", encoding="utf-8")


def keep_beside(run: Path, warn: Callable[[str], None]) -> None:
    """Copy the file as it was found, because rows of it will not be in the next one."""
    path, number = run / METRICS, 1
    while os.path.lexists(kept := path.with_name(f"{path.name}.damaged{f'.{number}' if number > 1 else ''}")):
        number += 1
    write_file(kept, files.read(path, files.TABLE))
    warn(
        f"'{path}' as it was found is kept in '{kept}': rows of it that are damaged, or of no checkpoint, are left out."
    )


def read_metrics(run: Path) -> Metrics:
    """The rows of a run's metrics.csv that can be trusted, told one by one, and where it is damaged."""
    path = run / METRICS
    content = files.read(path, files.TABLE) if os.path.lexists(path) else bytearray()
    lines = _lines(content)
    header = next(lines, Line(1, "", False))
    if not header.has_end:
        return Metrics([], [], [], is_unfinished=len(content) > 0)
    columns, has_seals = _cells(header.text) or [], re.search(rb",s[0-9a-f]{16},", content) is not None
    if not _are_columns(columns, has_seals):
        places = [Damage(line.number, update) for update, line in enumerate(lines, 1)]
        return Metrics([], [], [Damage(header.number, 0), *places], is_unfinished=False)
    return _judge(columns, header.text, lines)


def _lines(content: bytearray) -> Iterator[Line]:
    """All lines but empty ones."""
    start, number = 0, 0
    while start < len(content):
        end, number = content.find(b"\n", start), number + 1
        text = content[start : end if end >= 0 else None].decode(errors="surrogateescape").removesuffix("\r")
        start = end + 1 if end >= 0 else len(content)
        if text:
            yield Line(number, text, end >= 0)


def _are_columns(columns: list[str], has_seals: bool) -> bool:
    """Whether these are names that a run writes; in a file with seals there is a column for them."""
    last = ["seal", "digest"] if has_seals or "seal" in columns else ["digest"]
    is_each_once = len(set(columns)) == len(columns)
    return is_each_once and columns[:2] == ["update", "steps"] and columns[-len(last) :] == last


def _judge(columns: list[str], header: str, lines: Iterable[Line]) -> Metrics:
    """Which rows are as they were written. A last one without its seal or its end is only unfinished."""
    rows: dict[int, dict[str, str]] = {}
    damage: list[Damage] = []
    before, update, has_seal, line = {""}, 0, False, Line(1, header, True)
    for line in lines:
        row, before = _row(columns, header, line, before)
        if row is None or int(row["update"]) in rows or (has_seal and not row.get("seal")):
            update += 1
            damage.append(Damage(line.number, update))
        else:
            update, has_seal = int(row["update"]), bool(row.get("seal"))
            rows[update] = row
    is_torn = not line.has_end or ("seal" in columns and not SEAL.search(line.text))
    is_unfinished = is_torn and damage[-1:] == [Damage(line.number, update)]
    damage = damage[:-1] if is_unfinished else damage
    if len(damage) > 1 and not rows:  # one change to the columns' names does that
        damage.insert(0, Damage(1, 0))
    return Metrics(columns, list(rows.values()), damage, is_unfinished)


def _row(columns: list[str], header: str, line: Line, before: set[str]) -> tuple[dict[str, str] | None, set[str]]:
    """The row that a line holds, if nothing shows that it was changed, and the seals that the next may follow.

    These are the seal as it stands, and as it should: a change to one row makes no other one doubtful.
    """
    stands, cells = set(SEAL.findall(line.text)), _cells(line.text) or []
    row = dict(zip(columns, cells, strict=False))
    if len(cells) != len(columns) or not (COUNT.fullmatch(row["update"]) and COUNT.fullmatch(row["steps"])):
        return None, stands or before
    if "seal" not in row:
        return (row if line.has_end else None), before
    values, _, digest = line.text.rpartition(f",{row['seal']},")
    fitting = {_seal(header, one, values, digest) for one in before}
    is_good = row["seal"] in fitting if row["seal"] else line.has_end
    return (row if is_good else None), {*stands, *fitting, row["seal"]}


def _sealed(columns: list[str], before: str, cells: list[str]) -> tuple[str, str]:
    """A row's line and its seal, which is the last cell but one."""
    *values, _, digest = cells
    parts = [_line(part).removesuffix(END) for part in (columns, values, [digest])]
    seal = _seal(parts[0], before, *parts[1:])
    return f"{parts[1]},{seal},{parts[2]}{END}", seal


def _seal(header: str, before: str, values: str, digest: str) -> str:
    text = "\n".join((header, before, values, digest))
    return f"s{hashlib.sha256(_bytes(text)).hexdigest()[:16]}"


def _in_order(names: Collection[str]) -> list[str]:
    others = sorted({*names} - {*FIRST, *SECOND, *LAST})
    return [*FIRST, *(name for name in SECOND if name in names), *others, *LAST]


def _gaps(updates: Iterable[int], last: int) -> list[str]:
    """What is missing of 1 to `last`, in words: 5, 7 to 9."""
    there = [0, *sorted(updates), last + 1]
    gaps = [(a + 1, b - 1) for a, b in itertools.pairwise(there) if b - a > 1]
    return [str(a) if a == b else f"{a} to {b}" for a, b in gaps]


def _some(names: list[str]) -> str:
    """As many of them as a message takes."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more}"


def _cells(line: str) -> list[str] | None:
    """What the line holds, if it can be read."""
    try:
        return next(csv.reader([line]), None)
    except csv.Error:
        return None


def _line(cells: Iterable[str]) -> str:
    out = io.StringIO(newline="")
    csv.writer(out, lineterminator=END).writerow(cells)
    return out.getvalue()


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogateescape")


def _text(value: float | int | str) -> str:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.9g}"
    return str(value)
