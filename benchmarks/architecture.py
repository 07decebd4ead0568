"""Measure the architecture of `src/operant`, and draw its modules and their imports.

    python -m benchmarks.architecture                       # the table
    python -m benchmarks.architecture --budget              # and lower the budget that tests hold it to
    python -m benchmarks.architecture --figure FILE.svg     # and as a figure

What is measured, and how, stands in `tests/architecture.py`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from architecture import (
    BUDGET,
    ROOT,
    STEP,
    budget,
    circles,
    files,
    layers,
    measure,
    module_graph,
    package_graph,
    reached,
    reading_list,
    rooms,
    used_once,
)
from texts import parts

PASSED = parts("programs.txt")["stations of an option"]


def stations() -> list[str]:
    """The calls and returns of functions that have `loss.clip` between the command line and the loss of PPO."""
    with tempfile.TemporaryDirectory() as folder:
        source = PASSED.replace("VALUE", repr("0.2371"))
        command = [sys.executable, "-c", source, *STEP, "--loss.clip", "0.2371", "--out", f"{folder}/run"]
        done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", cwd=folder, check=True)
    return [line for line in done.stderr.splitlines() if line.endswith((" call", " return"))]


def write_budget(measured: dict[str, dict[str, int]]) -> None:
    """Lower each number of the budget that is above what is measured. Rooms come and go; nothing else rises."""
    old, head = budget(), [line for line in BUDGET.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    found = {"house": {name: min(limit, measured["house"][name]) for name, limit in old["house"].items()}}
    found["rooms"] = {name: min(old["rooms"].get(name, lines), lines) for name, lines in measured["rooms"].items()}
    tables = [f"[{table}]\n" + "".join(f'"{name}" = {n}\n' for name, n in of.items()) for table, of in found.items()]
    BUDGET.write_text("\n".join(["\n".join(head) + "\n", *tables]), encoding="utf-8")


def tools() -> set[str]:
    """The packages that the core must not import, as `docs/design.md` lists them."""
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    listed = page.split("<!-- packages -->")[1].split("<!-- /packages -->")[0]
    return {name for name in listed.split() if name.startswith("tools.")} | {"api", "__main__"}


WIDTH, ROW, BOX = 1080, 74, 34
COLOURS = {"core": ("#e8f0fb", "#35577f"), "app": ("#e9f6ec", "#2f6b3f"), "tool": ("#fdf0dd", "#8a5a12")}


def figure(packages: dict[str, set[str]], outside: set[str]) -> str:
    """An SVG of the packages in layers, the lowest at the bottom; a line is an import, from the upper to the lower.

    A line is left out where a chain of other lines leads to the same package. outside: the packages drawn as tools.
    """
    rows = layers(packages)
    height = ROW * len(rows) + 60
    place: dict[str, tuple[float, float, float]] = {}
    for level, row in enumerate(rows):
        widths = [max(7.6 * len(name) + 22, 60) for name in row]
        gap = (WIDTH - sum(widths)) / (len(row) + 1)
        x = gap
        for name, width in zip(row, widths, strict=True):
            place[name] = (x, height - 44 - ROW * (level + 1) + (ROW - BOX) / 2, width)
            x += width + gap
    lines, boxes, below = [], [], {name: reached(packages, name) for name in packages}
    for name, targets in packages.items():
        x, y, width = place[name]
        for target in sorted(t for t in targets if not any(t in below[other] for other in targets)):
            to_x, to_y, to_width = place[target]
            start, end, middle = x + width / 2, to_x + to_width / 2, (y + BOX + to_y) / 2
            path = f"M{start:.0f} {y + BOX:.0f}C{start:.0f} {middle:.0f} {end:.0f} {middle:.0f} {end:.0f} {to_y:.0f}"
            lines.append(f'<path d="{path}" fill="none" stroke="#9aa7b5" stroke-width="1.2"/>')
        fill, ink = COLOURS["tool" if name in outside else "app" if name.startswith("apps.") else "core"]
        boxes.append(
            f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{BOX}" rx="6" fill="{fill}" stroke="{ink}"/>'
            f'<text x="{x + width / 2:.0f}" y="{y + 22:.0f}" text-anchor="middle" fill="{ink}">{name}</text>'
        )
    count = sum(map(len, packages.values()))
    legend = (
        f"{len(packages)} packages in {len(rows)} layers, {count} imports (those that others imply are not drawn); "
        "blue: the core, green: the apps, ochre: the tools"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="14"><rect width="{WIDTH}" height="{height}" fill="white"/>{"".join(lines)}{"".join(boxes)}'
        f'<text x="12" y="{height - 14}" fill="#444" font-size="13">{legend}</text></svg>\n'
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the measures and the lines of each room there")
    parser.add_argument("--budget", action="store_true", help="lower `tests/budget.toml` to what is measured")
    parser.add_argument("--once", action="store_true", help="list the functions that are used once")
    parser.add_argument("--step", action="store_true", help="list the files of one PPO step")
    parser.add_argument("--option", action="store_true", help="list the stations of an option on its way to the loss")
    parser.add_argument("--figure", type=Path, help="draw the packages there, as SVG")
    options = parser.parse_args(arguments)
    found = measure()
    for name, value in found.items():
        print(f"{name:<48} {value:>7,}")
    for group in circles(module_graph()):
        print("circle:", " ".join(group))
    if options.once:
        print(*used_once({path: path.read_text(encoding="utf-8") for path in files()}), sep="\n")
    if options.step:
        print(*reading_list(), sep="\n")
    if options.option:
        print(*(passed := stations()), f"{len(passed)} stations", sep="\n")
    if options.figure:
        options.figure.write_text(figure(package_graph(module_graph()), tools()), encoding="utf-8")
    if options.budget:
        write_budget({"house": found, "rooms": rooms()})
    if options.json:
        options.json.write_text(json.dumps({"house": found, "rooms": rooms()}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
