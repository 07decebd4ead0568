"""Response times of the live page with 200 steps of 128 replies, requested over HTTP as its table does.

python -m benchmarks.replies
"""

import argparse
import json
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from random import Random

from operant.runs.folder import RunFolder
from operant.tools.report.server import Server, Serving

STEPS, REPLIES, TOKENS = 200, 128, 20
WORDS = "a film that was great and the story is a boring but moving account of love with no plot".split()
REQUESTS = {
    "all, newest first": "",
    "search": "search=great+story",
    "search and sort by KL": "search=love&sort=kl",
    "sort by reward, last page": "sort=reward&descending=0&offset=25575&limit=25",
    "one step": "step=100&sort=reply_tokens",
}


def rows(random: Random) -> list[dict]:
    """The replies of one step."""
    table = []
    for i in range(REPLIES):
        tokens = [f" {random.choice(WORDS)}" for _ in range(TOKENS)]
        logprobs = [-random.expovariate(0.25) for _ in tokens]
        row = {
            "task": str(i),
            "query": "The movie was",
            "reply": "".join(tokens),
            "reward": random.random(),
            "tokens": tokens,
        }
        table.append(row | {"logprobs": logprobs, "ref_logprobs": [x - 0.1 for x in logprobs], "end": "length"})
    return table


def main() -> None:
    """Print the seconds of each request, the best of five."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    steps, random = parser.parse_args().steps, Random(0)
    with tempfile.TemporaryDirectory() as folder, RunFolder.create(Path(folder) / "run", {}) as run:
        for step in range(1, steps + 1):
            run.rollouts(step, rows(random))
        with Server(run.path, Serving(serve=True, port=0)) as site:
            threading.Thread(target=site.serve_forever, daemon=True).start()
            print(f"{steps * REPLIES:,} replies; the first request reads them: {request(site.url, ''):.2f} s")
            for name, query in REQUESTS.items():
                print(f"  {name:28} {min(request(site.url, query) for _ in range(5)):.3f} s")
            run.rollouts(steps + 1, rows(random))
            print(f"  {'after a new step':28} {request(site.url, ''):.3f} s")
            print(f"  {'tokens of a reply':28} {request(site.url, f'step={steps}&row=3', 'tokens'):.3f} s")
            site.shutdown()


def request(url: str, query: str, what: str = "replies") -> float:
    """Seconds until the answer has been received and parsed."""
    started = time.perf_counter()
    with urllib.request.urlopen(f"{url}{what}.json?{query}") as answer:
        json.load(answer)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
