"""`operant new`: what it writes passes its own test and trains; names that cannot be are refused."""

from pathlib import Path

import pytest
from cases import cases
from processes import Child

from operant.tools.cli import main


@pytest.mark.parametrize("kind", ["reward", "world", "method"])
@pytest.mark.slow
def test_a_starting_point_passes_its_own_test_and_trains(kind, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    name = f"first_{kind}"  # of its own: the last one is imported already
    assert main(["new", kind, name]) == 0
    train = capsys.readouterr().out.split("operant train ")[1].split()
    test = Child(lambda: pytest.main(["-q", "-p", "no:cacheprovider", f"test_{name}.py"]), output="said.txt")
    assert test.ends(300) == 0, Path("said.txt").read_text(encoding="utf-8")
    steps = [] if "--steps" in train else ["--steps", "1"]
    assert main(["train", *train, *steps, *"--batch 8 --minibatch 8 --probes 0 --evaluate none".split()]) == 0


@cases(
    (["reward"], "give a kind (reward, world, method) and a name"),
    (["rewards", "brevity"], "give a kind (reward, world, method) and a name"),
    (["reward", "class"], "'class' cannot be a module"),
    (["method", "operant"], "'operant' is taken"),
    (["reward", "max"], "'max' is taken"),
    (["world", "step"], "'step' is taken"),
    (["reward", "a/b"], "'a/b' cannot be a module"),
    (["reward", "there"], "there.py exists"),
    (["method", "tested"], "test_tested.py exists"),
)
def test_a_name_that_cannot_be_is_refused(words, reason, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("there.py", "test_tested.py"):
        (tmp_path / name).write_text("mine", encoding="utf-8")
    assert main(["new", *words]) == 2 and reason in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["test_tested.py", "there.py"]
