"""A task whose best mean reward is 1, the learner that finds it, and scores that teach nothing."""

from toys import lm

from operant import Task, train
from operant.sampling import counter
from operant.training.learner import Learner

WANTED, PROMPTS, VOCABULARY = 7, [[1, 2, 3], [4, 5], [6], [8, 9, 10, 11]], 12
OPTIONS = {"optimizer.lr": 1e-2, "max_tokens": 5, "fixed_length": True, "kl.coef": 0.0, "minibatch": 16}
ABSENT = "absent"
"""An option that the method does not have."""
CHANCE, NOISE = 1 / VOCABULARY, 0.06


def score(rollout):
    return rollout.ids.count(WANTED) / len(rollout.ids)


def learner(kind="gpt2", **more):
    options = {name: value for name, value in (OPTIONS | more).items() if value is not ABSENT}
    return Learner(lm(kind, VOCABULARY, spread=0.05), **options)


def shuffled(step, scores):
    shift = 1 + counter(5, step) % (len(scores) - 1)
    return scores[shift:] + scores[:shift]


KEPT = ("optimizer.lr", "sampling.max_tokens", "sampling.fixed_length", "kl.coef", "update.minibatch", "learner.seed")


def end_of_run(out, *, seed, **more):
    """The mean reward of the last four steps of a run."""
    student = learner(seed=seed)
    given = {name: value for name, value in student.option_values().items() if name in KEPT} | more
    given |= {"steps": 20, "batch": 32, "samples": 8, "probes": 0, "samples_every": 0, "out": out}
    tasks = [Task(f"t/{i}", prompt) for i, prompt in enumerate(PROMPTS)]
    run = train(student.policy, tasks, lambda rollouts: [score(r) for r in rollouts], **given)
    return sum(line["reward/mean"] for line in run.metrics[-4:]) / 4
