"""What a script or a notebook does with JAX itself changes no bits of a run, and a run changes none of its programs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.threads import PINNED
from tests.laws.process import digest_in, hearing_ctrl_c, options, run

# So wide that the number of threads shows: a process with two has another digest.
WIDE = {"policy.hidden": [256, 256], "algo.minibatch": 2048, "steps": 4096, "watch.eval_every": 0, "seed": 3}

BEFORE = """
import jax, jax.numpy as jnp
jax.devices(), jax.random.key(0), jnp.ones(3) @ jnp.ones(3)
"""

TRAINED = """
import json, sys
import lockstep
print(lockstep.train("pendulum", logdir=sys.argv[1], settings=json.loads(sys.argv[2])).digest)
"""

BROKEN = """
import jaxlib.xla_client
def make_cpu_client(**options):
    raise RuntimeError("there is no other")
jaxlib.xla_client.make_cpu_client = make_cpu_client
"""

MIXED = """
import sys
import gymnasium, jax, jax.numpy as jnp, numpy as np
from gymnasium.envs.classic_control import PendulumEnv

twice = jax.jit(lambda x: 2 * x)
seen = set()

def look():
    dtypes = twice(np.ones(2)).dtype, jnp.ones(2).dtype, jax.random.key(0).dtype
    seen.add((*map(str, dtypes), jax.config.jax_enable_x64))

class Looking(PendulumEnv):
    def reset(self, **given):
        look()
        return super().reset(**given)

    def step(self, action):
        look()
        return super().step(action)

gymnasium.register("Looking-v0", Looking, max_episode_steps=200)
look()
before = set(seen)
import lockstep
settings = {"steps": 512, "collect.steps": 32, "watch.eval_every": 256, "watch.eval_episodes": 1}
found = lockstep.train("Looking-v0", logdir=sys.argv[1], settings=settings)
look()
lockstep.load(found.path).act(np.zeros(3, np.float32))
look()
lockstep.resume(found.path, steps=768)
look()
assert seen == before and len(seen) == 1, seen
"""


def script(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A user's: nobody has pinned its threads."""
    env = {name: value for name, value in os.environ.items() if name not in PINNED}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest on the command line."""
    done = run("train", "pendulum", *options(WIDE), "--logdir", str(tmp_path_factory.mktemp("typed")))
    assert done.returncode == 0, done.stderr
    return digest_in(done.stdout)


def test_jax_used_before_gives_the_digest_of_the_command_line(tmp_path: Path, typed: str) -> None:
    done = script(BEFORE + TRAINED, str(tmp_path), json.dumps(WIDE))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [typed]


def test_where_that_cannot_be_it_is_told_before_the_start_and_marked(tmp_path: Path, typed: str) -> None:
    done = script(BEFORE + BROKEN + TRAINED, str(tmp_path), json.dumps(WIDE))
    assert done.returncode == 0, done.stderr
    assert done.stderr.index("JAX was used in this process before lockstep") < done.stderr.index("training:")
    assert done.stdout.split() != [typed], "one thread more shows at this size"
    manifests = list(tmp_path.glob("*/checkpoints/*/manifest.json"))
    assert manifests
    assert not any(json.loads(file.read_text())["exact"] for file in manifests)


OTHERWISE = """
import jax
jax.set_mesh(jax.make_mesh((1,), ("x",)))
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_default_prng_impl", "rbg")
jax.config.update("jax_default_matmul_precision", "bfloat16")
jax.config.update("jax_debug_nans", True)
"""


def test_a_scripts_own_settings_of_jax_change_no_bits(tmp_path: Path, typed: str) -> None:
    done = script(OTHERWISE + TRAINED, str(tmp_path), json.dumps(WIDE))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [typed]


def test_another_compilation_is_told_and_marked(tmp_path: Path) -> None:
    code = 'import jax\njax.config.update("jax_disable_most_optimizations", True)\n' + TRAINED
    small = {"steps": 512, "collect.steps": 64, "algo.minibatch": 64, "algo.epochs": 1, "watch.eval_every": 0}
    done = script(code, str(tmp_path), json.dumps(small))
    assert "jax_disable_most_optimizations is True in this process" in done.stderr
    manifests = list(tmp_path.glob("*/checkpoints/*/manifest.json"))
    assert manifests
    assert not any(json.loads(file.read_text())["exact"] for file in manifests)


def test_strict_refuses_where_that_cannot_be(tmp_path: Path) -> None:
    strict = TRAINED.replace("settings=", "strict=True, settings=")
    done = script(BEFORE + BROKEN + strict, str(tmp_path), json.dumps(WIDE))
    assert "strict: JAX was used in this process before lockstep" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_notebook_that_uses_jax_first_gives_the_digest_of_the_command_line(
    tmp_path: Path, typed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a real kernel of Jupyter's."""
    import nbformat
    from nbclient import NotebookClient

    code = TRAINED.replace("sys.argv[1]", repr(str(tmp_path))).replace("sys.argv[2]", repr(json.dumps(WIDE)))
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in (BEFORE, code)])
    for name in PINNED:
        monkeypatch.delenv(name)
    NotebookClient(book, timeout=300).execute()
    told = "".join(output.get("text", "") for output in book.cells[1].outputs if output.get("name") == "stdout")
    assert told.split() == [typed]


def test_a_users_own_programs_are_as_they_were_before_between_and_within_updates(tmp_path: Path) -> None:
    done = script(MIXED, str(tmp_path))
    assert done.returncode == 0, done.stderr


LOOP = """
import sys
import lockstep
for seed in range(3):
    try:
        lockstep.train("pendulum", logdir=sys.argv[1], name=str(seed), settings={"seed": seed})
    except Exception:
        print("swallowed")
    except KeyboardInterrupt as stopped:
        print(type(stopped).__name__, stopped, flush=True)
        raise
"""


def test_ctrl_c_in_a_script_is_a_keyboard_interrupt_that_says_how_to_go_on(tmp_path: Path) -> None:
    words = hearing_ctrl_c([sys.executable, "-c", LOOP, str(tmp_path)])
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("0/metrics.csv")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    told, _ = process.communicate(timeout=120)
    path = tmp_path / "0"
    assert told.strip() == f"KeyboardInterrupt stopped by SIGINT; continue with: lockstep resume {path}"
    assert process.returncode == -signal.SIGINT, "as a shell's own loop over seeds must see it"
    assert list(tmp_path.iterdir()) == [path]
