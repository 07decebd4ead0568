"""All snippets of the README run in order in one namespace."""

import json
import re
from pathlib import Path

import pytest

from operant.storage.hub import builtin_models
from operant.tools.report.diagnosis import diagnose, read_history, verdict

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.skipif("reviews-lm" not in builtin_models(), reason="the built-in model is not in this checkout")
def test_the_python_snippets_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    snippets = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(snippets) == 8
    for snippet in snippets:
        exec(compile(snippet, "README.md", "exec"), names)
    assert names["metrics"]["step"] == 1 and names["learner"].progress.step == 2
    assert {path.parent.name for path in tmp_path.glob("runs/*/report.html")} == {"personal", "words", "own"}
    metrics = (tmp_path / "runs/personal/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    first, last = json.loads(metrics[0]), json.loads(metrics[-1])
    assert "It learned" in verdict(history := read_history(tmp_path / "runs/personal"), found := diagnose(history))
    assert not found and not (tmp_path / "runs/personal/log.txt").exists(), "no warning during training either"
    half = 1.96 * max(x["reward/std"] / x["rollout/count"] ** 0.5 for x in (first, last))
    assert last["reward/mean"] - half > first["reward/mean"] + half, "the reward moves beyond its interval"
