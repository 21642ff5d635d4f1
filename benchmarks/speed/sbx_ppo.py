"""Steps per second of SBX's PPO (Stable-Baselines3 on JAX) at the same work, with DummyVecEnv."""

import flax
from clock import Clock
from sbx import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv

UPDATES = 8

envs = make_vec_env("HalfCheetah-v5", n_envs=8, seed=0, vec_env_cls=DummyVecEnv)
network = {"net_arch": {"pi": [64, 64], "vf": [64, 64]}, "activation_fn": flax.linen.tanh}
model = PPO("MlpPolicy", envs, n_steps=256, batch_size=64, n_epochs=10, policy_kwargs=network)
clock = Clock()
model.learn(2048 * UPDATES, callback=clock)
print(clock.steps_per_second(2048, warm_up=2))
