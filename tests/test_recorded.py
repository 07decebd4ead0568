"""Replies made elsewhere: what becomes of each record, what is lost without ids or log-probs, and what is refused."""

import json

import pytest
from cases import cases
from small_runs import model, options
from toys import bare_logprobs, letters

import operant
from operant import Learner, OperantError, Policy
from operant.models.reference import fingerprint
from operant.runs.config import configure

CHAT = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}a{% endif %}"
ONE = {"prompt_token_ids": [4, 5], "token_ids": [6, 2], "logprobs": [-3.0, -4.0], "reward": 1.0}


def learner(**more):
    return Learner(Policy(model(), letters(CHAT)), algorithm="reinforce", **more)


def test_each_form_of_a_record_is_the_same_episode():
    """Two turns, the second of which continues the first; `d` is the program's own and has no gradient."""
    second = [4, 5, 6, 2, 7]
    answers = [
        {"choices": [{"token_ids": [6, 2], "logprobs": {"content": [{"logprob": -3.0}, {"logprob": -4.0}]},
                      "message": {"content": "c"}}], "prompt_token_ids": [4, 5]},
        {"choices": [{"token_ids": [8], "logprobs": {"token_logprobs": [-2.0]}, "finish_reason": "length", "text": "e",
                      "prompt_token_ids": second}]},
    ]  # fmt: skip
    said = [ONE | {"role": "assistant", "content": "c"}, {"role": "user", "content": "d"}]
    last = {"prompt_token_ids": second, "token_ids": [8], "logprobs": [-2.0], "finish_reason": "length"}
    said += [last | {"role": "assistant", "content": " e"}]
    records = [
        {"responses": answers, "reward": 2.0, "version": 3, "group": "x"},
        {"messages": [{"role": "user", "content": "ab"}, *said], "reward": [0.0, 2.0], "version": 5, "group": "x"},
    ]
    one = learner()
    first, other = operant.recorded_replies(records, one)
    for rollout, version in ((first, -2), (other, 0)):
        assert [(t.prompt, t.action, t.logprobs, t.end, t.reward, t.version) for t in rollout.turns] == [
            ([4, 5], [6, 2], [-3.0, -4.0], "stop", 0.0, version),
            (second, [8], [-2.0], "length", 2.0, version),
        ]
        assert rollout.texts == ["c", "e"] and rollout.group == 0 and rollout.task.id == "replies/x"
    assert [r.turns[0].version for r in operant.recorded_replies(records[::-1], one, version=9)] == [-4, -6]
    metrics = one.step([first, other], [0.0, 0.0])
    assert metrics["rollout/staleness"] == 1.0 and metrics["rollout/staleness_max"] == 2.0
    assert one.last_step.batch.actions.sum() == 6 and len(one.last_step.batch) == 2


def test_a_reply_that_no_stop_ends_was_cut_unless_the_record_says_otherwise():
    cut = ONE | {"token_ids": [6, 7]}
    records = [ONE, cut, cut | {"finish_reason": "stop"}, cut | {"token_ids": [6], "logprobs": [-1.0]}]
    one = learner(max_tokens=2)
    assert [r.end for r in operant.recorded_replies(records, one)] == ["stop", "length", "stop", "stop"]
    given = operant.Learner.step(one, [[4, 5]] * 2, [[6, 2], [6, 7]], [0.0, 1.0])
    assert given["rollout/ended_length"] == 0.5, "as those of triplets"


def test_the_same_weights_make_every_ratio_one():
    one, ids = learner(importance="token"), ([4, 5], [6, 9, 2])
    known = {"logprobs": bare_logprobs(one.policy.model, *ids).tolist(), "system_fingerprint": fingerprint(one.policy)}
    record = {"prompt_token_ids": ids[0], "token_ids": ids[1], "reward": 1.0, **known}
    metrics = one.step(operant.recorded_replies([record] * 2, one), [0.0, 0.0])
    assert metrics["rollout/staleness_max"] == 0 and metrics["rollout/engine_gap_max"] < 1e-5
    assert metrics["rollout/importance_mean"] == pytest.approx(1, abs=1e-5) and metrics["reward/mean"] == 1


def test_a_run_says_once_what_is_lost(tmp_path):
    """Texts alone: the chat template makes their tokens, and the policy's own log-probs stand in."""
    tokenizer = letters(CHAT.replace("'a'", "''").replace("}a{", "}{"))
    talk = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
    (tmp_path / "talk.jsonl").write_text("\n".join(json.dumps({"messages": talk, "reward": r}) for r in (0, 1)))
    given = options(batch=2, samples=2, steps=2) | {"tokenizer": tokenizer, "replies": str(tmp_path / "talk.jsonl")}
    run = operant.train(model(), algorithm="grpo", out=tmp_path / "run", **given)
    log = (run.path / "log.txt").read_text()
    assert log.count("no token ids: their texts were tokenised again, 4 tokens") == log.count("have no log-probs") == 1
    assert run.config.learner["learner"].importance == "none" and run.metrics[0]["reward/mean"] == 0.5
    resumed = operant.train(model(), out=run.path, resume=True, steps=3, tokenizer=tokenizer)
    assert [m["step"] for m in resumed.metrics] == [1, 2, 3]


@pytest.fixture(scope="module")
def one():
    return learner()


BARE = {k: v for k, v in ONE.items() if k != "logprobs"}
SAID = {"role": "assistant", "content": "zebra"}


@cases(
    ('{"token_ids": [4', "line 2: invalid JSON"),
    ("[4]", "line 2 is .*is an object"),
    ({"token_ids": [4]}, "line 2: prompt_token_ids is None; .*return_token_ids"),
    ({"responses": [{"choices": [{"text": "a"}]}]}, "line 2, response 1: prompt_token_ids is None"),
    ({"responses": [{"choices": [{}, {}]}]}, "response 1: it has 2 choices"),
    (ONE | {"token_ids": [6, 999]}, "line 2 holds the id 999"),
    ({"messages": [ONE | SAID]}, "'zebra'.*another tokenizer"),
    (ONE | {"logprobs": [-1.0]}, "line 2: 1 log-probs for 2 token_ids"),
    (ONE | {"logprobs": [-1.0, float("nan")]}, "nan is no log-prob"),
    (ONE | {"logprobs": [-1.0, 0.5]}, "0.5 is no log-prob"),
    ({"messages": [SAID | {"logprobs": [-1.0]}]}, "message 1: .*no token_ids"),
    (ONE | {"reward": float("nan")}, "line 2: the reward nan must be a finite number"),
    (ONE | {"reward": [1.0, 2.0]}, "2 rewards for 1 turns"),
    ({"token_ids": [6], "prompt_token_ids": [4]}, "line 2: all records have a reward, or none; it has none"),
    (ONE | {"version": 3}, "has replies of version 3, newer than replies_version=2"),
    (ONE | {"version": -1}, "line 2: version=-1"),
    (ONE | {"temperature": 0.7}, "temperature 0.7, and the run scores at 1: --sampling.temperature 0.7"),
    (ONE | {"prompt_token_ids": [4] * 64}, "line 2 .*64"),
    (ONE | {"message": "hi"}, "line 2: message is 'hi'; it must be an object"),
    (ONE | {"logprobs": {"content": ["x"]}}, "line 2.*logprobs.content"),
    (ONE | {"group": [1]}, r"line 2: group=\[1\]"),
    ({"prompt": "a", "replies": ["b", "c"]}, "line 2: it has 2 replies: make a record of each"),
)
def test_a_broken_record_is_a_sentence(row, why, one, tmp_path):
    row = {"reward": 0.0, **row} if isinstance(row, dict) and "it has none" not in why else row
    path = tmp_path / "calls.jsonl"
    path.write_text(json.dumps(ONE) + "\n" + (row if isinstance(row, str) else json.dumps(row)))
    with pytest.raises(OperantError, match=f"calls.jsonl.*{why}"):
        operant.recorded_replies(str(path), one, 2)


@cases(
    ({"algorithm": "sft"}, "algorithm=sft: it learns from demonstrations .*in tasks"),
    ({"algorithm": "nlpo"}, "algorithm=nlpo: its mask decides"),
    ({"algorithm": "dapo", "batch": 8}, "redraw=4: it decides what is played; .*: use redraw=0"),
    ({"algorithm": "coderl"}, "algorithm=coderl: it also needs demonstrations"),
    ({"env": "rooms"}, "env='rooms': a world decides what is played"),
    ({"tasks": "a.txt"}, "tasks='a.txt': .*use tasks=none"),
    ({"rollouts_ahead": 1}, "rollouts_ahead=1"),
    ({"samples": 2, "batch": 2}, "samples=2: the largest group .* has 1 replies"),
    ({"batch": 2}, "batch=2: .* has 1 groups; use batch=1"),
    ({"replies": [ONE | {"logprobs": [-1.0]}]}, "1 log-probs for 2 token_ids"),
    ({"replies": [ONE, BARE]}, "has a reply without log-probs"),
)
def test_what_must_play_itself_refuses(given, why, tmp_path):
    given = {"batch": 1, "algorithm": "reinforce", "env": None, "replies": [ONE], **given}
    with pytest.raises(OperantError, match=why):
        operant.train(model(), out=tmp_path / "run", tokenizer=letters(), steps=1, probes=0, **given)
    assert not (tmp_path / "run").exists()


def test_log_probs_in_the_file_turn_importance_weights_on():
    found = [configure({"replies": [r], "algorithm": a}) for r in (ONE, BARE) for a in ("ppo", "soft_q", "decision")]
    assert [c.learner["learner"].importance for c in found] == ["token", *["none"] * 5]
