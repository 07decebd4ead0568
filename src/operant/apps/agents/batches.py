"""Generates what several clients ask for at the same time, in one thread that owns the model.

    with Batches(policy, engine) as batches:
        replies = batches.start(request, on_piece)      # from any thread; `on_piece` is called from the thread here

The replies that are asked for with equal sampling are decoded together, in rounds of a few tokens: one that arrives
joins at the next round. The keys and values of a reply stay until its next round, and random numbers go by the reply's
own key, so a reply does not depend on what else is asked for.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from operant.apps.agents.protocol import ModelRequest, RefusedRequestError, Reply, Scored
from operant.models.policy import Policy
from operant.sampling import Sampling
from operant.types import Batch, Engine, EngineParts

ROUND = 16
"""Tokens of a round: the most that a new request waits for, and the largest piece of a stream."""

OnPiece = Callable[["Going"], None]


@dataclass
class Going:
    """A reply that is being generated."""

    request: ModelRequest
    index: int
    prompt: list[int]
    key: int
    action: list[int] = field(default_factory=list)
    end: str | None = None
    scored: list[Scored] | None = None
    error: Exception | None = None

    @property
    def done(self) -> bool:
        return self.end is not None or self.error is not None

    def reply(self) -> Reply:
        return Reply(self.prompt, self.action, self.end or "length", self.scored)


class Batches:
    """A thread that generates for all requests. `waiting`: the most replies that may be asked for at a time.

    `rows`: the most replies that are decoded together.
    """

    def __init__(self, policy: Policy, engine: Engine, *, waiting: int = 256, rows: int = 64):
        self.policy, self.engine, self.waiting, self.rows = policy, engine, waiting, rows
        self._live: list[tuple[Going, OnPiece]] = []
        self._changed, self._ended = threading.Condition(), False
        self._thread = threading.Thread(target=self._run, name="batches", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Batches":
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join()

    def start(self, request: ModelRequest, on_piece: OnPiece) -> list[Going]:
        """Begin the replies to a request; `on_piece` is called after each round and at the end of each of them.

        Raises: RefusedRequestError if too many replies are asked for already.
        """
        prompts = [prompt for prompt in request.prompts for _ in range(request.n)]
        made = [Going(request, i, p, key) for i, (p, key) in enumerate(zip(prompts, request.keys(), strict=True))]
        with self._changed:
            if len(made) > self.waiting:
                raise RefusedRequestError(400, f"{len(made)} replies are asked for, of at most {self.waiting}")
            if len(self._live) + len(made) > self.waiting:
                raise RefusedRequestError(429, f"{len(self._live)} replies are asked for already: try again later")
            self._live += [(going, on_piece) for going in made]
            self._changed.notify()
        return made

    def stop(self, replies: Sequence[Going]) -> None:
        """Forget replies that nobody waits for any more."""
        with self._changed:
            self._live = [(going, tell) for going, tell in self._live if not any(going is r for r in replies)]

    def _run(self) -> None:
        with EngineParts.of(self.engine).remembering():
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._live or self._ended)
                    if self._ended:
                        return
                    groups: dict[Sampling, list[tuple[Going, OnPiece]]] = {}
                    for going, tell in self._live:
                        groups.setdefault(going.request.sampling, []).append((going, tell))
                for group in groups.values():
                    some = group[: self.rows]
                    try:
                        self._round([going for going, _ in some])
                    except Exception as error:  # the requests of this round fail, and the server goes on
                        for going, _ in some:
                            going.error = error
                    for going, tell in some:
                        tell(going)
                with self._changed:
                    self._live = [(going, tell) for going, tell in self._live if not going.done]

    def _round(self, some: Sequence[Going]) -> None:
        """Generate some tokens of replies with equal sampling, and score those that have ended."""
        parts, sampling = EngineParts.of(self.engine), some[0].request.sampling
        for going in some:
            going.end = "length" if going.request.no_reply else None
        if asked := [going for going in some if going.end is None]:
            prompts, keys = [going.prompt for going in asked], [going.key for going in asked]
            if parts.generate_more is None:
                made = self.engine.generate(prompts, sampling, keys)
            else:
                so_far = [going.action for going in asked]
                # A client that reads along has its first token at once: rounds of 1, 1, 2, 4, ... tokens
                begun = [len(going.action) for going in asked if going.request.stream]
                tokens = min(ROUND, max(1, min(begun, default=ROUND)))
                made = parts.generate_more(prompts, so_far, [tokens] * len(asked), sampling, keys)
            for going, piece in zip(asked, made, strict=True):
                going.action = [*going.action, *piece.action]
                whole = parts.generate_more is None or len(going.action) >= sampling.max_tokens
                going.end = piece.end if piece.end == "stop" or whole else None
        for going in some:
            if going.done and going.request.alternatives is not None:
                going.scored = self.score(going)

    @torch.no_grad()
    def score(self, going: Going) -> list[Scored]:
        """Each token of a reply, and of its prompt where that is echoed, with its log-prob at temperature 1."""
        request, prompt, action = going.request, going.prompt, going.action
        begin = 1 if request.echo else len(prompt)
        ids, most = [*prompt, *action], request.alternatives or 0
        scored = [Scored(ids[0], None, [])] if request.echo else []
        if len(ids) == begin:
            return scored
        batch = Batch.given([ids[:begin]], [ids[begin:]]).to(self.policy.device)
        states = self.policy.states(batch)
        for token, piece in zip(ids[begin:], states.split(1), strict=True):
            logprobs = self.policy.logits(piece)[0].float().log_softmax(-1)
            best = logprobs.topk(most)
            pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            scored.append(Scored(token, float(logprobs[token]), list(pairs)))
        return scored
