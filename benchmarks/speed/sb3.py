"""Steps per second of Stable-Baselines3's PPO, or sb3-contrib's TRPO, at the same work: `sb3.py [ppo|trpo]`.

With their best settings: DummyVecEnv, one thread. TRPO has its own defaults: 1 environment x 2048 steps.
"""

import sys

import torch
from clock import Clock
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv

UPDATES = 6


torch.set_num_threads(1)
network = {"net_arch": {"pi": [64, 64], "vf": [64, 64]}, "activation_fn": torch.nn.Tanh}
if sys.argv[1:] == ["trpo"]:
    from sb3_contrib import TRPO

    envs = make_vec_env("HalfCheetah-v5", n_envs=1, seed=0, vec_env_cls=DummyVecEnv)
    model = TRPO("MlpPolicy", envs, policy_kwargs=network, device="cpu")
else:
    envs = make_vec_env("HalfCheetah-v5", n_envs=8, seed=0, vec_env_cls=DummyVecEnv)
    model = PPO("MlpPolicy", envs, n_steps=256, batch_size=64, n_epochs=10, policy_kwargs=network, device="cpu")
clock = Clock()
model.learn(2048 * UPDATES, callback=clock)
print(clock.steps_per_second(2048, warm_up=1))
