"""Checkpoints are data, never code: safetensors and JSON, written to the side, synced and renamed.

A checkpoint is a directory `checkpoints/step_000000020480` with `learner.safetensors`, `episodes.safetensors`,
`manifest.json` (progress, versions, and the size and SHA-256 of those two), and `manifest.sha256` (its own).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import reprlib
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save

from lockstep import files
from lockstep.errors import FileFault
from lockstep.experiment import Config
from lockstep.run import arrays
from lockstep.run.directory import CONFIG, METRICS, sync_directory, write_file
from lockstep.run.progress import Progress, natural

FORMAT = 1
FOLDER, MANIFEST, SEAL = "checkpoints", "manifest.json", "manifest.sha256"
PREFIX = "step_"
FILES = LEARNER, EPISODES = "learner.safetensors", "episodes.safetensors"
SHA256 = re.compile("[0-9a-f]{64}")

Arrays = dict[str, np.ndarray]


class Checkpoint(NamedTuple):
    learner: Arrays  # the learner's leaves by path
    episodes: Arrays  # the running episodes
    progress: Progress
    experiment: str  # the digest of the experiment it belongs to, whatever its budget
    machine: dict[str, Any]  # versions and numeric fingerprint
    exact: bool  # whether the promise of equal bits holds up to here
    budget: int | None  # steps of the whole run, which schedules follow; None: written before this was kept


class Damaged(FileFault):
    """A checkpoint whose bytes are not those that were written."""


def name_of(steps: int) -> str:
    return f"{PREFIX}{steps:012d}"


def write(run: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Commit a checkpoint and remove all but the newest `keep` and the best."""
    folder = run / FOLDER
    folder.mkdir(exist_ok=True)
    path = folder / name_of(checkpoint.progress.steps)
    if _is_valid(path):
        return path
    side = folder / f".tmp.{path.name}.{os.getpid()}"
    shutil.rmtree(side, ignore_errors=True)
    try:
        side.mkdir()
        groups = {LEARNER: checkpoint.learner, EPISODES: checkpoint.episodes}
        contents = {name: save(_in_order(group)) for name, group in groups.items()}
        for name, content in contents.items():
            write_file(side / name, content)
        manifest = {
            "format": FORMAT,
            "progress": checkpoint.progress.to_json(),
            "experiment": checkpoint.experiment,
            "machine": checkpoint.machine,
            "exact": checkpoint.exact,
            "budget": checkpoint.budget,
            "files": {n: {"bytes": len(c), "sha256": hashlib.sha256(c).hexdigest()} for n, c in contents.items()},
        }
        content = json.dumps(manifest, indent=1).encode()
        write_file(side / MANIFEST, content)
        write_file(side / SEAL, hashlib.sha256(content).hexdigest().encode())
        if path.exists():
            remove(path)
        side.rename(path)
        sync_directory(folder)
    except OSError:
        shutil.rmtree(side, ignore_errors=True)
        raise
    _retain(run, keep, checkpoint.progress.best_steps)
    return path


def _in_order(group: Arrays) -> Arrays:
    """Safetensors writes memory as it lies: make it lie in C order."""
    return {name: np.asarray(array, order="C") for name, array in group.items()}


def _is_valid(path: Path) -> bool:
    try:
        read(path)
    except Damaged:
        return False
    return True


def read(path: Path) -> Checkpoint:
    """A checkpoint, every byte of it checked; Damaged says what is wrong with it."""
    try:
        manifest = _manifest(path)
        learner, episodes = (_arrays(path / name, manifest["files"][name]) for name in FILES)
        progress = Progress.from_json(_table(manifest, "progress"))
        if path.name.startswith(PREFIX) and path.name != name_of(progress.steps):
            raise ValueError(f"{MANIFEST} is of {progress.steps} steps")
        return Checkpoint(
            learner,
            episodes,
            progress,
            _hash(manifest, "experiment"),
            _machine(manifest),
            _exact(manifest),
            None if manifest.get("budget") is None else natural(manifest, "budget"),
        )
    except KeyError as error:
        raise Damaged(f"checkpoint '{path}' is damaged: {MANIFEST} has no {error}.") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise Damaged(f"checkpoint '{path}' is damaged: {error}.") from error


def refuse_another_experiment(run: Path, config: Config, found: Path, saved: Checkpoint) -> None:
    """A checkpoint is only good for the experiment that wrote it, whatever the budget."""
    if saved.experiment != config.experiment.digest:
        raise FileFault(f"'{run / CONFIG}' is not the experiment of '{found}': it was changed.")


def _manifest(path: Path) -> dict[str, Any]:
    content = _content(path / MANIFEST, files.TEXT)
    if hashlib.sha256(content).hexdigest().encode() != _content(path / SEAL, files.TEXT):
        raise ValueError(f"{MANIFEST} was changed after it was written")
    manifest = json.loads(content)
    if not isinstance(manifest, dict):
        raise ValueError(f"{MANIFEST} is not a table")
    if natural(manifest, "format") > FORMAT:
        raise FileFault(f"checkpoint '{path}' was written by a newer lockstep (format {manifest['format']}).")
    _table(manifest, "files")
    return manifest


def _arrays(file: Path, expected: Any) -> Arrays:
    """The arrays of a file that the manifest describes."""
    if not isinstance(expected, dict):
        raise ValueError(f"{MANIFEST} does not describe {file.name}")
    size = natural(expected, "bytes")
    content = _content(file, min(size, files.ARRAYS))
    if len(content) != size:
        raise ValueError(f"{file.name} is not {size} bytes long")
    if hashlib.sha256(content).hexdigest() != _hash(expected, "sha256"):
        raise ValueError(f"{file.name} was changed after it was written")
    return arrays.views(content)


def _content(file: Path, limit: int) -> bytearray:
    try:
        return files.read(file, limit)
    except FileFault as error:
        raise ValueError(str(error).removesuffix(".")) from error


def _table(manifest: dict[str, Any], name: str) -> dict[str, Any]:
    if not isinstance(manifest[name], dict):
        raise ValueError(f"'{name}' must be a table, not {reprlib.repr(manifest[name])}")
    return dict(manifest[name])


def _hash(table: dict[str, Any], name: str) -> str:
    if not isinstance(table[name], str) or not SHA256.fullmatch(table[name]):
        raise ValueError(f"'{name}' must be a SHA-256, not {reprlib.repr(table[name])}")
    return str(table[name])


def _exact(manifest: dict[str, Any]) -> bool:
    if not isinstance(manifest["exact"], bool):
        raise ValueError(f"'exact' must be true or false, not {reprlib.repr(manifest['exact'])}")
    return manifest["exact"]


def _machine(manifest: dict[str, Any]) -> dict[str, Any]:
    """Versions by package, and fingerprints."""
    machine = _table(manifest, "machine")
    texts = _table({"versions": {}, **machine}, "versions") | {
        name: machine[name] for name in ("kernels", "simulation") if name in machine
    }
    if wrong := [name for name, value in texts.items() if not isinstance(value, str)]:
        raise ValueError(f"'machine' must have text for '{wrong[0]}', not {reprlib.repr(texts[wrong[0]])}")
    return machine


def listed(run: Path) -> list[Path]:
    """All committed checkpoints, oldest first."""
    folder = run / FOLDER
    if folder.exists() and not folder.is_dir():
        raise FileFault(f"'{folder}' is not a directory.")
    return sorted(folder.glob(PREFIX + "[0-9]" * 12))


def newest(run: Path) -> tuple[Path, Checkpoint, list[str]]:
    """The newest valid checkpoint, and messages about damaged ones, which are set aside by name."""
    messages: list[str] = []
    for path in reversed(listed(run)):
        try:
            return path, read(path), messages
        except Damaged as error:
            messages.append(f"{error} An older one is used.")
    if messages:
        raise FileFault(
            f"no valid checkpoint is left in '{run}'. {messages[-1].removesuffix(' An older one is used.')}"
        )
    raise FileFault(f"there is no checkpoint in '{run}'.")


def set_aside(run: Path) -> None:
    """Rename damaged checkpoints to *.corrupt and remove what unfinished writes left. For the run's owner."""
    for path in listed(run):
        if not _is_valid(path):
            remove_if_there(path.with_suffix(".corrupt"))
            path.rename(path.with_suffix(".corrupt"))
    for leftover in [*(run / FOLDER).glob(".*"), *run.glob(f".{CONFIG}.*"), *run.glob(f".{METRICS}.*")]:
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink()


def remove(path: Path) -> None:
    """Renamed first, so that no half-removed checkpoint is ever listed."""
    gone = path.with_name(f".del.{path.name}")
    remove_if_there(gone)
    path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def remove_if_there(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _retain(run: Path, keep: int, best_steps: int | None) -> None:
    for path in listed(run)[:-keep]:
        if best_steps is None or path.name != name_of(best_steps):
            remove(path)
