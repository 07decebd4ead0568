"""Write the generated parts of the pages: `python docs/generate.py` (`make docs`). A test checks that they are current.

metrics.md, options.md, mistakes.md and the pages of site_pages.py are generated whole. The others have blocks between
marks, such as <!-- presets --> and <!-- /presets -->: `pages` says what stands in each. Numbers come from measured.py.
"""

import inspect
import json
import re
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from operant import algorithms
from operant import options as other_names
from operant.algorithms import ALGORITHMS, rl4lms
from operant.metrics import registry
from operant.options import defaults, names
from operant.runs.config import config_schema, recipes
from operant.tools.cli.parser import as_typed, sentences
from operant.tools.report.diagnosis import foreign

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS), str(DOCS.parent)]
import measured  # noqa: E402
import site_pages  # noqa: E402
from benchmarks import kl_table  # noqa: E402

HEAD = """# Options

Every option of a run with `algorithm=ppo`, by its full name; those of other methods' losses and advantages are on the
page of each [method](algorithms.md).
From Python `**{"kl.coef": 0.2}` or `kl={"coef": 0.2}`, on the command line `--kl.coef 0.2`, in a recipe either form;
where one group alone has the name, the name alone will do. This page is generated: edit the dataclass that holds the
option, then run `make docs`.
"""
OF_A_RUN = ("steps", "batch", "tasks", "reward", "out", "trackers", "best", "evaluate")
"""Options of `operant.train` and the command line, which a Learner does not have."""
BAR = r"\|"
TITLES = {"": "The run", "data": "data: how tasks are read", "learner": "learner"}


def main() -> None:
    (DOCS / "methods").mkdir(exist_ok=True)
    for name, text in pages().items():
        (DOCS / name).write_text(text, encoding="utf-8")
    sys.path[:0] = [str(DOCS.parent / "tests")]
    import mistakes

    with tempfile.TemporaryDirectory() as folder:
        (DOCS / "mistakes.md").write_text(mistakes.page(Path(folder)), encoding="utf-8")


@cache
def pages() -> dict[str, str]:
    """The current text of every page, by name."""
    whole = {"metrics.md": registry.markdown(), "options.md": options(), "faults.md": site_pages.faults()}
    whole |= {"papers.md": site_pages.papers(), **site_pages.method_pages()}
    marked = {
        "methods/ppo.md": {
            "presets": presets(),
            "watch": site_pages.to_watch("ppo"),
            "published": measured.seed_demo(),
            "frontier": measured.kl_frontier(),
            "sums": site_pages.on_sums("ppo"),
            "kl": kl_table.table(),
        },
        "other-names.md": {
            "metrics": old_metrics(),
            "options": trl_options(),
            "others": other_options(),
            "presets": rl4lms_presets(),
        },
        "algorithms.md": {
            "families": site_pages.families(),
            "methods": methods(),
            "runs": measured.methods(),
            "comparison": measured.policy_gradients(),
        },
        "gallery.md": site_pages.gallery(),
        "maths.md": {"sums": measured.thresholds("arithmetic"), "countdown": measured.thresholds("countdown")},
        "design.md": {"measured": measured.architecture(), "generation": measured.generation()},
        "extending.md": examples(),
        "models.md": {"memory": site_pages.memory(), "planned": site_pages.planned(), "tried": measured.tried()},
        "agents.md": {"tools": measured.tool_use()},
        "worlds.md": {"guessing": measured.guessing()},
        "../benchmarks/README.md": {"experiments": site_pages.experiments()},
        "../README.md": {"demo": seeds(), "first": measured.first_example()},
        "how-to-train.md": {
            "losses": measured.losses(),
            "frontier": measured.frontier(),
            "adaptive": measured.adaptive_kl(),
            "optimizers": measured.optimizers(),
        },
        "reading-a-report.md": {"foreign": foreign.markdown()},
        "tasks.md": {
            **recipes_and_numbers(),
            "extract": measured.extract(),
            "translation": measured.translation(),
            "words": measured.commongen(),
            "dialog": measured.dialog(),
        },
        "text-worlds.md": {
            "rooms": measured.rooms(),
            "variants": measured.room_variants(),
            "speed": measured.textworld_speed(),
            "players": measured.textworld_players(),
            "trained": measured.textworld_trained(),
        },
        "rlhf.md": {
            "road": measured.road(("labels", "shuffled")),
            "beside": measured.road(("beside",)),
            "frontier": measured.preference_frontier(),
            "preferences": measured.reward_models(),
            "process": measured.process_rewards(),
        },
        "rewards.md": {"hostile": measured.hostile()},
        "code.md": {"programs": measured.programs(), "test-time": measured.test_time()},
        "prompts.md": {
            "prompts": measured.prompts(),
            "few-shot": measured.few_shot(),
            "calls": measured.prompt_calls(),
            "style": measured.style_transfer(),
        },
        "sandbox.md": {"hostile": measured.hostile_programs(), "cost": measured.sandbox()},
        "resuming.md": {"chaos": measured.chaos(), "soak": measured.soak(), "sizes": measured.sizes()},
        "scale.md": {
            "ranks": measured.rank_memory(),
            "checks": measured.cluster_checks(),
            "modelled": measured.cluster_model(),
        },
        "fast.md": {
            "peers": measured.peers(),
            "pieces": measured.pieces(),
            "limit": measured.limit(),
            "memory": measured.memory(),
            "threads": measured.threads(),
            "start": measured.start(),
            "turns": measured.turns(),
            "contexts": measured.contexts(),
            "growth": measured.growth(),
        },
    }
    return whole | {page: _filled(page, parts) for page, parts in marked.items()}


def _filled(page: str, parts: dict[str, str]) -> str:
    """The page with each part between its two marks."""
    text = (DOCS / page).read_text(encoding="utf-8")
    for mark, part in parts.items():
        pattern = rf"(<!-- {mark} -->\n).*?(<!-- /{mark} -->)"
        text, found = re.subn(pattern, lambda m, part=part: m[1] + part + m[2], text, flags=re.DOTALL)
        if found != 1:
            sys.exit(f"{page} has {found} blocks {mark!r} between their two marks; give it one")
    return text


SHOWN = "engine form method metric reward tasks tracker world".split()
"""Files of the example package that the page shows whole; it links to the others."""


def examples() -> dict[str, str]:
    """Those files of the example package, each as a code block."""
    files = [DOCS / "extending/pyproject.toml", *(DOCS / f"extending/src/operant_example/{name}.py" for name in SHOWN)]
    kinds = {".py": "python", ".toml": "toml"}
    return {file.name: f"```{kinds[file.suffix]}\n{file.read_text(encoding='utf-8')}```\n" for file in files}


def recipes_and_numbers() -> dict[str, str]:
    """The table of the recipes, and the file and the numbers of the two that the page explains."""
    table = "| recipe | method | what it does |\n|---|---|---|\n"
    for name, path in recipes().items():
        text = path.read_text(encoding="utf-8")
        comment = " ".join(line[2:] for line in text[: text.index("\nalgorithm:")].splitlines())
        method = re.search(r"^algorithm: ([\w-]+)", text, re.MULTILINE)[1]
        table += f"| `{name}` | {method} | {comment.split('. ')[0].removesuffix('.')} |\n"
    parts = {"recipes": table}
    for name in ("keyword", "chat"):
        parts[f"{name} file"] = f"```yaml\n{recipes()[name].read_text(encoding='utf-8')}```\n"
        parts[f"{name} numbers"] = measured.recipe(name)
    return parts


def seeds() -> str:
    """The results of the sentiment benchmark and its figure."""
    results = json.loads((DOCS / "../benchmarks/results/sentiment-seeds.json").read_text(encoding="utf-8"))
    table = "| run | before | after | KL a reply |\n|---|---|---|---|\n"
    for row in results["runs"]:
        name = row["run"].replace("control", "shuffled rewards").replace("-", ", seed ").replace("seed, seed", "seed")
        table += f"| {name} | {row['before']:.3f} | {row['after']:.3f} | {row['kl_per_reply']:.1f} |\n"
    return (
        "Mean positive probability on 256 held-out openings, temperature 1, the same random numbers before and "
        "after:\n\n"
        f"{table}\n![reward and KL over steps, one line a seed](docs/figures/sentiment-seeds.svg)\n\n"
        f"Made by `{results['command']}`.\n"
    )


def old_metrics() -> str:
    """One row per name of a TRL metric, with our name and its meaning."""
    rows: dict[str, list[tuple[str, str]]] = {}
    for metric in registry.METRICS.values():
        for name, note in re.findall(r"([\w/*]+)(?: (\([^)]*\)))?", metric.old):
            rows.setdefault(name, []).append((f"`{metric.name}`", f"{metric.meaning} {note}".strip()))
    for columns, (meaning, names_there) in registry.COLUMNS.items():
        for name in filter(None, names_there.split(", ")):
            rows.setdefault(name, []).append((f"columns `{columns}`", meaning))
    table = "| TRL | here | meaning |\n|---|---|---|\n"
    for name in sorted(rows):
        ours, meanings = zip(*rows[name])
        table += f"| `{name}` | {', '.join(ours)} | {'; '.join(meanings)} |\n"
    return table


def trl_options() -> str:
    """One row per field of TRL 0.11.4's PPOConfig."""
    table = "| PPOConfig | TRL's default | operant | notes |\n|---|---|---|---|\n"
    for name, theirs in other_names.PPO_CONFIG.items():
        table += f"| `{name}` | {theirs.default} | {_ours(theirs)} | {theirs.note} |\n"
    return table


def other_options() -> str:
    """One row per name in later versions of TRL, in transformers and in OpenRLHF."""
    table = "| name | from | operant | notes |\n|---|---|---|---|\n"
    systems = {"TRL": other_names.TRL, "transformers": other_names.TRANSFORMERS, "OpenRLHF": other_names.OPENRLHF}
    systems["trlX"] = other_names.TRLX
    for system, names_there in systems.items():
        for name, theirs in names_there.items():
            table += f"| `{name}` | {system} | {_ours(theirs)} | {theirs.note} |\n"
    return table


def _ours(theirs: other_names.Theirs) -> str:
    options = [f"`{name}`" for name in filter(None, theirs.ours.split(", "))]
    return ", ".join(options) + (" (train)" if theirs.ours in OF_A_RUN else "")


def presets() -> str:
    """One row per option that a preset sets, one column per preset; empty if it is the default."""
    known = config_schema("ppo")
    ours = {full: defaults(known[group])[name] for full, (group, name) in names(known).items()}
    of_ppo = {name: preset for name, preset in algorithms.presets().items() if preset.get("algorithm", "ppo") == "ppo"}
    chosen = {name: preset for name, preset in of_ppo.items() if name not in rl4lms.PRESETS}
    used = [full for full in ours if any(preset.get(full, ours[full]) != ours[full] for preset in chosen.values())]
    table = f"| option | default | {' | '.join(chosen)} |\n|---|---|{'---|' * len(chosen)}\n"
    for full in used:
        cells = [as_typed(p[full]) if full in p and p[full] != ours[full] else "" for p in chosen.values()]
        cells = [str(cell).replace(":", ":<wbr>") for cell in cells]  # a long name may go on in the next line
        table += f"| `{full}` | {as_typed(ours[full])} | {' | '.join(cells)} |\n"
    return table


def rl4lms_presets() -> str:
    """One row per configuration of RL4LMs: the numbers that differ between them."""
    columns = {"steps": "steps", "batch": "replies", "sampling.max_tokens": "tokens", "sampling.min_tokens": "at least"}
    columns |= {"sampling.top_k": "top-k", "optimizer.lr": "rate", "kl.coef": "KL", "kl.target": "target"}
    columns |= {"sampling.top_p": "mask", "mask.every": "every"}
    table = f"| preset | {' | '.join(columns.values())} |\n|---|{'---|' * len(columns)}\n"
    for name, preset in rl4lms.PRESETS.items():
        cells = [str(as_typed(preset[full])) if full in preset else "" for full in columns]
        table += f"| `{name}` | {' | '.join(cells)} |\n"
    return table


def methods() -> str:
    """One row per method: its parts and its own defaults."""
    table = "| method | learns from | loss, mean over | advantage | needs | KL | its own defaults |\n"
    table += "|---|---|---|---|---|---|---|\n"
    for name, row in ALGORITHMS.items():
        critic = "a critic with Q values" if row.needs.action_values else "a critic"
        needs = [critic] * row.needs.critic + ["a teacher"] * ("teacher" in row.options)
        needs += ["a reference"] * ("reference" in row.copies and not row.kl and "teacher" not in row.options)
        needs += [f"{row.needs.samples} replies a prompt"] * (row.needs.samples > 1)
        needs += ["a key of each state (`Step.key`)"] * (row.collated is not None)
        needs += ["`learner.select`"] * ("learner.select" in row.defaults)
        own = ", ".join(f"`{full}` {as_typed(value)}" for full, value in row.defaults.items())
        hidden = " without a reward" * (
            not row.needs.reward and not row.needs.labels
        ) + ", their returns in the prompt" * ("condition" in row.options)
        source = {"play": "its own replies", "data": "labelled replies" if row.needs.labels else "given replies"}
        source["both"] = "its own replies and given ones"
        credit = f"`{row.advantage.__name__}`" if row.advantage is not None else ""
        cells = [
            f"[`{name}`]({site_pages.file_of(name)})",
            source[row.source] + hidden,
            f"`{row.loss.__name__}`, {row.per}",
            credit,
        ]
        table += f"| {' | '.join([*cells, ', '.join(needs), ', '.join(row.kl), own])} |\n"
    return table


def options() -> str:
    """One table per group of options: name, default, meaning."""
    page = HEAD
    for group, made in config_schema("ppo").items():
        meanings = sentences(made)
        page += f"\n## {TITLES.get(group, group)}\n\n{_lead(made)}\n\n| option | default | meaning |\n|---|---|---|\n"
        for name, value in defaults(made).items():
            full = name if group in ("", "learner") and _alone(name) else f"{group}.{name}"
            page += f"| `{full}` | {as_typed(value)} | {meanings.get(name, '').replace('|', BAR)} |\n"
    return page


def _alone(name: str) -> bool:
    return name in names(config_schema("ppo")) or sum(n.endswith(f".{name}") for n in names(config_schema("ppo"))) == 1


def _lead(made: Any) -> str:
    """The first paragraph of the docstring, on one line."""
    return (inspect.getdoc(made) or "").split("\n\n")[0].replace("\n", " ")


if __name__ == "__main__":
    main()
