"""The same list of old faults, continued: how episodes end, what credit they get, and what rewards may see."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from rigs import said
from toys import CAUSAL, letters, lm
from worlds import Turns

from operant import Learner, OperantError, Policy, Sampling, Step, Task, ValueOptions, distributed
from operant.data import DataOptions, load_tasks
from operant.engines.native.engine import NativeEngine
from operant.objectives import advantages
from operant.objectives.advantages import whiten, with_gae
from operant.rewards import NAMES, judge, resolve
from operant.rewards.text_scores import SCORES
from operant.rollouts.collate import collate
from operant.rollouts.play import play
from operant.training.scoring import bootstrap_prompts, with_bootstraps


class Corridor(Turns):
    """One turn that pays 1; then the episode is over, cut by a step limit, or (`end=None`) goes on for ever."""

    def __init__(self, end):
        self.ends = {end: True} if end else {}

    def answer(self, slot, reply):
        assert self.turn[slot] < 20, "nobody ended this episode"
        return Step("a wall.", fresh=True, reward=1.0, **self.ends)


@pytest.mark.parametrize("kind", CAUSAL)
def test_7_a_cut_is_followed_by_the_next_states_value(kind):
    policy, tokenizer = Policy(lm(kind, 40), letters(), value=ValueOptions(init="normal")), letters()
    ahead = tokenizer("a wall.")["input_ids"]
    with torch.no_grad():
        value = float(policy.value_head(policy.model.base_model(torch.tensor([ahead])).last_hidden_state[0, -1]))
    assert abs(value) > 0.05
    for end, expected in (("truncated", value), ("terminated", 0.0)):
        tasks = [Task("x", "a hall"), Task("y", "the")]
        kept = {"engine": NativeEngine(policy), "tokenizer": tokenizer, "sampling": Sampling(max_tokens=3)}
        rollouts = play(tasks, env=Corridor(end), **kept)
        batch = with_bootstraps(collate(rollouts, [0.0, 0.0]), bootstrap_prompts(rollouts), policy)
        assert batch.bootstrap.tolist() == pytest.approx([expected] * 2, abs=1e-4)
        credited = with_gae(batch, gamma=0.9, turn_gamma=0.5, whiten_scope="none")
        for row, rollout in enumerate(rollouts):
            last = batch.actions[row].nonzero()[-1, 0]
            surprise = 1.0 + 0.9 * 0.5 * expected - rollout.turns[0].values[-1]
            assert float(credited.advantages[row, last]) == pytest.approx(surprise, abs=1e-4)


def test_8_whitening_on_ranks_is_whitening_of_the_whole(monkeypatch):
    """Three ranks with 4, 1 and 0 numbers, as threads that meet wherever a rank would wait for the others."""
    parts = [torch.tensor([3.0, -1.0, 8.0, 2.5]), torch.tensor([40.0]), torch.tensor([7.0])]
    masks = [torch.ones(4, dtype=torch.bool), torch.ones(1, dtype=torch.bool), torch.zeros(1, dtype=torch.bool)]
    barrier, told = threading.Barrier(3, timeout=20), {}

    def total(number):
        told[threading.get_ident()] = number
        barrier.wait()
        summed = sum(told.values())
        barrier.wait()
        return summed

    whole = whiten(torch.cat(parts[:2]), torch.ones(5, dtype=torch.bool))
    monkeypatch.setattr(distributed, "total_float", total)
    assert advantages.distributed is distributed
    with ThreadPoolExecutor(3) as threads:
        first, second, none = threads.map(whiten, parts, masks)
    assert torch.allclose(torch.cat([first, second]), whole, atol=1e-6) and none.tolist() == [0.0]


def test_14_a_score_does_not_depend_on_its_neighbours():
    made = {"length": "length:5", "letters": "letters:e", "pattern": "pattern:e$", "repetition": "repetition"}
    models = {"builtin", "classifier", "vader", "minus_query"}  # of models: tests/test_rewards.py
    # In processes of their own: tests/test_isolated.py. Of targets and of ends: tests/test_recipes.py
    elsewhere = models | {"isolated", "keyword", "ended"}
    elsewhere |= {"reward_model", "humans"}  # tests/test_reward_model.py, tests/test_humans.py
    elsewhere |= {"prompt", "style_transfer"}  # tests/test_prompt_reward.py, tests/test_style_transfer.py
    elsewhere |= {"maths", "think_answer", "judge"}  # tests/test_maths.py, tests/test_judge.py
    elsewhere |= {"tests", "critic", "minus_greedy"}  # tests/test_programs.py, tests/test_critic.py
    elsewhere |= {*SCORES, "per_token"}  # tests/test_text_scores.py
    assert made.keys() | elsewhere == NAMES.keys(), "a new reward stands here, or says where its test is"
    texts = ["the end", "e", "", "see see see see", "no", "the end"]
    rollouts = [said([3], letters()(t or " ")["input_ids"], group=i) for i, t in enumerate(texts)]
    rollouts = [type(r)(r.task, r.group, r.turns, [t], "stop") for r, t in zip(rollouts, texts, strict=True)]
    for spec in made.values():
        reward = resolve(spec)
        alone = [judge(reward, [r]).scores[0] for r in rollouts]
        assert judge(reward, rollouts).scores == alone and judge(reward, rollouts[::-1]).scores == alone[::-1]
        assert len(set(alone)) > 1


def test_15_a_world_that_never_ends_is_an_error():
    policy, tokenizer = Policy(lm("llama", 40)), letters()
    kept = {"engine": NativeEngine(policy), "tokenizer": tokenizer, "sampling": Sampling(max_tokens=1)}
    with pytest.raises(OperantError, match=r"Corridor has not ended task 'x' after 5 turns.*truncated=True.*max_turns"):
        play([Task("x", "a hall")], env=Corridor(None), max_turns=5, **kept)
    (rollout,) = play([Task("x", "a hall")], env=Corridor("truncated"), max_turns=1, **kept)
    assert rollout.end == "cut"


def test_25_a_limit_on_queries_is_a_limit_on_queries():
    """lmhpd cut queries to the length of responses: the two lengths stand apart here, and each binds its own."""
    tokenizer = letters()
    texts = ["abcdefghijklmnopqrstuvwxyz", "zyxwvutsrqponmlkjihgfedcba"]
    tasks = load_tasks(texts, tokenizer, DataOptions(query_tokens=9), context=64, max_new=3)
    assert [len(t.prompt) for t in tasks] == [9, 9]
    learner = Learner(lm("gpt2", 40), tokenizer=tokenizer, max_tokens=3, fixed_length=True)
    replies = learner.generate(tasks)
    assert [(r.turns[0].prompt, len(r.ids)) for r in replies] == [(t.prompt, 3) for t in tasks]
    metrics = learner.step(replies, [0.0, 1.0])
    assert (metrics["rollout/query_tokens"], metrics["rollout/reply_tokens"]) == (9.0, 3.0)
