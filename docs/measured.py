"""Tables of measurements for the pages, as Markdown, made from benchmarks/results."""

import json
import math
import statistics
import tomllib
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.cluster import lines
from benchmarks.loss_and_reward import ends
from benchmarks.rooms import VARIANTS
from benchmarks.work import SHAPES, WORKS

from operant.models.logprobs import BUDGET
from operant.models.twins import MOST
from operant.tools.report.diagnosis.intervals import t_quantile

RESULTS = Path(__file__).parent / "../benchmarks/results"
NOTHING = "Not measured yet.\n"
SEEDS = "One or two seeds are listed, equal numbers once; three and more have their mean and its 95 % interval"


def peers() -> str:
    """One row per workload and peer."""
    rows = [row for row in _read("bench.json") if row["peer"] not in ("limit", "operant")]
    if not rows:
        return NOTHING
    quiet = [row for row in _read("bench.json") if row["peer"] == "limit" and "-busy" not in row["work"]]
    limits = {row["work"]: row["phases"] for row in quiet}
    table = "| work | against | faster (single rounds) | with products alone | with the model's kernels | memory |\n"
    table += f"|{'---|' * 6}\n"
    for row in rows:
        low, high = row["spread"]
        who, most = f"{row['peer']} {row['variant']}".strip(), []
        limit = limits.get(row["work"], {"peer": {}})
        for least in (limit["peer"].get("update"), limit["peer"].get("model")):
            ours = row["seconds"]["operant"] - (limit["operant"]["update"] - least if least else 0)
            most.append(f"{row['seconds']['peer'] / ours:.2f}x" if least else "")
        most.append(f"{row['memory_ratio']:.2f}x" if row["memory_ratio"] else "")
        faster = f"**{row['speed_ratio']:.2f}x** ({low:.2f}-{high:.2f})"
        if missed := sum(text.startswith("operant") and "did not reach" in text for text in row["differences"]):
            faster = f"not comparable: the score was not reached in {missed} of {row['rounds']} runs"
        table += f"| {row['work']} | {who} | {faster} | {' | '.join(most)} |\n"
    return (
        f"{table}\n{_works(rows)}\nMade by `make bench` on {_machines(rows)}; all numbers in `benchmarks/results/`.\n"
    )


def generation() -> str:
    """One row per workload: seconds of generation, ours and the peers'."""
    rows = [row for row in _read("bench.json") if row["work"] in ("W1", "W3", "W5b") and row["peer"] != "limit"]
    table = "| work | ours, with log-probs, s | transformers' `generate`, as TRL calls it, s |\n|---|---|---|\n"
    for name in dict.fromkeys(row["work"] for row in rows):
        of = [(row, f"{row['peer']} {row['variant']}".strip()) for row in rows if row["work"] == name]
        theirs = ", ".join(f"{row['phases']['peer']['generate']:.3g} ({who})" for row, who in of)
        ours = of[0][0]["phases"]["operant"]["generate"]
        table += f"| {name}: {WORKS[name].about} | {ours:.3g} | {theirs} |\n"
    return f"{table}\nMade by `make bench` on {_machines(rows)}.\n"


def memory() -> str:
    """One row per workload: the peak, and what is counted from shapes: weights, and the largest phase of a step."""
    rows = {row["work"]: row for row in _read("bench.json") if row["work"] in WORKS and row["peer"] != "limit"}
    if not rows:
        return NOTHING
    names = ("work", "weights", "gradients", "optimizer", "reference", "keys and values", "scores", "update", "counted")
    table = f"| {' | '.join(names)} | peak | all else |\n|{'---|' * (len(names) + 2)}\n"
    for name, row in rows.items():
        work, shape, trained = WORKS[name], SHAPES[WORKS[name].shape], row["did"]["trained"]
        width, layers, vocabulary = shape["n_embd"], shape["n_layer"], shape["vocab_size"]
        block = 12 * width**2 + 13 * width  # two layer norms, and four matrices with biases
        every = (vocabulary + shape["n_positions"]) * width + layers * block + 2 * width
        low = row["did"]["precision"] == "bfloat16"
        gradient = 4 * (2 if every <= MOST else 1) if not low else 2 * (2 if every <= MOST else 1) + 4
        size, peak = 2 if low else 4, row["peak_mb"]["operant"] * 2**20 / 1e6
        whole = [size * every, gradient * trained, (12 if low else 8) * trained, size * trained * work.reference]
        replies, tokens = work.queries * work.groups, row["did"]["tokens"]
        share = min(work.minibatch / replies, 1)
        # A block keeps its input, both norms, what is between attention and MLP, queries, keys, values, what attention
        # returns, and four widths on either side of GELU. Of logits there are these, their probabilities, the gradient.
        kept = 16 * width * min(layers, trained // block) * (replies * work.query + tokens) * share
        phases = [
            size * 2 * width * layers * (replies * work.query + tokens),
            size * min(tokens * vocabulary, BUDGET),
            size * (kept + 3 * min(tokens * share * vocabulary, BUDGET)),
        ]
        counted = sum(whole) + max(phases)
        cells = [f"{part / 1e6:,.0f}" for part in (*whole, *phases, counted)]
        table += f"| {name} | {' | '.join(cells)} | {peak:,.0f} | {peak - counted / 1e6:,.0f} |\n"
    return f"{table}\nMade by `make bench` on {_machines([*rows.values()])}; MB are millions of bytes.\n"


def textworld_speed() -> str:
    """One row per kind of game: turns per second of TextWorld's own environment and ours, seconds to make a game."""
    results: Any = _read("textworld-speed.json")
    if not results:
        return NOTHING
    table = "| game | theirs: answer only | with place, inventory, commands | with everything | ours: all, new states |"
    table += " all, known states | answer and commands | CPU s to make the first | each later |\n|"
    table += "---|" * 9 + "\n"
    for row in results["rows"]:
        names = ("theirs, text", "theirs, some", "theirs, all", "ours, first", "ours, later", "ours, text")
        rates = " | ".join(f"{row[name]:,.0f}" for name in names)
        later = row["describe"] + row["compile"]
        table += f"| {row['game']} | {rates} | {row['first']:.1f} | {later:.1f} |\n"
    return (
        f"{table}\nA process has {results['imported_mb']:.0f} MB with TextWorld imported, and "
        f"{max(row['live_mb'] for row in results['rows']):.1f} MB more for each live game at most. "
        f"Made by `{results['command']}`.\n"
    )


def textworld_players() -> str:
    """One row per kind of game: score and share of games won of each player."""
    results: Any = _read("textworld-players.json")
    if not results:
        return NOTHING
    names = list(dict.fromkeys(row["player"] for row in results["rows"]))
    table = f"| games | unseen | turns | {' | '.join(f'{name}: score, won' for name in names)} |\n"
    table += f"|---|---|---|{'---|' * len(names)}\n"
    for games in dict.fromkeys(row["games"] for row in results["rows"]):
        rows = {row["player"]: row for row in results["rows"] if row["games"] == games}
        cells = " | ".join(f"{rows[name]['score']:.2f}, {rows[name]['wins']:.0%}" for name in names)
        table += f"| {games} | {rows[names[0]]['unseen']} | {rows[names[0]]['max_turns']} | {cells} |\n"
    return f"{table}\nMade by `{results['command']}`.\n"


def textworld_trained() -> str:
    """One row per kind of game, size of model and seed: scores after walkthroughs, and after PPO."""
    results: Any = _read("textworld-trained.json")
    if not results:
        return NOTHING
    table = "| games | model | commands | walkthroughs: score, won | then PPO: score, won |"
    table += " likeliest commands: score, won | valid | steps | minutes |\n" + "|---" * 9 + "|\n"
    for row in results["rows"]:
        before, after, likeliest = row["sft"]["sampled"], row["ppo"]["sampled"], row["ppo"].get("greedy")
        found = (before, after, likeliest)
        cells = " | ".join(f"{one['score']:.2f}, {one['won']:.0%}" if one else "–" for one in found)
        who = f"{row['games']} | {row['size']} | {'chosen' if row['choose'] else 'written'}"
        table += f"| {who} | {cells} | {after['valid']:.0%} | {row['steps']} | {row['seconds'] / 60:.1f} |\n"
    return f"{table}\nOne thread a run. Made by `{results['command']}`.\n"


def road(kinds: tuple[str, ...]) -> str:
    """One row for each walk of the road: with labels, with labels that mean nothing, or with a model that goes on."""
    results: Any = _read("road.json")
    rows = [row for kind in kinds for row in (results["rows"] if results else []) if row["kind"] == kind]
    if not rows:
        return NOTHING
    names = {"labels": "of the stand-in", "shuffled": "meaningless", "beside": "of the stand-in, four times 250"}
    most = max(len(row["reward_models"]) for row in rows)
    table = "| labels | held-out picks that the reward models find (chance 25 %) | true preference: start |"
    table += "".join(f" PPO {n} |" for n in range(1, most + 1))
    table += " replies preferred to the start's | processor minutes |\n" + "|---" * (5 + most) + "|\n"
    for row in rows:
        of_taste = [found for found in row["eval"]["scores"] if found["reward"].endswith(":taste")]
        found = ", ".join(f"{model['preference/best']:.0%}" for model in row["reward_models"])
        means = " | ".join(f"{one['mean']:.2f} ± {1.96 * one['error']:.2f}" for one in of_taste)
        won = [one["won"] for one in of_taste if one["won"] is not None]
        wins = ", ".join(f"{one['mean']:.0%} ({one['low']:.0%}-{one['high']:.0%})" for one in won)
        table += f"| {names[row['kind']]}, seed {row['seed']} | {found} | {means} | {wins} | {row['minutes']:.0f} |\n"
    return f"{table}\nMade by `{results['command']}`; 256 held-out openings, two replies each; 95 % intervals.\n"


def preference_frontier() -> str:
    """One row for each method and number of labels: the last point, and the best one on the way."""
    results: Any = _read("preference-frontier.json")
    if not results:
        return NOTHING
    table = (
        "| labels | method | true preference at the end | KL, nats | best on the way, at KL | score of the model |\n"
    )
    table += "|---" * 6 + "|\n"
    for labels in (by_labels := sorted({row["labels"] for row in results["rows"]})):
        rows = [row for row in results["rows"] if row["labels"] == labels]
        for method in rows[0]["points"]:
            last = [row["points"][method][-1] for row in rows]
            best = [max(row["points"][method], key=lambda point: point["true"]) for row in rows]
            ends = ", ".join(f"{point['true']:.2f} ± {1.96 * point['error']:.2f}" for point in last)
            ends = ends if len(last) < 3 else _each(last, "true", digits=2)
            ways = f"{_each(best, 'true', digits=2)} at {_each(best, 'kl')}"
            cells = [ends, _each(last, "kl"), ways, _each(last, "proxy", digits=2)]
            name = "best of 32" if method == "best of n" else method
            table += f"| {labels:,} | {name} | {' | '.join(cells)} |\n"
    known = [(row["labels"], row["reward_model"]) for row in results["rows"]]
    of_labels = {labels: [model for n, model in known if n == labels] for labels in by_labels}
    right = ", ".join(f"{_each(of, 'preference/best', 100, 0)} % with {n:,}" for n, of in of_labels.items())
    return (
        f"{table}\n![True preference against KL](figures/preference-frontier.svg)\n\n"
        f"The start has {results['rows'][0]['points']['best of n'][0]['true']:.2f}. {SEEDS}; the interval of one "
        f"seed is that over the openings. Held-out picks that the reward model finds (chance 25 %): {right} labels, "
        "where with 1,000 and more their openings are among those that are trained on. "
        f"Made by `{results['command']}`.\n"
    )


def process_rewards() -> str:
    """One row for each score of solutions: how often its pick of eight is right."""
    results: Any = _read("process-rewards.json")
    if not results:
        return NOTHING
    rows = results["rows"]
    table = "| score | its pick of eight is right in every step | it knows of a solution whether it is right |\n"
    table += "|---|---|---|\n"
    names = {
        "process, min": "of steps: the worst",
        "process, last": "of steps: the last",
        "outcome": "of whole solutions",
    }
    for key, name in names.items():
        cells = " | ".join(_percents([row[key][of] for row in rows]) for of in ("best", "knows"))
        table += f"| {name} | {cells} |\n"
    table += f"| none | {_percents([row['chance'] for row in rows])} | |\n"
    return f"{table}\n{SEEDS}; {rows[0]['solutions']:,} labelled solutions. Made by `{results['command']}`.\n"


def reward_models() -> str:
    """One row per data set of real preferences: means over folds of the shares of pairs in the right order."""
    results: Any = _read("reward-models.json")
    if not results:
        return NOTHING
    table = "| pairs | training, test | length alone | words (Bradley-Terry) | reward model |\n|---|---|---|---|---|\n"
    for name in dict.fromkeys(row["data"] for row in results["rows"]):
        rows = [row for row in results["rows"] if row["data"] == name]
        models = [row["model"]["preference/accuracy"] for row in rows]
        cells = [_percents([row[kind] for row in rows]) for kind in ("length", "words")] + [_percents(models)]
        sizes = f"{round(fmean(row['train'] for row in rows)):,}, {round(fmean(row['test'] for row in rows)):,}"
        table += f"| {name} | {sizes} | {' | '.join(cells)} |\n"
    return f"{table}\nFolds are listed, equal numbers once. Made by `{results['command']}`.\n"


def room_variants() -> str:
    """One row per variant of the recipe of rooms."""
    results: Any = _read("rooms.json")
    rows = [row for row in results["rows"] if "variant" in row] if results else []
    if not rows:
        return NOTHING
    table = "| variant | won: walkthroughs | then PPO | likeliest commands | valid | copied | empty |"
    table += " states in 1,000 turns | tokens a turn | turns | minutes | peak MB |\n" + "|---" * 12 + "|\n"
    for row in sorted(rows, key=lambda row: [*VARIANTS].index(row["variant"])):
        after = row["after"]["sampled"]
        likeliest = row["after"].get("greedy", {}).get("won")
        shares = [
            row["before"]["sampled"]["won"],
            after["won"],
            likeliest,
            *map(after.get, ("valid", "copied", "empty")),
        ]
        cells = " | ".join("–" if share is None else f"{share:.0%}" for share in shares)
        rest = f"{after['states']:.0f} | {after['tokens']:.0f} | {after['turns']:.1f} | {row['seconds'] / 60:.1f}"
        recipe = " (the recipe: plain template, turn discount 0.9)" if row["variant"] == "memory 0" else ""
        table += f"| {row['variant']}{recipe} | {cells} | {rest} | {row['peak_mb']:,.0f} |\n"
    return f"{table}\nMade by `{results['command']}`, one thread a run, 32 games, one seed.\n"


def hostile() -> str:
    """One row per outcome: the hostile rewards that have it, and the slowest of them at both levels of isolation."""
    results: Any = _read("isolated.json")
    if not results:
        return NOTHING
    outcomes, levels = (list(dict.fromkeys(row[key] for row in results["rows"])) for key in ("outcome", "level"))
    slowest = " | ".join(f"{level}: at most s" for level in levels)
    table = f"| outcome | rewards | scores kept | {slowest} | left over |\n"
    table += f"|---|---|---|{'---|' * len(levels)}---|\n"
    for outcome in outcomes:
        rows = [row for row in results["rows"] if row["outcome"] == outcome]
        names = ", ".join(f"`{name}`" for name in dict.fromkeys(row["reward"] for row in rows))
        kept, left = min(row["kept"] for row in rows), max(row["left"] for row in rows)
        seconds = " | ".join(f"{max(row['seconds'] for row in rows if row['level'] == level):.1f}" for level in levels)
        table += f"| {outcome} | {names} | {kept} of 63 | {seconds} | {left} |\n"
    deadline = results["rows"][0]["deadline"]
    return f"{table}\nThe deadline was {deadline:g} s. Made by `{results['command']}`.\n"


def hostile_programs() -> str:
    """One row per hostile program: what it does without a sandbox, and at every level."""
    results: Any = _read("hostile.json")
    if not results:
        return NOTHING
    levels = [name for name in results["rows"][0] if name not in ("name", "kind", "none")]
    table = f"| program | kind | without a sandbox | {' | '.join(levels)} |\n|---|---|---|{'---|' * len(levels)}\n"
    for row in results["rows"]:
        cells = " | ".join(f"**{row[level]}**" if row[level] else "held" for level in levels)
        table += f"| {row['name']} | {row['kind']} | {row['none']} | {cells} |\n"
    sums = ", ".join(f"{sum(bool(row[level]) for row in results['rows'])} at {level}" for level in levels)
    untried = "".join(f" Not tried: {level}." for level in results["untried"])
    return (
        f"Of {len(results['rows'])} programs, these do harm: {sums}.{untried}\n\n{table}\n"
        f"Made by `{results['command']}` as root on {results['machine']['machine']}.\n"
    )


def sandbox() -> str:
    """One row per level: the seconds of a program, and programs a second."""
    results: Any = _read("sandbox.json")
    if not results:
        return NOTHING
    table = "| level | one program alone, ms: median | 99 % within | programs a second |\n|---|---|---|---|\n"
    for row in results["rows"]:
        numbers = f"{1000 * row['median']:.0f} | {1000 * row['p99']:.0f} | {row['per_second']:.0f}"
        table += f"| {row['level']} | {numbers} |\n"
    text = "".join(
        f"{row['many']:,} programs at {row['level']}, a tenth of which never end, took {row['seconds']:.1f} s; "
        f"{row['necessary']:.1f} s are what the others take alone, and as many endless plain processes that the kernel "
        f"ends after {results['deadline']:g} s. No program had more than {row['late']:.3f} s beyond its deadline. "
        for row in results["endless"]
        if row["necessary"] < row["seconds"]  # a machine that was busy in between says nothing
    )
    where = f"{results['machine']['machine']}, {results['cores']} cores, which other work kept at a load of"
    return f"{table}\n{text}{where} {results['load']:.1f}. Made by `{results['command']}`.\n"


def threads() -> str:
    """One row per shape and machine: a step with the library's number of threads, with one and with all."""
    results: Any = _read("threads.json")
    if not results:
        return NOTHING
    variants = list(results["rows"][0]["idle"])
    table = f"| steps of PPO | machine | {', s | '.join(variants)}, s | rule against |\n"
    table += f"|---|---|{'---|' * len(variants)}---|\n"
    for row in results["rows"]:
        for kind, other in (("idle", f"the best, {row['best']}"), ("busy", "one thread")):
            seconds = " | ".join(f"{row[kind][name]['seconds']:.3g}" for name in variants)
            low, high = row[f"{kind}_spread"]
            ratio = f"{row[f'{kind}_ratio']:.2f} ({low:.2f}-{high:.2f}) of {other}"
            table += f"| {row['case']} | {kind} | {seconds} | {ratio} |\n"
    table += "\n| steps of a run | idle, s | busy, s | busy over idle |\n|---|---|---|---|\n"
    for run in results.get("runs", ()):
        idle, busy = statistics.median(run["idle"]), statistics.median(run["busy"])
        some = [f"{statistics.median(x):.2f} ({min(x):.2f}-{max(x):.2f})" for x in (run["idle"], run["busy"])]
        table += f"| {run['run']}: `{run['command']}` | {' | '.join(some)} | {busy / idle:.2f} |\n"
    return (
        f"{table}\nSeconds are medians, ratios medians of single rounds. Busy: {results['cores']} other processes "
        f"compute on {results['cores']} cores; runs have `--evaluate none --probes 0`. "
        f"Made by `{results['command']}` on {results.get('machine')}.\n"
    )


def start() -> str:
    """One row per command: seconds until its end, its first line or its first step."""
    results: Any = _read("start.json")
    if not results:
        return NOTHING
    table = "| what is waited for | seconds | before |\n|---|---|---|\n"
    for row in results["rows"]:
        cells = ("{:.2f} ({:.2f}-{:.2f})".format(*row[when]) if when in row else "" for when in ("seconds", "before"))
        table += f"| {row['wait']} | {' | '.join(cells)} |\n"
    return f"{table}\nMedian of {results['rounds']} rounds. Made by `{results['command']}` on {results['machine']}.\n"


def turns() -> str:
    """One row per model and number of threads: turns per second of our play, and against three other ways."""
    results: Any = _read("turns.json")
    if not results:
        return NOTHING
    ways = {"single": "loop of single environments", "batched": "batched loop", "ours, nothing kept": "nothing kept"}
    table = "| model | threads | episodes | turns a second | processor seconds a turn "
    table += f"| {' | '.join(f'against {way}' for way in ways.values())} | tokens read a turn |\n|{'---|' * 9}\n"
    for row in results["rows"]:
        against = []
        for way in ways:
            work = row["turns_per_processor_second"]["ours"] / row["turns_per_processor_second"][way]
            against.append(f"**{row['faster_than'][way]:.1f}x** ({work:.1f}x)")
        read, work = row["tokens_read_per_turn"], 1 / row["turns_per_processor_second"]["ours"]
        table += (
            f"| {row['model']}, {row['parameters'] / 1e6:.1f}M | {row['threads']} | {row['episodes']} "
            f"| {row['turns_per_second']['ours']:.1f} | {work:.3f} | {' | '.join(against)} "
            f"| {read['ours']:.0f} of {read['ours, nothing kept']:.0f} |\n"
        )
    rounds = ", ".join(str(row["rounds"]) for row in results["rows"])
    if beside := results.get("at_once"):
        table += (
            "\nSixty-four episodes of 20 turns, beside one call that reads all that they show and generates as many "
        )
        table += "tokens:\n\n| world | model | tokens read a turn | times the seconds |\n|---|---|---|---|\n"
        for row in beside:
            low, high = row["spread"]
            table += (
                f"| {row['world']} | {row['model']} | {row['read']:.0f} | {row['ratio']:.2f} ({low:.2f}-{high:.2f}) |\n"
            )
        table += f"\nMade by `{results['command']} --at-once` on {beside[0]['machine']}.\n"
    return (
        f"{table}\nEpisodes of {results['rows'][0]['turns']} turns with 8 new tokens each; the two loops call "
        f"transformers' `generate`. In brackets: by processor time, on which other processes have little influence. "
        f"Sides in turn; rounds: {rounds}. Made by "
        f"`{results['command']}` on {results['machine']}.\n"
    )


def contexts() -> str:
    """One row per length: the planned and the measured peak of a step, and the largest batch that fits."""
    results: Any = _read("contexts.json")
    if not results:
        return NOTHING
    room = f"{results['room_gib']:.0f} GiB"
    table = f"| context | planned, batch {results['batch']} | measured | largest batch in {room} (planned) |\n"
    table += "|---|---|---|---|\n"
    for row in results["rows"]:
        measured = f"{row['measured_gb']:.2f} GB ({row['longest']} tokens)" if "measured_gb" in row else ""
        most = f"{row['largest_batch']:,}" + (" or more" if row["largest_batch"] == results["most"] else "")
        table += f"| {row['context']:,} | {row['planned_gb']:.2f} GB | {measured} | {most} |\n"
    return (
        f"{table}\nPPO with a reference copy, {results['model']}, float32, `kept_gb={results['kept_gb']:g}`; measured: "
        f"the largest resident set of the process. Made by `{results['command']}`.\n"
    )


def rank_memory() -> str:
    """One row per run and number of ranks: the planned and the measured peak of a rank."""
    results: Any = _read("rank-memory.json")
    if not results:
        return NOTHING
    table = "| run | planned, GB | measured of each rank, GB | error |\n|---|---|---|---|\n"
    for name, row in results["rows"].items():
        peaks = ", ".join(f"{peak:.2f}" for peak in row["measured_gb"])
        table += f"| {name} | {row['planned_gb']:.2f} | {peaks} | {row['error']:+.0%} |\n"
    return f"{table}\nMade by `{results['command']}`.\n"


def cluster_checks() -> str:
    """One row per number of processes: the modelled and the measured processor time of a step, over all of them."""
    results: Any = _read("cluster.json")
    if not results or not results["measured"]:
        return NOTHING
    table = "| processes | modelled, s | measured, s | error |\n|---|---|---|---|\n"
    for row in results["measured"]["checks"]:
        table += f"| {row['ranks']} | {row['modelled']:.2f} | {row['measured']:.2f} | {row['error']:+.0%} |\n"
    return f"{table}\n{results['measured']['shape']}. Made by `{results['command'].partition(';')[0]}`.\n"


def cluster_model() -> str:
    """One row per number of GPUs: what the simulation says of the three ways."""
    results: Any = _read("cluster.json")
    if not results:
        return NOTHING
    rows = [row for row in results["modelled"]["rows"] if row["gpus"] in (1, 8, 64, 512, 4096)]
    return "\n".join([*lines(rows), "", f"{results['modelled']['what']}. Made by `python -m benchmarks.cluster`.", ""])


def methods() -> str:
    """One row per run of the sentiment task, by each method and with controls."""
    results: Any = _read("sentiment-methods.json")
    if not results:
        return NOTHING
    table = "| run | before | after | KL a reply | what the diagnosis says |\n|---|---|---|---|---|\n"
    for row in results["runs"]:
        findings = " ".join(row["findings"]) or "nothing looks wrong"
        table += f"| {row['run']} | {row['before']:.3f} | {row['after']:.3f} | {row['kl']:.1f} | {findings} |\n"
    return f"{table}\nSeed {results['seed']}, one thread each. Made by `{results['command']}`.\n"


def thresholds(task: str) -> str:
    """One row per method: replies and seconds until held-out problems are solved as often as two thresholds say."""
    results: Any = _read("methods.json")
    rows = [row for row in results["rows"] if row["task"] == task] if results else []
    if not rows:
        return NOTHING
    lower, upper = results["thresholds"][task]

    def number(value: float) -> str:
        return "never" if value == math.inf else f"{value:,.0f}"

    def until(some: list[dict[str, Any]], threshold: float, column: int) -> str:
        firsts = ([point[column] for point in row["curve"] if point[3] >= threshold] for row in some)
        found = sorted(found[0] if found else math.inf for found in firsts)
        spread = f" ({number(found[0])} to {number(found[-1])})" if found[0] != found[-1] else ""
        return f"{number(statistics.median(found))}{spread}"

    table = f"| method | seeds | replies to {lower:.2f} | to {upper:.2f} | seconds to {lower:.2f} | to {upper:.2f} |"
    table += " right at the end | pass@4, 16 |\n" + "|---" * 8 + "|\n"
    by_method = {method: [row for row in rows if row["method"] == method] for method in results["methods"]}
    for method, some in by_method.items():
        if not some:
            continue
        both = [(column, threshold) for column in (1, 2) for threshold in (lower, upper)]
        cells = ["" if method == "start" else until(some, threshold, column) for column, threshold in both]
        cells += [f"{statistics.median(row['curve'][-1][3] for row in some):.2f}"]
        passes = [f"{statistics.median(row['passes'][k] for row in some):.2f}" for k in ("4", "16")]
        table += f"| {method} | {len(some)} | {' | '.join(cells)} | {', '.join(passes)} |\n"
    missing = ", ".join(f"`{method}`" for method, some in by_method.items() if not some)
    note = f"Medians, and the lowest and highest seed. Made by `{results['command']} --keep`.\n"
    return f"{table}\n{note}" + (f"\nNot measured yet: {missing}.\n" if missing else "")


def policy_gradients() -> str:
    """Per method: what it reaches with KL, without, and with shuffled rewards; and the runs that collapsed."""
    results: Any = _read("policy-gradients.json")
    rows = [row for row in results["rows"] if row["method"] != "start"] if results else []
    if not rows:
        return NOTHING
    start = next(row for row in results["rows"] if row["method"] == "start")

    def collapsed(row: dict[str, Any]) -> bool:
        worse = row["reward"] < start["reward"] - 2 * start["error"]
        return worse or row["perplexity"] > 3 * start["perplexity"] or row["distinct"] < start["distinct"] / 2

    def cell(some: list[dict[str, Any]], name: str, digits: int) -> str:
        return _mean([row[name] for row in some], digits)

    table = "| method | rewards | seeds | reward | perplexity | distinct-2 | KL a reply | seconds |\n"
    table += "|---|---|---|---|---|---|---|---|\n"
    table += f"| the start | | | {start['reward']:.3f} | {start['perplexity']:.0f} | {start['distinct']:.2f} | 0 | |\n"
    for method, kind in dict.fromkeys((row["method"], row["kind"]) for row in rows):
        some = [row for row in rows if (row["method"], row["kind"], row["rate"]) == (method, kind, 1)]
        cells = [cell(some, name, digits) for name, digits in (("reward", 3), ("perplexity", 0), ("distinct", 2))]
        cells += [cell(some, "kl", 1), f"{statistics.mean(row['seconds'] for row in some):.0f}"] if some else []
        if some:
            named = {"kl": "with KL", "no kl": "without KL", "shuffled": "shuffled"}[kind]
            table += f"| `{method}` | {named} | {len(some)} | {' | '.join(cells)} |\n"
    second = "| method | rate | runs | reward | lowest | perplexity | collapsed |\n|---|---|---|---|---|---|---|\n"
    for method, value in sorted({(row["method"], row["value"]) for row in rows}):
        some = [r for r in rows if (r["method"], r["value"], r["kind"]) == (method, value, "kl")]
        if some:
            lowest, ended = min(row["reward"] for row in some), sum(map(collapsed, some))
            cells = [cell(some, "reward", 3), f"{lowest:.3f}", cell(some, "perplexity", 0), f"{ended} of {len(some)}"]
            second += f"| `{method}` | {value:g} | {len(some)} | {' | '.join(cells)} |\n"
    note = "Means over the seeds with 95 % intervals, 256 held-out openings; the standard error of a single reward is "
    note += f"{start['error']:.3f}. Seconds are of processor time, one thread."
    note += "\n\n![Reward of five methods over steps, and against perplexity](figures/policy-gradients.svg)"
    steps = [
        (kl / row["value"], accepted)
        for row in rows
        if row["method"] == "trpo"
        for kl, accepted in zip(row["curve"]["trust/kl"], row["curve"]["trust/accepted"], strict=True)
    ]
    taken = [share for share, accepted in steps if accepted]
    second += f"\nTRPO: {len(taken)} of {len(steps)} steps were accepted; their KL was {statistics.mean(taken):.0%} "
    second += f"of the bound on average, and {max(taken):.0%} at most.\n"
    return f"{table}\n{note}\n\n{second}\nMade by `{results['command']}`.\n"


EXTRACT = {
    "random": "a random sentence",
    "first": "the first sentence",
    "last": "the last sentence",
    "title": "the sentence with most words of the title",
    "best": "the best sentence",
    "ppo": "PPO",
    "shuffled": "PPO, scores shuffled",
}


def extract() -> str:
    """One row per player that chooses a sentence, over its seeds."""
    results: Any = _read("extract.json")
    if not results:
        return NOTHING
    table = "| player | ROUGE-1 before | after | steps | seconds |\n|---|---|---|---|---|\n"
    rows = results["rows"]
    for name in sorted({row["player"] for row in rows}, key=[*EXTRACT].index):
        some = [row for row in rows if row["player"] == name]
        if "after" not in some[0]:
            table += f"| {EXTRACT[name]} | {some[0]['rouge1']:.3f} | | | |\n"
            continue
        cells = [_each([row[when] for row in some], "rouge1", digits=3) for when in ("before", "after")]
        cells += [str(len(some[0]["curve"])), _each(some, "seconds", digits=0)]
        table += f"| {EXTRACT[name]} | {' | '.join(cells)} |\n"
    note = f"{rows[0].get('papers', 0) or rows[0]['after']['papers']} held-out papers; the standard error of a mean is "
    error = max(row["error"] if "error" in row else row["after"]["error"] for row in rows)
    return f"{table}\n{note}{error:.3f}. {SEEDS}. Made by `{results['command']}`.\n"


def sizes() -> str:
    """One row per run: bytes and seconds of each kind of checkpoint, and of the whole policy, reference and Adam."""
    results: Any = _read("checkpoint-size.json")
    if not results:
        return NOTHING
    rows = {(row["run"], row["kind"]): row for row in results["rows"]}
    whole = next(row for row in results["rows"] if "+" in row["kind"])
    table = "| what is trained | `light` | `resume` | policy, reference and Adam, whole |\n|---|---|---|---|\n"
    for run in dict.fromkeys(row["run"] for row in results["rows"]):
        both = [rows[run, kind] for kind in ("light", "resume")]
        cells = [f"{_size(row)}, 1/{whole['bytes'] / row['bytes']:.3g}" for row in both]
        table += f"| {run} | {' | '.join(cells)} | {_size(whole)} |\n"
    load = f", with {results['load']:.0f} other processes at work" if results["load"] >= 1 else ""
    return f"{table}\nMade by `{results['command']}` on {results['machine']}{load}.\n"


def _size(row: dict[str, Any]) -> str:
    size = f"{row['bytes'] / 1e9:.2f} GB" if row["bytes"] > 1e9 else f"{row['bytes'] / 1e6:.3g} MB"
    return f"{size} in {row['seconds']:.2g} s"


def pieces() -> str:
    """One row per optimisation."""
    rows = _read("pieces.json")
    if not rows:
        return NOTHING
    table = "| piece | work | phase | with, s | without, s | times | the whole step |\n|---|---|---|---|---|---|---|\n"
    for row in rows:
        table += (
            f"| {row['says']} | {row['work']} | {row['phase']} | {row['seconds']:.3g} | {row['without']:.3g} "
            f"| {row['ratio']:.2f} | {row['step_ratio']:.2f} |\n"
        )
    made = f"One epoch a step, {min(row['rounds'] for row in rows)} rounds. Made by `python -m benchmarks.pieces`"
    return f"{table}\n{made} on {_machines(rows)}.\n"


def limit() -> str:
    """One row per workload: the update beside its own matrix products."""
    rows = [row for row in _read("bench.json") if row["peer"] == "limit" and "-busy" not in row["work"]]
    if not rows:
        return NOTHING
    table = "| work | update, s | products and Adam alone, s | share | with the model's kernels, s | share |\n"
    table += f"|{'---|' * 6}\n"
    for row in rows:
        ours, least = row["seconds"]["operant"], row["phases"]["peer"].get("model")
        cells = [f"{ours:.3g}", f"{row['seconds']['peer']:.3g}", f"{100 * row['speed_ratio']:.0f} %"]
        cells += [f"{least:.3g}", f"{100 * least / ours:.0f} %"] if least else ["", ""]
        table += f"| {row['work']} | {' | '.join(cells)} |\n"
    return table


def frontier() -> str:
    """One row per KL coefficient, and one for the policy before training."""
    results = json.loads((RESULTS / "letters-frontier.json").read_text(encoding="utf-8"))
    before = [group["final"]["before"]["mean"] for group in results["groups"]]
    table = "| `kl.coef` | e's, held out | KL | empty | the diagnosis |\n|---|---|---|---|---|\n"
    table += f"| before | {sum(before) / len(before):.1f} | 0 | | |\n"
    for group in results["groups"]:
        final, runs = group["final"], group["runs"]
        findings = [
            f["name"].replace("_", " ") + (f" ({f['runs']} of {runs})" if f["runs"] < runs else "")
            for f in group["findings"]
            if f["level"] != "note"
        ]
        table += (
            f"| {group['kl.coef']:g} | {_interval(final['reward'])} | {_interval(final['kl'])} "
            f"| {100 * final['empty']['mean']:.0f} % | {', '.join(findings)} |\n"
        )
    return f"{table}\nMeans of three seeds with 95 % intervals (Student's t), made by `{results['command']}`.\n"


def tool_use() -> str:
    """What each run solves and how often it calls, at the start and at the end."""
    results: Any = _object("tool-use.json")
    if not results:
        return NOTHING
    table = "| run | seed | steps | seconds | right, held out | episodes with a call |\n|---|---|---|---|---|---|\n"
    for row in results["rows"]:
        (_, _, right, called), (steps, seconds, right_then, called_then) = row["curve"][0], row["curve"][-1]
        cells = [f"{seconds:.0f}", f"{right:.2f} to {right_then:.2f}", f"{called:.2f} to {called_then:.2f}"]
        table += f"| {row['method']} | {row['seed']} | {steps} | {' | '.join(cells)} |\n"
    return f"{table}\nProcessor seconds of training, sandboxes included. Made by `{results['command']}`.\n"


def growth() -> str:
    """Seconds at the smallest and the largest size, and the slope between the last two; in brackets, all rounds."""
    results: Any = _object("growth.json")
    if not results:
        return NOTHING
    table = "| what grows | from | to | seconds | slope at the end |\n|---|---|---|---|---|\n"
    for row in results["rows"]:
        ends = row["points"][0], row["points"][-1]
        cells = [f"{p['size']:,.0f}" for p in ends]
        cells += [" to ".join(f"{p['seconds']:.3g} ({min(p['all']):.3g}-{max(p['all']):.3g})" for p in ends)]
        low, high = row["slopes"]
        table += f"| {row['what']} | {' | '.join(cells)} | {row['slope']:.2f} ({low:.2f} to {high:.2f}) |\n"
    made = (
        f"{results['rounds']} rounds, their range in brackets. Made by `{results['command']}` on {results['machine']}."
    )
    return f"![seconds over sizes](figures/growth.svg)\n\n{table}\n{made}\n"


def optimizers() -> str:
    """Each optimizer at its best rate: what it reaches, its control, and what it costs."""
    results: Any = _object("optimizers.json")
    if not results:
        return NOTHING
    table = "| optimizer | rate | reward, held out | KL, nats | shuffled rewards | bytes a weight | ms a step |\n"
    table += f"|{'---|' * 7}\n"
    rates: dict[str, set[float]] = {}
    for row in results["rows"]:
        rates.setdefault(row["optimizer"], set()).add(row["rate"])
    for name in rates:
        own = [row for row in results["rows"] if row["optimizer"] == name]
        control = next(row for row in own if row["kind"] == "shuffled")
        best = [row for row in own if row["kind"] == "own" and row["rate"] == control["rate"]]
        rewards = [row["reward"] for row in best]
        reached = f"{statistics.mean(rewards):.2f} ({min(rewards):.2f} to {max(rewards):.2f})"
        cells = [f"{control['rate']:g}", reached, f"{statistics.mean(row['kl'] for row in best):.1f}"]
        cells += [f"{control['reward']:.2f}", f"{control['bytes']:.1f}"]
        table += f"| {name} | {' | '.join(cells)} | {min(row['ms'] for row in own):.0f} |\n"
    tried = "; ".join(f"{name}: {', '.join(f'{rate:g}' for rate in sorted(all_))}" for name, all_ in rates.items())
    lower = next(row for row in results["rows"] if (row["optimizer"], row["rate"]) == ("adamw", 3e-4))
    return (
        f"![mean reward over the steps](figures/optimizers.svg)\n\n{table}\nTwenty-four steps of 128 replies of the "
        "recipe `sentiment`; three seeds at the best of three rates, of which seed 1 decides, and one seed with "
        f"shuffled rewards. The highest reward is paid for in KL: adamw at {lower['rate']:g} reaches "
        f"{lower['reward']:.2f} at {lower['kl']:.1f} nats. Rates tried: {tried}. The time is the least of its runs, "
        "of the optimizer alone, on one thread. Made by "
        f"`{results['command']}` on {results['machine']}.\n"
    )


def guessing() -> str:
    """What each player of the guessing game wins."""
    results: Any = _object("guessing.json")
    if not results:
        return NOTHING
    table = "| player | seed | held-out games won, sampled | the likeliest choice |\n|---|---|---|---|\n"
    names = {
        "random": "random guesses",
        "start": "`builtin:rooms`",
        "grpo": "after GRPO",
        "coin": "after GRPO, paid by a coin",
    }
    for row in results["rows"]:
        seed = row["seed"] if row["player"] in ("grpo", "coin") else ""
        greedy = f"{row['won']['greedy']:.2f}" if "greedy" in row["won"] else ""
        table += f"| {names[row['player']]} | {seed} | {row['won']['sampled']:.2f} | {greedy} |\n"
    how = "64 games, each played 4 times by sampling and once by the likeliest choice."
    return f"{table}\n{how} Made by `{results['command']}`.\n"


def adaptive_kl() -> str:
    """The demo with a controller, beside its fixed price, and the figure."""
    results: Any = _object("adaptive-kl.json")
    if not results:
        return NOTHING
    table = "| price of KL | at the end | reward, held out | KL a reply, held out |\n|---|---|---|---|\n"
    for row in results["runs"]:
        start = results["start"] if row["run"] == "adaptive" else row["coef"][0]
        cells = [f"{row['coef'][-1]:.3f}", f"{row['before']:.3f} to {row['after']:.3f}", f"{row['kl_after']:.1f}"]
        table += f"| {row['run']}, from {start} | {' | '.join(cells)} |\n"
    figure = "![KL and its price over the steps, adaptive and fixed](figures/adaptive-kl.svg)"
    return f"{figure}\n\n{table}\nSeed {results['seed']}. Made by `{results['command']}`.\n"


def losses() -> str:
    """Reward and loss at the beginning and at the end: the demo and its control by PPO, `keyword` by GRPO."""
    demo, recipes = _object("loss-and-reward.json"), _object("recipes.json")
    if not demo or not recipes:
        return NOTHING
    names = {"seed-1": "PPO, the demo", "control-1": "PPO, its control with shuffled rewards"}
    rows = [(names[run["run"]], run["curves"]) for run in demo["runs"]]
    first = next(run for run in recipes["runs"] if run["recipe"] == "keyword" and not run["control"])
    rows.append(("GRPO, the recipe `keyword`", {"reward/mean": first["reward"], "loss/total": first["loss"]}))
    table = "| run | mean reward | total loss | policy loss | value loss |\n|---|---|---|---|---|\n"
    for name, curves in rows:
        cells = []
        for key in ("reward/mean", "loss/total", "policy/loss", "value/loss"):
            cells.append(
                "{:.3f} to {:.3f}".format(*ends(curves[key])).replace("-0.000", "0.000") if key in curves else ""
            )
        table += f"| {name} | {' | '.join(cells)} |\n"
    return f"{table}\nMeans of the first and of the last tenth of the steps. Made by `{demo['command']}`.\n"


ROOMS = {
    "random": "random admissible commands",
    "start": "the starting model: SFT on 200 walkthroughs",
    "sft": "the same SFT, continued",
    "sft-long": "the same SFT, continued for as long as PPO",
    "ppo": "PPO",
    "grpo": "GRPO, 8 attempts at a game",
    "rejection": "rejection sampling, the best quarter",
    "shuffled": "PPO, rewards shuffled among the games",
}


def rooms() -> str:
    """One row per player of the world of rooms, over its seeds."""
    results: Any = _read("rooms.json")
    if not results:
        return NOTHING
    table = "| player | games won | likeliest commands | turns of won games (optimum) | valid commands | minutes |\n"
    table += "|---|---|---|---|---|---|\n"
    for name, title in ROOMS.items():
        rows = [row for row in results["rows"] if row.get("player") == name]
        if not rows:
            continue
        greedy = [row["evaluation"]["greedy"]["won"] for row in rows if "greedy" in row["evaluation"]]
        of = {k: [row["evaluation"]["sampled"][k] for row in rows] for k in ("won", "turns", "optimum", "valid")}
        turns = f"{fmean(of['turns']):.1f} ({fmean(of['optimum']):.1f})" if any(of["won"]) else "-"
        minutes = fmean(row.get("seconds", 0) for row in rows) / 60
        table += f"| {title} | {_percents(of['won'])} | {_percents(greedy) if greedy else '-'} | {turns} | "
        table += f"{_percents(of['valid'])} | {minutes:.1f} |\n" if minutes else f"{_percents(of['valid'])} | - |\n"
    made = f"Made by `{results['command']}`, one thread a run; processor time."
    return f"{table}\n{SEEDS}. {made}\n"


TRANSLATION = {
    "start": "the start",
    "sft": "cross-entropy, continued",
    "ppo": "PPO",
    "ppo-normalised": "PPO, scores normalised",
    "nlpo": "NLPO, scores normalised",
    "a2c": "A2C, scores normalised",
    "trpo": "TRPO, scores normalised",
    "reinforce": "REINFORCE, scores normalised",
    "grpo": "GRPO, 8 samples of a sentence",
    "rejection": "rejection sampling, the best of 8",
    "shuffled": "PPO, references of other sentences",
}


def translation() -> str:
    """One row per method of translation, over its seeds."""
    results: Any = _read("translation.json")
    if not results:
        return NOTHING
    table = "| trained by | BLEU, greedy | sampled | chrF of a sentence, greedy | sampled | KL, nats | tokens |"
    table += " rate | steps |\n" + "|---" * 9 + "|\n"
    of_test = [row for row in results["rows"] if row["seed"]]
    for name in sorted({row["method"] for row in of_test}, key=[*TRANSLATION].index):
        rows = [row for row in of_test if row["method"] == name]
        sampled, greedy = ([row["evaluation"][how] for row in rows] for how in ("sampled", "greedy"))
        cells = [_each(greedy, "bleu"), _each(sampled, "bleu")]
        cells += [_each(found, "reward", 100) for found in (greedy, sampled)]
        cells += [_each(sampled, key) for key in ("kl", "tokens")]
        cells += ["", ""] if name == "start" else [_each(rows, "rate", digits=5), _each(rows, "steps", digits=0)]
        table += f"| {TRANSLATION[name]} | {' | '.join(cells)} |\n"
    error = max(row["evaluation"][how]["error"] for row in of_test for how in ("sampled", "greedy"))
    return (
        f"{table}\n{SEEDS}; the standard error of a mean chrF over the sentences is at most "
        f"{100 * error:.1f}. {results['minutes']:g} minutes of processor time each, on one thread. Made by "
        f"`{results['command']}`.\n"
    )


COMMONGEN = {"start": "the start", "sft": "cross-entropy, continued", "ppo": "PPO", "shuffled": "PPO, scores shuffled"}


def commongen() -> str:
    """One row per player of the task of given words, over its seeds."""
    results: Any = _read("commongen.json")
    if not results:
        return NOTHING
    table = "| trained by | words that occur, sampled | greedy | copies | BLEU, sampled | greedy | KL, nats | steps |\n"
    table += "|---" * 8 + "|\n"
    for name in sorted({row["player"] for row in results["rows"]}, key=[*COMMONGEN].index):
        rows = [row for row in results["rows"] if row["player"] == name]
        sampled, greedy = ([row["evaluation"][how] for row in rows] for how in ("sampled", "greedy"))
        copies = [{"share": abs(found["repeat_penalty"])} for found in sampled]
        cells = [_each(found, "coverage", 100) for found in (sampled, greedy)] + [_each(copies, "share", 100)]
        cells += [_each(found, "bleu") for found in (sampled, greedy)]
        cells += [_each(sampled, "kl"), "" if name == "start" else _each(rows, "steps", digits=0)]
        table += f"| {COMMONGEN[name]} | {' | '.join(cells)} |\n"
    replies = results["rows"][0]["evaluation"]["greedy"]["replies"]
    return (
        f"{table}\nPercent of the words, and of the replies that copy their prompt; {replies} held-out tasks. "
        f"{SEEDS}. {results['minutes']:g} minutes of processor time each, on one thread. Made by "
        f"`{results['command']}`.\n"
    )


def seed_demo() -> str:
    """The demo at its published size: each run, the means over the seeds, and the figures."""
    results: Any = _read("seed-demo.json")
    if not results:
        return NOTHING
    table = "| run | before | after | KL a reply | minutes |\n|---|---|---|---|---|\n"
    for method, name in (("ppo", "PPO"), ("shuffled", "shuffled rewards")):
        rows = [row for row in results["rows"] if row["method"] == method]
        keys = (("before", 3, 1), ("after", 3, 1), ("kl_after", 1, 1), ("seconds", 1, 60))
        for row in rows:
            cells = [f"{row[key] / unit:.{digits}f}" for key, digits, unit in keys]
            table += f"| {name}, seed {row['seed']} | {' | '.join(cells)} |\n"
        cells = [_mean([row[key] / unit for row in rows], digits) for key, digits, unit in keys]
        table += f"| {name}, mean of {len(rows)} | {' | '.join(cells)} |\n" if len(rows) > 1 else ""
    first = results["rows"][0]
    return (
        f"{first['steps']} steps of {first['replies'] / first['steps']:.0f} replies to the first 2 to 8 tokens of real "
        f"reviews: mean probability over {first['openings']} held-out openings, means with 95 % intervals over seeds, "
        f"minutes of one processor. Made by `{results['command']}`.\n\n{table}\n"
        "![Reward and KL over 100 steps of 256 replies, one line a seed](../figures/seed-demo.svg)\n\n"
        "![How many replies of each step have which reward](../figures/seed-demo-rewards.svg)\n"
    )


PRICES = {
    "fixed": "sampled difference in the reward, a fixed price",
    "adaptive": "the same, a price that follows a target (nats)",
    "loss": "k3 in the loss",
    "reverse": "exact reverse KL in the reward",
    "forward": "exact forward KL in the reward",
    "loss, reverse": "exact reverse KL in the loss",
}


def kl_frontier() -> str:
    """Held-out reward and KL of each way of pricing KL, at five prices or targets, and the figure."""
    results: Any = _read("kl-frontier.json")
    if not results:
        return NOTHING
    head = " | ".join(("lowest", "", "middle", "", "highest"))
    table = f"| KL is charged as | {head} |\n|---|---|---|---|---|---|\n"
    for way, name in PRICES.items():
        cells = []
        for value in sorted({row["value"] for row in results["rows"] if row["way"] == way}):
            rows = [row for row in results["rows"] if (row["way"], row["value"]) == (way, value)]
            reward, kl = (_seeds([row[key] for row in rows], digits) for key, digits in (("reward", 3), ("kl", 1)))
            cells.append(f"{value:g}: {reward} at {kl}")
        table += f"| {name} | {' | '.join(cells)} |\n" if cells else ""
    seeds = ", ".join(str(seed) for seed in sorted({row["seed"] for row in results["rows"]}))
    return (
        "Price or target: held-out reward at nats of KL a reply, after 72 steps of 128 replies, from 0.55. Seeds "
        f"{seeds}; {SEEDS[0].lower()}{SEEDS[1:]}. Made by `{results['command']}`.\n\n{table}\n"
        "![Held-out reward over KL, a line for each way of charging it](../figures/kl-frontier.svg)\n"
    )


PROGRAMS = {
    "start": "the start",
    "sft": "cross-entropy, continued",
    "sft-fresh": "cross-entropy on 20,000 new references",
    "grpo": "`grpo`",
    "ppo": "`ppo`",
    "reinforce": "`reinforce`",
    "critic-coderl": "`reinforce`, CodeRL's return",
    "critic-group": "`reinforce`, return relative to the group",
    "critic-difference": "`reinforce`, differences of the critic",
    "coderl": "`coderl`, on the start's references",
    "shuffled": "`grpo`, scores of other programs",
}


def programs() -> str:
    """One row per method of writing programs, over its seeds, and what the critic knows."""
    results: Any = _read("programs.json")
    if not results:
        return NOTHING
    rows = {(row["method"], row["seed"]): row for row in results["rows"]}
    table = "| trained by | seeds | pass@1 | less cross-entropy's | pass@4 | pass@1, greedy | failed test | error |"
    table += " tokens | replies |\n" + "|---" * 10 + "|\n"
    for name in (name for name in PROGRAMS if any(method == name and seed for method, seed in rows)):
        own = {seed: row for (method, seed), row in rows.items() if method == name and seed}  # 0: the critic itself
        trained = name not in ("start", "sft", "sft-fresh")
        found = [row["evaluation"]["sampled"] for row in own.values()]
        gains = [
            fmean(a - b for a, b in zip(right(row), right(rows["sft", seed]), strict=True)) / 4
            for seed, row in own.items()
            if trained and ("sft", seed) in rows
        ]
        shares = [one["outcomes"] for one in found]
        failed = [of.get("failed test", 0.0) for of in shares]
        errors = [of.get("compile error", 0.0) + of.get("runtime error", 0.0) for of in shares]
        cells = [str(len(own)), _each(found, "pass@1", digits=3), _seeds(gains, 3, "+")]
        cells += [_each(found, "pass@4", digits=3)]
        cells += [_each([row["evaluation"]["greedy"] for row in own.values()], "pass@1", digits=3)]
        cells += [_seeds(some, 2) for some in (failed, errors)] + [_each(found, "tokens", digits=0)]
        cells += [_each(list(own.values()), "steps", 64, 0) if trained else ""]
        table += f"| {PROGRAMS[name]} | {' | '.join(cells)} |\n"
    text = (
        f"{table}\n400 held-out problems, four samples of each; the standard error of a pass@1 over the problems is at "
        f"most 0.024. {SEEDS}. {results['minutes']:g} minutes of processor time each, the programs' own included. "
        f"Made by `{results['command']}`.\n"
    )
    if ("critic", 0) not in rows:
        return text
    table = (
        "| critic pools over | seeds | accuracy | calibration error | area under the curve of passing after 25, 50, "
    )
    table += "75, 100 % of the tokens |\n" + "|---" * 5 + "|\n"
    for kind, over in {"critic": "the program", "critic-padded": "the program and its padding"}.items():
        if of := [row["metrics"] for (method, _), row in rows.items() if method == kind]:
            areas = " / ".join(_each(of, f"critic/auc_{share}", digits=2) for share in (25, 50, 75, 100))
            cells = [
                str(len(of)),
                _each(of, "critic/accuracy", digits=3),
                _each(of, "critic/calibration_error", digits=3),
            ]
            table += f"| {over} | {' | '.join([*cells, areas])} |\n"
    of, samples = rows["critic", 0]["metrics"], rows["critic", 0]["samples"] - 400
    return text + (
        f"\n{table}\nA critic, on {samples:,} samples of the start, and 400 others: the most frequent outcome is "
        f"{100 * of['critic/majority']:.0f} % of these, and a linear model of the counts of tokens finds "
        f"{100 * of['bag/accuracy']:.0f} %.\n"
    )


def prompt_calls() -> str:
    """One row per way of asking a task model."""
    results: Any = _read("prompt-calls.json")
    if not results:
        return NOTHING
    table = "| way | calls a second | over RLPrompt's loop |\n|---|---|---|\n"
    for row in results["rows"]:
        table += f"| {row['way']} | {row['calls a second']:,} | {row[OVER_THEIRS]:.1f} |\n"
    about = f"{results['prompts']} prompts of five tokens, {results['texts']} sentences of SST-2, processor time of "
    about += f"{results['threads']} thread{'s' * (results['threads'] > 1)}, median of {results['rounds']} rounds; the "
    about += f"log-probs of all ways differ by at most {results['largest difference of a log-prob']:.1e}. "
    return f"{table}\n{about}Made by `{results['command']} --data FOLDER --write`.\n"


OVER_THEIRS = "over RLPrompt's loop"


def test_time() -> str:
    """One row per way of spending 16 programs on a problem."""
    results: Any = _read("code-test-time.json")
    if not results:
        return NOTHING
    table = (
        "| 8 samples, then | seeds | the chosen program is right | less that of 16 samples | some program is right |"
    )
    table += " programs a problem |\n" + "|---" * 6 + "|\n"
    rows = {(row["way"], row["seed"]): row for row in results["rows"]}
    for way in dict.fromkeys(
        row["way"] for row in sorted(results["rows"], key=lambda row: TEST_TIME.index(row["way"]))
    ):
        own = {seed: row for (name, seed), row in rows.items() if name == way}
        gains = [fmean(row["right"]) - fmean(rows["sampled", seed]["right"]) for seed, row in own.items()]
        cells = [str(len(own)), _seeds([fmean(row["right"]) for row in own.values()], 3)]
        cells += ["" if way == "sampled" else _seeds(gains, 3, "+")]
        cells += [_each(list(own.values()), "any", digits=3), _each(list(own.values()), "programs")]
        table += f"| {'8 more samples' if way == 'sampled' else way} | {' | '.join(cells)} |\n"
    about = f"200 held-out problems; the standard error of a share is at most 0.035. {SEEDS}."
    return f"{table}\n{about} Made by `{results['command']}`.\n"


TEST_TIME = [
    "sampled",
    "refined, critic",
    "refined, line",
    "refined, random",
    "repaired, itself",
    "repaired, trained",
    "both",
]


def right(row: dict[str, Any]) -> list[int]:
    """How many of four samples of each problem pass."""
    return row["evaluation"]["sampled"]["right"]


WROTE = {
    "soft_q": "learnt, `soft_q`",
    "grpo": "learnt, `grpo`",
    "reinforce": "learnt, `reinforce`",
    "ppo": "learnt, `ppo`",
    "halving+mean": "successive halving",
    "random+mean": "random search",
    "greedy+mean": "greedy search",
    "manual+mean": "six prompts by hand",
    "in-context+mean": "examples in the prompt",
    "none+mean": "no prompt",
    "head": "a linear head on the model's features",
    "soft_q, shuffled": "`soft_q`, shuffled labels",
    "halving+mean, shuffled": "successive halving, shuffled labels",
}


def prompts() -> str:
    """One row per way of finding a prompt, over its seeds."""
    results: Any = _read("prompts.json")
    if not results:
        return NOTHING
    table = "| prompt by | seeds | calls | training texts | held-out texts | best prompt of the first seed |\n"
    table += "|---|---|---|---|---|---|\n"
    for name, title in WROTE.items():
        own = [row for row in results["rows"] if row["name"] == name]
        if own:
            cells = [str(len(own)), f"{own[0]['calls']:,}", _each(own, "train", digits=3), _each(own, "test", digits=3)]
            text = own[0]["prompt"].replace("|", r"\|").replace("`", "'") if len(own[0]["prompt"]) < 80 else "(long)"
            table += f"| {title} | {' | '.join(cells)} | {f'`{text}`' if text.strip() else ''} |\n"
    return f"{table}\n{SEEDS}. The standard error of an accuracy is at most 0.018. Made by `{results['command']}`.\n"


FEW_SHOT = {
    "soft_q": "learnt, `soft_q`",
    "halving": "successive halving",
    "random": "random search",
    "manual": "six prompts by hand",
    "none": "no prompt",
    "head": "a linear head on the model's states",
}


def few_shot() -> str:
    """The mean accuracy over the seeds, one row per way of finding a prompt, with and without calibration."""
    results: Any = _read("few-shot.json")
    if not results:
        return NOTHING
    sets = [name for name in ("sst-2", "mr", "cr") if any(row["set"] == name for row in results["rows"])]
    table = (
        f"| prompt by | calibration | calls | {' | '.join(map(str.upper, sets))} |\n|---|---|---|{'---|' * len(sets)}\n"
    )
    for name, title in FEW_SHOT.items():
        for way in (name, f"{name}+mean"):
            own = [row for row in results["rows"] if row["name"] == way]
            if own:
                found = [[row["test"] for row in own if row["set"] == of] for of in sets]
                cells = [f"{_mean(numbers)} ({len(numbers)})" if numbers else "" for numbers in found]
                calls = f"{max(row['calls'] for row in own):,}" if name != "head" else ""
                table += f"| {title} | {'mean' if way != name else ''} | {calls} | {' | '.join(cells)} |\n"
    model, rows = results["model"], results["rows"]
    return (
        f"{table}\nMeans over the seeds (their number), with 95 % intervals, of the accuracy on {rows[0]['held_out']} "
        f"held-out texts. The task model has {model['parameters'] / 1e6:.1f}M parameters "
        f"({model['bytes'] / 1e6:.0f} MB), and was trained for {model['seconds'] / 60:.0f} minutes of processor time "
        f"on {model['tokens'] / 1e6:.1f}M tokens; it finds {100 * model['test_accuracy']:.0f} % of the masked tokens "
        f"of test reviews. Made by `{results['command']}`.\n"
    )


def _mean(numbers: list[float], digits: int = 3, sign: str = "") -> str:
    """`0.512 ± 0.010`, the half of the 95 % interval of Student's t; one number has none."""
    count = len(numbers)
    half = t_quantile(count - 1) * statistics.stdev(numbers) / math.sqrt(count) if count > 1 else None
    return f"{fmean(numbers):{sign}.{digits}f}" + (f" ± {half:.{digits}f}" if half is not None else "")


STYLE = {
    "copy": "the sentence itself",
    "none": "no prompt",
    "hand 1": "by hand",
    "hand 2": "by hand",
    "soft_q": "learnt, `soft_q`",
}


def style_transfer() -> str:
    """Content, style, fluency and joint mean of each prompt, of single rewrites and of selected ones."""
    results: Any = _read("style-transfer.json")
    if not results:
        return NOTHING
    names = ("content", "style", "fluency", "joint")
    table = f"| prompt by | prompt | {' | '.join(names)} | {' | '.join(f'{name}, selected' for name in names)} |\n"
    table += f"|---|---|{'---|' * 8}\n"
    judges = {row["name"]: 100 * row["accuracy"] for row in results["rows"] if "accuracy" in row}
    for name, title in STYLE.items():
        for row in (row for row in results["rows"] if row["name"] == name):
            for when in ("before", "after"):
                if when in row:
                    text = row["prompt" if when == "after" else "prompt_before"]
                    text = "" if name == "copy" or not text else f"`{text.replace('`', chr(39))}`"
                    of = f"{title}, seed {row['seed']}, {when}" if name == "soft_q" else title
                    cells = [f"{row[when][f'{kind}{one}']:.1f}" for kind in ("", "selected/") for one in names]
                    table += f"| {of} | {text} | {' | '.join(cells)} |\n"
    return (
        f"{table}\n{results['test']} test sentences, from negative to positive. The judges are right on "
        f"{judges['style']:.0f} % (style) and {judges['fluency']:.0f} % (fluency) of test sentences. Made by "
        f"`{results['command']}`.\n"
    )


def dialog() -> str:
    """The accuracy of the classifier of topics, and PPO and its control before and after."""
    results: Any = _read("dialog-intents.json")
    if not results:
        return NOTHING
    (known,) = (row for row in results["rows"] if row["player"] == "classifier")
    table = "| paid for | seeds | topic right, before | after | ROUGE-1, before | after | KL a reply |\n"
    table += "|---|---|---|---|---|---|---|\n"
    for player, title in (("ppo", "topic and ROUGE"), ("shuffled", "those of other replies")):
        own = [row for row in results["rows"] if row["player"] == player]
        cells = [
            _each([row[when] for row in own], name, digits=digits)
            for name, digits in (("intent", 3), ("rouge/rouge1", 3))
            for when in ("before", "after")
        ]
        table += f"| {title} | {len(own)} | {' | '.join(cells)} | {_each([row['after'] for row in own], 'kl')} |\n"
    return (
        f"The classifier finds the topic of {100 * known['accuracy']:.0f} % of {known['utterances']:,} held-out "
        f"utterances (the most frequent is {100 * known['majority']:.0f} %).\n\n{table}\n"
        f"{SEEDS}. Made by `{results['command']}`.\n"
    )


def _each(rows: list[dict[str, float]], key: str, times: float = 1, digits: int = 1) -> str:
    """A number of the rows, as `_seeds` writes it."""
    return _seeds([times * row[key] for row in rows], digits)


def _percents(shares: list[float]) -> str:
    return _seeds([100 * share for share in shares], 0) + " %"


def _seeds(numbers: list[float], digits: int, sign: str = "") -> str:
    """What `SEEDS` says; equal numbers are written once."""
    each = list(dict.fromkeys(f"{round(number, digits) + 0:{sign}.{digits}f}" for number in numbers))
    return ", ".join(each) if len(each) < 2 or len(numbers) < 3 else _mean(numbers, digits, sign)


def first_example() -> str:
    """The sentence below the README's first example."""
    results: Any = _read("first-example.json")
    rises = [f"from {row['first']:.2f} to {row['last']:.2f}" for row in results["rows"]]
    half, low, high = (f([row[k] for row in results["rows"]]) for f, k in ((max, "half"), (min, "kl"), (max, "kl")))
    return (
        f"From the first step to the last, the share of replies with an `I` rises {rises[0]}; with other seeds\n"
        f"{' and '.join(rises[1:])} (95 % intervals of a step: at most {half:.2f}), at {low:.0f} to {high:.0f} nats "
        f"of KL (`{results['command']}`).\n"
    )


def recipe(name: str) -> str:
    """One row per run of a recipe, before and after training, and the replies of the first to some held-out tasks."""
    results: Any = _object("recipes.json")
    if not results:
        return NOTHING
    runs = [run for run in results["runs"] if run["recipe"] == name]
    measures = list(runs[0]["measures"]["after"])
    table = f"| run | reward, held out | {' | '.join(measures)} | KL a reply |\n|---|---|{'---|' * len(measures)}---|\n"
    for run in runs:
        who = f"shuffled rewards, seed {run['seed']}" if run["control"] else f"seed {run['seed']}"
        pairs = [(run["before"], run["after"])] + [
            (run["measures"]["before"][measure], run["measures"]["after"][measure]) for measure in measures
        ]
        cells = [f"{before:.2f} to {after:.2f}" for before, after in pairs]
        table += f"| {who} | {' | '.join(cells)} | {run['kl']:.1f} |\n"
    table += "\n| held-out prompt | before | after |\n|---|---|---|\n"
    for reply in runs[0]["replies"]:
        cells = [f"`{' '.join(reply[key].split())}`" for key in ("query", "before", "after")]
        table += f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |\n"
    return f"{table}\nReplies of seed 1. Made by `{results['command']}`.\n"


def chaos() -> str:
    """One row per kind of harm."""
    results = _object("chaos.json")
    if not results:
        return NOTHING
    table = "| what was done to the run | trials | kills | resumed | begun anew | equal |\n|---|---|---|---|---|---|\n"
    for row in results["rows"]:
        numbers = [row[name] or "" for name in ("trials", "kills", "resumed", "fresh")]
        table += f"| {row['kind']} | {' | '.join(map(str, numbers))} | **{row['equal']}** |\n"
    return f"{table}\nMade by `{results['command']}`.\n"


def soak() -> str:
    """One row per quantity that must not grow."""
    results = _object("soak.json")
    if not results:
        return NOTHING
    bound, quarter = results["criteria"], results["steps"] // 4
    start, warm, end = results["memory_mb"]
    rows = [
        ("memory", f"{start:.0f} MB, {warm:.0f} MB after {quarter} steps, {end:.0f} MB at the end"),
        ("its growth after that", f"{results['growth_kb']:.1f} KB a step (bound: {bound['growth_kb']:g})"),
        ("open file handles", _range(results["handles"])),
        ("threads", _range(results["threads"])),
        (
            "a step of the last quarter",
            f"{results['step_ratio']:.2f} of one of the second (bound: {bound['step_ratio']:g})",
        ),
    ]
    table = f"| over {results['steps']} steps | |\n|---|---|\n" + "".join(f"| {a} | {b} |\n" for a, b in rows)
    return f"{table}\nMade by `{results['command']}`.\n"


def tried() -> str:
    """Which architectures of transformers train, and why the others do not."""
    found = _object("architectures.json")
    if not found:
        return NOTHING
    rows = [dict(zip(("kind", "name"), row["model"].split(":")), **row) for row in found["rows"]]
    by_outcome = {outcome: [r for r in rows if r["outcome"] == outcome] for outcome in OUTCOMES_OF_MODELS}
    wide = ", ".join(f"`{row['name']}` {row['gap']:.2g}" for row in by_outcome["trained"] if row["gap"] > 1e-4)
    text = f"Of {len(rows)} classes of transformers {found['transformers']}:\n\n"
    for outcome, about in OUTCOMES_OF_MODELS.items():
        text += f"- **{len(by_outcome[outcome])}** {about}\n"
    text += "\nThe log-probs of generation and of training agree to 1e-4 nats in replies of six tokens"
    text += f", but for {wide}.\n\nThey train: " if wide else ".\n\nThey train: "
    names = {
        kind: [r["name"] for r in by_outcome["trained"] if r["kind"] == kind] for kind in ("causal", "encoder-decoder")
    }
    text += "; ".join(f"{kind}: " + ", ".join(f"`{name}`" for name in of) for kind, of in names.items()) + ".\n\n"
    text += "| model | outcome | why |\n|---|---|---|\n"
    for row in by_outcome["refused"] + by_outcome["failed"] + by_outcome["no small model"]:
        why = " ".join(row.get("why", "a step was refused").split()).replace("|", "\\|")
        text += f"| `{row['name']}` ({row['kind']}) | {row['outcome']} | {why[:160]} |\n"
    return f"{text}\nMade by `{found['command']}`.\n"


OUTCOMES_OF_MODELS = {
    "trained": "take two steps of PPO",
    "refused": "are refused by a sentence: what they compute is no distribution over the next token, or the tiny "
    "configuration does not fit them",
    "failed": "end with an error of their own or take longer than 150 seconds",
    "no small model": "have no tiny model by the rule that makes the others small, and are untried",
}


def _range(bounds: list[int]) -> str:
    return str(bounds[0]) if bounds[0] == bounds[1] else f"{bounds[0]} to {bounds[1]}"


def _object(name: str) -> dict[str, Any]:
    path = RESULTS / name
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _interval(estimate: dict[str, float]) -> str:
    return f"{estimate['mean']:.1f} ± {estimate['half']:.1f}"


def _works(rows: list[dict[str, Any]]) -> str:
    about = dict.fromkeys((row["work"], row["about"]) for row in rows)
    return "".join(f"- **{work}**: {text}.\n" for work, text in about)


def _machines(rows: list[dict[str, Any]]) -> str:
    """The machines of the rows; if there are several, with the works that each measured."""
    works: dict[str, list[str]] = {}
    for row in rows:
        works.setdefault(row["machine"], []).append(str(row.get("work")))
    named = {machine: ", ".join(dict.fromkeys(each)) for machine, each in sorted(works.items())}
    return "; ".join(named) if len(named) < 2 else "; ".join(f"{machine} ({each})" for machine, each in named.items())


def _read(name: str) -> list[dict[str, Any]]:
    path = RESULTS / name
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def architecture() -> str:
    """The measures of the house before it was rebuilt, the budget that holds it today, and what is asked for."""
    before: Any = _read("architecture-before.json")
    budget = tomllib.loads((RESULTS.parents[1] / "tests" / "budget.toml").read_text(encoding="utf-8"))
    asked = {
        "imports between packages": 145,
        "lines": 42500,
        "functions used once": 150,
        "files under 60 lines": 20,
        "types with Any in signatures": 509,
        "names looked up by getattr": 53,
        "lines that Learner imports": 14000,
        "files of one PPO step": 40,
        "lines of one PPO step": 9500,
        "lines of tests": 33000,
    }
    table = "| measure | before | at most | asked for |\n|---|---|---|---|\n"
    for name, limit in budget["house"].items():
        goal = f"{asked[name]:,}" if name in asked else ""
        table += f"| {name} | {before['house'][name]:,} | {limit:,} | {goal} |\n"
    table += "\n| room | lines before | at most |\n|---|---|---|\n"
    for room in sorted({*before["rooms"], *budget["rooms"]}):
        old, limit = (f"{found[room]:,}" if room in found else "" for found in (before["rooms"], budget["rooms"]))
        table += f"| {room} | {old} | {limit} |\n"
    speed: Any = _read("against.json")
    table += "\nSeconds of a step, after over before, in turn on one machine (`python -m benchmarks.against`): "
    table += "; ".join(f"{w} {r['ratio']:.3f} ({r['low']:.3f} to {r['high']:.3f})" for w, r in speed.items())
    counted: Any = _read("operations.json")
    earlier: Any = _read("operations-before.json")
    counts = [f"{name} {earlier[name]['operations']:,} and {now['operations']:,}" for name, now in counted.items()]
    return f"{table}.\nTorch operations before and today (`python -m benchmarks.operations`): {'; '.join(counts)}.\n"
