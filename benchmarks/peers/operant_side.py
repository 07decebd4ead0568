"""operant: generate + step of a `Learner` with the presets and options of the work."""

from contextlib import ExitStack
from unittest.mock import patch

from products import Recorder, write
from protocol import Pipe, Steps, queries, rewards
from ragged import Forced
from shapes import language_model, trained

from operant import Learner, Task
from operant.algorithms import preset
from operant.models import twins
from operant.sampling import task_key

RUN = ("algorithm", "batch", "steps")
"""Options of a preset that belong to a run and not to a learner."""


class Side:
    def __init__(self, spec: dict):
        self.spec, self.step = spec, 0
        options = {k: v for name in spec["presets"] for k, v in preset(name).items() if k not in RUN}
        options |= {"sampling.max_tokens": spec["new"], "update.epochs": spec["epochs"], "seed": spec["seed"]}
        options |= {"update.minibatch": spec["minibatch"], "sampling.fixed_length": spec["lengths"] is None}
        options |= spec["options"]
        named = {"algorithm": spec["algorithm"]} | ({} if spec["reference"] else {"reference": None})
        self.learner = Learner(language_model(spec), **named, **options)
        self.steps = Steps(self.learner.optimizer)

    def about(self) -> dict:
        update = self.learner.options["update"]
        kind = str(self.learner.policy.head.weight.dtype).removeprefix("torch.")
        moved = trained(self.learner.policy.parameters())
        about = {"batch": self.spec["queries"] * self.spec["groups"], "precision": kind, "trained": moved}
        return about | {"minibatch": update.minibatch, "epochs": update.epochs}

    def play(self):
        tasks = [Task(f"{self.step}/{i}", ids) for i, ids in enumerate(queries(self.spec, self.step))]
        if self.spec["lengths"] is None:
            return self.learner.play([task for task in tasks for _ in range(self.spec["groups"])])
        keys = [task_key(self.spec["seed"], "train", self.step, task.id) for task in tasks]
        forced = Forced(**vars(self.learner.sampling)).prepare(keys, self.spec["lengths"])
        return self.learner.play(tasks, sampling=forced)

    def take_step(self, capture: str | None) -> dict:
        replies = self.play()
        recorder = Recorder(self.learner.policy.parameters()) if capture else None
        with ExitStack() as recording:
            if recorder is not None:
                recording.enter_context(recorder)
                recording.enter_context(patch.object(twins, "ThreadPoolExecutor", recorder.pool))
            metrics = self.learner.step(replies, rewards(self.spec, self.step, len(replies)))
        self.step += 1
        taken = self.steps.take()
        if recorder is not None:
            write(capture, recorder, self.learner.optimizer, taken)
        phases = {name.removeprefix("time/"): value for name, value in metrics.items() if name.startswith("time/")}
        return {"tokens": sum(len(r.ids) for r in replies), "optimizer_steps": taken, "phases": phases}


def main() -> None:
    pipe = Pipe()
    side = Side(pipe.spec)
    command = pipe.next(**side.about())
    while True:
        command = pipe.next(**side.take_step(command.get("capture")))


if __name__ == "__main__":
    main()
