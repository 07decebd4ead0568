"""Every reward says where it is tested."""

from operant.rewards import NAMES
from operant.rewards.text_scores import SCORES


def test_14_every_reward_has_a_test_of_its_neighbours():
    plain = {"length", "letters", "pattern", "repetition", *SCORES}  # tests/test_text_scores.py
    models = {"builtin", "classifier", "vader", "minus_query"}  # of models: tests/test_rewards.py
    # In processes of their own: tests/test_isolated.py. Of targets and of ends: tests/test_recipes.py
    elsewhere = models | {"isolated", "keyword", "ended", "per_token"}
    elsewhere |= {"reward_model", "humans"}  # tests/test_reward_model.py, tests/test_humans.py
    elsewhere |= {"prompt", "style_transfer"}  # tests/test_prompt_reward.py, tests/test_style_transfer.py
    elsewhere |= {"maths", "think_answer", "judge"}  # tests/test_maths.py, tests/test_reward_model.py
    elsewhere |= {"tests", "critic", "minus_greedy"}  # tests/test_programs.py, tests/test_critic.py
    assert plain | elsewhere == NAMES.keys(), "a new reward stands here, or says where its test is"
