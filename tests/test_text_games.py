"""Text games: memory within a budget, templates, rewards, examples, and the bundled world with its known optimum."""

import random
import re
from dataclasses import replace
from itertools import product

import pytest
import torch
from cases import cases
from toys import letters, lm

import operant
from operant import Learner, OperantError, Task
from operant.apps.games.rooms import CARRIED, Rooms, RoomsGame, actions, layout, solution, won
from operant.apps.games.textworld import SCORED, clean
from operant.envs import for_evaluation
from operant.envs.games import GameState, TextGames
from operant.envs.isolated import IsolatedEnv, WorkerEnv
from operant.envs.memory import TEMPLATES, GameMemory, Template
from operant.runs.config import configure


# --- memory and templates ---------------------------------------------------------------------------------------------
def words(text):
    return len(text.split())


@cases((None, None, 4, 0), (2, None, 2, 6), (0, None, 0, 12), (None, 17, 2, 6), (3, 14, 1, 9), (None, 2, 0, 12))
def test_a_memory_forgets_the_oldest_turns_until_the_prompt_fits(turns, room, shown, forgotten):
    memory = GameMemory(Template(), turns, count=words, room=room)
    memory.objective = "win it"
    for n in range(4):
        memory.add(f"state{n}", f"go{n}")  # three words with the sign before the command
    prompt = memory.prompt("now", "a lamp", "x or y")
    past = "".join(f"state{n}\n> go{n}\n\n" for n in range(4 - shown, 4))
    assert prompt.text == f"win it\n{past}now\na lamp\nYou can x or y.\n>"
    assert (prompt.turns, prompt.forgotten) == (shown, forgotten)


CHOOSE = "You choose the action to"


@cases(
    ("plain", "Win.\nA.\n> go\n\nB.\nA lamp.\nYou can go or take.\n>"),
    ("state_info_you", "Win.\nA.\nYou go\n\nB.\n[A lamp.]\n[You can go or take.]\nYou"),
    ("what_do_you_do", "Win.\nA.\nWhat do you do?\ngo.\n\nB.\nA lamp.\nYou could go or take.\nWhat do you do?\n"),
    ("fork", f"Win. A. {CHOOSE} go. B. A lamp. Your possible actions are to go or take. {CHOOSE}"),
    ("thought", "Win.\nA.\nThought: Why not? Action: go\n\nB.\nA lamp.\nYou can go or take.\nThought:"),
)
def test_the_templates(name, text):
    memory = GameMemory(TEMPLATES[name])
    memory.objective = "Win."
    memory.add("A.", "go", "Why not?")
    assert memory.prompt("B.", "A lamp.", "go or take").text == text


def test_objectives_are_not_repeated_and_thoughts_are_forgotten():
    memory = GameMemory(TEMPLATES["thought"], thoughts=False)
    memory.objective = "Win."
    memory.add("A.", "go", "Why not?")
    assert memory.prompt("Win. B.").text == "A.\nThought:  Action: go\n\nWin. B.\nThought:"


@cases(
    (" go north\nYou are", "", "", "go north"),
    ("go north. Then east", "", "", "go north"),
    ("\n\n take lamp ", "", "", "take lamp"),
    ("I need it. Action: take lamp", "Action:", "I need it.", "take lamp"),
    ("take lamp", "Action:", "take lamp", ""),
    ("", "", "", ""),
    ("x" * 10_000, "", "", "x" * 200),
    ("...", "", "", ""),
)
def test_the_command_in_a_reply(reply, mark, thought, command):
    assert TextGames(template={"thought": mark}).read(reply) == (thought, command)


# --- the world --------------------------------------------------------------------------------------------------------
class Ladder:
    """A game of three rungs: `up` climbs, `down` falls to the ground; the third rung wins, `jump` loses."""

    optimum = 3

    def reset(self):
        self.rung = 0
        return self.state("You stand below a ladder.")

    def step(self, command):
        moves = {"up": self.rung + 1, "down": 0, "jump": -1}
        valid = command in moves
        self.rung = moves.get(command, self.rung)
        return self.state(f"Rung {self.rung}." if valid else "What?", valid)

    def state(self, text, valid=True):
        end = {"score": max(self.rung, 0), "won": self.rung == 3, "lost": self.rung == -1}
        known = {"objective": "Climb.", "commands": ("up", "down", "jump"), "most": 3.0, "key": str(self.rung)}
        return GameState(text, valid=valid, **known, **end)

    def expert(self):
        return "up"

    def close(self):
        """There is nothing to close, and no map."""

    map = close


class Ladders(TextGames):
    def make(self, task):
        return Ladder()

    def games(self, split):
        return [Task(f"{split}/{n}", "Climb") for n in range(2)]


def played(world, *replies):
    steps = [world.reset({7: Task("t", "Climb")})[7], *(world.step({7: reply})[7] for reply in replies)]
    return steps, steps[-1].info["game"]


def test_rewards_are_added_and_the_end_is_told():
    world = Ladders(score=3.0, win=2.0, lose=-2.0, living=-0.125, invalid=-0.5)
    steps, record = played(world, "up", "fly", "up", "down", "jump")
    assert [s.reward for s in steps[1:]] == [1 - 0.125, -0.5 - 0.125, 1 - 0.125, -2 - 0.125, -2 - 0.125]
    assert steps[-1].terminated and not steps[-1].truncated and record["lost"] and not record["won"]
    assert [turn["valid"] for turn in record["turns"]] == [True, False, True, True, True]
    steps, record = played(world, "up", "up", "up")
    assert steps[-1].reward == 1 + 2 - 0.125 and record["won"] and record["score"] == 3
    steps, _ = played(Ladders(max_turns=2), "up", "down")
    assert steps[-1].truncated and not steps[-1].terminated


def test_whole_history_is_appended_until_it_no_longer_fits():
    world = Ladders(memory=None)
    world.measure(words, 40)
    steps, _ = played(world, *["down"] * 6)
    assert steps[0].fresh and steps[1].text == "\n\nRung 0.\n>" and not steps[1].fresh
    later = [step for step in steps[1:] if step.fresh]
    assert later and later[0].text.startswith("Climb.\n") and words(later[0].text) <= 20
    assert all(words(step.text) <= 40 for step in steps)
    steps, _ = played(world, "down. " + "and so on " * 10)  # what stands behind the command is in the context, too
    assert steps[1].fresh


def test_examples_are_appended_to_a_whole_history_too():
    steps, record = played(Ladders(memory=None, examples=0.5, max_turns=12), *["down"] * 5)
    assert not any(step.fresh for step in steps[1:]) and any(step.examples for step in steps)
    shown = iter(record["turns"])
    for step in steps[1:]:
        next(shown)  # the reply
        after = "".join(f"{turn['state']}\n> {turn['command']}\n\n" for turn in [next(shown) for _ in step.examples])
        assert step.text.startswith(f"\n\n{after}") and step.text.endswith("\n>")
    assert [turn["fit"] for turn in record["turns"] if turn["by"] == "policy"][1] == 1 + len(steps[1].examples)


def test_examples_of_the_world_depend_on_the_commands_alone():
    once, record = played(Ladders(examples=0.5, max_turns=40), *["down"] * 12)
    assert played(Ladders(examples=0.5, max_turns=40), *["down"] * 12)[0] == once
    by = [turn["by"] for turn in record["turns"]]
    assert 4 < by.count("random") < 30 and by.count("policy") == 12
    shown = next(step for step in once if step.examples)
    assert f"> {shown.examples[-1][0]}\n" in shown.text
    _, record = played(Ladders(examples=0.9, example_player="expert"), "down")
    assert record["won"] and [turn["by"] for turn in record["turns"]] == ["policy", "expert", "expert", "expert"]


def test_a_choice_is_played_as_it_was_offered():
    _, record = played(Ladders(choose=True), " up, slowly.")
    assert record["turns"][0]["command"] == "up, slowly."


class Opening(Ladders):
    """Its first turn is an example, too."""

    def reset(self, tasks):
        return {slot: replace(first, examples=[("up", 1.0)]) for slot, first in super().reset(tasks).items()}


def test_a_learner_trains_on_episodes_with_examples():
    world = Opening(examples=0.5, max_turns=6, memory=1)
    learner = Learner(lm("llama", 40), tokenizer=letters(), env=world, max_tokens=3)
    rollouts = learner.play([Task(str(n), "Climb") for n in range(6)])
    for rollout in rollouts:
        game = rollout.info["game"]["turns"]
        assert [turn.trained for turn in rollout.turns] == [False, *(turn["by"] == "policy" for turn in game)]
        assert len(rollout.texts) == len(rollout.turns)
    metrics = learner.step(rollouts, [0.0] * 6)
    assert metrics["rollout/unpaid"] == 6 and metrics["rollout/logprob_gap"] < 1e-4
    assert metrics["rollout/untrained"] == sum(not t.trained for r in rollouts for t in r.turns)
    assert torch.isfinite(torch.tensor(metrics["update/grad_norm"]))


def test_a_thought_that_is_too_long_is_followed_by_no_command():
    world = Ladders(template="thought", thought_tokens=2)
    world.measure(words, None)
    _, record = played(world, "Up now. Action: up", "Up it is now. Action: up")
    assert [turn["command"] for turn in record["turns"]] == ["up", ""]
    assert [turn["thought"] for turn in record["turns"]] == ["Up now.", "Up it is now."] and record["score"] == 1


def test_a_budget_of_tokens_needs_a_counter_and_room():
    world = Ladders(tokens=1)
    with pytest.raises(OperantError, match=r"env\.tokens=1: nothing counts tokens here"):
        world.reset({0: Task("t", "x")})
    world.measure(words, None)
    with pytest.raises(OperantError, match=r"env\.tokens=1: the first prompt of game .* alone has \d+; allow more"):
        world.reset({0: world.games("test")[0]})


@pytest.mark.parametrize("form", [Rooms, WorkerEnv])
def test_a_policy_is_measured_without_examples(form):
    given = {"memory": 0, "test_games": 1, "examples": 0.9, "example_player": "expert", "max_turns": 4}

    def made(**more):
        options = given | more
        return Rooms(**options) if form is Rooms else form("operant.apps.games.rooms:Rooms", options, workers=1)

    plain = made(examples=0)
    assert for_evaluation(plain) is plain  # no second set of workers
    # A tokenizer of more than 128 kB, the most that an argument of a program may have.
    learner = Learner("builtin:reviews-lm", env=made(), algorithm="rloo", reference=None, max_tokens=4)
    tasks, by = Rooms(**given).games("test"), {}
    for stream in ("train", "evaluate"):
        [rollout] = learner.play(tasks, stream=stream)
        by[stream] = {turn["by"] for turn in rollout.info["game"]["turns"]}
    assert by == {"train": {"policy", "expert"}, "evaluate": {"policy"}}


def test_a_recipe_declares_short_names_and_keeps_its_options_of_a_world_in_workers():
    env = configure({"memory": 3, "env.examples": 0.33}, "rooms").parts["env"]
    assert (env["memory"], env["examples"]) == (3, 0.33)
    found = configure({"env": "workers:rooms", "env.workers": 2}, "rooms")
    assert found.left_out == {} and configure({}, "rooms").parts["env"].items() <= found.parts["env"].items()
    other = configure({"env": "http", "env.url": "http://127.0.0.1:1"}, "rooms")
    assert other.left_out == {"rooms, env": ["env.invalid", "env.train_games", "env.memory"]}


@pytest.mark.parametrize("form", [WorkerEnv, IsolatedEnv])
@pytest.mark.slow
def test_worlds_in_workers_count_tokens_as_the_learner_does(form):
    """The prompts are those of the world in this process, and no longer than the budget."""
    given = {"memory": 8, "tokens": 90, "test_games": 1}
    prompts = []
    for env in (Rooms(**given), form("operant.apps.games.rooms:Rooms", given, workers=1)):
        learner = Learner("builtin:rooms", env=env, algorithm="rloo", reference=None, max_tokens=12, threads="1")
        [rollout] = learner.play(Rooms(**given).games("test"), stream="evaluate")
        prompts.append([turn.prompt for turn in rollout.turns])
    assert prompts[0] == prompts[1] and len(prompts[0]) > 8 and 60 < max(map(len, prompts[0])) <= 90


# --- rooms ------------------------------------------------------------------------------------------------------------
def test_every_game_is_won_by_its_solution_and_by_none_shorter():
    """The search is compared with a blind one: all commands of the game, junk included, to the depth of the optimum."""
    for seed in range(3):
        fixed, start = layout(3, f"small/{seed}")
        optimum, level = len(solution(fixed, start)), {start}
        for _ in range(optimum - 1):
            level = {after for now in level for _, after in actions(fixed, now)}
            assert not any(won(fixed, now) for now in level)
        assert any(won(fixed, after) for now in level for _, after in actions(fixed, now))


def test_a_walkthrough_wins_every_game_and_scores_every_part():
    for split, n in product(("train", "test"), range(10)):
        game = RoomsGame(8, f"{split}/{n}")
        state, scores = game.reset(), []
        for _ in range(game.optimum):
            command = game.expert()
            assert not state.won and command in state.commands
            state = game.step(command)
            scores.append(state.score)
            assert state.valid
        assert state.won and scores[-1] == 4.0 and sorted(scores) == scores
        assert game.now.items[1] == CARRIED
        assert game.step(f"drop {game.fixed.items[1]}").score == 4.0  # a part that was done stays done


def test_states_that_can_still_be_paid_for_other_things_differ():
    game = RoomsGame(8, "test/0")
    while not (take := game.expert()).startswith("take"):
        before = game.step(take)
    game.step(take)
    assert game.step(take.replace("take", "drop")).key != before.key


def test_a_solution_is_found_after_any_detour():
    chance = random.Random(0)
    for n in range(10):
        game = RoomsGame(8, f"x/{n}")
        state = game.reset()
        for _ in range(15):
            state = game.step(chance.choice(state.commands))
        before = game.now
        assert not game.step("eat the house").valid and game.now == before
        for _ in range(60):
            state = state if state.won else game.step(game.expert())
        assert state.won


def test_rooms_have_tasks_of_their_own():
    world = Rooms(test_games=4, examples=0.3, memory=None, choose=True)
    operant.check_env(world, world.games("test"))
    ids = [{task.id for task in world.games(split)} for split in ("train", "test")]
    assert len(ids[0]) == 200 and not ids[0] & ids[1]


@cases(
    ("Your score is 10 (total of 350 points), in 12 moves.", 10, 350),
    ("You have so far scored 0 out of a possible 10, in 1 turn.", 0, 10),
)
def test_the_score_of_a_classic_game_is_read_from_what_it_says(answer, score, most):
    found = re.search(SCORED, answer, re.IGNORECASE)
    assert found is not None and (int(found[1]), int(found[2])) == (score, most)


def test_status_lines_are_cut_and_the_inventory_stands_once():
    assert clean(" West of House            Score: 0     Moves: 1\nYou see a mailbox.") == "You see a mailbox."
    assert clean("Your score is 10.  It rises.") == "Your score is 10.  It rises."

    class Bag(Ladder):
        def state(self, text, valid=True):
            shown = "Hall." if text.startswith("You stand") else "You carry a key."
            return GameState(shown, inventory="You carry a key.")

    world = type("Bags", (Ladders,), {"make": lambda self, task: Bag()})(memory=0)
    world.reset({0: Task("bag", "")})
    assert world.step({0: "inventory"})[0].text.count("You carry a key.") == 1
