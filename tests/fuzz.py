"""Damaged and hostile input for every reader, and what comes of it. `python tests/fuzz.py 1000` prints it as JSON.

It imports nothing of the tests, so that any lockstep on PYTHONPATH can be held against it.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import random
import shutil
import signal
import sys
import tempfile
import tomllib
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

LIMIT_S = 30  # for one command; those that compile something take two
BUDGET = "256"
SETTINGS = [
    *("collect.steps=32", "lanes=2", "envs_per_lane=1", "policy.hidden=[8]", "algo.epochs=1", "algo.minibatch=16"),
    *("watch.eval_every=0", "watch.checkpoint_every=64", "watch.keep=2"),
]
NOWHERE = ["--logdir", "/dev/null/nowhere"]  # training ends here with status 5, after everything else was refused
DEEP = "[" * 10_000 + "]" * 10_000
VALUES = [  # as JSON and TOML write them, and some as neither does
    *("null", "true", "0", "-1", "-5", "1.5", "1e999", "-1e999", "NaN", "nan", "Infinity", "inf", "5", "9" * 19),
    *(
        "9" * 30,
        "9" * 5000,
        "0x" + "f" * 5000,
        '""',
        '"x"',
        '"²"',
        '"٣"',
        "²",
        "[]",
        "{}",
        "[[]]",
        '{"a": 1}',
        "{a = 1}",
    ),
    *(
        '["x"]',
        "[1, [2]]",
        DEEP,
        '"' + "y" * 200_000 + '"',
        "1979-05-27",
        "1e308",
        "2147483648",
        '"a:b"',
        '"sys:Env-v0"',
    ),
]
NUMBERS = [value.strip('"') for value in VALUES if len(value) < 100_000] + ["1e30", "1e400", "+5", "1_000", "0.1", " 7"]
DIGITS = "٣²①߁"


class Case(NamedTuple):
    """A command with an input of which something was changed."""

    arguments: list[str]
    changed: Callable[[str], bool] = lambda told: False  # whether, after exit 0, data was lost or changed unseen


class Verdict(NamedTuple):
    kind: str  # ok, crash, hang or silent
    told: str = ""


class Hang(BaseException):
    """The command took too long."""


# What is damaged


def bytes_of(rng: random.Random, content: bytes) -> bytes:
    """A flipped bit, bytes too few or too many, a cut, or a line twice or not at all; now and then several of them."""
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        content = _damaged(rng, content)
    return content


def _damaged(rng: random.Random, content: bytes) -> bytes:
    at = rng.randrange(len(content) + 1)
    before, here, after = content[:at], content[at : at + 1], content[at + 1 :]
    some = rng.choice([1, 1, 4, 64])
    lines = content.splitlines(keepends=True)
    line = rng.randrange(len(lines) or 1)
    flipped = bytes(byte ^ 1 << rng.randrange(8) for byte in here)
    return rng.choice(
        [
            before + flipped + after,
            before + content[at + some :],
            before + rng.randbytes(some) + here + after,
            before + rng.choice(DIGITS).encode() + after,
            before,
            b"".join([*lines[:line], *lines[line : line + 1], *lines[line:]]),
            b"".join([*lines[:line], *lines[line + 1 :]]),
        ]
    )


def toml_of(rng: random.Random, content: bytes) -> bytes:
    """One value is another."""
    lines = content.decode().splitlines()
    settings = [i for i, line in enumerate(lines) if " = " in line]
    at = rng.choice(settings)
    lines[at] = f"{lines[at].split(' = ')[0]} = {rng.choice(VALUES)}"
    return "\n".join(lines).encode()


def json_of(rng: random.Random, content: bytes) -> bytes:
    """One value, however deep inside, is another, or is missing."""
    data = json.loads(content)
    holders = list(_holders(data))
    holder, key = rng.choice(holders)
    if rng.random() < 0.15:
        del holder[key]
        return json.dumps(data).encode()
    holder[key] = "@here@"
    return json.dumps(data).replace('"@here@"', rng.choice(VALUES)).encode()


def _holders(data: Any) -> Iterator[tuple[Any, Any]]:
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield data, key
        yield from _holders(value)


def csv_of(rng: random.Random, content: bytes) -> bytes:
    """One cell is another."""
    rows = [line.split(",") for line in content.decode().split("\n")]
    row = rng.choice(rows[:-1])
    row[rng.randrange(len(row))] = rng.choice(VALUES)
    return "\n".join(",".join(row) for row in rows).encode()


def arrays_of(rng: random.Random, content: bytes) -> bytes:
    """One array is another: other numbers, another shape, another type, or gone."""
    import numpy as np
    from safetensors.numpy import load, save

    arrays = load(content)
    name = rng.choice(sorted(arrays))
    array = arrays[name]
    other = rng.choice([-5, 0, 1, 2**62, -(2**62), np.nan, np.inf])
    with np.errstate(all="ignore"):
        arrays[name] = rng.choice(
            [
                lambda: np.full(array.shape, other).astype(array.dtype),
                lambda: np.full(array.shape, other, np.float64),
                lambda: array.reshape(-1)[:-1].copy(),
                lambda: np.zeros((3, *array.shape), array.dtype),
                lambda: array.astype(np.int8),
            ]
        )()
    if rng.random() < 0.2:
        del arrays[name]
    return bytes(save(arrays))


def header_of(rng: random.Random, content: bytes) -> bytes:
    """The table of contents in front of arrays says something else."""
    size = int.from_bytes(content[:8], "little")
    header = json_of(rng, content[8 : 8 + size])
    return len(header).to_bytes(8, "little") + header + content[8 + size :]


# What reads it


class Place:
    """A run that was made here, and a copy of it to be damaged."""

    def __init__(self, folder: Path) -> None:
        self.pristine, self.run, self.file = folder / "pristine", folder / "run", folder / "file"
        train = ["train", "Pendulum-v1", "--steps", BUDGET, "--logdir", str(folder), "--name", "pristine"]
        status, told = command([*train, *(word for setting in SETTINGS for word in ("--set", setting))])
        assert status == 0, told
        for events in self.pristine.glob("events*"):
            events.unlink()
        self.config = (self.pristine / "config.toml").read_bytes()
        self.metrics = (self.pristine / "metrics.csv").read_bytes()
        action = [[0.5], [-0.25], [1.0]]
        self.fault = json.dumps({"env": {"id": "Pendulum-v1", "kwargs": {}}, "seed": 7, "actions": action}).encode()

    def renew(self) -> None:
        shutil.rmtree(self.run, ignore_errors=True)
        shutil.copytree(self.pristine, self.run)

    @property
    def checkpoint(self) -> Path:
        return max((self.run / "checkpoints").glob("step_*"))

    def reseal(self, name: str, content: bytes) -> None:
        """Write a file of the newest checkpoint, as whoever can write there can: with its seals."""
        path = self.checkpoint
        (path / name).write_bytes(content)
        manifest = path / "manifest.json"
        if name != manifest.name:
            found = json.loads(manifest.read_bytes())
            found["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            manifest.write_bytes(json.dumps(found, indent=1).encode())
        (path / "manifest.sha256").write_text(hashlib.sha256(manifest.read_bytes()).hexdigest())

    # For each reader a case

    def config_for_train(self, rng: random.Random) -> Case:
        file = self.file.with_suffix(".toml")
        file.write_bytes(rng.choice([bytes_of, toml_of])(rng, self.config))
        return Case(["train", str(file), *NOWHERE])

    def config_of_run(self, rng: random.Random) -> Case:
        content = rng.choice([bytes_of, toml_of])(rng, self.config)
        (self.run / "config.toml").write_bytes(content)
        words = rng.choice([self.resume, self.verify, self.digest, self.evaluate])
        return Case(words, lambda told: experiment_in(content) != experiment_in(self.config))

    def metrics_of_run(self, rng: random.Random) -> Case:
        content = rng.choice([bytes_of, csv_of])(rng, self.metrics)
        (self.run / "metrics.csv").write_bytes(content)
        words = rng.choice([self.resume, self.resume, self.verify, self.digest, self.plot])
        return Case(words, lambda told: self.lost(content, told, words))

    def manifest(self, rng: random.Random) -> Case:
        content = (self.checkpoint / "manifest.json").read_bytes()
        self.reseal("manifest.json", rng.choice([bytes_of, json_of, json_of])(rng, content))
        return Case(rng.choice([self.resume, self.verify, self.digest, self.evaluate]))

    def learner(self, rng: random.Random) -> Case:
        return self._arrays(rng, "learner.safetensors")

    def episodes(self, rng: random.Random) -> Case:
        return self._arrays(rng, "episodes.safetensors")

    def _arrays(self, rng: random.Random, name: str) -> Case:
        content = (self.checkpoint / name).read_bytes()
        self.reseal(name, rng.choice([bytes_of, header_of, arrays_of, arrays_of])(rng, content))
        return Case(rng.choice([self.resume, self.verify, self.digest]))

    def fault_file(self, rng: random.Random) -> Case:
        self.file.write_bytes(rng.choice([bytes_of, json_of, json_of])(rng, self.fault))
        return Case(["check", "Pendulum-v1", "--replay", str(self.file)])

    def numbers(self, rng: random.Random) -> Case:
        number = rng.choice([rng.choice(NUMBERS), str(rng.randrange(-9, 10 ** rng.choice([1, 5, 40])))])
        return Case(
            rng.choice(
                [
                    *(["train", "pendulum", option, number, *NOWHERE] for option in ("--steps", "--seed", "--lanes")),
                    ["train", "pendulum", "--workers", number, *NOWHERE],
                    ["verify", str(self.run), "--updates", f"{number}:"],
                    ["verify", str(self.run), "--updates", f":{number}"],
                    ["bench", "pendulum", "--steps", "1", "--nprocs", number],
                    ["evaluate", str(self.run), "--episodes", "1", "--checkpoint", number],
                ]
            )
        )

    def settings(self, rng: random.Random) -> Case:
        from lockstep.config import leaves
        from lockstep.experiment import Config, to_dict

        keys = [key.removeprefix("experiment.") for key in leaves(to_dict(Config()))]
        keys += ["x", "", "env", "algo", "env.kwargs.g", "a." * 5000 + "b", "env.kwargs." + "a." * 5000 + "b"]
        return Case(["train", "pendulum", "--set", f"{rng.choice(keys)}={rng.choice(VALUES)}", *NOWHERE])

    @property
    def resume(self) -> list[str]:
        return ["resume", str(self.run), "--steps", BUDGET]

    @property
    def verify(self) -> list[str]:
        return ["verify", str(self.run)]

    @property
    def digest(self) -> list[str]:
        return ["digest", str(self.run)]

    @property
    def evaluate(self) -> list[str]:
        return ["evaluate", str(self.run), "--episodes", "1"]

    @property
    def plot(self) -> list[str]:
        return ["plot", str(self.run), "--out", str(self.file.with_suffix(".png"))]

    def lost(self, content: bytes, told: str, words: list[str]) -> bool:
        """Whether rows of metrics.csv are gone or others, and nobody said so.

        A file that ends after any row is what a run that is going on has: what only reads it can't know more rows.
        """
        found = (self.run / "metrics.csv").read_bytes() if words[0] == "resume" else content
        here, before = rows_in(found), rows_in(self.metrics)
        same = here == before or (words[0] != "resume" and here == before[: len(here)])
        said = "metrics.csv" in told.replace("as in metrics.csv", "")
        return not same and not said


def rows_in(content: bytes) -> list[list[str]]:
    before = csv.field_size_limit(1 << 30)
    try:
        return [row for row in csv.reader(io.StringIO(content.decode(errors="replace"))) if row]
    except csv.Error as error:
        return [[str(error)]]
    finally:
        csv.field_size_limit(before)


def experiment_in(content: bytes) -> str:
    """The digest of the experiment, which leaves out the budget; nothing where it is none."""
    from lockstep.experiment import from_dict

    try:
        return str(from_dict(tomllib.loads(content.decode())).experiment.digest)
    except Exception:
        return ""


READERS: dict[str, Callable[[Place, random.Random], Case]] = {
    "config.toml given to train": Place.config_for_train,
    "config.toml of a run": Place.config_of_run,
    "metrics.csv": Place.metrics_of_run,
    "manifest.json, resealed": Place.manifest,
    "learner.safetensors, resealed": Place.learner,
    "episodes.safetensors, resealed": Place.episodes,
    "fault files": Place.fault_file,
    "numbers on the command line": Place.numbers,
    "--set": Place.settings,
}


# What is known to have broken something once


def _in_config(place: Place, content: bytes, *words: str) -> Case:
    (place.run / "config.toml").write_bytes(content)
    place.file.with_suffix(".toml").write_bytes(content)
    return Case(
        [*words, str(place.run)] if words[0] != "train" else ["train", str(place.file.with_suffix(".toml")), *NOWHERE]
    )


def _in_metrics(place: Place, old: bytes, new: bytes, words: list[str]) -> Case:
    content = place.metrics.replace(old, new, 1)
    assert content != place.metrics
    (place.run / "metrics.csv").write_bytes(content)
    return Case(words, lambda told: place.lost(content, told, words))


def _in_manifest(place: Place, key: str, value: str) -> Case:
    """That a changed number was believed is seen by the run that went on from it."""
    manifest = json.loads((place.checkpoint / "manifest.json").read_bytes())
    table = next(part for part in (manifest["progress"], manifest["machine"], manifest) if key in part)
    table[key] = "@here@"
    place.reseal("manifest.json", json.dumps(manifest).replace('"@here@"', value).encode())
    return Case(place.resume, lambda told: "damaged" not in told)


def _in_episodes(place: Place) -> Case:
    from safetensors.numpy import load, save

    arrays = load((place.checkpoint / "episodes.safetensors").read_bytes())
    name = next(name for name in sorted(arrays) if "episode" in name or "number" in name)
    arrays[name][...] = -5
    place.reseal("episodes.safetensors", bytes(save(arrays)))
    return Case(place.resume, lambda told: "damaged" not in told)


def _in_fault(place: Place, key: str, value: str) -> Case:
    record = {**json.loads(place.fault), key: "@here@"}
    place.file.write_text(json.dumps(record).replace('"@here@"', value))
    return Case(["check", "Pendulum-v1", "--replay", str(place.file)])


def _typed(*words: str) -> Callable[[Place], Case]:
    return lambda place: Case(["train", "pendulum", *words, "--logdir", str(place.run.parent), "--name", "typed"])


LATIN = b'# caf\xe9\n[experiment.env]\nid = "Pendulum-v1"\n'
NESTED = b'[experiment.env]\nid = "Pendulum-v1"\nkwargs = { a = ' + DEEP.encode() + b" }\n"
SITES: dict[str, Callable[[Place], Case]] = {
    "config.toml that is not UTF-8, train": lambda place: _in_config(place, LATIN, "train"),
    "config.toml that is not UTF-8, evaluate": lambda place: _in_config(place, LATIN, "evaluate"),
    "config.toml that nests too deeply, train": lambda place: _in_config(place, NESTED, "train"),
    "config.toml that nests too deeply, evaluate": lambda place: _in_config(place, NESTED, "evaluate"),
    "metrics.csv with a renamed column, resume": lambda place: _in_metrics(place, b"update,", b"upd,", place.resume),
    "metrics.csv with a renamed column, verify": lambda place: _in_metrics(place, b"steps,", b"stp,", place.verify),
    "metrics.csv with a renamed column, digest": lambda place: _in_metrics(place, b"digest", b"diges", place.digest),
    "metrics.csv with a renamed column, plot": lambda place: _in_metrics(place, b"steps,", b"stp,", place.plot),
    "metrics.csv with a ², resume": lambda place: _in_metrics(place, b"\n2,", "\n²,".encode(), place.resume),
    "metrics.csv with a ², digest": lambda place: _in_metrics(place, b"\n2,", "\n²,".encode(), place.digest),
    "metrics.csv with a cell of 200 kB": lambda place: _in_metrics(
        place, b"\n2,", b"\n2" + b"x" * 200_000 + b",", place.resume
    ),
    "--steps 1e30": _typed("--steps", "1e30"),
    "a seed of 5000 digits": _typed("--seed", "9" * 5000),
    "a seed of 5000 digits in --set": _typed("--set", f"seed={'9' * 5000}"),
    "--set x=[[[[": _typed("--set", f"x={DEEP}"),
    'a fault file with "seed": Infinity': lambda place: _in_fault(place, "seed", "Infinity"),
    'a fault file with "env": "x"': lambda place: _in_fault(place, "env", '"x"'),
    'a resealed manifest with "steps": 1e999': lambda place: _in_manifest(place, "steps", "1e999"),
    'a resealed manifest with "steps": -5': lambda place: _in_manifest(place, "steps", "-5"),
    'a resealed manifest with "versions": 5': lambda place: _in_manifest(place, "versions", "5"),
    "resealed episodes with a negative number": _in_episodes,
}


# What comes of it


def command(arguments: list[str]) -> tuple[int, str]:
    """The exit status of a command in this process, and what it printed."""
    from lockstep.cli import main

    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        status = main(arguments)
    return status, told.getvalue()


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def judge(case: Case) -> Verdict:
    """What the command made of its input."""
    try:
        with limited(LIMIT_S):
            status, told = command(case.arguments)
    except Hang:
        return Verdict("hang")
    except BaseException:
        return Verdict("crash", traceback.format_exc())
    if status not in (0, 2, 3, 4, 5) or "Traceback" in told:
        return Verdict("crash", told)
    return Verdict("silent" if status == 0 and case.changed(told) else "ok", told)


def attempt(place: Place, reader: str, rng: random.Random) -> Verdict:
    place.renew()
    case = READERS[reader](place, rng)
    verdict = judge(case)
    words = " ".join(word[:80] for word in case.arguments)
    return verdict._replace(told=f"{words}\n{verdict.told[-2000:]}")


def main(mutations: int, readers: list[str]) -> dict[str, Any]:
    """For every reader how many mutations ended how, and for every site how it ended."""
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder))
        found: dict[str, Any] = {"readers": {}, "sites": {}, "examples": {}}
        for reader in readers:
            counts = dict.fromkeys(("ok", "crash", "hang", "silent"), 0)
            for number in range(mutations):
                verdict = attempt(place, reader, random.Random(f"{reader} {number}"))
                counts[verdict.kind] += 1
                if verdict.kind != "ok":
                    found["examples"].setdefault(f"{reader}: {verdict.kind}", []).append(verdict.told[-700:])
            found["readers"][reader] = counts
            print(reader, counts, file=sys.stderr)
        for site, make in SITES.items():
            place.renew()
            shutil.rmtree(Path(folder) / "typed", ignore_errors=True)
            verdict = judge(make(place))
            found["sites"][site] = verdict.kind
            print(site, verdict.kind, verdict.told[-200:] if verdict.kind != "ok" else "", file=sys.stderr)
        return found


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), sys.argv[2:] or list(READERS)), indent=1))
