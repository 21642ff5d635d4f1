"""What was written to metrics.csv is told from what was not, row by row."""

from __future__ import annotations

import csv
import io
import math
import random
from pathlib import Path

import pytest

from lockstep.run import metrics
from lockstep.run.metrics import MetricsFile, read_metrics

Rows = list[dict[str, str]]
LENGTH = 40  # rows of a file that is mutated


def row(update: int, **more: float) -> dict[str, float | int | str]:
    values = {"kl": update / 3, "zeta": 1.0, "alpha": 2, "update": update, "steps": 128 * update}
    return {"digest": f"{update:064x}", "return_mean": math.nan, **values, **more}


def write_rows(run: Path, updates: range, resumed_at: int = 0, **more: float) -> list[str]:
    """What a run that is resumed at an update tells, and writes."""
    told: list[str] = []
    file = MetricsFile(run, resumed_at, told.append)
    for update in updates:
        file.write(row(update, **more))
    file.close()
    return told


def updates(run: Path) -> list[int]:
    return [int(line["update"]) for line in read_metrics(run).rows]


def without_seals(run: Path) -> None:
    """The file as it was before rows had seals."""
    file = run / "metrics.csv"
    rows = list(csv.reader(io.StringIO(file.read_text())))
    at = rows[0].index("seal")
    file.write_bytes("".join(",".join(cells[:at] + cells[at + 1 :]) + "\r\n" for cells in rows).encode())


def change(run: Path, line: int, old: str, new: str) -> None:
    file = run / "metrics.csv"
    lines = file.read_bytes().decode().split("\n")
    assert old in lines[line]
    lines[line] = lines[line].replace(old, new, 1)
    file.write_bytes("\n".join(lines).encode())


def test_a_row_is_written_at_once_with_nine_digits_and_no_nan(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path, 0, pytest.fail)
    file.write({**row(1), "digest": "ab,c"})
    with (tmp_path / "metrics.csv").open(newline="") as written:
        header, values = csv.reader(written)
    file.close()
    assert header == [*metrics.FIRST, "kl", "alpha", "zeta", *metrics.LAST]
    line = dict(zip(header, values, strict=True))
    assert (line["update"], line["kl"], line["alpha"], line["zeta"]) == ("1", "0.333333333", "2", "1")
    assert (line["digest"], line["return_mean"], line["eval_return"]) == ("ab,c", "", "")
    assert read_metrics(tmp_path).rows == [line]


def test_on_resume_rows_after_the_checkpoint_are_cut_off_without_a_word(tmp_path: Path) -> None:
    write_rows(tmp_path, range(1, 8))
    whole = (tmp_path / "metrics.csv").read_bytes()
    change(tmp_path, 6, "768", "769")
    assert write_rows(tmp_path, range(0), resumed_at=4) == []
    assert updates(tmp_path) == [1, 2, 3, 4]
    assert whole.startswith((tmp_path / "metrics.csv").read_bytes())
    write_rows(tmp_path, range(5, 8), resumed_at=4)
    assert (tmp_path / "metrics.csv").read_bytes() == whole
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]


def test_an_unfinished_last_row_is_dropped_with_a_word_wherever_it_was_cut(tmp_path: Path) -> None:
    write_rows(tmp_path, range(1, 3))
    file = tmp_path / "metrics.csv"
    whole = file.read_bytes()
    ends = [i - 1 for i in range(len(whole)) if whole[i : i + 1] == b"\n"]  # of what a line says
    for cut in (cut for cut in range(1, len(whole)) if cut % 7 == 0 or any(abs(cut - end) < 4 for end in ends)):
        file.write_bytes(whole[:cut])
        complete = max(sum(end <= cut for end in ends) - 1, 0)
        if cut in (ends[0], ends[0] + 1):
            continue  # the names of the columns, and no row
        told = write_rows(tmp_path, range(0), resumed_at=2)
        assert updates(tmp_path) == list(range(1, complete + 1))
        assert any("not written to its end" in note for note in told) != any(end <= cut <= end + 2 for end in ends)
        assert any("has no rows of these updates" in note for note in told) == (complete < 2)
        write_rows(tmp_path, range(complete + 1, 3), resumed_at=complete)
        assert file.read_bytes() == whole
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]


def test_a_resume_at_the_start_begins_anew(tmp_path: Path) -> None:
    write_rows(tmp_path, range(1, 4))
    assert write_rows(tmp_path, range(1, 2), resumed_at=0) == []
    assert updates(tmp_path) == [1]


def test_one_changed_cell_is_one_damaged_row_which_is_named_and_kept_beside(tmp_path: Path) -> None:
    write_rows(tmp_path, range(1, 8))
    seal = read_metrics(tmp_path).rows[4]["seal"]
    for old, new in (
        (",640,", ",641,"),
        (seal, "s0123456789abcdef"),
        (seal, ""),
        ("5", "²"),
        (",2,", f",{'2' * 200_000},"),
    ):
        write_rows(tmp_path, range(1, 8))
        change(tmp_path, 5, old, new)
        damaged = (tmp_path / "metrics.csv").read_bytes()
        told = write_rows(tmp_path, range(8, 9), resumed_at=7)
        assert "is damaged in line 6 (where update 5 belongs)." in told[0]
        assert "has no rows of these updates, which the run made: 5." in told[1]
        beside = max(tmp_path.glob("metrics.csv.damaged*"), key=lambda path: path.stat().st_mtime_ns)
        assert f"is kept in '{beside}'" in told[2]
        assert beside.read_bytes() == damaged
        assert updates(tmp_path) == [1, 2, 3, 4, 6, 7, 8]
        assert write_rows(tmp_path, range(0), resumed_at=8) == [told[1]], "sealed anew"
    assert len(list(tmp_path.glob("metrics.csv.damaged*"))) == 5


def test_damage_to_the_names_of_the_columns_leaves_no_row_certain(tmp_path: Path) -> None:
    for old, new in (("kl", "kk"), ("seal", "seel"), ("zeta", "kl"), ("update", "updaet"), ("steps,", "")):
        write_rows(tmp_path, range(1, 4))
        change(tmp_path, 0, old, new)
        assert read_metrics(tmp_path).rows == []
        told = write_rows(tmp_path, range(4, 5), resumed_at=3)
        assert "line 1 (the names of the columns), line 2 (where update 1 belongs)" in told[0]
        assert updates(tmp_path) == [4]


def test_rows_that_are_missing_are_named(tmp_path: Path) -> None:
    write_rows(tmp_path, range(1, 10))
    file = tmp_path / "metrics.csv"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:8]))
    assert write_rows(tmp_path, range(0), resumed_at=9) == [
        f"'{file}' has no rows of these updates, which the run made: 8 to 9."
    ]
    file.unlink()
    assert "the run made: 1 to 9." in write_rows(tmp_path, range(10, 11), resumed_at=9)[0]
    assert "the run made: 1 to 9, 11." in write_rows(tmp_path, range(0), resumed_at=11)[0]


def test_a_file_from_before_seals_is_read_and_gets_them_from_now_on(tmp_path: Path) -> None:
    write_rows(tmp_path, range(1, 4))
    without_seals(tmp_path)
    before = (tmp_path / "metrics.csv").read_bytes()
    told = write_rows(tmp_path, range(0), resumed_at=3)
    assert len(told) == 1
    assert "has rows without a seal, up to update 3" in told[0]
    assert (tmp_path / "metrics.csv").read_bytes() == before
    assert write_rows(tmp_path, range(4, 7), resumed_at=3) == told
    found = read_metrics(tmp_path)
    assert found.columns[-2:] == ["seal", "digest"]
    assert [bool(line["seal"]) for line in found.rows] == [False] * 3 + [True] * 3
    change(tmp_path, 5, "640", "641")
    assert [place.update for place in read_metrics(tmp_path).damage] == [5]


def test_a_file_from_before_seals_shows_what_is_no_row(tmp_path: Path) -> None:
    for line, old, new, left in (
        (2, "2,256", "x,256", [1, 3, 4]),
        (2, "2,256", "2,²", [1, 3, 4]),
        (2, ",2,", ",", [1, 3, 4]),
        (4, "\r", "", [1, 2, 3, 4]),
        (0, "update", "updates", []),
    ):
        write_rows(tmp_path, range(1, 5))
        without_seals(tmp_path)
        change(tmp_path, line, old, new)
        assert updates(tmp_path) == left
        assert bool(read_metrics(tmp_path).damage) == (len(left) < 4)


def test_other_columns_are_added_with_nothing_in_older_rows(tmp_path: Path) -> None:
    write_rows(tmp_path, range(1, 4))
    older = [{k: v for k, v in line.items() if k != "seal"} for line in read_metrics(tmp_path).rows]
    assert write_rows(tmp_path, range(4, 6), resumed_at=3, entropy=0.5, beta=2.0) == []
    found = read_metrics(tmp_path)
    assert found.columns == [*metrics.FIRST, "kl", "entropy", "alpha", "beta", "zeta", *metrics.LAST]
    assert [line["beta"] for line in found.rows] == ["", "", "", "2", "2"]
    assert [{k: line[k] for k in older[0]} for line in found.rows[:3]] == older
    assert all(line["seal"] for line in found.rows)
    write_rows(tmp_path, range(6, 7), resumed_at=5)
    assert read_metrics(tmp_path).rows[-1]["beta"] == ""


def test_what_is_left_of_a_power_cut_is_damage_or_an_unfinished_end(tmp_path: Path) -> None:
    write_rows(tmp_path, range(1, 4))
    file = tmp_path / "metrics.csv"
    whole = file.read_bytes()
    file.write_bytes(whole + b"\0" * 400)
    assert (updates(tmp_path), read_metrics(tmp_path).is_unfinished) == ([1, 2, 3], True)
    file.write_bytes(whole + b"\0" * 400 + b"\n")
    assert (updates(tmp_path), read_metrics(tmp_path).is_unfinished) == ([1, 2, 3], True)
    second = whole.splitlines(keepends=True)[2]
    file.write_bytes(whole.replace(second, b"\0" * len(second)))
    assert [place.line for place in read_metrics(tmp_path).damage] == [3], "the rest of the line is garbage too"
    file.write_bytes(b"\0" * 50)
    assert (updates(tmp_path), read_metrics(tmp_path).is_unfinished) == ([], True)


def test_other_programs_read_the_file_as_before(tmp_path: Path) -> None:
    write_rows(tmp_path, range(1, 4))
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(line["update"]) for line in rows] == [1, 2, 3]
    for line in rows:
        with pytest.raises(ValueError, match="could not convert"):
            float(line["seal"])


def mutated(content: bytes, rng: random.Random) -> bytes:
    """One change, as an editor, a disk or a cosmic ray makes it."""
    at = rng.randrange(len(content))
    end = min(at + rng.choice([1, 1, 2, 5, 30, 300]), len(content))
    lines = content.splitlines(keepends=True)
    one, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    cells = lines[one].split(b",")
    cells[rng.randrange(len(cells))] = rng.choice(
        [b"", b"0", b"1e9", b"nan", "²".encode(), b"-3", b'"', b"s" + b"0" * 16]
    )
    return rng.choice(
        [
            lambda: content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :],
            lambda: content[:at] + bytes([rng.randrange(256)]) + content[at + 1 :],
            lambda: content[:at] + content[end:],
            lambda: content[:at] + rng.choice([b"7", b",", b"\n", b'"', b"\0", b"\r\n", b"\xff"]) + content[at:],
            lambda: content[:at] + b"\0" * (end - at) + content[end:],
            lambda: content[:at],
            lambda: b"".join([*lines[:one], b",".join(cells), *lines[one + 1 :]]),
            lambda: b"".join([*lines[:one], *lines[one + 1 :]]),
            lambda: b"".join([*lines[:one], lines[one], *lines[one:]]),
            lambda: b"".join([*lines[:one], lines[other], *lines[one + 1 :]]),
            lambda: b"".join(lines[other:] + lines[:other]),
        ]
    )()


def resumed(run: Path, content: bytes) -> tuple[Rows, list[str]]:
    """The rows that a resume at the last update leaves of a file, and what it tells."""
    (run / "metrics.csv").write_bytes(content)
    told = write_rows(run, range(0), resumed_at=LENGTH)
    rows = read_metrics(run)
    assert not rows.damage
    return rows.rows, told


@pytest.mark.parametrize("mutations", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_no_row_is_lost_silently_and_no_changed_value_unseen(tmp_path: Path, mutations: int) -> None:
    write_rows(tmp_path, range(1, LENGTH + 1))
    content = (tmp_path / "metrics.csv").read_bytes()
    written = {line["update"]: {**line, "seal": ""} for line in read_metrics(tmp_path).rows}
    rng = random.Random(7)
    kept_beside = 0
    for number in range(mutations):
        changed = mutated(content, rng)
        run = tmp_path / str(number)
        run.mkdir()
        rows, told = resumed(run, changed)
        for line in rows:
            assert {**line, "seal": ""} == written[line["update"]], f"mutation {number}: a changed value is unseen"
        lost = [int(update) for update in written if update not in {line["update"] for line in rows}]
        gaps = metrics._gaps((int(line["update"]) for line in rows), LENGTH)
        assert (not lost) or any(f"which the run made: {metrics._some(gaps)}." in note for note in told), number
        whole = [path.read_bytes() for path in run.glob("metrics.csv.damaged")]
        assert whole in ([], [changed])
        kept_beside += len(whole)
        is_torn = any("not written to its end" in note for note in told)
        missing = sum(changed.count(line.removesuffix(b"\r\n")) == 0 for line in content.splitlines(keepends=True)[1:])
        assert len(lost) <= missing + 2 or whole or is_torn, f"mutation {number}: whole rows were dropped"
    assert kept_beside > mutations / 3
