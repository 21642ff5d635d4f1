"""How Stable-Baselines3's family is timed. Imported by the scripts beside it, in the peers' Pythons."""

import time

from stable_baselines3.common.callbacks import BaseCallback


class Clock(BaseCallback):
    """Notes when each rollout starts: the time between two of them is whole updates."""

    def __init__(self) -> None:
        super().__init__()
        self._times: list[float] = []

    def _on_rollout_start(self) -> None:
        self._times.append(time.perf_counter())

    def _on_step(self) -> bool:
        return True

    def steps_per_second(self, batch: int, warm_up: int) -> float:
        """After so many updates, which start up or compile."""
        return batch * (len(self._times) - 1 - warm_up) / (self._times[-1] - self._times[warm_up])
