"""Safetensors are read as their own library reads them, without a copy, and nothing else is."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors.numpy import load, save

from lockstep.run.arrays import DTYPES, views

LEAVES = st.sampled_from(sorted(DTYPES.values())).flatmap(
    lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
)


@given(st.dictionaries(st.text(alphabet="ab/é_", max_size=9), LEAVES, max_size=6))
def test_what_their_library_writes_is_read_bit_for_bit(group: dict[str, np.ndarray]) -> None:
    content = save(group)
    found, expected = views(bytearray(content)), load(content)
    assert found.keys() == group.keys() == expected.keys()
    for name, array in found.items():
        assert (array.dtype, array.shape) == (group[name].dtype, group[name].shape)
        assert array.tobytes() == group[name].tobytes() == expected[name].tobytes()


def test_metadata_is_no_array() -> None:
    assert list(views(bytearray(save({"w": np.ones(2)}, metadata={"by": "hand"})))) == ["w"]


def packed(header: Any, data: int = 16) -> bytearray:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return bytearray(len(text).to_bytes(8, "little") + text + bytes(data))


def entry(dtype: Any = "F64", shape: Any = (2,), offsets: Any = (0, 16)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


REFUSED: dict[str, bytearray] = {
    "nothing": bytearray(),
    "a header without an end": packed({"w": entry()})[:20],
    "a header of any length": bytearray(b"\xff" * 8 + b"{}"),
    "no JSON": packed(b"{"),
    "no text": packed(b"\xff\xfe"),
    "a list": packed([entry()]),
    "an entry that is none": packed({"w": [0, 16]}),
    "too much in an entry": packed({"w": {**entry(), "more": 1}}),
    "an unknown dtype": packed({"w": entry("F7")}),
    "a dtype that is no text": packed({"w": entry(["F64"])}),
    "a negative shape": packed({"w": entry(shape=[-2])}),
    "a shape of fractions": packed({"w": entry(shape=[2.0])}),
    "a shape of flags": packed({"w": entry(shape=[2, True])}),
    "a shape that is none": packed({"w": entry(shape=2)}),
    "an immense shape": packed({"w": entry(shape=[2**62, 4, 0], offsets=[0, 0])}, 0),
    "one end only": packed({"w": entry(offsets=[16])}),
    "the ends the wrong way round": packed({"w": entry(shape=[], offsets=[8, 0])}, 8),
    "another size than the shape's": packed({"w": entry(shape=[3])}),
    "beyond the file": packed({"w": entry(shape=[3], offsets=[0, 24])}),
    "two arrays in one place": packed({"w": entry(), "v": entry()}),
    "a hole": packed({"w": entry(shape=[1], offsets=[8, 16])}),
    "bytes of no array": packed({"w": entry()}, 24),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_safetensors_is_refused(what: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  (JSON's and NumPy's own messages are among them)
        views(REFUSED[what])


@given(st.data())
def test_no_change_to_a_header_does_more_than_refuse_or_rename(data: st.DataObject) -> None:
    content = bytearray(save({"weights": np.ones((2, 3), np.float32), "steps": np.array(7)}))
    length = int.from_bytes(content[:8], "little")
    at = data.draw(st.integers(0, 7 + length))
    content[at] = data.draw(st.integers(0, 255))
    try:
        found = views(content)
    except (ValueError, RecursionError):
        return
    assert sum(array.nbytes for array in found.values()) == 32


PEAK = """
import hashlib, resource, sys
from pathlib import Path
import numpy as np
from safetensors.numpy import save
from lockstep.run import checkpoint
from lockstep.run.checkpoint import Checkpoint
from lockstep.run.progress import Progress

def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024

run, size = Path(sys.argv[1]), int(sys.argv[2])
if sys.argv[3] == "write":
    learner = {f"layer{i}": np.full(size // 8 // 4, i, np.float32) for i in range(8)}
    checkpoint.write(run, Checkpoint(learner, {}, Progress(), "0" * 64, {}, True, None), keep=1)
else:
    before = peak()
    found = checkpoint.read(checkpoint.listed(run)[0])
    assert found.learner["layer7"][-1] == 7
    print((peak() - before) / size)
"""


@pytest.mark.parametrize("size", [300 << 20, pytest.param(3 << 30, marks=pytest.mark.slow)])
def test_a_sealed_learner_needs_little_more_than_its_size_to_be_read(tmp_path: Path, size: int) -> None:
    def run(what: str) -> str:
        command = [sys.executable, "-W", "ignore", "-c", PEAK, str(tmp_path), str(size), what]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    run("write")
    needed = float(run("read"))
    shutil.rmtree(tmp_path / "checkpoints")
    assert 0.9 < needed < 1.3
