"""A stand-in for `vllm serve`, with numpy alone: it answers the same requests, with a GPT-2 that it computes itself.

    python stand_in_vllm.py serve FOLDER --host 127.0.0.1 --port 8000 --served-model-name policy

Weights come from FOLDER, and are loaded again by `POST /collective_rpc`. Nothing here is shared with the library.
"""

import argparse
import http.server
import json
import os
import threading
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file


class GPT2:
    """The next-token logits of a transformers GPT-2 folder, in float64."""

    def __init__(self, folder):
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        weights = load_file(Path(folder) / "model.safetensors")
        self.weights = {name.removeprefix("transformer."): x.astype(np.float64) for name, x in weights.items()}
        self.heads, self.layers, self.known = config["n_head"], config["n_layer"], {}

    def norm(self, x, name):
        x = x - x.mean(-1, keepdims=True)
        scaled = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
        return scaled * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def linear(self, x, name):
        return x @ self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def logits(self, ids):
        if (key := tuple(ids)) not in self.known:
            self.known[key] = self.compute(ids)
        return self.known[key]

    def compute(self, ids):
        x = self.weights["wte.weight"][ids] + self.weights["wpe.weight"][: len(ids)]
        ahead = np.triu(np.full((len(ids), len(ids)), -np.inf), 1)
        for layer in range(self.layers):
            q, k, v = np.split(self.linear(self.norm(x, f"h.{layer}.ln_1"), f"h.{layer}.attn.c_attn"), 3, -1)
            q, k, v = (part.reshape(len(ids), self.heads, -1).swapaxes(0, 1) for part in (q, k, v))
            scores = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1]) + ahead
            mass = np.exp(scores - scores.max(-1, keepdims=True))
            mixed = (mass / mass.sum(-1, keepdims=True)) @ v
            x = x + self.linear(mixed.swapaxes(0, 1).reshape(len(ids), -1), f"h.{layer}.attn.c_proj")
            h = self.linear(self.norm(x, f"h.{layer}.ln_2"), f"h.{layer}.mlp.c_fc")
            h = 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
            x = x + self.linear(h, f"h.{layer}.mlp.c_proj")
        return self.norm(x[-1], "ln_f") @ self.weights.get("lm_head.weight", self.weights["wte.weight"]).T


def log_softmax(x):
    x = x - x.max()
    return x - np.log(np.exp(x).sum())


class Server(http.server.ThreadingHTTPServer):
    """Serves a folder. `fault`: what it does wrong; `seen`: the bodies of all requests for completions."""

    daemon_threads = True
    request_queue_size = 128  # with 5, a busy machine resets connections that come at the same time

    def __init__(self, folder, port=0, raw=False, fault=None):
        super().__init__(("127.0.0.1", port), Handler)
        self.folder, self.raw, self.fault = folder, raw, fault
        self.model, self.lock, self.seen, self.posted = GPT2(folder), threading.Lock(), [], []

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/v1"

    def handle_error(self, *_):
        """A client that has gone is no news."""

    def complete(self, body):
        numbers, ids, logprobs, reason = np.random.default_rng(body["seed"]), [], [], "length"
        stops = set(body["stop_token_ids"])
        for place in range(body["max_tokens"]):
            with self.lock:
                logits = self.model.logits([*body["prompt"], *ids])
            scores = logits / body["temperature"]
            if place < body["min_tokens"]:
                scores[sorted(stops)] = -np.inf
            if body["top_k"] > 0:
                scores[scores < np.sort(scores)[-body["top_k"]]] = -np.inf
            order = np.argsort(-scores)
            sorted_mass = np.exp(log_softmax(scores))[order]
            scores[order[np.cumsum(sorted_mass) - sorted_mass >= body["top_p"]]] = -np.inf
            processed = log_softmax(scores)
            processed[processed < processed.max() + np.log(body["min_p"] or 1e-300)] = -np.inf
            processed = log_softmax(processed)
            token = int(numbers.choice(len(processed), p=np.exp(processed)))
            ids.append(token)
            logprobs.append(float((log_softmax(logits) if self.raw else processed)[token]))
            if token in stops:
                reason = "stop"
                break
        known = {"prompt_token_ids": body["prompt"], "token_ids": ids, "finish_reason": reason, "text": "..."}
        choice = known | {"logprobs": {"token_logprobs": logprobs, "tokens": [str(token) for token in ids]}}
        match self.fault:
            case "text only":
                del choice["token_ids"], choice["prompt_token_ids"]
            case "no log-probs":
                choice["logprobs"] = None
            case "other ids":
                choice["prompt_token_ids"] = [0, *body["prompt"]]
            case "short":
                choice["token_ids"], choice["logprobs"]["token_logprobs"] = ids[:2], logprobs[:2]
            case "large id":
                choice["token_ids"] = [999, *ids[1:]]
        return choice


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self):
        self.answer({})

    def do_POST(self):
        server, text = self.server, self.rfile.read(int(self.headers["Content-Length"] or 0))
        body = json.loads(text or b"{}")
        if self.path == "/v1/completions":
            with server.lock:
                server.seen.append(body)
                last = server.fault == "dies" and len(server.seen) > 6
            if last:
                os._exit(9)
            if server.fault == "silent":
                time.sleep(1.0)
            if server.fault == "busy" and len(server.seen) % 3 == 1:
                self.answer({"error": {"message": "try again"}}, 503)
            elif body["model"] != "policy":
                self.answer({"error": {"message": f"The model `{body['model']}` does not exist."}}, 404)
            else:
                self.answer({"choices": [server.complete(body)]})
        elif self.path == "/collective_rpc" and body["method"] == "reload_weights":
            with server.lock:
                server.posted.append(self.path)
                kept, server.model = server.model, GPT2(body["kwargs"]["weights_path"])
                if server.fault == "keeps its head":
                    server.model.weights["lm_head.weight"] = kept.weights["wte.weight"]
            self.answer({"results": [None]})
        elif self.path == "/reset_prefix_cache":
            server.posted.append(self.path)
            self.answer({})
        else:
            self.answer({"detail": "Not Found"}, 404)

    def answer(self, content, status=200):
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format, *args):
        pass


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("folder")
    for name in ("host", "served-model-name", "logprobs-mode", "generation-config", "fault"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--port", type=int)
    parser.add_argument("--skip-tokenizer-init", action="store_true")
    asked = parser.parse_args()
    assert asked.host == "127.0.0.1"
    assert os.environ["VLLM_NO_USAGE_STATS"] == os.environ["DO_NOT_TRACK"] == "1"
    assert "PYTHONPATH" not in os.environ
    if asked.fault == "at the start":
        raise SystemExit("no accelerator was found")
    fault = asked.fault
    if fault == "dies":  # the first time
        mark = Path(asked.folder).with_name("died")
        fault = None if mark.exists() else fault
        mark.touch()
    Server(asked.folder, asked.port, asked.logprobs_mode != "processed_logprobs", fault).serve_forever(0.01)


if __name__ == "__main__":
    main()
