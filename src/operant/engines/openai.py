"""Generation by an OpenAI-compatible server that takes token ids and returns token ids and log-probs, such as vLLM's.

Token in, token out: prompts are sent as ids, and nothing is re-tokenised. The weights of the server are its own; after
each update the policy is written to a folder, and the server is asked to load it from there.
"""

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import torch

from operant import distributed
from operant.machine import beat
from operant.models import output_mlp
from operant.models.loading import replace_export
from operant.models.policy import Policy
from operant.net.client import Client, NoAnswer
from operant.sampling import Sampling, check_expressed, check_ids, check_prompts, end_of
from operant.types import Batch, Completion, OperantError, require, shown

UNKNOWN = ("only_text", "banned", "top_p_least", "keep_stops", "guidance", "truncation")
"""What the protocol does not have."""
COOLEST = 0.01
"""vLLM raises lower temperatures to this one."""
NEUTRAL = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "n": 1}
"""Sent with each request, because a server may take other values from the model's generation_config."""
FOLDER = "FOLDER"
"""In `engine.reload`, this text stands for the path of the exported policy."""
RELOAD: Mapping[str, Any] = {
    "/collective_rpc": {"method": "reload_weights", "kwargs": {"weights_path": FOLDER}},
    "/reset_prefix_cache": {},
}
"""How vLLM loads other weights, and drops what it has computed with the previous ones (VLLM_SERVER_DEV_MODE=1)."""
PROBE = Sampling(temperature=0.5, max_tokens=8)
"""Of the first request. At this temperature, raw log-probs are not those of the distribution that was sampled from."""
OTHER_MODEL = 0.5
"""Nats, mean over the probe's tokens: a larger difference is another model, as rounding makes at most a tenth."""
ROUNDING = 0.01
"""Nats beside five times the first difference: a larger one after an update is weights that were not loaded."""
Reply = tuple[list[int], list[float]]
"""The ids and log-probs of an answer."""


class OpenAIEngine:
    """An engine in another process: `POST URL/completions` with token ids.

    url: the address up to `/v1`. model: the name that the server gives its model.
    sync: `folder`: after each update the policy is written to `folder`, as safetensors that the server can read, and
    the paths of `reload` are posted, in their order, each with its body, in which FOLDER stands for the folder. `none`:
    the server keeps its weights, and completions their version: replies get stale.
    at_once: most requests under way. timeout: seconds for the answer to one. tries: how often one is sent, with growing
    pauses, while there is no connection, no answer, or a status that may pass (429, 503).
    key_variable: the environment variable with the server's key, if it wants one.
    The random number of a reply is its seed, from its key: whether the same seed gives the same reply again, in another
    batch too, is up to the server. Completions have no values: the learner computes them.
    """

    own_weights = True
    own_numbers = True

    def __init__(
        self,
        policy: Policy,
        *,
        url: str,
        model: str,
        sync: Literal["folder", "none"] = "folder",
        folder: Path | None = None,
        reload: Mapping[str, Any] = RELOAD,
        at_once: int = 64,
        timeout: float = 600.0,
        tries: int = 6,
        key_variable: str = "OPENAI_API_KEY",
    ):
        limits: dict[str, Any] = {"timeout": timeout, "longest_wait": timeout, "tries": tries, "at_once": at_once}
        wording = {"owner": "engine", "wait_option": "engine.timeout", "serves": f"a model {model!r}"}
        self.client = Client(url, key_variable=key_variable, **limits, **wording)
        fits, paths = (folder is None) == (sync == "none"), all(path[:1] == "/" for path in reload)
        require(fits, f"engine.folder={shown(folder)}: it is what engine.sync=folder needs, and none else")
        require(paths, f"engine.reload={shown(reload)}: it maps paths, which begin with /, to bodies")
        check_exported(policy, "openai")
        self.folder = None if folder is None else Path(folder).expanduser().resolve()
        self.follows = folder is not None
        self.model, self.address = model, f"{self.client.url}/completions"
        self.reload, self.policy = reload, policy
        self.version = policy.version
        self.busy = threading.Lock()
        """Held by each call, so that the weights do not change within one."""
        self.usual: float | None = None
        """The difference that rounding alone made, in nats, in the first answer."""
        if self.folder is None:
            distributed.together(lambda: self.check() if distributed.rank() == 0 else None)
        self.sync(policy, policy.version)

    def sync(self, policy: Policy, version: int) -> None:
        """Write the weights of `policy` to the folder, and let the server load them; without a folder, do nothing."""
        if self.folder is None:
            return
        self.policy = policy  # with which the answers are compared; of rollouts ahead, a copy

        def first() -> None:
            with self.busy:
                self.load(policy)
            self.check()

        distributed.together(first if distributed.rank() == 0 else lambda: None)
        self.version = version

    def load(self, policy: Policy) -> None:
        assert self.folder is not None
        replace_export(policy, self.folder)
        server = urlsplit(self.client.url)
        for path, body in self.reload.items():
            text = json.dumps(body).replace(json.dumps(FOLDER), json.dumps(str(self.folder)))
            try:
                self.client.send(f"{server.scheme}://{server.netloc}{path}", text)
            except NoAnswer as error:
                remedy = self.client.remedy
                if error.status:
                    remedy = (
                        "the server did not load the policy's new weights: does it have that path (vLLM with "
                        f"VLLM_SERVER_DEV_MODE=1), and can it read {self.folder}? Its own paths go into engine.reload"
                    )
                raise OperantError(f"{error}; {remedy}") from error
            beat()

    def generate(self, prompts: Sequence[list[int]], sampling: Sampling, keys: Sequence[int]) -> list[Completion]:
        check_prompts(self.policy, prompts, sampling)
        check_expressed(sampling, UNKNOWN, "openai")
        if sampling.temperature < COOLEST and sampling.top_k != 1:
            raise OperantError(
                f"sampling.temperature={sampling.temperature:g}: a server raises it to {COOLEST:g}; use at least that, "
                "or top_k=1, which is greedy"
            )
        if sampling.min_p and sampling.top_p < 1:
            raise OperantError(
                f"sampling.min_p={sampling.min_p:g} with top_p={sampling.top_p:g}: a server applies them in another "
                "order than this library; use one of them, or engine=native"
            )
        with self.busy:
            bodies = (self.body(prompt, sampling, key) for prompt, key in zip(prompts, keys, strict=True))
            requests, answers = dict(enumerate(bodies)), dict[int, Reply]()
            self.ask(requests, answers)
            return [self.completion(*answers[i], sampling) for i in range(len(prompts))]

    def ask(self, requests: Mapping[int, dict[str, Any]], answers: dict[int, Reply]) -> None:
        """Send the requests; their answers are added to `answers`."""

        def keep(i: int, answer: Any) -> None:
            try:
                answers[i] = read(answer["choices"][0], requests[i]["prompt"])
            except (KeyError, IndexError, TypeError, AttributeError) as error:
                raise OperantError(
                    f"{self.address} answered {shown(answer, 300)}, which lacks an answer; can it give them?"
                ) from error

        self.client.ask_all(self.address, requests, keep)

    def choose(
        self, prompts: object, options: object, sampling: Sampling, keys: object
    ) -> list[tuple[int, Completion]]:
        raise OperantError(
            f"the world offers replies to choose among, and the server at {self.client.url} only generates: use "
            "engine=native or engine=transformers"
        )

    def body(self, prompt: Sequence[int], sampling: Sampling, key: int) -> dict[str, Any]:
        """What is asked for a prompt; vLLM's names where OpenAI has none."""
        strings = () if sampling.fixed_length else sampling.stop_strings
        ends = {"stop": list(strings), "include_stop_str_in_output": True} if strings else {}
        return NEUTRAL | {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": sampling.max_tokens,
            "min_tokens": sampling.min_tokens,
            "temperature": max(sampling.temperature, COOLEST),
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "seed": key >> 1,  # 63 bits, as a signed number has
            "stop_token_ids": sorted(sampling.stops),
            "ignore_eos": True,  # the model's own end is among the stop tokens, unless the run says otherwise
            "logprobs": 1,
            "return_token_ids": True,
            "skip_special_tokens": False,
            **ends,
        }

    def completion(self, ids: list[int], logprobs: list[float], sampling: Sampling) -> Completion:
        check_ids(ids, self.policy.vocabulary, f"a reply of {self.address}")
        ended = end_of(ids, sampling, self.policy.tokenizer)
        if ended is None and len(ids) != sampling.max_tokens:
            raise OperantError(
                f"{self.address} returned {len(ids)} tokens, {shown(ids[-3:])} at the end, where "
                f"sampling.max_tokens={sampling.max_tokens} and no stop token or string ended the reply: does the "
                "server keep to max_tokens, stop_token_ids, min_tokens and ignore_eos?"
            )
        end = "length" if ended is None else "stop"
        return Completion(ids[:ended], logprobs[:ended], None, end, self.version)

    @torch.no_grad()
    def check(self) -> None:
        """Ask for a short reply, and compare its log-probs with the policy's own.

        A server may answer that it has loaded weights when it has loaded some of them: hence this after each update.
        """
        policy = self.policy
        prompt = [token % policy.vocabulary for token in (1, 2, 3, 4)]
        (reply,) = self.generate([prompt], PROBE, [0])
        batch = Batch.given([prompt], [reply.action]).to(policy.device)
        theirs = torch.tensor(reply.logprobs)
        processed, raw = (
            float((policy.forward(batch, as_).logprobs[batch.actions].cpu().float() - theirs).abs().mean())
            for as_ in (PROBE, PROBE.plain)
        )
        if raw < min(processed, 0.1) and processed > 0.01:
            raise OperantError(
                f"{self.address} returns log-probs from before temperature and truncation: start the server "
                "with processed ones (vLLM: --logprobs-mode processed_logprobs)"
            )
        if not processed <= (OTHER_MODEL if self.usual is None else ROUNDING + 5 * self.usual):  # or NaN
            remedy = "let engine.reload load all of them" if self.folder else "serve them, or set engine.sync=folder"
            raise OperantError(
                f"{self.address}: its log-probs of a reply differ from the policy's by {processed:.2g} nats a "
                f"token, so {self.model!r} has not the weights of the policy; {remedy} (docs/engines.md)"
            )
        self.usual = processed if self.usual is None else self.usual


def read(choice: Mapping[str, Any], prompt: Sequence[int]) -> Reply:
    """The ids and log-probs of an answer's choice."""
    ids, logprobs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
    if not (isinstance(ids, list) and ids and all(type(token) is int for token in ids)):
        raise OperantError(
            "the server returns text and no token ids, which a text does not tell: it has to answer "
            "return_token_ids=true with token_ids and prompt_token_ids, as vLLM 0.10.2 and later do"
        )
    if choice.get("prompt_token_ids") != list(prompt):
        raise OperantError(
            f"the server read the prompt {shown(choice.get('prompt_token_ids'))}, and was sent {shown(list(prompt))}: "
            "it must not add, cut or re-tokenise ids"
        )
    numbers = isinstance(logprobs, list) and all(type(x) in (int, float) for x in logprobs)
    if not numbers or len(logprobs) != len(ids):
        raise OperantError(
            f"the server returns {len(ids)} tokens and no log-prob for each: it has to answer logprobs=1 with "
            "logprobs.token_logprobs"
        )
    return ids, [float(x) for x in logprobs]


def check_exported(policy: object, engine: str) -> None:
    """Raises: OperantError for a policy that no server can load as a plain transformers folder."""
    what = "is no transformers model"
    if isinstance(policy, Policy):
        what = "has a soft prompt" if policy.virtual else "is an encoder-decoder" if policy.encoder_decoder else ""
        what = "has an MLP before its head" if output_mlp.find(policy.model) is not None else what
    require(not what, f"engine {engine}: the policy {what}, which no server of it can run; use engine=native")
