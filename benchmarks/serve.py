"""Tokens a second of `operant serve`, beside plain calls of its engine, and the time to the first token.

    python -m benchmarks.serve [--rounds 3] [--tokens 32]

A random Llama of 30 million parameters answers 1, 8 and 32 clients at the same time, each with requests one after the
other, by HTTP; the engine answers as many prompts in one call. The sides take turns. Writes
`benchmarks/results/serve.json` and the table in docs/serving.md.
"""

import argparse
import http.client
import json
import re
import statistics
import threading
import time
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


def asked(server: ModelServer, tokens: int, seed: int, first: list[float]) -> None:
    """One streamed request; appends the seconds to its first piece."""
    connection = http.client.HTTPConnection("127.0.0.1", server.socket.getsockname()[1])
    body = {"prompt": [5, 6, 7, 8] * 4, "max_tokens": tokens, "seed": seed, "stream": True}
    begun = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    answer.readline()
    first.append(time.perf_counter() - begun)
    answer.read()
    connection.close()


def served(server: ModelServer, clients: int, tokens: int) -> tuple[float, list[float]]:
    """Seconds for all requests of all clients, and the seconds to each first piece."""
    first: list[float] = []

    def client(number: int) -> None:
        for k in range(REQUESTS):
            asked(server, tokens, number * REQUESTS + k, first)

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
    for k in range(REQUESTS):
        engine.generate([[5, 6, 7, 8] * 4] * clients, sampling, [k * clients + i for i in range(clients)])
    return time.perf_counter() - begun


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(find_model("builtin:reviews-lm"))
    policy = Policy(LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **SIZE)).eval(), tokenizer)
    engine, sampling = NativeEngine(policy), Sampling(max_tokens=args.tokens, stop_tokens=policy.stop_tokens)
    rows = []
    with ModelServer(policy, NativeEngine(policy), "llama", ServerOptions(port=0)) as server:
        server.start()
        plain(engine, 1, sampling)
        for clients in args.clients:
            seconds: dict[str, list[float]] = {"serve": [], "generate": []}
            first: list[float] = []
            for _ in range(args.rounds):
                taken, begun = served(server, clients, args.tokens)
                seconds["serve"].append(taken)
                first += begun
                seconds["generate"].append(plain(engine, clients, sampling))
            count = clients * REQUESTS * args.tokens
            rows.append(
                {
                    "clients": clients,
                    **{f"{side} tokens/s": count / statistics.median(all_of) for side, all_of in seconds.items()},
                    "requests/s": clients * REQUESTS / statistics.median(seconds["serve"]),
                    "seconds to the first piece": statistics.median(first),
                }
            )
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
