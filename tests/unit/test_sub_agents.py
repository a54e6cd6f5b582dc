"""From an agent's calls of sub-agents to what their tokens are worth."""

import asyncio

import numpy as np
import pytest

from areal_ray.agents.chat_client import ChatClient, ChatLimits
from areal_ray.algorithms.objective import ObjectiveConfig
from areal_ray.core.trajectory import Group, decode_group, encode_group
from areal_ray.engines.advantage_columns import score_step
from areal_ray.engines.train_rows import collect_lines
from areal_ray.gateway.recorder import Recorder
from areal_ray.gateway.template import ChatTemplate
from tests.support.templates import TPL_A, ScriptedTurn, letter_tokenizer

LIMITS = ChatLimits(max_new_tokens=8, context_tokens=400, max_turns=20)


def user(text):
    return {"role": "user", "content": text}


async def ask(client, *messages):
    """One turn; the conversation with its reply."""
    reply = await client.chat.completions.create(messages=list(messages))
    return [*messages, reply.choices[0].message]


def recorded(agent, episode="e", reward=None):
    """The trajectories of an agent whose model says "yo"."""
    template = ChatTemplate(letter_tokenizer(), TPL_A)
    recorder = Recorder(template)

    async def sample(prompt_ids, max_new_tokens, turn_id, stop):
        await asyncio.sleep(0)
        return ScriptedTurn(template.encode("yo"))

    asyncio.run(agent(ChatClient(recorder, sample, LIMITS)))
    names = {"task_id": "t", "group_id": "g", "episode_id": episode, "reward": reward}
    return recorder.trajectories(**names)


def tree(trajectories):
    return {t.branch_id: t.parent_branch_id for t in trajectories}


async def searching(client):
    """Two sub-agents side by side, the second of which calls one of its own."""
    main = await ask(client, user("main"))

    async def search(sub, what, deeper):
        said = await ask(sub, user(what))
        if deeper:
            await ask(sub.sub_agent(), user("fetch"))
        await ask(sub, *said, user("sum up"))

    subs = [client.sub_agent(), client.sub_agent()]
    await asyncio.gather(search(subs[0], "left", False), search(subs[1], "right", True))
    await ask(client, *main, user("so?"))


def test_a_sub_agent_names_the_branch_that_called_it_however_calls_interleave():
    trajectories = recorded(searching)
    assert tree(trajectories) == {0: -1, 1: 0, 2: 0, 3: 2}
    assert len(set(trajectories[3].turn_ids)) == 2, "the sub-agent's sub-agent, asked once"


def test_a_conversation_beside_the_main_one_counts_as_called_by_it():
    async def agent(client):
        said = await ask(client, user("main"))
        await ask(client, user("other"))
        await ask(client, *said, user("go on"))

    assert tree(recorded(agent)) == {0: -1, 1: 0}


def test_what_is_sent_again_edited_or_taken_up_earlier_is_the_same_agent_s():
    async def agent(client):
        said = await ask(client, user("main"))
        await ask(client, user("main"))
        await ask(client, *said, user("x"))
        await ask(client, *said, user("y"))
        await ask(client, user("main"), {"role": "assistant", "content": "no"}, user("z"))

    found = tree(recorded(agent))
    assert len(found) == 4
    assert set(found.values()) == {-1}


def test_a_sub_agent_before_any_turn_of_the_main_agent_has_no_caller():
    async def agent(client):
        await ask(client.sub_agent(), user("first"))

    assert tree(recorded(agent)) == {0: -1}


@pytest.mark.parametrize("discount", [1.0, 0.5])
def test_scores_are_discounted_along_the_calls_from_recorder_to_advantage(discount):
    episodes = [recorded(searching, "good", 1.0), recorded(searching, "bad", 0.0)]
    group = Group("g", "t", tuple(t for episode in episodes for t in episode))
    objective = ObjectiveConfig(branch_discount=discount)
    share = collect_lines([decode_group(encode_group(group))], objective, 0, None)
    (scores,) = score_step([share], objective, lambda numbers: numbers)
    expected = [1.0, discount, discount, discount**2]
    np.testing.assert_allclose(scores.by_line, [*expected, *(-x for x in expected)])
