"""Steps per second of Stable-Baselines3's PPO or A2C, or sb3-contrib's TRPO: `sb3.py [ppo|a2c|trpo] [ENVS STEPS]`.

With their best settings: DummyVecEnv, one thread. What is not said is their default.
"""

import sys

import torch
from clock import Clock
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv

torch.set_num_threads(1)
algo, envs, steps = (*sys.argv[1:], *("ppo", "8", "256")[len(sys.argv) - 1 :])
settings = {
    "n_steps": int(steps),
    "policy_kwargs": {"net_arch": {"pi": [64, 64], "vf": [64, 64]}, "activation_fn": torch.nn.Tanh},
    "device": "cpu",
}
made = make_vec_env("HalfCheetah-v5", n_envs=int(envs), seed=0, vec_env_cls=DummyVecEnv)
if algo == "ppo":
    model = PPO("MlpPolicy", made, batch_size=64, n_epochs=10, **settings)
elif algo == "a2c":
    model = A2C("MlpPolicy", made, **settings)
else:
    from sb3_contrib import TRPO

    model = TRPO("MlpPolicy", made, **settings)
batch, clock = int(envs) * int(steps), Clock()
warm_up = max(2048 // batch, 1)
updates = 12 if warm_up == 1 else 40 * warm_up  # small ones for as long as the others
model.learn(batch * updates, callback=clock)
print(clock.steps_per_second(batch, warm_up))
