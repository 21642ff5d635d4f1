from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import learning, same_digests
from lockstep.experiment import resolve


def test_every_measured_row_is_of_the_preset_as_it_is() -> None:
    found = learning.kept()
    assert found["ppo"]
    stale = [
        f"{preset} {algo} {seed}"
        for algo, presets in found.items()
        for preset, seeds in presets.items()
        for seed, result in seeds.items()
        if not learning.is_of(result, resolve(preset, algo, {"seed": int(seed)}).experiment)
    ]
    assert not stale, "these presets were changed after they were measured: benchmarks/learning.py measures them again"


def test_the_tables_are_those_of_the_results() -> None:
    tables, _, by_hand = learning.TABLES.read_text().partition(learning.TRIED)
    assert tables.strip() == learning.tables(learning.kept()).strip()
    assert by_hand


@pytest.mark.parametrize(
    ("kept", "held", "why"),
    [
        ({"digest": "0123456789ab", "cpu": "here"}, True, "holds, 0123456789ab"),
        ({"digest": "ba9876543210", "cpu": "here"}, False, "DIFFERS: kept is ba9876543210, made was 0123456789ab"),
        ({"digest": "0123456789ab", "cpu": "there"}, None, "it was made on CPU there, this is here"),
        ({"digest": "0123456789ab"}, True, "holds"),
        ({"digest": "ba9876543210"}, None, "its kind of CPU was not kept, and here gives 0123456789ab"),
    ],
)
def test_a_row_of_another_kind_of_cpu_never_counts_as_holding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: dict[str, str], held: bool | None, why: str
) -> None:
    made = []
    monkeypatch.setattr(learning, "this_cpu", lambda scratch: "here")
    monkeypatch.setattr(
        learning, "lockstep", lambda *words, code: made.append((words[:2], code)) or "digest 0123456789abcd"
    )
    (tmp_path / "abc1234").mkdir()
    found = learning.again("ppo", "pendulum", "7", {**kept, "commit": "abc1234"}, tmp_path)
    assert found.held is held
    assert why in found.why
    assert made == ([] if kept.get("cpu") == "there" else [(("train", "pendulum"), tmp_path / "abc1234")])


def test_digests_that_differ_are_counted_unless_they_are_meant_to(capsys: pytest.CaptureFixture[str]) -> None:
    before = {"Hopper-v5-ppo": ["aa", "bb"], "Hopper-v5-trpo": ["aa"], "Ant-v5-a2c": ["cc"]}
    now = {"Hopper-v5-ppo": ["xx", "bb"], "Hopper-v5-trpo": ["bb"], "Ant-v5-a2c": ["cc"], "Ant-v5-npg": ["dd"]}
    assert same_digests.compare(before, now, ["trpo"]) == 2
    told = capsys.readouterr().out
    assert [line.split()[3] for line in told.splitlines()[:4]] == ["equal", "DIFFERS", "DIFFERS", "DIFFERS"]
    assert "(exempt)" in told
