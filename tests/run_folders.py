"""Folders as runs leave them, written by hand."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import yaml


def run(folder, *, coef=0.1, seed=1, rewards=(1.0, 2.0), kls=(0.0, 3.0), after=None, replies=(), **options):
    """Write a run folder with one line per step. after: (reward, KL) on held-out tasks, answered by `replies`."""
    folder.mkdir(parents=True)
    config = {"steps": len(rewards), "reward": "letters:e", "keep": 2, "kl": {"coef": coef}, "learner": {"seed": seed}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config | options), encoding="utf-8")
    lines = [{"step": i + 1, "reward/mean": r, "kl/per_reply": k} for i, (r, k) in enumerate(zip(rewards, kls))]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    if after:
        rows = [{"task": f"t{i}", "query": "ab", "reply": text, "score": 1.0} for i, text in enumerate(replies)]
        evaluation = {"before": {"mean": 1.0, "kl": 0.0, "replies": rows}}
        evaluation["after"] = {"mean": after[0], "kl": after[1], "replies": rows}
        (folder / "evaluation.json").write_text(json.dumps(evaluation), encoding="utf-8")
    return folder


def probes(folder, name, replies):
    (folder / "probes").mkdir(exist_ok=True)
    rows = [
        {"task": t, "query": f"query {t}", "reply": text, "reward": 0.5, "rollout": 0} for t, text in replies.items()
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "probes" / name)
