"""policy_gradient_torch.py on several processes, in five edits."""

import gymnasium
import torch

import lockstep.ranks

ranks = lockstep.ranks.start(nprocs=2)  # edit 1: run this script on two processes
EPISODES, UPDATES = 16, 8
seed = ranks.env_seeds(1, envs_per_rank=1)[0]  # edit 2: every process has its own episodes
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
    policy.load_state_dict(ranks.broadcast(policy.state_dict()))  # edit 3: all act with the root's weights
    episodes = [episode() for _ in range(EPISODES // ranks.size)]  # edit 4: share the work, and put it together
    batch = ranks.gather_batches([torch.cat(parts) for parts in zip(*episodes, strict=True)])  # edit 4
    if ranks.rank:  # edit 5: the root learns
        continue  # edit 5
    observations, actions, to_go = batch
    log_prob = torch.distributions.Categorical(logits=policy(observations)).log_prob(actions)
    loss = -(log_prob * (to_go - to_go.mean()) / to_go.std()).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"update {update}: mean return {len(actions) / EPISODES:.1f}")
