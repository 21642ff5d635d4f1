"""Train a policy from Python, then act with it in a plain Gymnasium environment."""

import gymnasium

import lockstep

# A preset, with fewer steps than it needs to be good: enough to see how it goes.
run = lockstep.train("pendulum", settings={"steps": 10_000, "seed": 1})
print(run.path, run.digest)

policy = lockstep.load(run.path)
env = gymnasium.make("Pendulum-v1")
observation, _ = env.reset(seed=0)
total = 0.0
for _ in range(200):
    observation, reward, _, _, _ = env.step(policy.act(observation))
    total += float(reward)
print(f"return {total:.1f}")
