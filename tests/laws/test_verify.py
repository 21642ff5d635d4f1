"""An honest run verifies on any layout; whatever was altered is named with its update."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import lockstep
from lockstep.cli import main
from lockstep.run import checkpoint, metrics
from lockstep.run.directory import locked
from lockstep.run.train import resume
from tests.laws.process import run as command
from tests.laws.table import BATCH, settings

Output = pytest.CaptureFixture[str]
UPDATES = 6  # with checkpoints of updates 2, 4 and 6


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lockstep.train("Pendulum-v1", logdir=tmp_path_factory.mktemp("honest"), settings=settings(UPDATES)).path


@pytest.fixture
def run(honest: Path, tmp_path: Path) -> Path:
    """A copy of the honest run, to be altered."""
    return Path(shutil.copytree(honest, tmp_path / "run"))


def verify(run: Path, *options: str) -> int:
    return main(["verify", str(run), *options])


def contents(run: Path) -> dict[Path, tuple[bytes, int]]:
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in run.rglob("*") if path.is_file()}


def test_an_honest_run_verifies_and_stays_as_it_was(run: Path, capsys: Output) -> None:
    before = contents(run)
    assert verify(run) == 0
    assert capsys.readouterr().out == "updates 3 to 6: 4 digests equal, 3 checkpoints intact\n"
    assert contents(run) == before


@pytest.mark.parametrize(
    ("wanted", "told", "origin"),
    [
        ("0:", "updates 1 to 6: 6 digests equal, 3 checkpoints intact", "updates 1 to 6 from the beginning"),
        ("1:1", "updates 1 to 1: 1 digests equal, 0 checkpoints intact", "updates 1 to 1 from the beginning"),
        (
            "4:5",
            "updates 4 to 5: 2 digests equal, 2 checkpoints intact",
            "updates 3 to 5 from checkpoint step_00000000",
        ),
        (":4", "updates 3 to 4: 2 digests equal, 2 checkpoints intact", "updates 3 to 4 from checkpoint step_00000000"),
    ],
)
def test_slices_start_at_the_checkpoint_before_them(
    honest: Path, capsys: Output, wanted: str, told: str, origin: str
) -> None:
    assert verify(honest, "--updates", wanted) == 0
    output = capsys.readouterr()
    assert told in output.out
    assert f"re-running {origin}" in output.err


def test_an_honest_run_verifies_on_another_layout(honest: Path) -> None:
    done = command("verify", str(honest), "--nprocs", "2", "--mode", "average")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "updates 3 to 6: 4 digests equal, 3 checkpoints intact\n"
    assert "on 2 processes, average" in done.stderr


def alter_receipt(run: Path, update: int, sealed: bool = True) -> tuple[str, str]:
    """Another last figure in the digest of an update, and new seals if need be: what it was, and what it is."""
    file, found = run / "metrics.csv", metrics.read_metrics(run)
    was = found.rows[update - 1]["digest"]
    altered = was[:-1] + ("0" if was[-1] != "0" else "1")
    if not sealed:
        file.write_bytes(file.read_bytes().replace(was.encode(), altered.encode()))
        return was, altered
    found.rows[update - 1]["digest"] = altered
    lines, before = [metrics._line(found.columns)], ""
    for row in found.rows:
        line, before = metrics._sealed(found.columns, before, list(row.values()))
        lines.append(line)
    file.write_bytes("".join(lines).encode())
    return was, altered


@pytest.mark.parametrize("update", [2, 5, 6])
def test_an_altered_receipt_names_its_update(run: Path, capsys: Output, update: int) -> None:
    was, altered = alter_receipt(run, update)
    assert verify(run) == 4
    told = capsys.readouterr().err
    assert f"lockstep: update {update} differs: its receipt in metrics.csv is {altered}" in told
    assert was in told


def test_a_row_that_was_changed_is_no_receipt_and_the_others_are(run: Path, capsys: Output) -> None:
    file = run / "metrics.csv"
    whole = file.read_bytes()
    alter_receipt(run, 5, sealed=False)
    assert verify(run) == 5
    told = f"'{file}' is damaged in line 6 (where update 5 belongs)."
    assert f"{told} Verify other rows with --updates :4" in capsys.readouterr().err
    assert verify(run, "--updates", ":4") == 0
    assert f"lockstep: {told}" in capsys.readouterr().err
    assert main(["digest", str(run)]) == 0
    output = capsys.readouterr()
    assert "as in metrics.csv" in output.out
    assert told in output.err
    assert main(["plot", str(run), "--column", "kl", "--out", str(run / "curves.png")]) == 0
    assert f"{told} Its other rows are drawn." in capsys.readouterr().err
    file.write_bytes(whole)
    alter_receipt(run, 6, sealed=False)
    for options in ((), ("--updates", "5:6")):
        assert verify(run, *options) == 5
        assert "line 7 (where update 6 belongs). Verify other rows with --updates :5" in capsys.readouterr().err
    file.write_bytes(file.read_bytes().replace(b"seal", b"saal"))
    for reader, status in (("verify", 5), ("plot", 2)):
        assert main([reader, str(run)]) == status
        assert "line 1 (the names of the columns)" in capsys.readouterr().err


def test_an_altered_receipt_ends_all_ranks_and_is_told_once(run: Path) -> None:
    was, altered = alter_receipt(run, 5)
    done = command("verify", str(run), "--nprocs", "4", "--mode", "gather")
    assert done.returncode == 4, done.stderr
    assert done.stderr.count(f"update 5 differs: its receipt in metrics.csv is {altered}, computed was {was}") == 1


@pytest.mark.parametrize("name", ["learner.safetensors", "episodes.safetensors", "manifest.json"])
def test_one_altered_byte_of_a_checkpoint_names_its_update(run: Path, capsys: Output, name: str) -> None:
    file = run / "checkpoints" / checkpoint.name_of(4 * BATCH) / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    for options in ((), ("--nprocs", "2")):
        assert verify(run, *options) == 5
        told = capsys.readouterr().err
        assert f"update 4, 1,024 steps: checkpoint '{file.parent}' is damaged: {name} was changed" in told
    assert verify(run, "--updates", ":3") == 0


def rewrite(run: Path, update: int, **changes: object) -> None:
    """A checkpoint with something else in it, sealed again."""
    path = run / "checkpoints" / checkpoint.name_of(update * BATCH)
    saved = checkpoint.read(path)._replace(**changes)  # type: ignore[arg-type]
    checkpoint.remove(path)
    checkpoint.write(run, saved, keep=9)


@pytest.mark.parametrize(
    ("update", "told"), [(2, "its receipt in metrics.csv is"), (4, "checkpoint step_000000001024 is")]
)
def test_a_forged_checkpoint_is_found_by_its_digest(run: Path, capsys: Output, update: int, told: str) -> None:
    saved = checkpoint.read(run / "checkpoints" / checkpoint.name_of(update * BATCH))
    name = next(name for name, array in saved.learner.items() if array.dtype == np.float32)
    rewrite(run, update, learner={**saved.learner, name: saved.learner[name] + np.float32(1e-3)})
    assert verify(run) == 4
    assert f"update {update} differs: {told}" in capsys.readouterr().err


def test_another_machine_is_told_and_the_comparison_made(run: Path, capsys: Output) -> None:
    saved = checkpoint.newest(run)[1]
    versions = {**saved.machine["versions"], "jax": "0.0.1"}
    rewrite(run, 4, machine={**saved.machine, "versions": versions, "kernels": "others"})
    doubt = f"bits may differ from the run's: jax 0.0.1 -> {saved.machine['versions']['jax']}, arithmetic of this CPU."
    assert verify(run) == 0
    assert f"lockstep: {doubt}" in capsys.readouterr().err
    alter_receipt(run, 5)
    assert verify(run) == 4
    assert capsys.readouterr().err.count(doubt) == 2


def test_a_run_that_goes_on_is_verified_up_to_its_newest_receipt(run: Path, capsys: Output) -> None:
    with locked(run), (run / "metrics.csv").open("a") as file:
        file.write("7,1792,1.2")
        file.flush()
        assert verify(run) == 0
    assert "updates 3 to 6: 4 digests equal" in capsys.readouterr().out


def test_a_checkpoint_that_the_run_removes_meanwhile_is_no_fault(
    run: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, oldest = checkpoint.read, checkpoint.listed(run)[0]

    def removing(path: Path) -> checkpoint.Checkpoint:
        if path == oldest and path.exists():
            shutil.rmtree(path)
        return read(path)

    monkeypatch.setattr(checkpoint, "read", removing)
    assert verify(run) == 0
    assert capsys.readouterr().out == "updates 5 to 6: 2 digests equal, 2 checkpoints intact\n"


def test_without_checkpoints_a_run_is_derived_from_its_configuration(run: Path, capsys: Output) -> None:
    shutil.rmtree(run / "checkpoints")
    assert verify(run) == 0
    assert capsys.readouterr().out == "updates 1 to 6: 6 digests equal, 0 checkpoints intact\n"


def test_receipts_that_are_missing_are_named(run: Path, capsys: Output) -> None:
    file = run / "metrics.csv"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:5] + lines[6:]))
    assert verify(run) == 5
    assert "line 6 (where update 5 belongs)" in capsys.readouterr().err, "what follows the gap"
    file.write_bytes(b"".join([*lines[:4], b"x", *lines[4:]]))
    assert verify(run) == 5
    told = capsys.readouterr().err
    assert f"has no receipt of checkpoint {checkpoint.name_of(4 * BATCH)}: it was cut off or altered" in told
    assert "It is damaged in line 5 (where update 4 belongs)." in told
    assert verify(run, "--updates", ":3") == 0
    file.unlink()
    assert verify(run) == 2
    assert "has no receipts to verify yet" in capsys.readouterr().err


def test_a_changed_experiment_is_refused(run: Path, capsys: Output) -> None:
    file = run / "config.toml"
    file.write_text(file.read_text().replace("clip = 0.2", "clip = 0.3"))
    assert verify(run) == 5
    assert "it was changed" in capsys.readouterr().err


def test_another_budget_on_the_way_is_told_where_the_digests_part(run: Path, capsys: Output) -> None:
    resume(run, steps=8 * BATCH)
    assert verify(run, "--updates", "7:") == 0
    assert "with another budget" in capsys.readouterr().err
    assert verify(run, "--updates", "0:3") == 4
    told = capsys.readouterr().err
    assert "update 2 differs" in told
    assert told.count("with another budget") == 2


def test_what_can_not_be_verified_is_refused(honest: Path, capsys: Output) -> None:
    for options, message in {
        ("--nprocs", "3"): "nprocs (3) must divide the 4 lanes: 1, 2, 4.",
        ("--updates", "3:7"): "has receipts of updates 1 to 6",
        ("--updates", "7:"): "has receipts of updates 1 to 6",
        ("--updates", ":0"): "has receipts of updates 1 to 6",
    }.items():
        assert verify(honest, *options) == 2
        assert message in capsys.readouterr().err
