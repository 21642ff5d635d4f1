from __future__ import annotations

import itertools

import numpy as np

from lockstep.address import Purpose, integer, words


def test_no_two_of_a_hundred_thousand_episodes_have_the_same_seed() -> None:
    seeds = {integer(0, Purpose.RESET, env, episode) for env in range(320) for episode in range(320)}
    assert len(seeds) == 320 * 320
    assert 0 <= min(seeds) < max(seeds) < 2**63


def test_every_part_of_an_address_counts() -> None:
    addresses = [
        (seed, purpose, *numbers)
        for seed in (0, 1, 2**32, 2**64 - 1)
        for purpose in Purpose
        for length in range(4)
        for numbers in itertools.product((0, 1, 2), repeat=length)
    ]
    assert len({words(*address).tobytes() for address in addresses}) == len(addresses)


def test_a_stream_does_not_depend_on_others() -> None:
    alone = words(3, Purpose.ACT, 5)
    for number in reversed(range(10)):
        words(3, Purpose.ACT, number)
    np.random.default_rng(3).random()
    np.testing.assert_array_equal(words(3, Purpose.ACT, 5), alone)


def test_addresses_are_numpys_children_of_children() -> None:
    child = np.random.SeedSequence(7).spawn(Purpose.RESET + 1)[Purpose.RESET].spawn(3)[2].spawn(5)[4]
    np.testing.assert_array_equal(words(7, Purpose.RESET, 2, 4), child.generate_state(2, np.uint32))
    high, low = (int(word) for word in child.generate_state(2, np.uint32))
    assert integer(7, Purpose.RESET, 2, 4) == (high * 2**32 + low) // 2


def test_the_numbers_of_the_purposes_never_change() -> None:
    assert {purpose.name: purpose.value for purpose in Purpose}.items() >= {
        "INIT": 0,
        "ACT": 1,
        "LEARN": 2,
        "RESET": 3,
        "EVALUATE": 4,
        "CHECK": 5,
    }.items()


def test_the_words_are_evenly_spread() -> None:
    """Every bit of the words of neighbouring addresses is set about half of the time."""
    drawn = np.stack([words(0, Purpose.ACT, update) for update in range(4000)])
    share = np.unpackbits(drawn.view(np.uint8), axis=1).mean(0)
    assert share.shape == (64,)
    assert (np.abs(share - 0.5) < 5 * 0.5 / np.sqrt(4000)).all()
