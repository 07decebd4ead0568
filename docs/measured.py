"""Tables of measurements for the pages, as Markdown, made from benchmarks/results."""

import json
from pathlib import Path
from typing import Any

from benchmarks.loss_and_reward import ends

RESULTS = Path(__file__).parent / "../benchmarks/results"
NOTHING = "Not measured yet.\n"


def peers() -> str:
    """One row per workload and peer."""
    rows = [row for row in _read("bench.json") if row["peer"] not in ("limit", "operant")]
    if not rows:
        return NOTHING
    table = "| work | against | faster (single rounds) | memory |\n|---|---|---|---|\n"
    for row in rows:
        low, high = row["spread"]
        memory = f"{row['memory_ratio']:.2f}x" if row["memory_ratio"] else ""
        who = f"{row['peer']} {row['variant']}".strip()
        table += f"| {row['work']} | {who} | **{row['speed_ratio']:.2f}x** ({low:.2f}-{high:.2f}) | {memory} |\n"
    return (
        f"{table}\n{_works(rows)}\nMade by `make bench` on {_machines(rows)}; all numbers in `benchmarks/results/`.\n"
    )


def hostile() -> str:
    """One row per hostile reward, at both levels of isolation."""
    results: Any = _read("isolated.json")
    if not results:
        return NOTHING
    names = dict.fromkeys(row["reward"] for row in results["rows"])
    levels = list(dict.fromkeys(row["level"] for row in results["rows"]))
    table = f"| reward | outcome | scores kept | {' | '.join(f'{level}: s' for level in levels)} | left over |\n"
    table += f"|---|---|---|{'---|' * len(levels)}---|\n"
    for name in names:
        rows = [row for row in results["rows"] if row["reward"] == name]
        kept, left = min(row["kept"] for row in rows), max(row["left"] for row in rows)
        outcome = "/".join(dict.fromkeys(row["outcome"] for row in rows))
        seconds = " | ".join(f"{row['seconds']:.1f}" for row in rows)
        table += f"| `{name}` | {outcome} | {kept} of 63 | {seconds} | {left} |\n"
    deadline = results["rows"][0]["deadline"]
    return f"{table}\nThe deadline was {deadline:g} s. Made by `{results['command']}`.\n"


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
    return (
        f"{table}\nSeconds are medians, ratios medians of single rounds. Busy: {results['cores']} other processes "
        f"compute on {results['cores']} cores. Made by `{results['command']}`.\n"
    )


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
    made = "One epoch a step. Made by `python -m benchmarks.pieces`"
    return f"{table}\n{made} on {_machines(rows)}.\n"


def limit() -> str:
    """One row per workload: the update beside its own matrix products."""
    rows = [row for row in _read("bench.json") if row["peer"] == "limit"]
    if not rows:
        return NOTHING
    table = "| work | update, s | its matrix products and Adam alone, s | share |\n|---|---|---|---|\n"
    for row in rows:
        ours, theirs = row["seconds"]["operant"], row["seconds"]["peer"]
        table += f"| {row['work']} | {ours:.3g} | {theirs:.3g} | {100 * row['speed_ratio']:.0f} % |\n"
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
    return "; ".join(sorted({row["machine"] for row in rows}))


def _read(name: str) -> list[dict[str, Any]]:
    path = RESULTS / name
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def architecture() -> str:
    """The measures of the architecture before and after the packages were made, the limits asked then, and today's."""
    before: Any = _read("architecture-before.json")
    after: Any = _read("architecture-packages.json")
    today: Any = _read("architecture.json")
    asked = {
        "modules in the root": "at most 12",
        "packages": "at most 32",
        "imports between packages": "at most 160",
        "layers": "at most 11",
        "circles between files": "0",
        "statements": f"at most {int(0.9 * before['statements']):,}",
        "90 % of functions have at most this many lines": "under 40",
        "lines of the longest function": "at most 80",
        "private functions used once": "at most 150",
    }
    table = "| measure | before | after | asked for | today |\n|---|---|---|---|---|\n"
    for name, value in after.items():
        old = before[name] if "afternoon" not in name else None
        table += (
            f"| {name} | {'' if old is None else f'{old:,}'} | {value:,} | {asked.get(name, '')} | {today[name]:,} |\n"
        )
    speed: Any = _read("against.json")
    table += "\nSeconds of a step, after over before, in turn on one machine (`python -m benchmarks.against`): "
    table += "; ".join(f"{w} {r['ratio']:.3f} ({r['low']:.3f} to {r['high']:.3f})" for w, r in speed.items())
    counted: Any = _read("operations.json")
    earlier: Any = _read("operations-before.json")
    counts = [f"{name} {earlier[name]['operations']:,} and {now['operations']:,}" for name, now in counted.items()]
    return f"{table}.\nTorch operations before and today (`python -m benchmarks.operations`): {'; '.join(counts)}.\n"
