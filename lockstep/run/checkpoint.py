"""Checkpoints are data, never code: safetensors and JSON, written to the side, synced and renamed.

A checkpoint is a directory `checkpoints/step_000000020480` with `learner.safetensors`, `episodes.safetensors`,
`manifest.json` (progress, versions, and the size and SHA-256 of those two), and `manifest.sha256` (its own).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from lockstep.errors import FileFault
from lockstep.run.directory import sync_directory, write_file
from lockstep.run.progress import Progress

FORMAT = 1
FOLDER, MANIFEST, SEAL = "checkpoints", "manifest.json", "manifest.sha256"
MAX_MANIFEST, MAX_ARRAYS = 1 << 20, 4 << 30  # bytes; more than this is no checkpoint of ours

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
    return f"step_{steps:012d}"


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
        groups = {"learner.safetensors": checkpoint.learner, "episodes.safetensors": checkpoint.episodes}
        files = {name: save(_in_order(arrays)) for name, arrays in groups.items()}
        for name, content in files.items():
            write_file(side / name, content)
        manifest = {
            "format": FORMAT,
            "progress": checkpoint.progress.to_json(),
            "experiment": checkpoint.experiment,
            "machine": checkpoint.machine,
            "exact": checkpoint.exact,
            "budget": checkpoint.budget,
            "files": {n: {"bytes": len(c), "sha256": hashlib.sha256(c).hexdigest()} for n, c in files.items()},
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


def _in_order(arrays: Arrays) -> Arrays:
    """Safetensors writes memory as it lies: make it lie in C order."""
    return {name: np.asarray(array, order="C") for name, array in arrays.items()}


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
        arrays = {}
        for name in ("learner.safetensors", "episodes.safetensors"):
            expected, file = manifest["files"][name], path / name
            if file.is_symlink() or file.stat().st_size != expected["bytes"] or expected["bytes"] > MAX_ARRAYS:
                raise Damaged(f"checkpoint '{path}' is damaged: {name} is not {expected['bytes']} bytes long.")
            content = file.read_bytes()
            if hashlib.sha256(content).hexdigest() != expected["sha256"]:
                raise Damaged(f"checkpoint '{path}' is damaged: {name} was changed after it was written.")
            arrays[name] = load(content)
        return Checkpoint(
            arrays["learner.safetensors"],
            arrays["episodes.safetensors"],
            Progress.from_json(manifest["progress"]),
            str(manifest["experiment"]),
            dict(manifest["machine"]),
            bool(manifest["exact"]),
            None if manifest.get("budget") is None else int(manifest["budget"]),
        )
    except (OSError, KeyError, TypeError, ValueError, RecursionError, SafetensorError) as error:
        raise Damaged(f"checkpoint '{path}' is damaged: {type(error).__name__}: {error}.") from error


def _manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    if file.stat().st_size > MAX_MANIFEST:
        raise Damaged(f"checkpoint '{path}' is damaged: its manifest is too long.")
    content = file.read_bytes()
    if hashlib.sha256(content).hexdigest().encode() != (path / SEAL).read_bytes():
        raise Damaged(f"checkpoint '{path}' is damaged: {MANIFEST} was changed after it was written.")
    manifest = json.loads(content)
    if int(manifest["format"]) > FORMAT:
        raise FileFault(f"checkpoint '{path}' was written by a newer lockstep (format {manifest['format']}).")
    return dict(manifest)


def listed(run: Path) -> list[Path]:
    """All committed checkpoints, oldest first."""
    return sorted((run / FOLDER).glob("step_" + "[0-9]" * 12))


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
    for leftover in (run / FOLDER).glob(".*"):
        if leftover.is_dir():
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
    if path.exists():
        shutil.rmtree(path, ignore_errors=True)


def _retain(run: Path, keep: int, best_steps: int | None) -> None:
    for path in listed(run)[:-keep]:
        if best_steps is None or path.name != name_of(best_steps):
            remove(path)
