"""What one exchange of mode `average` costs: `mpiexec -n 2 python -m benchmarks.crossing`.

The numbers of docs/parallel.md, in milliseconds: the best of many short rounds. `io_callback` and `pure_callback` are
asked for small messages only: with one thread, large ones may wait for ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from lockstep.runtime import start_jax

start_jax()

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental import io_callback  # noqa: E402
from jax.experimental.buffer_callback import buffer_callback  # noqa: E402

from lockstep.parallel.lanes import exchange_over  # noqa: E402
from lockstep.parallel.launch import join  # noqa: E402

COMM = join()
SIZES = {"44 kB": 11_000, "1 MB": 250_000, "17 MB": 4_250_000}  # in float32
SMALL = 20_000
ROUNDS, EXCHANGES = 40, 8


def gather(mine: Any, out: np.ndarray) -> np.ndarray:
    COMM.gathering(np.asarray(mine)[0], out)()
    return out


def host(vector: np.ndarray) -> None:
    gathering = COMM.gathering(vector, np.empty((COMM.size, *vector.shape), vector.dtype))
    for _ in range(EXCHANGES):
        gathering()


def looped(exchange: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A compiled program that exchanges several times, each with what the one before gave."""
    return jax.jit(lambda v: jax.lax.fori_loop(0, EXCHANGES, lambda i, v: exchange(v[None])[COMM.size - 1], v))


def gathered(callback: Callable[..., Any], **options: Any) -> Callable[[Any], Any]:
    def exchange(vector: Any) -> Any:
        shape = jax.ShapeDtypeStruct((COMM.size, *vector.shape[1:]), vector.dtype)
        return callback(lambda mine: gather(mine, np.empty(shape.shape, shape.dtype)), shape, vector, **options)

    return exchange


def in_place(vector: Any) -> Any:
    def fill(context: Any, out: Any, mine: Any) -> None:
        gather(mine, np.asarray(out))

    shape = jax.ShapeDtypeStruct((COMM.size, *vector.shape[1:]), vector.dtype)
    return buffer_callback(fill, shape, has_side_effect=True)(vector)


WAYS: dict[str, Callable[[Any], Any]] = {
    "no compiled program": host,
    "custom call": looped(exchange_over(COMM).all),
    "buffer_callback": looped(in_place),
    "io_callback, ordered": looped(gathered(io_callback, ordered=True)),
    "pure_callback": looped(gathered(jax.pure_callback)),
}
WAYS_FOR_ALL = (WAYS["no compiled program"], WAYS["custom call"], WAYS["buffer_callback"])


def best(way: Callable[[Any], Any], vector: np.ndarray) -> float:
    jax.block_until_ready(way(vector))
    times = []
    for _ in range(ROUNDS if vector.size < 10**6 else ROUNDS // 4):
        COMM.share(None)
        began = time.perf_counter()
        jax.block_until_ready(way(vector))
        times.append(1000 * (time.perf_counter() - began) / EXCHANGES)
    return min(times)


def main() -> None:
    for name, way in WAYS.items():
        sizes = [n for n in SIZES.values() if n < SMALL or way in WAYS_FOR_ALL]
        cells = [f"{best(way, np.ones(size, np.float32)):.2f}" for size in sizes]
        if COMM.rank == 0:
            print(f"| {name} | {' | '.join(cells + ['-'] * (len(SIZES) - len(cells)))} |", flush=True)


if __name__ == "__main__":
    main()
