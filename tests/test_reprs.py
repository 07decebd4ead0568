"""What a debugger and a notebook show of the public objects: sizes and shapes, in one or few lines."""

import torch
from toys import letters, lm

from operant import Batch, Completion, Learner, Outputs, Task, Turn
from operant.storage.checkpoint import RunState
from operant.tools.report.diagnosis import Finding


def test_values_that_are_long_are_sizes() -> None:
    batch = Batch.given([[5, 6], [7]], [[8, 9, 3], [4]])
    shape = "tokens=int64[2, 5], mask=bool[2, 5], actions=bool[2, 5], rewards=float32[2, 5]"
    assert repr(batch).startswith(f"Batch({shape}, ") and len(repr(batch)) < 220 and "logprobs" not in repr(batch)
    outputs = Outputs(torch.zeros(2, 3), torch.zeros(2, 3))
    assert repr(outputs) == "Outputs(logprobs=float32[2, 3], raw_logprobs=float32[2, 3])"
    assert repr(Task("a", "why", target=1)) == "Task(id='a', prompt='why', target=1)"
    assert repr(Turn([5], list(range(200)))) == "Turn(prompt=[5], action=<list of 200>)"
    said = "Completion(action=[40, 0], logprobs=[-1.2, -0.3], values=None, end='stop', version=3)"
    assert repr(Completion([40, 0], [-1.2, -0.3], None, "stop", 3)) == said


def test_a_learner_says_what_it_trains_and_how_far_it_is() -> None:
    learner = Learner(lm(vocab=40), tokenizer=letters(), max_tokens=4)
    (reply,) = learner.generate(["ab"])
    learner.step([reply], [1.0])
    model = "Policy(GPT2LMHeadModel, 28,833 parameters, 28,833 trained, value head, cpu, version=1)"
    assert repr(learner) == f"Learner(ppo, reference=copy, step=1, policy={model})"
    said = f"Rollout('ab' -> {reply.reply!r}, turns=1, actions={reply.count}, end={reply.end!r}, group=0)"
    assert repr(reply) == said
    state = RunState()
    state.register("policy", learner.policy)
    assert repr(state) == "RunState(policy)"
    finding = Finding("empty", "problem", "62 % of the replies are empty.", "cause", "`--kl.coef 0.1`", step=4)
    assert repr(finding) == "<problem empty, step 4: 62 % of the replies are empty. Remedy: `--kl.coef 0.1`>"
