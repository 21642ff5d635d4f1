"""The same experiment gives the same digest, whatever surrounds it."""

from __future__ import annotations

from pathlib import Path

import pytest

import lockstep
from lockstep.run.programs import actor_of, update_of
from tests.laws.process import digest_in, options, run, timeless
from tests.laws.table import BATCH, every_algorithm, settings


def digest(logdir: Path, env: str, algo: str, name: str, **changes: object) -> str:
    return lockstep.train(env, algo=algo, logdir=logdir, name=name, settings=settings(4, algo, **changes)).digest


@every_algorithm
def test_same_seed_same_bits_and_another_seed_others(tmp_path: Path, env: str, algo: str) -> None:
    first = digest(tmp_path, env, algo, "first")
    assert digest(tmp_path, env, algo, "second") == first
    assert digest(tmp_path, env, algo, "other", seed=4) != first


@every_algorithm
def test_observers_change_nothing(tmp_path: Path, env: str, algo: str) -> None:
    watched = {"watch.eval_every": 256, "watch.eval_episodes": 2, "watch.checkpoint_every": 256, "watch.keep": 1}
    watched["watch.trace"] = True
    assert digest(tmp_path, env, algo, "watched", **watched) == digest(tmp_path, env, algo, "alone")


def test_another_seed_or_budget_needs_no_other_programs(tmp_path: Path) -> None:
    lockstep.train("Pendulum-v1", logdir=tmp_path, settings=settings(1))
    before = [programs.cache_info().misses for programs in (actor_of, update_of)]
    lockstep.train("Pendulum-v1", logdir=tmp_path, name="other", settings=settings(1, steps=BATCH + 64, seed=4))
    assert [programs.cache_info().misses for programs in (actor_of, update_of)] == before
    names, *rows = timeless(tmp_path / "other")
    rates = [float(row[names.index("learning_rate")]) for row in rows]
    assert rates == pytest.approx([3e-4, 3e-4 * 64 / (BATCH + 64)]), "by its own budget"


def test_another_process_directory_and_thread_settings_change_nothing(tmp_path: Path) -> None:
    inside = digest(tmp_path, "Pendulum-v1", "ppo", "inside")
    threads = {"OMP_NUM_THREADS": "4", "PJRT_NPROC": "8", "OPENBLAS_NUM_THREADS": "3", "PYTHONHASHSEED": "7"}
    where = ("--logdir", str(tmp_path), "--name", "outside")
    outside = run("train", "Pendulum-v1", *options(settings(4)), *where, env=threads)
    assert outside.returncode == 0, outside.stderr
    assert digest_in(outside.stdout) == inside
    assert "PJRT_NPROC is set to 1" in outside.stderr


def test_receipts_of_two_runs_are_equal_row_by_row(tmp_path: Path) -> None:
    for name in ("first", "second"):
        digest(tmp_path, "Pendulum-v1", "ppo", name)
    first, second = timeless(tmp_path / "first"), timeless(tmp_path / "second")
    assert first == second
    assert len(first) == 5


def test_the_final_digest_is_the_last_receipt(tmp_path: Path) -> None:
    final = digest(tmp_path, "Pendulum-v1", "ppo", "run")
    assert (tmp_path / "run" / "metrics.csv").read_text().splitlines()[-1].endswith(final)
    assert run("digest", str(tmp_path / "run")).stdout.splitlines()[-1] == final
