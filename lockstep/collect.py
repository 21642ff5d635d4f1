"""Policy and environments make trajectories, lane by lane."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lockstep import foreign
from lockstep.algorithms.actor_critic import Normalize, see
from lockstep.core import Array, Learner, Policy, Trajectory, Tree
from lockstep.envs.episodes import Envs, OpenEpisode, action_row
from lockstep.envs.make import is_finite
from lockstep.errors import NumericFault
from lockstep.foreign import Buffers
from lockstep.parallel.lanes import LaneBlock
from lockstep.runtime import JaxSettings, cpu, own_settings

TURN = "lockstep_turn"  # as compiled programs name it
AT_ONCE = 2**15  # bytes of an array that XLA copies before it does anything else
# number, actions [L, E, ...] -> what the policy sees next; None: it was the last
Turn = Callable[[int, np.ndarray], np.ndarray | None]
_takers: dict[int, Turn] = {}  # by the thread that calls a program


def _turn(given: Buffers, wanted: Buffers) -> Callable[[], None]:
    (action, t), (going, observation) = given, wanted

    def turn() -> None:
        # Where programs run in threads of JAX's own (`runtime.doubts`), it is that of the only call there is.
        take = _takers.get(threading.get_ident()) or next(iter(_takers.values()))
        seen = take(t.item(), action)
        going[...] = seen is not None
        if seen is not None:
            observation[...] = seen

    return turn


foreign.register(TURN, _turn)


class Actor(NamedTuple):
    """A policy's compiled actions, for all lanes of the process in one call."""

    noise: Callable[[np.ndarray, np.ndarray], Array]  # key data, lane numbers -> [L, T, E, ...]
    act: Callable[[Learner, np.ndarray, Array, Turn], int]  # learner, observation [L, E, ...], noise, turn -> turns
    mode: Callable[[Tree, Tree, Array], Array]  # params, moments, observation [N, ...] -> [N, ...]


def make_actor(policy: Policy, normalize: Normalize, steps: int, envs_per_lane: int) -> Actor:
    """Noise is drawn beforehand by address and values are left to the update: acting is the actor alone.

    One program acts for as long as the environments are stepped, and calls Python to step them: that takes half as long
    as a program that Python calls at every step. It runs on the CPU, where they are.
    """
    distribution, acts_here = policy.distribution, jax.default_backend() == "cpu"

    def noise(key_data: Array, lanes: Array) -> Array:
        key = jax.random.wrap_key_data(key_data, impl="threefry2x32")
        return (
            LaneBlock(lanes)
            .map(lambda lane: distribution.noise(jax.random.fold_in(key, lane), (steps, envs_per_lane)))
            .held()
        )

    @jax.jit
    def acted(params: Tree, moments: Tree, observation: Array, noise: Array) -> Array:
        def lane_action(lane: tuple[Array, Array]) -> Array:
            observation, noise = lane
            parameters, _ = policy.act(params, see(normalize, moments, observation), ())
            return distribution.sample(parameters, noise)

        def turned(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            t, going, observation = state
            lanes = LaneBlock((observation, jax.lax.dynamic_index_in_dim(noise, t, 1, False)))
            results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (going, observation)]
            # No effect is declared, or Python would start the program, which takes 1 ms. What the call answers decides
            # when the loop ends, so no compiler can do without it.
            return t + 1, *jax.ffi.ffi_call(TURN, results)(lanes.map(lane_action).held(), t)

        start = jnp.asarray(0, jnp.int32), jnp.asarray(True), observation
        return jax.lax.while_loop(lambda state: state[1], turned, start)[0]

    def ready(leaf: Array) -> Array:
        """While arguments are on their way XLA runs a program in a thread of its own: environments may mind."""
        at_once = isinstance(leaf, jax.Array) or leaf.nbytes < AT_ONCE
        return leaf if at_once and acts_here else jax.device_put(leaf, cpu())

    def act(learner: Learner, observation: np.ndarray, noise: Array, turn: Turn) -> int:
        with own_settings() as theirs:
            return run(learner, observation, noise, turn, JaxSettings(theirs))

    def run(learner: Learner, observation: np.ndarray, noise: Array, turn: Turn, users: JaxSettings) -> int:
        made, over, raised, stepped = 0, False, [], foreign.in_full_range(turn)

        def take(t: int, action: np.ndarray) -> np.ndarray | None:
            nonlocal made, over
            try:
                if t != made:
                    raise KeyboardInterrupt  # it came when the turn before was called, which did not happen
                with users:  # environments may use JAX too
                    seen = stepped(t, action)
                made, over = made + 1, seen is None
                return seen
            except BaseException as error:
                raised.append(error)
                return None

        needed = {"policy": learner.params["policy"]}, learner.observation, observation, noise
        given = jax.block_until_ready(jax.tree.map(ready, needed))
        _takers[threading.get_ident()] = take
        try:
            jax.block_until_ready(acted(*given))
        finally:
            del _takers[threading.get_ident()]
            foreign.reraise(threading.get_ident())
        if raised:
            raise raised[0]
        if not over:
            raise KeyboardInterrupt
        return made

    def mode(params: Tree, moments: Tree, observation: Array) -> Array:
        return distribution.mode(policy.act(params, see(normalize, moments, observation), ())[0])

    return Actor(own_settings()(jax.jit(noise)), act, own_settings()(jax.jit(mode)))


class Episode(NamedTuple):
    """A finished episode."""

    at: int  # the step of the update it ended in
    env: int  # the environment's number in the experiment
    steps: int
    total: float  # the sum of its rewards


class Collector:
    """The lanes' environments, and what is known of their running episodes.

    An update takes `steps` steps of every environment; with `episodes`, so many whole episodes of each, which
    need no more than `steps`.
    """

    def __init__(
        self,
        envs: Envs,
        actor: Actor,
        lanes: range,
        steps: int,
        discount: float,
        episodes: int = 0,
        beat: Callable[[], None] = lambda: None,  # called at every step: this process gets on
    ) -> None:
        self._envs, self._actor, self._lanes, self._steps, self._discount = envs, actor, lanes, steps, discount
        self._episodes, self._beat = episodes, beat
        n, spec = len(envs), envs.spec.observation
        self._first = lanes[0] * (n // len(lanes))  # the number of the first environment
        self._observation = np.zeros((n, *spec.shape), spec.dtype)
        self._length = np.zeros(n, np.int64)
        self._total = np.zeros(n, np.float64)
        self._discounted = np.zeros(n, np.float64)

    @property
    def strangers(self) -> list[int]:
        """The environments that did not repeat themselves when an episode was rebuilt."""
        return self._envs.strangers

    def start(self) -> None:
        self._envs.start(self._observation)

    def collect(self, learner: Learner, key_data: np.ndarray) -> tuple[Trajectory, list[Episode]]:
        """The next update's data, stacked over lanes, and the episodes that ended meanwhile.

        The trajectory may lie in the environments' memory: it holds until the next call.
        """
        n, steps, lanes = len(self._envs), self._steps, len(self._lanes)
        envs_per_lane, spec = n // lanes, self._envs.spec
        numbers = np.asarray(self._lanes, np.int32)
        noise = self._actor.noise(key_data, numbers)
        rollout = self._envs.rollout(steps)
        reward, terminated, truncated, final, observation = rollout
        real, left = np.ones((steps, n), bool), np.full(n, self._episodes)
        observation[0] = self._observation
        shape, dtype = action_row(spec.action)
        action = np.zeros((steps, n, *shape), dtype)
        chosen_by_lane = action.reshape(steps, lanes, envs_per_lane, *shape)
        seen = observation.reshape(steps + 1, lanes, envs_per_lane, *spec.observation.shape)

        def turn(t: int, chosen: np.ndarray) -> np.ndarray | None:
            chosen_by_lane[t] = chosen
            self._check(action[t])
            self._beat()
            self._envs.step(action[t], rollout, t)
            rest = self._episodes and self._all_rest(terminated[t] | truncated[t], left, real[t + 1 :])
            return None if rest or t + 1 == steps else seen[t + 1]

        made = self._actor.act(learner, seen[0], noise, turn)
        self._observation = observation[made].copy()
        if self._episodes:
            for array in (action, reward, terminated, truncated, observation[:-1], observation[1:]):
                array[~real] = 0
        ended = terminated | truncated
        discounted, episodes = self._follow(reward, ended, real)

        def by_lane(array: np.ndarray) -> np.ndarray:
            """[T, L E, ...] -> [L, T, E, ...]"""
            split = array.reshape(steps, lanes, envs_per_lane, *array.shape[2:])
            return np.ascontiguousarray(split.swapaxes(0, 1))

        next_observation = by_lane(observation[1:])
        if ended.any() and next_observation.base is not None:  # one lane: still the same memory
            next_observation = next_observation.copy()
        for t, i in np.argwhere(ended).tolist():
            lane, e = divmod(i, envs_per_lane)
            next_observation[lane, t, e] = final[t, i]
        trajectory = Trajectory(
            lane=numbers,
            observation=by_lane(observation[:steps]),
            action=by_lane(action),
            reward=by_lane(reward.astype(np.float32)),
            terminated=by_lane(terminated),
            truncated=by_lane(truncated),
            next_observation=next_observation,
            discounted_return=by_lane(discounted),
            policy_state=(),
            real=by_lane(real) if self._episodes else (),
        )
        return trajectory, episodes

    def _check(self, chosen: np.ndarray) -> None:
        """Actions that are no numbers are the policy's fault, and no environment is asked to take them."""
        if chosen.dtype.kind == "f" and not is_finite(chosen):
            i = int(np.argwhere(~np.isfinite(chosen))[0][0])
            raise NumericFault(
                f"the policy chose the action {chosen[i]} in environment {self._first + i}, which was not taken. The"
                " run's checkpoints are as they were. A smaller learning rate or policy.log_std may help."
            )

    def _all_rest(self, ended: np.ndarray, left: np.ndarray, later: np.ndarray) -> bool:
        """Let environments with no episodes `left` rest, fresh for the next update; whether all do. `later`: real."""
        left[ended] -= 1
        resting = self._envs.resting
        resting |= ended & (left == 0)
        later[:, resting] = False
        if not resting.all():
            return False
        resting[:] = False
        return True

    def _follow(self, reward: np.ndarray, ended: np.ndarray, real: np.ndarray) -> tuple[np.ndarray, list[Episode]]:
        """Keep the running episodes' records; the discounted returns so far and the episodes that ended."""
        discounted = np.empty_like(reward)
        episodes = []
        for t, any_ended in enumerate(np.any(ended, axis=1).tolist()):
            self._discounted = self._discounted * self._discount + reward[t]
            discounted[t] = self._discounted
            self._total += reward[t]
            self._length += real[t]
            if any_ended:
                for i in np.flatnonzero(ended[t]):
                    episodes.append(Episode(t, self._first + int(i), int(self._length[i]), float(self._total[i])))
                for record in (self._discounted, self._total, self._length):
                    record[ended[t]] = 0
        return discounted, episodes

    def open_episodes(self) -> dict[str, np.ndarray]:
        """The running episodes as arrays, for a checkpoint; `restore` takes them back."""
        numbers, actions = zip(*(self._envs.running(i) for i in range(len(self._envs))), strict=True)
        return {
            "episode": np.asarray(numbers, np.int64),
            "length": self._length.copy(),
            "total": self._total.copy(),
            "discounted": self._discounted.copy(),
            "observation": self._observation.copy(),
            "actions": np.concatenate(actions),
        }

    def accepts(self, record: dict[str, np.ndarray]) -> bool:
        """Whether these can be the running episodes of all lanes' environments."""
        mine, last = self.open_episodes(), self._first + len(self._envs)
        kinds, expected = ({k: (a.dtype, a.ndim, a.shape[1:]) for k, a in arrays.items()} for arrays in (record, mine))
        if kinds != expected:
            return False
        length, actions = record["length"], len(record["actions"])
        rows = {len(record[name]) for name in mine if name != "actions"}
        fits = len(rows) == 1 and rows.pop() >= last and length.sum() == actions
        return bool(fits and (record["episode"] >= 0).all() and (length >= 0).all() and (length <= actions).all())

    def restore(self, record: dict[str, np.ndarray]) -> list[int]:
        """Rebuild the running episodes from those of all lanes. Returns the environments that did not repeat."""
        record = _taken(record, self._first, len(self._envs))
        self._length, self._total = record["length"].copy(), record["total"].copy()
        self._discounted, self._observation = record["discounted"].copy(), record["observation"].copy()
        parts = np.split(record["actions"], np.cumsum(self._length)[:-1])
        episodes = [OpenEpisode(int(record["episode"][i]), part, self._observation[i]) for i, part in enumerate(parts)]
        return [self._first + i for i, episode in enumerate(episodes) if not self._envs.restore(i, episode)]


def _taken(record: dict[str, np.ndarray], first: int, count: int) -> dict[str, np.ndarray]:
    """The records of `count` environments from `first` on."""
    ends = np.concatenate([[0], np.cumsum(record["length"])])
    mine = {name: array[first : first + count] for name, array in record.items()}
    return {**mine, "actions": record["actions"][ends[first] : ends[first + count]]}


def joined(records: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The records of several processes' environments, in their order, as one."""
    return {name: np.concatenate([record[name] for record in records]) for name in records[0]}
