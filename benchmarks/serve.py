"""Tokens a second of `operant serve`, beside plain calls of its engine, and the time to the first token.

    python -m benchmarks.serve [--rounds 3] [--tokens 32] [--transformers .venv-serving/bin/transformers]

A random Llama of 34 million parameters answers 1, 8 and 32 clients at the same time, each with requests one after the
other, by HTTP; the engine answers as many prompts in one call. `--transformers` names a program with the extra
`transformers[serving]`, and the same clients ask `transformers serve`, too. The sides take turns. Writes
`benchmarks/results/serve.json` and the table in docs/serving.md.
"""

import argparse
import http.client
import json
import re
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from operant import Policy, Sampling
from operant.apps.agents.server import ModelServer, ServerOptions
from operant.engines.native.engine import NativeEngine
from operant.machine import about
from operant.storage.hub import find_model

RESULTS, PAGE = Path(__file__).parent / "results/serve.json", Path(__file__).parents[1] / "docs/serving.md"
SIZE = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "num_attention_heads": 8}
REQUESTS = 2
"""Of each client, one after the other."""
PROMPT = "the film was one that"


def asked(port: int, model: str, tokens: int, seed: int, first: list[float]) -> None:
    """One streamed request; appends the seconds to its first piece."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    body = {"model": model, "prompt": PROMPT, "max_tokens": tokens, "seed": seed, "stream": True}
    begun = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    answer.readline()
    first.append(time.perf_counter() - begun)
    said = answer.read()
    assert answer.status == 200 and b"error" not in said, said[:300]
    connection.close()


def served(port: int, model: str, clients: int, tokens: int) -> tuple[float, list[float]]:
    """Seconds for all requests of all clients, and the seconds to each first piece."""
    first: list[float] = []

    def client(number: int) -> None:
        for k in range(REQUESTS):
            asked(port, model, tokens, number * REQUESTS + k, first)

    threads = [threading.Thread(target=client, args=(i,)) for i in range(clients)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begun, first


def plain(engine: NativeEngine, clients: int, sampling: Sampling) -> float:
    """Seconds of the engine alone for as many replies."""
    begun = time.perf_counter()
    prompt = engine.policy.tokenizer(PROMPT)["input_ids"]  # pyright: ignore
    for k in range(REQUESTS):
        engine.generate([prompt] * clients, sampling, [k * clients + i for i in range(clients)])
    return time.perf_counter() - begun


@contextmanager
def of_transformers(program: str | None, policy: Policy) -> Iterator[tuple[int, str] | None]:
    """The port of `transformers serve`, and the name of its model."""
    if program is None:
        yield None
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        policy.model.save_pretrained(folder)
        policy.tokenizer.save_pretrained(folder)  # pyright: ignore
        words = [program, "serve", folder, "--port", str(port), "--device", "cpu"]
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            for _ in range(600):
                with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                assert process.poll() is None, f"{' '.join(words)} has ended"
                time.sleep(0.2)
            served(port, folder, 1, 4)
            yield port, folder
        finally:
            process.terminate()
            process.wait()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--transformers", help="a program `transformers` with its extra `serving`")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(find_model("builtin:reviews-lm"))
    policy = Policy(LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **SIZE)).eval(), tokenizer)
    engine, sampling = NativeEngine(policy), Sampling(max_tokens=args.tokens, stop_tokens=policy.stop_tokens)
    rows = []
    with (
        ModelServer(policy, NativeEngine(policy), "llama", ServerOptions(port=0)) as server,
        of_transformers(args.transformers, policy) as theirs,
    ):
        server.start()
        plain(engine, 1, sampling)
        servers = {"serve": (server.socket.getsockname()[1], "llama"), "transformers serve": theirs}
        for clients in args.clients:
            seconds: dict[str, list[float]] = {"generate": []}
            first: dict[str, list[float]] = {}
            for _ in range(args.rounds):
                for side, at in servers.items():
                    if at is None:
                        continue
                    taken, begun = served(at[0], at[1], clients, args.tokens)
                    seconds.setdefault(side, []).append(taken)
                    first.setdefault(side, []).extend(begun)
                seconds["generate"].append(plain(engine, clients, sampling))
            count = clients * REQUESTS * args.tokens
            rows.append({"clients": clients})
            for side, all_of in seconds.items():
                rows[-1][f"{side}, tokens/s"] = count / statistics.median(all_of)
            rows[-1]["serve, requests/s"] = clients * REQUESTS / statistics.median(seconds["serve"])
            for side, found in first.items():
                rows[-1][f"{side}, seconds to the first piece"] = statistics.median(found)
            print(rows[-1], flush=True)
    parameters = sum(p.numel() for p in policy.model.parameters())
    made = {"machine": about(), "parameters": parameters, "tokens": args.tokens, "rounds": args.rounds, "rows": rows}
    args.out.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    if args.out == RESULTS:
        names = [name for name in rows[0] if name != "clients"]
        lines = [f"| clients | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
        lines += [f"| {row['clients']} | {' | '.join(f'{row[name]:.3g}' for name in names)} |" for row in rows]
        table = "<!-- serve -->\n" + "\n".join(lines) + "\n<!-- /serve -->"
        page = re.sub(r"<!-- serve -->.*<!-- /serve -->", table, PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
        PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
