"""People as a reward, and the stand-in for them: what answers are worth, waiting, deadlines, and the whole road."""

import json
import math
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
from cases import cases
from processes import until

import operant
from operant import OperantError, Rollout, Task, machine
from operant.rewards import resolve
from operant.tools.cli import main
from operant.tools.labels.agreement import win_rates
from operant.tools.labels.humans import Humans
from operant.tools.labels.items import Item
from operant.tools.labels.stand_in import Labeller, preference, taste
from operant.tools.labels.store import Store
from operant.types import StoppedError

pytestmark = pytest.mark.filterwarnings("ignore")
ROOT = Path(__file__).parents[1]


def rollouts(*replies: str, task: str = "t") -> list[Rollout]:
    return [Rollout(Task(task, "2 + 2 ="), 0, [], [reply], query="2 + 2 =") for reply in replies]


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr("operant.tools.labels.humans.POLL", 0.02)


def answering(path, answer, name="anna"):
    """Begin to answer every item of the database, once there is one."""

    def work():
        with Store(path) as store:
            until(lambda: store.next_item(name))
            while (item_id := store.next_item(name)) is not None:
                store.add_label(item_id, name, answer(store.item(item_id)))

    thread = threading.Thread(target=work)
    thread.start()
    return thread


@cases(
    ("pick", ("a", "b", "b", "c"), {"best": 1}, [0, 1, 1, 0]),
    ("rank", ("a", "b", "c", "d"), {"ranks": [2, 1, 3, None]}, [0.5, 1, 0, None]),
    ("rank", ("a", "b"), {"ranks": [1, 1]}, [0.5, 0.5]),
    ("rank", ("a", "b"), {"all_bad": True}, [0, 0]),
    ("rate", ("a", "b", "a"), {"ratings": [4]}, [0.75, 0.75, 0.75]),
    ("good", ("a", "b"), {"good": [True]}, [1, 1]),
)
def test_answers_become_scores(kind, replies, answer, wanted, tmp_path):
    reward = Humans(str(tmp_path / "labels.sqlite"), kind=kind, minutes=1)
    reward.check()
    thread = answering(tmp_path / "labels.sqlite", lambda item: answer)
    assert reward(rollouts(*replies)) == wanted
    assert reward(rollouts(*replies)) == wanted  # a resumed run asks the same, and nobody has to answer twice
    thread.join()


def test_scores_of_several_people_are_averaged_and_nobody_is_waited_for_for_ever(tmp_path, capsys):
    reward = Humans(str(tmp_path / "labels.sqlite"), kind="pick", labellers=2, minutes=0.005)
    asked = rollouts("a", "b") + rollouts("a", "a", task="same") + rollouts("c", "d", task="late")
    with pytest.raises(OperantError, match="nobody labelled any of 2 items"):  # equal replies cannot be compared
        reward(asked)
    assert "2 items wait for labels: operant label" in capsys.readouterr().err
    with Store(tmp_path / "labels.sqlite") as store:
        assert store.next_item("anna") is None  # closed: too late, until the run is resumed
        first = store.item_of(1)
        store.add_items([first])
        assert store.next_item("anna") == first.id
        store.close_items([first.id])
    with pytest.raises(OperantError, match="set samples to 2 or more"):
        reward(rollouts("a"))
    again = rollouts("e", "f")
    reward.minutes = 1
    for name, best in (("anna", 0), ("bert", 1)):
        answering(tmp_path / "labels.sqlite", lambda item, best=best: {"best": best}, name)
    assert reward(again) == [0.5, 0.5]


def test_a_skip_is_an_answer_and_a_stop_ends_the_waiting(tmp_path, monkeypatch):
    path, asked = tmp_path / "labels.sqlite", rollouts("a", "b") + rollouts("c", "d", task="other")
    reward = Humans(str(path), kind="pick")
    answering(path, lambda item: None if item.replies[0] == "a" else {"best": 0})
    assert reward(asked) == [None, None, 1, 0]
    answering(path, lambda item: None)
    with pytest.raises(OperantError, match="all of 1 items were skipped: open the page"):
        reward(rollouts("g", "h"))
    answering(path, lambda item: {"best": 1})
    assert reward(rollouts("g", "h")) == [0, 1], "a resumed run asks again"
    monkeypatch.setattr(operant.distributed, "world", lambda: 2)
    answering(path, lambda item: None)
    two = Humans(str(path), labellers=2, minutes=0.05)
    assert two(rollouts("i", "j")) == [None, None], "another rank may have labels"
    assert len(Store(path).skipped()) == 1, "who skipped i and j alone is asked again"
    machine.stop_asked.set()
    try:
        with pytest.raises(StoppedError, match="stopped while 1 of 1 items waited for labels"):
            reward(rollouts("e", "f"))
    finally:
        machine.stop_asked.clear()
    turn = operant.Turn(prompt=[1], action=[2], end="stop", version=0)
    with pytest.raises(OperantError, match=r"humans:.*here an episode has several turns"):
        reward([Rollout(Task("t", "go"), 0, [turn, turn], ["a", "b"], query="go")])


def test_people_are_one_reward_among_others(tmp_path):
    path = str(tmp_path / "labels.sqlite")
    reward = resolve({f"humans:{path}": {"weight": 2, "minutes": 1, "kind": "good"}, "letters:e": 1})
    operant.rewards.check(reward)
    with Store(path) as store:
        assert store.kind == "good"
    answering(path, lambda item: {"good": [item.replies[0] == "eee"]})
    judged = operant.rewards.judge(reward, rollouts("eee", "abc"))
    assert judged.parts["humans"] == [1, 0] and set(judged.parts) == {"humans", "letters"}
    with pytest.raises(OperantError, match="minutes=0 must be above 0"):
        resolve(f"humans:{path}", {"minutes": 0})
    with pytest.raises(OperantError, match="needs the database"):
        resolve("humans")


def test_the_picks_of_the_stand_in_are_a_softmax_of_its_preference(tmp_path):
    replies = ("a good film about my dog and its friends in the old town", "a bad film", "good good good good")
    # 14 words, 13 of them different, one of them praise; a bad one; four times the same one
    worth = [1 - 0.1 * (14 - 13), -1 - 0.1 * 11, 3 - 4 * 0.75 - 0.1 * 10]
    assert taste(rollouts(*replies)) == [preference(reply) for reply in replies] == pytest.approx(worth)
    weights = [math.exp(one) for one in worth]
    shares = [weight / sum(weights) for weight in weights]
    for labeller, expected in ((Labeller(noise=1.0), shares), (Labeller(shuffled=True), [1 / 3] * 3)):
        picks = Counter(labeller.answer("pick", str(number), replies)["best"] for number in range(3000))
        assert [picks[place] / 3000 for place in range(3)] == pytest.approx(expected, abs=0.04)
    with Store(tmp_path / "labels.sqlite", kind="rank") as store:
        store.add_items([Item(str(number), "p", replies) for number in range(3)])
        assert Labeller(0).label(store) == 3 and store.labels()[0].answer == {"ranks": [1, 3, 2]}
    with pytest.raises(OperantError, match="noise=-1"):
        Labeller(-1)


def test_win_rates_by_people_by_hand(tmp_path, capsys):
    with Store(tmp_path / "judge.sqlite", kind="rank", overlap=2) as store:
        store.add_items(Item(str(n), "p", ("x", "y", "z"), ("old", "new", None)) for n in range(4))
        for n, ranks in enumerate([[2, 1, 3], [1, 2, None], [1, 1, 2]]):  # new wins, old wins, a tie
            store.add_label(str(n), "anna", {"ranks": ranks})
        store.add_label("1", "bert", {"ranks": [2, 1, None]})  # the two labellers of an item count half each
    assert main(["label", str(tmp_path / "judge.sqlite"), "--wins"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    # (1 + 1/2 + 1/2) / 3, and Wilson's interval of 2/3 of 3
    assert " ".join(lines[2]) == "new 67 % 21 % to 94 % 3"
    with Store(tmp_path / "picks.sqlite") as store:  # the pick of z says nothing of x and y
        store.add_items([Item("1", "p", ("x", "y", "z"), ("old", "new", "newest"))])
        store.add_label("1", "anna", {"best": 2})
        assert [(row["source"], row["prompts"]) for row in win_rates(store)] == [("old", ""), ("newest", "1")]
    with Store(tmp_path / "shared.sqlite") as store:  # x is from old and newest, so that these two are equal
        store.add_items([Item("1", "p", ("x", "y"), (["old", "newest"], "new"))])
        store.add_label("1", "anna", {"best": 0})
        rates = {row["source"]: row["preferred to the first"] for row in win_rates(store)}
        assert rates == {"old": "", "newest": "50 %", "new": "0.0 %"}
    with Store(tmp_path / "none.sqlite") as store:
        store.add_items([Item("1", "p", ("x", "y"))])
        store.add_label("1", "anna", {"best": 0})
    assert main(["label", str(tmp_path / "none.sqlite"), "--wins"]) == 2
    assert "no comparison of two sources" in capsys.readouterr().err


@pytest.mark.slow
def test_the_road_is_walked_and_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
    sys.path[:0] = [str(ROOT / "recipes")]
    import rlhf

    words = ["rlhf.py", "--work", str(tmp_path), *"--labels 20 --steps 1 --rounds 2 --limit 16".split()]
    monkeypatch.setattr(sys, "argv", words)
    rlhf.main()
    found = json.loads((tmp_path / "eval.json").read_text())
    assert len(found["models"]) == 3
    assert capsys.readouterr().out.count("$ operant train sentiment") == 2
    (tmp_path / "eval.json").unlink()
    rlhf.main()
    again = capsys.readouterr().out
    assert "$ operant train" not in again and "$ operant generate" not in again
    assert json.loads((tmp_path / "eval.json").read_text()) == found
