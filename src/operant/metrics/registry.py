"""The registry of metrics in `registry.txt`: name, unit, healthy range, meaning, and the name in TRL's PPOTrainer.

`python -m operant.metrics.registry > docs/metrics.md` writes the page. The report explains its charts with the same
sentences, and a test checks that the page is up to date.
"""

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Metric:
    """A metric, which has one value per step: `METRICS["kl/per_reply"].band == (0.0, 10.0)`."""

    name: str
    group: str
    unit: str
    healthy: str
    """In words: "rises", "0 to 10"."""
    old: str
    """TRL's names for it."""
    meaning: str
    band: tuple[float | None, float | None] | None = None
    """The healthy range as numbers (lowest, highest), if there is one."""

    def unhealthy(self, value: float) -> bool:
        """Return whether `value` is outside of the band by more than rounding."""
        low, high = self.band or (None, None)
        return (low is not None and value < low - 1e-4) or (high is not None and value > high + 1e-4)


def _read(table: str) -> dict[str, Metric]:
    """Lines "name | unit | healthy: words, or lowest..highest | TRL's names | meaning"; an indented one goes on."""
    metrics, group = {}, ""
    for line in re.sub(r"\n +", " ", table.strip()).split("\n"):
        if line.startswith("# "):
            group = line[2:]
            continue
        name, unit, healthy, old, meaning = (cell.strip() for cell in line.split("|"))
        band = None
        low, dots, high = healthy.partition("..")
        if dots:
            band = (float(low) if low else None, float(high) if high else None)
            healthy = f"{low} to {high}" if low and high else f"at most {high}" if high else f"at least {low}"
        metrics[name] = Metric(name, group, unit, healthy, old, meaning, band)
    return metrics


METRICS: dict[str, Metric] = _read((Path(__file__).parent / "registry.txt").read_text(encoding="utf-8"))
CHOSEN = METRICS["evaluate/<metric>"].group
"""The group of the metrics that the option `evaluation.metrics` chooses."""

COLUMNS = {
    "task, group, rollout, turn": (
        "the task, the group of attempts that are compared, the attempt, and its turn", ""),
    "query, reply": ("both as text", "game_log"),
    "tokens": ("the text of each token of the reply", ""),
    "prompt, ids": ("the token ids of the prompt, and those of the reply", ""),
    "query_tokens, reply_tokens": ("their lengths", "tokens/queries_dist, tokens/responses_dist"),
    "logprobs, ref_logprobs": (
        "log-prob of each reply token, under the policy that generated it and under the reference",
        "objective/logprobs, objective/ref_logprobs"),
    "kl": ("KL penalty of each reply token, before the coefficient", "objective/kl_dist"),
    "values, advantages, returns": ("one number per reply token", "ppo/policy/advantages"),
    "passing": (
        "one number per reply token: the probability that the program passes, by the critic that has read it so far; "
        "absent without a critic", ""),
    "reward, reward/<part>": ("the score and its named parts, in the row of an attempt's last turn", "env/reward_dist"),
    "outcome, message": (
        "the outcome class and the message of the reward's `Judgement`, in the same row; of all parts of a sum", ""),
    "paid": ("the environment's reward for this reply", ""),
    "game": ("the transcript of a game as JSON, in the row of its last turn; absent in runs without games", ""),
    "end, version": ("why the reply ended, and the version of the weights that generated it", ""),
}  # fmt: skip
"""The columns of `rollouts/step-00012.parquet`: names -> (meaning, TRL's names)."""

_HEAD = """# Metrics

`metrics.jsonl` has one object per step. Every mean is a sum over a count, pooled over minibatches and ranks, and every
spread is a standard deviation (biased). A name is absent if there was nothing to count, and null if the value was NaN
or infinity. This page is generated: edit `src/operant/metrics/registry.txt`, then run
`python -m operant.metrics.registry > docs/metrics.md`.

In an environment a reply is a whole episode, except where turns are named; text metrics are those of single turns. A
token is an action of the policy, and choosing a whole reply from a list is one action. Replies that are not trained
on, because they were not judged or because of `on_length=drop`, count only in metrics that name judged or all replies.
Means during the update are over every minibatch of every epoch. If `rescore` makes a second pass, as in bfloat16, its
log-probs and values replace those of sampling.
"""
_COLUMNS_HEAD = """
## Whole distributions

`rollouts/step-00012.parquet` has the values behind the histograms, one row per turn.

| column | meaning | TRL's name |
|---|---|---|
"""


def describe(name: str) -> Metric | None:
    """Return the entry of a metric, None if it has none; `reward/taste/mean` has that of `reward/<part>/mean`."""
    name = re.sub(r"^reward/.+/(mean|std|abstained)$", r"reward/<part>/\1", name)
    name = re.sub(r"^(|evaluate/)outcome/.+$", r"\1outcome/<class>", name)
    return METRICS.get(name) or METRICS.get(re.sub(r"^evaluate/.+?(_std|_before)?$", r"evaluate/<metric>\1", name))


def markdown() -> str:
    """Return the page docs/metrics.md."""
    page, group = _HEAD, ""
    for m in METRICS.values():
        if m.group != group:
            group = m.group
            page += f"\n## {group}\n\n| name | meaning | unit | healthy | TRL's name |\n|---|---|---|---|---|\n"
        page += f"| {_code(m.name)} | {m.meaning} | {m.unit} | {m.healthy} | {_code(m.old)} |\n"
    page += _COLUMNS_HEAD
    return page + "".join(f"| {_code(n)} | {meaning} | {_code(old)} |\n" for n, (meaning, old) in COLUMNS.items())


def _code(names: str) -> str:
    """Return the names in code quotes; remarks in brackets stay outside of them."""
    return re.sub(r"([\w/*<>]+)((?: \([^)]*\))?)(, |$)", r"`\1`\2\3", names) if names else ""


if __name__ == "__main__":
    print(markdown(), end="")
