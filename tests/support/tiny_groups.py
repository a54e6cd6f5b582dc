"""Random groups of trajectories with plausible masks, for tests of the training side."""

import numpy as np

from areal_ray.core.trajectory import Group, Outcome, Trajectory


def random_group(
    rng: np.random.Generator,
    number: int = 0,
    *,
    siblings: int = 4,
    prompt_tokens: int = 12,
    turns: tuple[int, ...] = (6, 5),
    tool_tokens: int = 4,
    vocab_size: int = 300,
    version: int = 0,
    rewards: list[float | None] | None = None,
) -> Group:
    """Siblings with one prompt and `turns` sampled turns each (half to full length), with
    unsampled tool tokens between them; rewards are 0 or 1 unless given."""
    prompt = rng.integers(4, vocab_size, prompt_tokens)
    trajectories = []
    for place in range(siblings):
        tokens, mask, turn_ids = [prompt], [np.zeros(prompt_tokens, bool)], [[-1] * prompt_tokens]
        for turn, longest in enumerate(turns):
            if turn:
                tokens.append(rng.integers(4, vocab_size, tool_tokens))
                mask.append(np.zeros(tool_tokens, bool))
                turn_ids.append([-1] * tool_tokens)
            length = int(rng.integers((longest + 1) // 2, longest + 1))
            tokens.append(rng.integers(4, vocab_size, length))
            mask.append(np.ones(length, bool))
            turn_ids.append([turn] * length)
        loss_mask = np.concatenate(mask)
        logprobs = np.where(loss_mask, rng.normal(-5.5, 0.3, len(loss_mask)), 0.0)
        reward = float(rng.integers(0, 2)) if rewards is None else rewards[place]
        trajectories.append(
            Trajectory(
                token_ids=np.concatenate(tokens).astype(np.int32),
                loss_mask=loss_mask,
                behaviour_logprobs=logprobs.astype(np.float32),
                versions=np.where(loss_mask, version, -1).astype(np.int32),
                turn_ids=np.concatenate(turn_ids).astype(np.int16),
                task_id=f"task-{number}",
                group_id=f"group-{number}",
                episode_id=f"group-{number}/{place}",
                reward=reward,
                outcome=Outcome.OK if reward is not None else Outcome.UNSCORED,
            )
        )
    return Group(f"group-{number}", f"task-{number}", tuple(trajectories))
