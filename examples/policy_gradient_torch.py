"""A plain policy gradient on CartPole with PyTorch, in one process. Parallel: policy_gradient_torch_parallel.py."""

import gymnasium
import torch

EPISODES, UPDATES = 16, 8
seed = 1
torch.manual_seed(seed)
policy = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))
optimizer = torch.optim.Adam(policy.parameters(), 2e-2)
env = gymnasium.make("CartPole-v1")
env.reset(seed=seed)


def episode():
    observations, actions, rewards, ended = [torch.tensor(env.reset()[0])], [], [], False
    while not ended:
        with torch.no_grad():
            choice = torch.distributions.Categorical(logits=policy(observations[-1]))
        actions.append(choice.sample())
        observation, reward, terminated, truncated, _ = env.step(actions[-1].item())
        observations.append(torch.tensor(observation))
        rewards.append(reward)
        ended = terminated or truncated
    to_go = torch.tensor(rewards).flip(0).cumsum(0).flip(0)
    return torch.stack(observations[:-1]), torch.stack(actions), to_go


for update in range(UPDATES):
    episodes = [episode() for _ in range(EPISODES)]
    batch = [torch.cat(parts) for parts in zip(*episodes, strict=True)]
    observations, actions, to_go = batch
    log_prob = torch.distributions.Categorical(logits=policy(observations)).log_prob(actions)
    loss = -(log_prob * (to_go - to_go.mean()) / to_go.std()).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"update {update}: mean return {len(actions) / EPISODES:.1f}")
