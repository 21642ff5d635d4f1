"""An environment of one's own. From the command line: `lockstep train own_environment:Target-v0`."""

import gymnasium
import numpy as np
from gymnasium import spaces

import lockstep


class Target(gymnasium.Env):
    """Move a point to the middle of a square. All randomness comes from `self.np_random`, so it replays."""

    observation_space = spaces.Box(-2, 2, (2,), np.float32)
    action_space = spaces.Box(-0.1, 0.1, (2,), np.float32)

    def __init__(self, render_mode=None):
        self.place = np.zeros(2, np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return self.place.copy(), {}

    def step(self, action):
        self.place = np.clip(self.place + action, -2, 2).astype(np.float32)
        distance = float(np.linalg.norm(self.place))
        return self.place.copy(), -distance, distance < 0.05, False, {}


gymnasium.register("Target-v0", Target, max_episode_steps=50)

if __name__ == "__main__":
    run = lockstep.train("Target-v0", settings={"steps": 20_480, "collect.steps": 64})
    print(f"return {run.return_mean:.2f}, digest {run.digest}")
