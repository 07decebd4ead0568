"""Text games: their metrics, verdict and findings, and their transcripts in the report, against hand-made ones."""

import json
from dataclasses import replace

import pytest
from browsing import LAPTOP, PHONE, visit
from cases import cases, slow
from houses import ROOMS, House, record
from pages import low_contrast, overflows
from processes import served
from toys import letters, lm

from operant import Rollout, Task, Turn
from operant.api import runs
from operant.metrics.games import of_games, of_replies, transcript
from operant.runs.folder import RunFolder
from operant.tools.report import games, parquet, run_report
from operant.tools.report.diagnosis import History, diagnose, read_history, verdict
from operant.tools.report.runs import read_run
from operant.tools.report.server import Server, Serving
from operant.tools.report.summary import results

WON = ["kitchen", "cellar", "kitchen", "garden", "vault"]
LOST = ["attic", "", "kitchen"]
EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


def rollout(game, **more):
    turns = [Turn([5], [6], trained=turn["by"] == "policy") for turn in game["turns"]]
    texts = [turn["command"] for turn in game["turns"]]
    return Rollout(Task(game["name"], "go"), 0, turns, texts, info={"game": game}, **more)


def test_the_metrics_of_two_games_by_hand():
    won = record(WON, by=["policy", "expert", "expert", "policy", "policy"])
    lost = record(LOST, name="house/2", lost=True, most=4.0, score=1.0, optimum=None)
    won["turns"][0] |= {"fit": 0, "forgotten": 0, "copied": True}
    assert of_games([rollout(won), rollout(lost), rollout(won, end="crashed")]).result() == {
        "game/won": 1 / 2,
        "game/lost": 1 / 2,
        "game/score": (1 + 1 / 4) / 2,
        "game/turns": (5 + 3) / 2,
        "game/turns_to_win": 5,
        "game/optimum_ratio": 5 / 3,
        "game/examples": 2 / 8,
        "game/states_per_1000": 1000 * (4 + 1) / 8,  # hall, kitchen, cellar, garden; only the hall of the other house
        "actions/valid": 4 / 6,
        "actions/copied_from_prompt": 1 / 6,
        "actions/empty": 1 / 6,
        "memory/turns_fit": 5 / 6,
        "memory/forgotten_tokens": 10 / 6,
    }
    each = {"won": [1, 0], "score": [1, 1 / 4], "turns": [5, 3], "turns_to_win": [5, None]}
    each["optimum_ratio"] = [5 / 3, None]
    assert of_replies([rollout(won), rollout(lost)]) == {f"game/{name}": found for name, found in each.items()}
    assert of_games([Rollout(Task("a", "b"), 0, [], [])]).result() == {} == of_replies([])


# --- a run ------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path, tokenizer = tmp_path_factory.mktemp("runs") / "house", letters()
    tasks, held = ([Task(f"{name}/{i}", "go") for i in range(n)] for name, n in (("house", 4), ("unseen", 40)))
    options = {"steps": 12, "batch": 16, "evaluate_every": 12, "max_tokens": 8, "optimizer.lr": 1e-2, "kl.coef": 0.0}
    options |= {"epochs": 1, "minibatch": 16, "probes": 0, "watch_every": 0}
    given = {"policy": lm("gpt2", len(tokenizer), spread=0.05), "tokenizer": tokenizer, "env": House(), "tasks": tasks}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *a, **k: None)
        list(runs(path, evaluate=held, **given, **options))
    return path


def test_the_table_of_rollouts_keeps_every_game(folder):
    found, metrics = parquet.games(folder / "rollouts" / "step-00012.parquet"), read_history(folder).metrics[-1]
    assert len(found) == 16 and sum(game["won"] for game in found) / 16 == metrics["game/won"]
    assert sum(len(game["turns"]) for game in found) / 16 == metrics["game/turns"]
    turn = found[0]["turns"][0]
    assert turn["options"][turn["chosen"]][0] == turn["command"]
    assert sum(share for _, share in turn["options"]) == pytest.approx(1)
    assert all(isinstance(turn["value"], float) for game in found for turn in game["turns"])


def test_held_out_games_are_compared_before_and_after(folder):
    known = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    replies = [known[when]["replies"] for when in ("before", "after")]
    rates = [sum(r["metrics"]["game/won"] for r in each) / 40 for each in replies]
    assert [sum("game" in r for r in each) for each in replies] == [32, 32]
    history = read_history(folder)
    last = history.metrics[-1]
    assert [last["evaluate/game/won_before"], last["evaluate/game/won"]] == rates
    assert f"held-out success rate {100 * rates[0]:.0f} % -> {100 * rates[1]:.0f} % (" in verdict(history, [])
    run = results([read_run(folder)], held_out=True)["game/won"]
    assert [run.before.mean, run.after.mean] == rates
    numbers = {row["label"]: row for row in run_report.key_numbers(history)}
    assert numbers["Held-out success rate"]["after"] == 100 * rates[1] and "game/won" not in numbers


def test_the_page_embeds_games_of_the_first_and_the_last_step(folder, tmp_path):
    data = games.embedded(folder)
    labels = [group["label"] for group in data["groups"]]
    assert labels[0] == games.HELD_OUT["before"] and labels[-1] == games.HELD_OUT["after"] and len(labels) == 12
    assert {"step 1", "step 12"} <= set(labels) and "12 of 14" in data["summary"]
    assert len({game["won"] for game in data["groups"][1]["games"]}) == 2
    small = games.embedded(folder, budget=20_000)
    assert len(json.dumps(small["groups"])) < 25_000 and len(small["groups"]) >= 2
    assert games.embedded(tmp_path) is None
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts/step-00001.parquet").symlink_to(folder / "rollouts/step-00012.parquet")
    (tmp_path / "rollouts/step-00002.parquet").write_bytes(b"PAR1 and then the disk was full")
    assert [group["label"] for group in games.embedded(tmp_path)["groups"]] == ["step 1"]
    game = record(["kitchen", "hall"] * 150)
    game["turns"][0]["state"] = "x" * 5000
    short = games.shortened(game)
    assert (len(short["turns"]), short["further"]) == (games.TURNS, 300 - games.TURNS)
    assert short["turns"][0]["state"].endswith("(3,000 more characters)")


# --- findings ---------------------------------------------------------------------------------------------------------
def played(steps=40, **series):
    base = {"reward/mean": 0.0, "reward/std": 0.2, "rollout/count": 16, "game/turns": 20.0, "game/won": 0.3}
    base |= {"actions/valid": 0.9, "actions/copied_from_prompt": 0.1, "actions/empty": 0.0, "text/top_word": 0.2}
    return [{"step": i + 1} | base | {k.replace("__", "/"): v for k, v in series.items()} for i in range(steps)]


@cases(
    ("invalid_commands", {"actions__valid": 0.3}, "does not understand 70 %"),
    ("copied_commands", {"actions__copied_from_prompt": 0.6, "actions__valid": 0.3}, "60 % of the policy's"),
    ("empty_commands", {"actions__empty": 0.2, "actions__valid": 0.3, "text__empty": 0.2}, "20 % of the policy's"),
    ("never_won", {"game__won": 0.0, "game__score": 0.25}, "None of the 640 games of 40 steps"),
)
def test_a_rule_of_games_reports_its_fault_alone(name, series, said):
    (finding,) = (f for f in diagnose(History(played(**series))) if f.name != "flat")
    assert finding.name == name and said in finding.message and "--env" in finding.remedy


def test_the_verdict_counts_wins_once_there_is_one():
    rates = [0.1] * 5 + [0.2 + 0.02 * i for i in range(35)]
    history = History([m | {"game/won": rate} for m, rate in zip(played(), rates)])
    assert verdict(history, []).startswith("It learned: success rate 10 % in steps 1 to 4 -> 84 % in steps 36 to 40 (+")
    assert diagnose(History([m | {"game/won": 0.0} for m in played(20)])) == []  # too early
    never = History([m | {"game/won": 0.0, "reward/mean": 0.05 * i} for i, m in enumerate(played())])
    assert "reward 0" in verdict(never, []) and "success" not in verdict(never, [])


# --- in a browser -----------------------------------------------------------------------------------------------------
def write(path):
    """A run of two steps with hand-made games: a lost one, and a won one with all that a turn may have."""
    lost, won = record(LOST, name=EVIL, lost=True), record(WON, by=["policy", "random", "expert", "policy", "policy"])
    lost["map"] = {"rooms": {**ROOMS, EVIL: [3, 0]}, "ways": lost["map"]["ways"]}
    lost["turns"][0] |= {"state": EVIL, "copied": True}
    won["turns"][3] |= {"thought": f"{EVIL} the garden is next", "reply": "think... garden", "reward": -0.5}
    won["turns"][4] |= {"options": [["vault", 0.9], [EVIL, 0.1]], "chosen": 0}
    folder = RunFolder.create(path, {"steps": 2})
    for step, game in ((1, lost), (2, won)):
        folder.log(step, {"game/won": step - 1.0, "game/turns": 4.0, "reward/mean": 0.5, "actions/valid": 0.5 * step})
        known = {"task": "t", "query": "q", "reply": "r", "end": "stop", "rollout": 0, "ids": [1]}
        rows = [known | {"turn": i, "values": [0.125 * i]} for i in range(len(game["turns"]))]
        folder.rollouts(step, [*rows[:-1], rows[-1] | {"game": json.dumps(game), "reward": 1.0}])
    folder.close()
    return folder.path


@pytest.fixture(scope="module", params=["static", slow("live")])
def url(request, tmp_path_factory):
    path = write(tmp_path_factory.mktemp("pages") / "house")
    if request.param == "static":
        yield run_report.write_report(path).as_uri()
        return
    with served(Server(path, Serving(port=0))) as server:
        yield server.url


def panes(page):
    both = page.locator("#plays .pane").nth(0), page.locator("#plays .pane").nth(1)
    for pane in both:  # the live page fetches each by itself
        pane.locator(".result").first.wait_for()
    return both


def test_games_can_be_stepped_through_and_a_turn_shows_its_player_numbers_and_options(browser, url):
    with visit(browser, url) as page:
        early, late = panes(page)
        log, lost = late.locator(".log > li"), early.locator(".log > li")
        assert [log.nth(i).locator(".by").all_inner_texts() for i in (1, 2, 3)] == [[], ["random"], ["expert"]]
        assert "reward −0.5" in log.nth(4).inner_text() and "value 0.375" in log.nth(4).inner_text()
        assert not log.nth(4).get_by_text("the garden is next").is_visible()
        log.nth(4).get_by_text("Thought").click()
        assert log.nth(4).get_by_text("the garden is next").is_visible()
        assert log.nth(5).locator(".options li").all_inner_texts()[0].split() == ["vault", "90", "%"]
        assert "not understood" in lost.nth(1).inner_text() and "copied from the prompt" in lost.nth(1).inner_text()
        assert EVIL in early.inner_text()  # as text: a script would have failed the visit
        here = lambda pane: pane.locator("svg .here text").text_content()  # noqa: E731
        assert "lost after 3 turns" in early.inner_text() and "won in 5 turns" in late.inner_text()
        assert here(early) == "kitchen" and here(late) == "vault"
        assert page.locator("#games figure").count() >= 2
        late.get_by_role("button", name="Turn back").click()
        assert here(late) == "garden" and late.locator("output").inner_text() == "turn 4 of 5"
        late.locator(".stage").press("Home")
        assert here(late) == "hall" and late.locator(".now").inner_text().splitlines()[-1] == "You are in the hall."
        late.locator(".stage").press("ArrowRight")
        assert here(late) == "kitchen" and late.locator(".log > li[aria-current] .count").inner_text() == "1"
        assert here(early) == "kitchen"  # each pane by itself
        late.get_by_label("when").select_option("step 1")
        late.locator(".head", has_text="lost after 3 turns").wait_for()  # the live page fetches it


@pytest.mark.parametrize("size", [LAPTOP, PHONE], ids=["laptop", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.slow
def test_games_fit_and_can_be_read(browser, url, size, scheme):
    with visit(browser, url, size, scheme) as page:
        page.evaluate("document.querySelectorAll('section > details').forEach((it) => (it.open = true))")
        panes(page)
        page.evaluate("document.querySelector('#replies').remove()")
        assert overflows(page) == [] and low_contrast(page) == []


def test_branches_of_an_episode_are_a_tree(browser, tmp_path):
    said = (("start", "a", -1), ("two?", "b", 0), ("two?", "c", 0), ("go on", "d", 1))
    turns = [dict(zip(("state", "command", "parent"), turn)) | {"by": "policy", "valid": True} for turn in said]
    folder = RunFolder.create(tmp_path / "tree", {"steps": 1})
    folder.log(1, {"reward/mean": 0.5})
    known = {"task": "t", "query": "q", "reply": "r", "end": "stop", "rollout": 0, "ids": [1], "reward": 1.0}
    folder.rollouts(1, [known | {"turn": 3, "game": json.dumps({"name": "t", "turns": turns})}])
    folder.close()
    with visit(browser, run_report.write_report(folder.path).as_uri()) as page:
        log = panes(page)[0].locator(".log > li")
        told = [" ".join(text.split()) for text in log.all_inner_texts()]
        assert told == ["start", "1 a two?", "2 branch 1 of 2 b go on", "4 d", "3 branch 2 of 2 c"]
        left = [log.nth(i).bounding_box()["x"] for i in range(5)]
        assert left[1] < left[2] == left[3] == left[4]


def test_short_commands_that_repeat_are_no_fault_of_a_game():
    spoken = {"text__top_word": 0.6, "text__repeated": 0.9, "rollout__reply_tokens": 2.0}
    assert diagnose(History(played(**spoken))) == []


def test_a_transcript_has_the_options_and_their_probabilities():
    game = record(["kitchen"])
    turns = [Turn([5], [7], values=[0.25], options=[[7], [8]], chosen=0, probabilities=[0.75, 0.25])]
    (turn,) = transcript(replace(rollout(game), turns=turns), lambda ids: f" {ids[0]}")["turns"]
    assert (turn["options"], turn["chosen"], turn["value"]) == ([["7", 0.75], ["8", 0.25]], 0, 0.25)
