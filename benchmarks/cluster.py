"""What throughput, idle time and staleness to expect from 1 to 4,096 GPUs: `python -m benchmarks.cluster`.

    python -m benchmarks.cluster --measure     unit costs of this machine, and the model against runs of 2 and 4 ranks
    python -m benchmarks.cluster               the table and the figure
    python -m benchmarks.cluster --costs FILE  the table for unit costs in a file: the fields of `Costs`, as JSON

A step of a run is simulated from unit costs. Nothing in it knows operant's code, so it is a model: it is held to real
runs of 2 and 4 processes by the processor time of a step over all ranks, which other processes on the machine hardly
change. The costs of GPUs are computed from data sheets (`paper`), and nothing of them was measured.
Writes benchmarks/results/cluster.json and docs/figures/cluster.svg.
"""

import argparse
import heapq
import json
import math
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import NormalDist, median
from typing import Any

from operant.tools.memory_plan.ranks import GPUS, Gpu

ROOT = Path(__file__).parents[1]
RESULTS, FIGURE = ROOT / "benchmarks/results/cluster.json", ROOT / "docs/figures/cluster.svg"
SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
STEPS = 24
"""Simulated steps; the first quarter of them fills the queue and is not counted."""
SHAPE = "--n-embd 256, 4 layers, built-in vocabulary; prompts of 8 tokens, replies of 24, 4 epochs, float32"


@dataclass(frozen=True)
class Costs:
    """Unit costs in seconds, unless it says otherwise."""

    decode_step: float
    """Of one more token of all replies, however many there are."""
    decode_token: float
    """Of one token of one reply, on top."""
    train_step: float
    """Of scoring and updating, however many replies there are: the optimizer above all."""
    train_token: float
    """Of a token of a prompt or reply, in scoring and in all epochs."""
    reward: float
    """Of a reply."""
    serial: float
    """Of a step, on one rank while all wait: order, logging, page."""
    sums: float
    """Bytes that a rank sends and receives in a step to sum gradients, but for the factor (n - 1) / n."""
    weights: float
    """Bytes of the weights that workers of rollouts get after a step."""
    link: float
    """Bytes a second of a rank's link."""
    latency: float
    """Of a message between two ranks."""
    messages: float
    """Sums over ranks in a step."""
    prompt: int
    reply: int
    """Mean tokens of a reply."""
    spread: float
    """Standard deviation of the length of a reply, as a share of its mean."""

    def generation(self, rows: int, longest: float) -> float:
        """Seconds of one rank for so many replies that are decoded together, the longest of so many tokens."""
        return longest * self.decode_step + rows * self.reply * self.decode_token

    def training(self, replies: float) -> float:
        """Seconds of one rank for its replies, without the sums."""
        return self.train_step + replies * (self.prompt + self.reply) * self.train_token

    def summing(self, ranks: int) -> float:
        """Seconds of a step's sums of gradients over ranks: a ring's traffic, and a tree's latency for each sum."""
        if ranks == 1:
            return 0.0
        return self.sums * (ranks - 1) / ranks / self.link + self.messages * self.latency * math.log2(ranks)

    def sending(self, workers: int) -> float:
        """Seconds of the new weights to so many workers, which pass them on in a chain of pieces."""
        return self.weights / self.link + self.latency * math.log2(workers + 1)


def longest(costs: Costs, rows: int, draw: random.Random) -> float:
    """A sample of the longest of so many replies, in tokens: normal lengths, cut at twice the mean."""
    if not costs.spread:
        return float(costs.reply)
    share = draw.random() ** (1.0 / rows)  # the quantile of the largest of `rows`: one random number in place of `rows`
    lengths = NormalDist(costs.reply, costs.spread * costs.reply)
    return min(lengths.inv_cdf(min(max(share, 1e-9), 1 - 1e-9)), 2.0 * costs.reply)


def colocated(costs: Costs, ranks: int, batch: int, *, ahead: bool = False, seed: int = 0) -> dict[str, Any]:
    """Every rank generates, judges and trains; all wait for the slowest. ahead: the replies of the next step are
    generated on the same ranks while rewards and sums of this one are waited for."""
    draw, rows, total, busy = random.Random(seed), -(-batch // ranks), 0.0, 0.0
    train, sums = costs.training(rows), costs.summing(ranks)
    waits = sums + costs.serial + rows * costs.reward
    for _ in range(STEPS):
        spans = [costs.generation(rows, longest(costs, rows, draw)) for _ in range(ranks)]
        mean, slowest = sum(spans) / ranks, max(spans)
        total += max(slowest + train, waits) if ahead else slowest + train + waits
        busy += mean + train
    found = {"generation": slowest, "training": train, "sums": sums, "reward": rows * costs.reward}
    return _row(costs, batch, total / STEPS, busy / total, float(ahead), found | {"serial": costs.serial})


def separate(costs: Costs, gpus: int, workers: int, batch: int, *, bound: int = 1, seed: int = 0) -> dict[str, Any]:
    """`workers` generate without pause, the others train: events in a queue that holds `bound` steps at most.

    A worker asks for `share` replies at a time with the newest weights that it has, and waits where the queue is full.
    """
    ranks, draw, share = gpus - workers, random.Random(seed), -(-batch // workers)
    train = costs.training(-(-batch // ranks)) + costs.summing(ranks) + costs.serial
    push = costs.sending(workers)
    events: list[tuple[float, int, int]] = []  # the end, the worker, the version of its weights
    version, queue, blocked = 0, list[int](), list[int]()
    trained_until, waiting, ages, ends, generating = 0.0, True, list[int](), list[float](), 0.0

    def begin(worker: int, now: float) -> None:
        nonlocal generating
        span = costs.generation(share, longest(costs, share, draw)) + share * costs.reward
        generating += span
        heapq.heappush(events, (now + span, worker, version))

    for worker in range(workers):
        begin(worker, 0.0)
    while len(ends) < STEPS:
        now, worker, used = heapq.heappop(events)
        if worker < 0:  # a step of training has ended
            version, waiting = version + 1, True
            ends.append(now)
            for free in blocked:
                begin(free, now + push)
            blocked = []
        else:
            queue += [used] * share
            if len(queue) < bound * batch:
                begin(worker, now)
            else:
                blocked.append(worker)
        if waiting and len(queue) >= batch:
            ages += [version - used for used in queue[:batch]]
            queue, waiting = queue[batch:], False
            heapq.heappush(events, (max(now, trained_until) + train, -1, version))
            trained_until = max(now, trained_until) + train
            for free in blocked:
                begin(free, now)
            blocked = []
    first = STEPS // 4
    seconds = (ends[-1] - ends[first - 1]) / (STEPS - first)
    busy = (min(generating / workers / ends[-1], 1.0) * workers + train / seconds * ranks) / gpus
    rollouts = costs.generation(share, longest(costs, share, draw)) + share * costs.reward
    parts = {"generation": rollouts, "training": train - costs.summing(ranks) - costs.serial, "weights": push}
    parts |= {"sums": costs.summing(ranks), "serial": costs.serial}
    return _row(costs, batch, seconds, min(busy, 1.0), sum(ages[first * batch :]) / max(len(ages[first * batch :]), 1),
                parts) | {"workers": workers}  # fmt: skip


def _row(
    costs: Costs, batch: int, seconds: float, busy: float, stale: float, parts: dict[str, float]
) -> dict[str, Any]:
    return {
        "step_seconds": seconds,
        "tokens_per_second": batch * costs.reply / seconds,
        "idle": 1.0 - busy,
        "staleness": stale,
        "binds": max(parts, key=lambda name: parts[name]),
        "parts": {name: round(value, 6) for name, value in parts.items()},
    }


def table(costs: Costs, replies: int) -> list[dict[str, Any]]:
    """The three ways from 1 to 4,096 GPUs, with so many replies for each GPU and step. Of separate workers the best
    division of the GPUs is taken."""
    rows = []
    for gpus in SIZES:
        batch = replies * gpus
        row: dict[str, Any] = {"gpus": gpus, "batch": batch, "in turn": colocated(costs, gpus, batch)}
        row["one ahead"] = colocated(costs, gpus, batch, ahead=True)
        parts = sorted({max(1, min(gpus - 1, round(gpus * k / 8))) for k in range(1, 8)}) if gpus > 1 else []
        tried = [separate(costs, gpus, workers, batch) for workers in parts]
        if tried:
            row["separate"] = max(tried, key=lambda found: found["tokens_per_second"])
        rows.append(row)
    return rows


# --- unit costs -------------------------------------------------------------------------------------------------------


def paper(gpu: Gpu, parameters: float, *, epochs: int = 4, share: float = 0.4) -> Costs:
    """Unit costs of a GPU by its data sheet, in bfloat16: decoding reads all weights for each token of all replies, and
    a product reaches `share` of the peak. Links of 50 GB/s and 20 us; replies of 256 tokens that spread by 40 %."""
    weights, work = 2.0 * parameters, parameters / (gpu.rate * share)
    return Costs(
        decode_step=weights / gpu.bandwidth,
        decode_token=2.0 * work,
        train_step=epochs * 32.0 * parameters / gpu.bandwidth,  # Adam reads and writes 16 bytes a weight, in an epoch
        train_token=(6.0 * epochs + 2.0) * work,
        reward=0.0,
        serial=0.05,
        sums=2.0 * weights * epochs,
        weights=weights,
        link=50e9,
        latency=20e-6,
        messages=100.0 * epochs,
        prompt=256,
        reply=256,
        spread=0.4,
    )


WORK = {"max_tokens": 24, "sampling.fixed_length": True, "epochs": 4, "probes": 0, "watch_every": 0, "seed": 1}
SMALL = {"n_positions": 64, "n_embd": 256, "n_layer": 4, "n_head": 4}
WARM, MEASURED = 1, 5
"""Steps of a measured run before the counted ones, and the counted ones."""


def worker(batch: int, out: Path) -> None:
    """One rank of a real run: the processor seconds of each step and its phases, and of sums alone; as JSON."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from operant import distributed, steps
    from operant.models.safe_loading import load_tokenizer
    from operant.storage.hub import find_model

    torch.manual_seed(0)
    tokenizer = load_tokenizer(find_model("builtin:reviews-lm"))
    model = GPT2LMHeadModel(GPT2Config(**SMALL, vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=0))
    size, taken, rank = 4 * sum(p.numel() for p in model.parameters()), [], int(os.environ["RANK"])
    tasks = [[1 + (7 * i + j) % 500 for j in range(8)] for i in range(256)]
    with distributed.launched(10):
        before, wall = time.process_time(), time.perf_counter()
        given = {"batch": batch, "steps": WARM + MEASURED, "tokenizer": tokenizer, "quiet": True, **WORK}
        for metrics in steps(model, tasks, "letters:e", out=out / "run", **given):
            now, at = time.process_time(), time.perf_counter()
            phases = {name[5:]: value for name, value in metrics.items() if name.startswith("time/")}
            taken.append({"processor": now - before, "wall": at - wall, "phases": phases})
            before, wall = now, at
        sums, gradient = [], torch.zeros(size // 4)
        for _ in range(4):
            start = time.process_time()
            distributed.total(gradient)
            sums.append(time.process_time() - start)
    (out / f"{rank}.json").write_text(json.dumps({"steps": taken[WARM:], "sum": median(sums), "bytes": size}), "utf-8")


def real(ranks: int, batch: int) -> dict[str, Any]:
    """A run of so many processes: median processor seconds of a step, over all ranks, and what the worker has seen."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(ranks)}
        place |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        place["PYTHONPATH"] = f"{ROOT / 'src'}:{ROOT}"
        free.close()
        command = [sys.executable, "-m", "benchmarks.cluster", "--worker", str(batch), folder]
        started = [subprocess.Popen(command, cwd=ROOT, env=os.environ | place | {"RANK": str(r)}) for r in range(ranks)]
        if any([process.wait() for process in started]):
            raise SystemExit(f"a run of {ranks} processes failed")
        seen = [json.loads((Path(folder) / f"{r}.json").read_text("utf-8")) for r in range(ranks)]
    spent = [sum(one["steps"][i]["processor"] for one in seen) for i in range(MEASURED)]
    walls = [max(one["steps"][i]["wall"] for one in seen) for i in range(MEASURED)]
    phases = {n: median(s["phases"].get(n, 0.0) for s in seen[0]["steps"]) for n in seen[0]["steps"][-1]["phases"]}
    return {"processor": median(spent), "wall": median(walls), "phases": phases, "sum": seen[0]["sum"],
            "bytes": seen[0]["bytes"]}  # fmt: skip


def measured() -> dict[str, Any]:
    """Unit costs in processor seconds from runs of one process with two sizes of a step, and the sum of gradients of
    two; and the model's error for runs of 2 and 4, which it has not seen."""
    few, many = (real(1, batch) for batch in (16, 64))
    pair = real(2, 64)

    def seconds(run: dict[str, Any], *names: str) -> float:
        """Processor seconds of phases, by their share of the step's time."""
        return run["processor"] * sum(run["phases"].get(name, 0.0) for name in names) / run["phases"]["step"]

    tokens, reply = 8 + WORK["max_tokens"], WORK["max_tokens"]
    decode = (seconds(many, "generate") - seconds(few, "generate")) / 48
    train = ("observe", "advantage", "update", "metrics")
    each = (seconds(many, *train) - seconds(few, *train)) / 48
    judged = seconds(many, "reward") / 64
    fixed = max(seconds(many, *train) - 64 * each, 0.0)
    begun = max(seconds(many, "generate") - 64 * decode, 0.0)
    updates = WORK["epochs"]
    costs = Costs(
        decode_step=begun / reply,
        decode_token=decode / reply,
        train_step=fixed,
        train_token=each / tokens,
        reward=judged,
        serial=max(many["processor"] - 64 * (decode + each + judged) - fixed - begun, 0.0),
        sums=2.0 * pair["bytes"] * updates,
        weights=float(pair["bytes"]),
        link=pair["bytes"] / pair["sum"],  # of two ranks, a sum sends each byte once and receives it once
        latency=0.0,
        messages=0.0,
        prompt=8,
        reply=reply,
        spread=0.0,
    )
    checks = []
    for ranks, run in ((2, pair), (4, real(4, 64))):
        # Ranks of one machine all spend processor time; what is serial is done by each in its own folder or not at all.
        step = colocated(replace(costs, serial=0.0), ranks, 64)["step_seconds"]
        expected = ranks * step + costs.serial
        found = {"ranks": ranks, "modelled": round(expected, 4), "measured": round(run["processor"], 4)}
        checks.append(found | {"error": round(expected / run["processor"] - 1, 3), "wall": round(run["wall"], 4)})
        print(json.dumps(checks[-1]), flush=True)
    return {"shape": SHAPE, "unit": "processor seconds", "costs": asdict(costs), "checks": checks,
            "one process": {"16 replies": few, "64 replies": many}}  # fmt: skip


# --- results ----------------------------------------------------------------------------------------------------------


def figure(rows: list[dict[str, Any]], title: str) -> str:
    """Generated tokens a second and GPU, against the number of GPUs, as SVG."""
    most = max(row[way]["tokens_per_second"] / row["gpus"] for row in rows for way in WAYS if way in row)
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 280" font-family="sans-serif" font-size="12">']
    parts.append(f'<rect width="720" height="280" fill="white"/><text x="60" y="20">{title}</text>')

    def place(gpus: int, value: float) -> tuple[float, float]:
        return 60 + 520 * math.log2(gpus) / math.log2(SIZES[-1]), 240 - 200 * value / most

    for gpus in SIZES[::2]:
        x, y = place(gpus, 0.0)
        parts.append(f'<text x="{x:.0f}" y="{y + 16:.0f}" text-anchor="middle">{gpus:,}</text>')
    for share in (0.0, 0.5, 1.0):
        y = place(1, share * most)[1]
        parts.append(f'<line x1="60" x2="580" y1="{y:.0f}" y2="{y:.0f}" stroke="#ddd"/>')
        parts.append(f'<text x="54" y="{y + 4:.0f}" text-anchor="end">{share * most:,.0f}</text>')
    for (way, colour), y in zip(WAYS.items(), (60, 80, 100), strict=True):
        points = [place(r["gpus"], r[way]["tokens_per_second"] / r["gpus"]) for r in rows if way in r]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="592" y="{y}" fill="{colour}">{way}</text>')
    parts.append('<text x="320" y="274" text-anchor="middle">GPUs (modelled, not measured)</text></svg>')
    return "\n".join(parts) + "\n"


WAYS = {"in turn": "#1b6ca8", "one ahead": "#c2571a", "separate": "#3a7d44"}


def lines(rows: list[dict[str, Any]]) -> list[str]:
    """A table in Markdown: of each way tokens a second and GPU, idle time, staleness, and what takes the longest."""
    out = ["| GPUs | " + " | ".join(f"{way}: tokens/s a GPU, idle, stale, binds" for way in WAYS) + " |"]
    out.append("|" + "---|" * (1 + len(WAYS)))
    for row in rows:
        cells = []
        for way in WAYS:
            if (found := row.get(way)) is None:
                cells.append("")
                continue
            workers = f" ({found['workers']} generate)" if "workers" in found else ""
            rate = found["tokens_per_second"] / row["gpus"]
            cells.append(f"{rate:,.0f}, {found['idle']:.0%}, {found['staleness']:.1f}, {found['binds']}{workers}")
        out.append(f"| {row['gpus']:,} | " + " | ".join(cells) + " |")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--measure", action="store_true", help="measure unit costs and the model's error on this machine"
    )
    parser.add_argument("--costs", type=Path, help="unit costs, as JSON; prints the table alone")
    parser.add_argument("--gpu", default="h200", choices=GPUS)
    parser.add_argument("--billions", type=float, default=1.3, help="parameters of the model")
    parser.add_argument("--replies", type=int, default=32, help="replies of a step for each GPU")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--figure", type=Path, default=FIGURE)
    parser.add_argument("--worker", nargs=2, metavar=("BATCH", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(int(args.worker[0]), Path(args.worker[1]))
        return
    if args.costs:
        print("\n".join(lines(table(Costs(**json.loads(args.costs.read_text("utf-8"))), args.replies))))
        return
    old = json.loads(args.results.read_text("utf-8")) if args.results.exists() else {}
    about = "python -m benchmarks.cluster"
    result: dict[str, Any] = {"command": f"{about} --measure; {about}", "measured": old.get("measured")}
    if args.measure:
        from operant.machine import about as versions

        result["measured"] = measured() | {"machine": versions()}
    costs = paper(GPUS[args.gpu], 1e9 * args.billions)
    rows = table(costs, args.replies)
    name = f"{args.billions:g}B in bfloat16 on {GPUS[args.gpu].name}, by data sheet"
    result["modelled"] = {"what": name, "costs": asdict(costs), "replies_per_gpu": args.replies, "rows": rows}
    args.results.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    args.figure.write_text(figure(rows, f"{name}: generated tokens a second and GPU"), encoding="utf-8")
    print("\n".join(lines(rows)))


if __name__ == "__main__":
    main()
