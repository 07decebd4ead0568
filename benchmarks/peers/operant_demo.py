"""operant: the demo task of `operant train sentiment`, one step at a time and without a run folder."""

from contextlib import ExitStack

from protocol import Pipe, Steps
from shapes import trained

from operant.rewards import judge
from operant.runs.build import build
from operant.runs.config import configure


def main() -> None:
    pipe = Pipe()
    config = configure(pipe.spec["options"], "sentiment")
    built = build(config, closing=ExitStack())
    learner, steps = built.learner, Steps(built.learner.optimizer)
    pipe.next(trained=trained(learner.policy.parameters()), precision=str(learner.policy.head.weight.dtype))
    while True:
        picked = [built.tasks[i] for i in built.order.take(config.train.batch)]
        rollouts = learner.play(picked)
        with learner.clock.timing("reward"):
            judged = judge(built.reward, learner.as_seen(rollouts))
        metrics = learner.learn(rollouts, judged.scores)
        phases = {name.removeprefix("time/"): value for name, value in metrics.items() if name.startswith("time/")}
        answer = {"reward": metrics["reward/mean"], "kl": metrics["kl/per_reply"], "phases": phases}
        pipe.next(tokens=sum(len(r.ids) for r in rollouts), optimizer_steps=steps.take(), **answer)


if __name__ == "__main__":
    main()
