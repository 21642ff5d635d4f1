"""Random numbers have addresses, not histories: (seed, purpose, numbers such as update, lane, episode)."""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class Purpose(IntEnum):
    """What a random stream is for. The numbers are part of every result: never reuse or change one."""

    INIT = 0
    ACT = 1
    LEARN = 2
    RESET = 3
    EVALUATE = 4
    CHECK = 5


def words(seed: int, purpose: Purpose, *numbers: int) -> np.ndarray:
    """Two 32-bit words for this address: the data of a JAX threefry key."""
    return np.random.SeedSequence(seed, spawn_key=(int(purpose), *numbers)).generate_state(2, np.uint32)


def integer(seed: int, purpose: Purpose, *numbers: int) -> int:
    """A seed below 2^63 for this address, as environments take them."""
    high, low = words(seed, purpose, *numbers)
    return (int(high) << 32 | int(low)) >> 1
