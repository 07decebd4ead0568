"""The registry of metrics in `registry.txt`: name, unit, healthy range, meaning, and the name in TRL's PPOTrainer.

`python -m operant.metrics.registry > docs/metrics.md` writes the page. The report explains its charts with the same
sentences, and a test checks that the page is up to date.
"""

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Metric:
    """A metric, which has one value per step: `METRICS["kl/per_reply"].band == (0.0, 10.0)`."""

    name: str
    group: str
    unit: str
    healthy: str
    """In words: "rises", "0 to 10"."""
    old: str
    """TRL's names for it."""
    meaning: str
    band: tuple[float | None, float | None] | None = None
    """The healthy range as numbers (lowest, highest), if there is one."""

    def unhealthy(self, value: float) -> bool:
        """Return whether `value` is outside of the band by more than rounding."""
        low, high = self.band or (None, None)
        return (low is not None and value < low - 1e-4) or (high is not None and value > high + 1e-4)


def _text(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _read(table: str) -> dict[str, Metric]:
    """Lines "name | unit | healthy: words, or lowest..highest | TRL's names | meaning"; an indented one goes on."""
    metrics, group = {}, ""
    for line in re.sub(r"\n +", " ", table.strip()).split("\n"):
        if line.startswith("# "):
            group = line[2:]
            continue
        name, unit, healthy, old, meaning = (cell.strip() for cell in line.split("|"))
        band = None
        low, dots, high = healthy.partition("..")
        if dots:
            band = (float(low) if low else None, float(high) if high else None)
            healthy = f"{low} to {high}" if low and high else f"at most {high}" if high else f"at least {low}"
        metrics[name] = Metric(name, group, unit, healthy, old, meaning, band)
    return metrics


METRICS: dict[str, Metric] = _read(_text("registry.txt"))
CHOSEN = METRICS["evaluate/<metric>"].group
"""The group of the metrics that the option `evaluation.metrics` chooses."""

COLUMNS = {
    names: (meaning, old)
    for names, meaning, old in (map(str.strip, line.split("|")) for line in _text("columns.txt").splitlines())
}
"""The columns of `rollouts/step-00012.parquet`: names -> (meaning, TRL's names)."""


def describe(name: str) -> Metric | None:
    """Return the entry of a metric, None if it has none; `reward/taste/mean` has that of `reward/<part>/mean`."""
    name = re.sub(r"^reward/.+/(mean|std|abstained)$", r"reward/<part>/\1", name)
    name = re.sub(r"^(|evaluate/)outcome/.+$", r"\1outcome/<class>", name)
    return METRICS.get(name) or METRICS.get(re.sub(r"^evaluate/.+?(_std|_before)?$", r"evaluate/<metric>\1", name))


def markdown() -> str:
    """Return the page docs/metrics.md."""
    page, group = "", ""
    for m in METRICS.values():
        if m.group != group:
            group = m.group
            page += f"\n## {group}\n\n| name | meaning | unit | healthy | TRL's name |\n|---|---|---|---|---|\n"
        page += f"| {_code(m.name)} | {m.meaning} | {m.unit} | {m.healthy} | {_code(m.old)} |\n"
    page = _text("page.md").format(metrics=page)
    return page + "".join(f"| {_code(n)} | {meaning} | {_code(old)} |\n" for n, (meaning, old) in COLUMNS.items())


def _code(names: str) -> str:
    """Return the names in code quotes; remarks in brackets stay outside of them."""
    return re.sub(r"([\w/*<>]+)((?: \([^)]*\))?)(, |$)", r"`\1`\2\3", names) if names else ""


if __name__ == "__main__":
    print(markdown(), end="")
