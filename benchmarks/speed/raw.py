"""Steps per second of the environments alone: 8 HalfCheetah-v5 in one process, random actions, no learning."""

import time

import gymnasium

ENVS, STEPS, ROUNDS = 8, 256, 6

envs = [gymnasium.make("HalfCheetah-v5", disable_env_checker=True) for _ in range(ENVS)]
for i, env in enumerate(envs):
    env.reset(seed=i)
    env.action_space.seed(i)
actions = [[env.action_space.sample() for env in envs] for _ in range(STEPS)]


def rollout() -> None:
    for row in actions:
        for env, action in zip(envs, row, strict=True):
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()


rollout()
began = time.perf_counter()
for _ in range(ROUNDS):
    rollout()
print(ENVS * STEPS * ROUNDS / (time.perf_counter() - began))
