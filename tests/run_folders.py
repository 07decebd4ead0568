"""Folders as runs leave them, written by hand."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from texts import write_rows


def run(folder, *, coef=0.1, seed=1, rewards=(1.0, 2.0), kls=(0.0, 3.0), after=None, before=(1.0, 0.0), **options):
    """Write a run folder with one line per step. `before`, `after`: (reward, KL) on held-out tasks.

    These were answered by `replies`; `scores` and `metrics`: what each reply and all of them got, before and after.
    """
    folder.mkdir(parents=True)
    replies, metrics = options.pop("replies", ()), options.pop("metrics", (None, None))
    scores = options.pop("scores", ([1.0] * len(replies),) * 2)
    config = {"steps": len(rewards), "reward": "letters:e", "keep": 2, "kl": {"coef": coef}, "learner": {"seed": seed}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config | options), encoding="utf-8")
    rows = [{"step": i + 1, "reward/mean": r, "kl/per_reply": k} for i, (r, k) in enumerate(zip(rewards, kls))]
    write_rows(folder / "metrics.jsonl", rows)
    evaluation = {}
    for when, (mean, kl), each, told in zip(("before", "after"), (before, after or before), scores, metrics):
        rows = [{"task": f"t{i}", "query": "ab", "reply": x, "score": s} for i, (x, s) in enumerate(zip(replies, each))]
        evaluation[when] = {"mean": mean, "kl": kl, "replies": rows} | ({"metrics": told} if told else {})
    if after:
        (folder / "evaluation.json").write_text(json.dumps(evaluation), encoding="utf-8")
    return folder


def probes(folder, name, replies):
    (folder / "probes").mkdir(exist_ok=True)
    known = {"reward": 0.5, "rollout": 0}
    rows = [{"task": t, "query": f"query {t}", "reply": text} | known for t, text in replies.items()]
    pq.write_table(pa.Table.from_pylist(rows), folder / "probes" / name)


def row(i, count=3, **more):
    known = {"task": f"t{i}", "group": i, "rollout": i, "turn": 0, "query": f"Query {i}", "reply": f" reply {i}"}
    known |= {"reward": 0.5, "reply_tokens": count, "end": "stop", "tokens": [f" w{j}" for j in range(count)]}
    return known | {"logprobs": [-1.0] * count, "ref_logprobs": [-1.5] * count} | more
