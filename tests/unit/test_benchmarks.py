from __future__ import annotations

from benchmarks import learning
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
