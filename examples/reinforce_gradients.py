"""REINFORCE on several processes that send gradients: observations of 50 MB never leave the process that saw them."""

import numpy as np

import lockstep.ranks

EPISODES, STEPS, UPDATES = 8, 4, 8


def picture(side):
    """50 MB, bright on one side: the one to turn to."""
    pixels = np.zeros((2, 25_000_000), np.uint8)
    pixels[side] = 200
    return pixels


def episode(weights, rng):
    """The gradient of an episode's return, and the return. No picture outlives its step."""
    gradient, trace, total = np.zeros_like(weights), np.zeros_like(weights), 0.0
    for side in rng.integers(0, 2, STEPS):
        features = picture(side).mean(1) / 255
        odds = np.exp(weights @ features)
        action = rng.choice(2, p=odds / odds.sum())
        trace += np.outer(np.eye(2)[action] - odds / odds.sum(), features)  # of log p, over the actions so far
        gradient += ((action == side) - 0.5) * trace
        total += action == side
    return gradient, total


ranks = lockstep.ranks.start(nprocs=2)
rngs = [np.random.default_rng(seed) for seed in ranks.env_seeds(1, EPISODES // ranks.size)]
weights = np.zeros((2, 2))  # one row per action, the same on every rank
for update in range(UPDATES):
    with ranks.section("collect"):
        gradients, totals = zip(*(episode(weights, rng) for rng in rngs), strict=True)
    mine = {"gradient": np.mean(gradients, 0), "return": np.mean(totals)}
    mean = ranks.average(mine, count=len(totals))  # all that travels: five numbers
    weights += 4 * mean["gradient"]
    ranks.print0(f"update {update}: mean return {mean['return']:.2f} of {STEPS}")
ranks.print_times()
