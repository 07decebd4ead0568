"""Train the small language model of the world of rooms: `python recipes/train_rooms_lm.py --work build`, half an hour.

Three steps, each left out if its result exists:

1. `build/tokenizer`: byte-level BPE of 2,048 entries, from games played at random (and `--more`, a JSON list of texts);
2. `build/games-lm`: a Llama of 0.5M parameters learns to write a random admissible command, in all templates and with
   memories of 0 to 8 turns. No walkthrough is among them;
3. `build/rooms`: supervised training on walkthroughs of the 200 training games. `operant train rooms` starts here.

The games of step 2 have seeds of their own (`pretrain`), and those of the split `test` are never seen.
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from builtin_tokenizers import save, train_bpe
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import operant
from operant.apps.games.rooms import Rooms, RoomsGame
from operant.envs.games import GameState, observed
from operant.envs.memory import TEMPLATES, GameMemory

CONTEXT, END = 1024, 0


def listing(commands: tuple[str, ...]) -> str:
    """`a, b, or c`, as the world shows them."""
    return " or ".join(commands) if len(commands) < 3 else f"{', '.join(commands[:-1])}, or {commands[-1]}"


def random_game(seed: int) -> list[tuple[GameState, str]]:
    """The states of a game that is played at random, verb by verb, each with the command that follows."""
    chance = random.Random(seed)
    game, played = RoomsGame(chance.randint(3, 12), f"pretrain/{seed}"), list[tuple[GameState, str]]()
    state = game.reset()
    while len(played) < 60 and not state.won:
        verb = chance.choice(sorted({command.split()[0] for command in state.commands}))
        command = chance.choice([command for command in state.commands if command.startswith(verb)])
        played.append((state, command))
        state = game.step(command)
    return played


def rows(games: int, per_game: int) -> Iterator[dict[str, str]]:
    """Prompts as a policy would see them, each with the command that was played."""
    for seed in range(games):
        chance, played = random.Random(-seed), random_game(seed)
        name = "plain" if chance.random() < 0.6 else chance.choice([name for name in TEMPLATES if name != "thought"])
        for index in sorted(chance.sample(range(len(played)), min(per_game, len(played)))):
            memory = GameMemory(TEMPLATES[name], chance.choice((0, 0, 0, 1, 1, 3, 3, 8)))
            memory.objective = played[0][0].objective
            for state, command in played[max(index - 8, 0) : index]:
                memory.add(observed(state), command)
            state, command = played[index]
            listed = listing(state.commands) if chance.random() < 0.25 else ""
            yield {"prompt": memory.prompt(observed(state), state.inventory, listed).text, "completion": f" {command}"}


def walkthroughs(games: int, **options: Any) -> Iterator[dict[str, str]]:
    """One row for each turn of the solutions of the first training games, as the world shows them with `options`."""
    world = Rooms(train_games=games, **options)
    for task in world.games("train"):
        prompt = world.reset({0: task})[0].text
        while (command := world.playing(0)[0].expert()) is not None:
            yield {"prompt": prompt, "completion": f" {command}"}
            prompt = world.step({0: command})[0].text


def write(path: Path, found: Iterator[dict[str, str]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")
    return str(path)


def fresh_model() -> LlamaForCausalLM:
    """Rotary positions: a model of this size learns much sooner with them to copy names from its prompt."""
    size: Any = {"hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 256}
    ends: Any = {"bos_token_id": END, "eos_token_id": END, "pad_token_id": END, "tie_word_embeddings": True}
    return LlamaForCausalLM(LlamaConfig(vocab_size=2048, max_position_embeddings=CONTEXT, **size, **ends))


def finished(run: operant.Run) -> Path:
    """The folder of a run. Raises: SystemExit if it was stopped."""
    if run.interrupted:
        raise SystemExit(f"stopped after step {len(run.metrics)}: the same command begins this training again")
    return run.path


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("build"))
    parser.add_argument("--games", type=int, default=12_000, help="games that are played at random")
    parser.add_argument("--steps", type=int, default=2000, help="steps of training on them")
    parser.add_argument("--walkthroughs", type=int, default=200)
    parser.add_argument("--memory", type=int, default=0, help="earlier turns in the prompts of the walkthroughs")
    parser.add_argument("--template", default="plain")
    parser.add_argument("--epochs", type=float, default=2.65, help="passes over the walkthroughs")
    parser.add_argument("--more", type=Path, help="a JSON list of further texts for the tokenizer")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    read, shown = given.work / "games.jsonl", given.work / "walkthroughs.jsonl"
    if not read.is_file():
        write(read, rows(given.games, 6))
    if not (given.work / "tokenizer").is_dir():
        texts = [" ".join(json.loads(line).values()) for line in read.read_text(encoding="utf-8").splitlines()[:8000]]
        texts += json.loads(given.more.read_text(encoding="utf-8")) if given.more else []
        tokenizer = train_bpe(texts, 2048)
        tokenizer.model_max_length = CONTEXT
        save(tokenizer, given.work / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(given.work / "tokenizer")
    plain: Any = {"algorithm": "sft", "quiet": True, "probes": 0, "schedule": "linear"}
    if not (given.work / "games-lm").is_dir():
        options = plain | {"steps": given.steps, "batch": 64, "lr": 1.5e-3, "warmup": 0.02}
        options["out"] = given.work / "reading"
        run = operant.train(fresh_model(), str(read), tokenizer=tokenizer, seed=1, **options)
        (finished(run) / "export").rename(given.work / "games-lm")
    if (given.work / "rooms").is_dir():
        return
    write(shown, walkthroughs(given.walkthroughs, memory=given.memory, template=given.template))
    count = len(shown.read_text(encoding="utf-8").splitlines())
    steps = max(int(given.epochs * count / 32), 1)
    options = plain | {"steps": steps, "batch": 32, "lr": 3e-4, "warmup": 0.05, "out": given.work / "sft"}
    run = operant.train(str(given.work / "games-lm"), str(shown), **options)
    (finished(run) / "export").rename(given.work / "rooms")
    print(f"{count} turns of {given.walkthroughs} walkthroughs, {steps} steps: {given.work / 'rooms'}")


if __name__ == "__main__":
    main()
