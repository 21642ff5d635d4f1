from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import lockstep
from lockstep.cli import main
from lockstep.errors import Differs, UsageError
from lockstep.experiment import Config, Layout, resolve
from lockstep.run import bench
from lockstep.run.bench import Bench, Measured, Timing, budgeted, layouts, timing
from tests.laws.process import options, run
from tests.laws.table import BATCH, settings
from tests.unit.test_timeline import nested


def test_layouts_are_all_combinations_and_one_process_has_no_mode() -> None:
    assert layouts([1, 2], ["gather", "average"]) == [Layout(), Layout(2, "gather"), Layout(2, "average")]
    assert layouts([4, 1, 4], ["average"]) == [Layout(4, "average"), Layout()]
    assert layouts([1], ["gather", "average"], [0, 2]) == [Layout(), Layout(workers=2)]


def test_the_budget_leaves_something_to_measure() -> None:
    config = resolve("pendulum")
    assert budgeted(config, None).experiment.steps == 23 * 2048
    assert budgeted(config, 6145).experiment.steps == 6145
    assert not budgeted(config, None).watch.eval_every
    with pytest.raises(UsageError, match="Give more than 6144"):
        budgeted(config, 6144)


def row(update: int, seconds: float, collect: float, communicate: float, learn: float) -> dict[str, str]:
    times = {"time_collect": collect, "time_communicate": communicate, "time_update": learn, "seconds": seconds}
    return {"steps": str(100 * update), "digest": f"d{update}"} | {name: str(value) for name, value in times.items()}


def test_timing_leaves_the_warm_up_out_and_shares_add_up_to_one() -> None:
    slow = [row(update, 10.0 * update, 9, 9, 9) for update in (1, 2, 3)]
    found = timing([*slow, row(4, 31.0, 0.5, 0.25, 0.125), row(5, 32.0, 0.25, 0.25, 0.125)])
    assert found.steps_per_second == 100
    assert found.shares == {"collect": 0.375, "communicate": 0.25, "update": 0.125, "other": 0.25}
    assert found.receipts == ["d1", "d2", "d3", "d4", "d5"]


def entry(layout: Layout, *rates: float, receipts: str = "abcde") -> Measured:
    shares = {"collect": 0.5, "communicate": 0.25, "update": 0.125, "other": 0.125}
    return Measured(layout, [Timing(rate, shares, list(receipts)) for rate in rates])


def test_speed_up_is_counted_from_the_fewest_processes_and_the_best_turn() -> None:
    result = Bench(Config(), [entry(Layout(4, "average"), 250.0, 300.0), entry(Layout(2, "average"), 200.0, 100.0)])
    assert [result.speed_up(measured) for measured in result.measured] == [1.5, 1.0]
    assert [result.efficiency(measured) for measured in result.measured] == [0.75, 1.0]
    assert result.difference is None


def test_the_table_and_the_picture_have_a_line_for_each_layout(tmp_path: Path) -> None:
    result = Bench(Config(), [entry(Layout(), 1000.0), entry(Layout(2, "average"), 1500.0)])
    title, _, head, first, second = (" ".join(line.split()) for line in bench.table(result).splitlines())
    assert "2 updates after 3 of warm-up" in title
    assert head == "nprocs mode workers steps/s speed-up efficiency collect communicate update other digest"
    assert first == "1 gather 0 1,000 1.00 100% 50% 25% 12% 12% e"
    assert second == "2 average 0 1,500 1.50 75% 50% 25% 12% 12% e"
    for name in ("bench.png", "below/bench.svg"):
        bench.draw(result, tmp_path / name)
        assert (tmp_path / name).stat().st_size > 5000


def test_the_first_digest_that_differs_is_named() -> None:
    others = [entry(Layout(2), 1.0, receipts="abcdX"), entry(Layout(4), 1.0, receipts="abYde")]
    result = Bench(Config(), [entry(Layout(), 1.0), *others])
    assert result.difference == "update 3 differs: 1 process has digest c, 4 processes, gather has Y."


def test_digests_that_differ_are_status_4_after_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = Bench(Config(), [entry(Layout(), 1.0), entry(Layout(2), 1.0, receipts="abcdX")])
    monkeypatch.setattr(bench, "bench", lambda *_: found)
    assert main(["bench", "pendulum", "--out", str(tmp_path / "bench.png")]) == Differs.status == 4
    output = capsys.readouterr()
    assert "nprocs" in output.out
    assert "lockstep: update 5 differs: 1 process has digest e, 2 processes, gather has X" in output.err


def test_layouts_of_one_experiment_agree_and_every_rank_has_a_timeline(tmp_path: Path) -> None:
    small = settings(5)
    wanted = {name: value for name, value in small.items() if not name.startswith("watch") and name != "steps"}
    layouts = ["--nprocs", "1,2", "--mode", "average"]
    where = ["--out", str(tmp_path / "bench.png"), "--trace", str(tmp_path / "traces"), "--json"]
    done = run("bench", "Pendulum-v1", *options(wanted), "--steps", str(5 * BATCH), *layouts, *where)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [(found["nprocs"], found["mode"]) for found in told["layouts"]] == [(1, "gather"), (2, "average")]
    assert told["difference"] is None
    plain = lockstep.train("Pendulum-v1", logdir=tmp_path, name="plain", settings=small)
    assert {found["digest"] for found in told["layouts"]} == {plain.digest}
    for found in told["layouts"]:
        assert sum(found[share] for share in bench.SHARES) == pytest.approx(1)
        assert found["steps_per_second"] > 0
    assert (tmp_path / "bench.png").is_file()
    check_traces(tmp_path / "traces")


def check_traces(folder: Path) -> None:
    """Every rank of every layout, its updates in full, messages where there is somebody to send them to."""
    messages: dict[str, set[str]] = {"1-gather": set(), "2-average": {"allgather"}}
    assert {file.stem for file in folder.iterdir()} == set(messages)
    for name, sent in messages.items():
        events = json.loads((folder / f"{name}.json").read_text())["traceEvents"]
        for rank in range(int(name[0])):
            spans = [event for event in events if event["pid"] == rank and event["ph"] == "X"]
            names = [span["name"] for span in spans]
            assert names.count("collect") == names.count("update") == 5
            assert {"report", "save"} | sent <= set(names)
            assert nested(spans)
    assert overlap(events)


def overlap(events: list[dict[str, Any]]) -> bool:
    """Whether the ranks' first updates went on at the same time: they wait for each other in it."""
    first, second = (
        next(event for event in events if event["name"] == "update" and event["pid"] == rank) for rank in (0, 1)
    )
    return first["ts"] < second["ts"] + second["dur"] and second["ts"] < first["ts"] + first["dur"]


def test_a_layout_that_fails_is_named_with_its_status(tmp_path: Path) -> None:
    kwargs = ["--set", 'env.kwargs.what="nan"', "--set", "env.kwargs.at=9", "--nprocs", "1"]
    failed = run("bench", "lockstep.envs.testing:Scripted-v0", *kwargs, "--out", str(tmp_path / "bench.png"))
    assert failed.returncode == 3, failed.stderr
    assert "lockstep: 1 process: the run ended with status 3" in failed.stderr
    assert "the observation is nan at index 1, at step 9" in failed.stderr
    assert not list(tmp_path.iterdir())
