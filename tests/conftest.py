"""JAX as every run has it, set up before any test module imports it."""

import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from lockstep.runtime import start_jax

start_jax()

import jax  # noqa: E402

from tests.laws.process import MARK, wait_until_gone  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_enable_x64", True)  # tests compute in double precision what they compare with

settings.register_profile("lockstep", deadline=None, derandomize=True, max_examples=25)
settings.load_profile("lockstep")


@pytest.fixture(autouse=True, scope="session")
def key_of_ones_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs are sealed with a key that is not the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def nothing_left_behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No process survives the test that started it."""
    monkeypatch.setenv(MARK, uuid.uuid4().hex)
    yield
    wait_until_gone()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 kB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system may be mounted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)
