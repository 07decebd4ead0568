"""`operant generate`: replies of a trained model, as they are generated in a terminal, else one on each line."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from operant import rewards
from operant.algorithms import find
from operant.data import DataOptions, load_tasks
from operant.models.loading import load_policy
from operant.models.safe_loading import load_tokenizer
from operant.options import compose, convert
from operant.rewards.classifier import Classifier
from operant.rewards.failure_policy import IsolationOptions
from operant.rewards.shaping import ScoreOptions, as_seen
from operant.rollouts.chat import encode_prompt
from operant.runs import named_parts
from operant.runs.build import trained
from operant.runs.folder import read_config, runs_near
from operant.runs.initial_models import MODELS, START
from operant.sampling import Sampling, reply_text, task_key
from operant.trackers.console import emit, plain
from operant.training.learner import default_engine
from operant.types import OperantError, Rollout, Task, Turn


@dataclass(frozen=True)
class Speaker:
    """A model that replies."""

    name: str
    policy: Any
    engine: Any
    sampling: Sampling


def generate(words: Sequence[str], options: dict[str, Any]) -> int:
    """`operant generate runs/x` prints replies to --prompt, or to each line of standard input."""
    if len(words) != 1:
        raise OperantError("expected one run folder or model: operant generate runs/sentiment")
    shown = sys.stdout.isatty()
    prompt, versus, target = (options.pop(name, None) for name in ("prompt", "versus", "target"))
    seed = convert(options.pop("seed", 0), int, "seed")
    judges = convert(options.pop("reward", shown), bool, "reward")
    chat = options.pop("chat", None)
    place = Path(words[0])
    config = named_parts.flattened(read_config(place)) if (place / "config.yaml").exists() else {}
    speakers = [_speaker(words[0], *_load(words[0]), options)]
    if versus is not None:
        loaded = _reference(place, config) if versus == "reference" else _load(versus)
        speakers.append(_speaker(versus, *loaded, options))
    first = _first_task(config)
    template = getattr(speakers[0].policy.tokenizer, "chat_template", None) is not None
    if chat is None:
        chat = template if first is None else not isinstance(first.prompt, str)
    opening = first.prompt[:1] if first is not None and isinstance(first.prompt, list) else []
    session = Session(
        speakers,
        Judge(config, target, first) if judges else None,
        seed,
        chat=convert(chat, bool, "chat"),
        system=[message for message in opening if isinstance(message, dict) and message.get("role") == "system"],
        shown=shown,
    )
    try:
        if isinstance(prompt, str):
            session.answer(prompt)
        elif shown and sys.stdin.isatty():
            session.converse()
        else:
            for line in filter(str.strip, (line.rstrip("\n") for line in sys.stdin)):
                session.answer(line)
    finally:
        session.close()
    return 0


# --- models -----------------------------------------------------------------------------------------------------------


def _speaker(name: str, policy: Any, engine: Any, options: Mapping[str, Any]) -> Speaker:
    return Speaker(name, policy, engine, compose({"": Sampling}, {"stop_tokens": policy.stop_tokens, **options})[""])


def _load(name: str) -> tuple[Any, Any]:
    """The policy of a run folder or model, and its engine. Raises: OperantError, with the runs there are."""
    folder = Path(name)
    if (folder / "config.yaml").exists() and not (folder / "export").exists():
        raise OperantError(
            f"{folder} has no exported model yet: wait for the run to end, or resume it: "
            f"operant train --resume {folder}"
        )
    if (folder / "export").exists():
        return trained(folder)
    try:
        policy = load_policy(name)
    except OperantError as error:
        raise OperantError(f"{error}; {runs_near(folder)}") from error
    return policy, default_engine(policy)


def _reference(folder: Path, config: Mapping[str, Any]) -> tuple[Any, Any]:
    """The policy that the run in `folder` measures its KL to, which is usually the one that it began from."""
    if not config:
        raise OperantError(f"--versus reference needs a run folder, and {folder} is none: name the other model")
    adapter = (config.get("lora") or {}).get("adapter")
    named = {"reference": config.get("reference"), "lora.adapter": adapter, "policy": config["policy"]}
    option = next(name for name, value in named.items() if value not in (None, "copy", "none") or name == "policy")
    name, kept = str(named[option]), folder / START / MODELS[option]
    if name.startswith("<"):
        raise OperantError(
            f"{folder} was started from Python with {option}={name}, which no file holds: save that model and name its "
            "folder, as in --versus ./my-model"
        )
    if option == "policy" and named_parts.is_object("policy", name):
        made = named_parts.policy(name, named_parts.stored_options("policy", config))
        policy = load_policy(made, tokenizer=load_tokenizer(folder / "export"))
    else:
        policy = load_policy(str(kept) if kept.is_dir() else name)
    return policy, default_engine(policy)


def _first_task(config: Mapping[str, Any]) -> Task | None:
    """The first task of a run, which shows what its prompts are; None if that cannot be read on this machine."""
    source = config.get("tasks")
    local = isinstance(source, str) and (source.startswith("builtin:") or Path(source).is_file())
    if not local and not (isinstance(source, str) and named_parts.is_object("tasks", source)):
        return None
    with suppress(OperantError):
        data = compose({"": DataOptions}, config.get("data") or {})[""]
        rows = named_parts.source(source, named_parts.stored_options("tasks", config))
        supervised = find(config.get("algorithm", "ppo")).source != "play"
        one = replace(data, limit=1, shuffle=False, query_tokens=None)
        return load_tasks(rows, None, one, with_replies=supervised)[0]
    return None


# --- rewards ----------------------------------------------------------------------------------------------------------


class Judge:
    """Scores replies by the reward of a run. It is loaded with the first reply, and models in it run on the CPU."""

    def __init__(self, config: Mapping[str, Any], target: Any, first: Task | None):
        self.config, self.target, self.reward = config, target, None
        self.name, self.why = "", self._obstacle(first)
        """Why there is no score; empty if there may be one, None if the run has no reward at all."""

    def _obstacle(self, first: Task | None) -> str | None:
        reward = self.config.get("reward")
        if self.config.get("env") is not None:
            return f"its world {self.config['env']} pays it"
        if reward is None:
            return None
        if str(reward).startswith("<"):
            return f"it is {reward} of a Python program"
        targets = bool((self.config.get("data") or {}).get("target_field"))
        if self.target is None and (targets or (first is not None and first.target is not None)):
            return "the tasks of the run have targets for it; give one with --target"
        return ""

    def __call__(self, rollout: Rollout, sampling: Sampling, tokenizer: Any) -> float | None:
        """The score of a reply; None if there is none, and then `why` says the reason."""
        if self.why != "":
            return None
        try:
            if self.reward is None:
                own = named_parts.stored_options("reward", self.config)
                isolation = compose({"": IsolationOptions}, self.config.get("isolation") or {})[""]
                self.reward = _on_cpu(rewards.under(rewards.resolve(self.config["reward"], own), isolation))
                self.name = rewards.name_of(self.reward)
            score = compose({"": ScoreOptions}, self.config.get("score") or {})[""]
            seen = as_seen([rollout], score, tokenizer, sampling)
            return rewards.totals(rewards.judge(self.reward, seen).scores, seen)[0]
        except OperantError as error:
            self.why = str(error)
            return None

    def close(self) -> None:
        """End the processes of isolated rewards."""
        for part in rewards.isolated_parts(self.reward):
            part.close()


def _on_cpu(reward: Any) -> Any:
    """The same reward, whose models will be loaded on the CPU: the GPU may be in use by a run."""
    for part in [getattr(reward, "reward", None), *(p for p, _ in getattr(reward, "rewards", {}).values())]:
        if part is not None:
            _on_cpu(part)
    if isinstance(reward, Classifier):
        reward.device = "cpu"
    return reward


# --- the session ------------------------------------------------------------------------------------------------------


class ReplyText:
    """The text of a growing reply.

    text = ReplyText(tokenizer, prompt_ids, sampling)
    for token in engine.stream(prompt_ids, sampling, key):
        print(text.add(token), end="")        # the new text that no later token can change, maybe none
    print(text.rest())
    """

    def __init__(self, tokenizer: Any, prompt: list[int], sampling: Sampling):
        self.tokenizer, self.prompt, self.sampling = tokenizer, prompt, sampling
        self.action: list[int] = []
        self.shown = ""

    @property
    def whole(self) -> str:
        """The reply so far."""
        return reply_text(self.tokenizer, self.prompt, self.action, self.sampling)

    def add(self, token: int) -> str:
        """Append a token. Half a character, a space at the end and the beginning of a stop string wait."""
        self.action.append(token)
        text = self.whole.rstrip("\ufffd \n")
        strings = () if self.sampling.fixed_length else self.sampling.stop_strings
        begun = max((k for s in strings for k in range(1, len(s)) if text.endswith(s[:k])), default=0)
        text = text[: len(text) - begun]
        if not text.startswith(self.shown):
            return ""
        new, self.shown = text[len(self.shown) :], text
        return new

    def rest(self) -> str:
        """The text that waited. If a token has changed text that was shown, the whole reply on a new line."""
        whole = self.whole
        return whole[len(self.shown) :] if whole.startswith(self.shown) else f"\n{whole}"


class Session:
    """Prompts and the replies of one or two models to them. Each prompt is answered by itself, as a task of a run."""

    def __init__(
        self,
        speakers: Sequence[Speaker],
        judge: Judge | None,
        seed: int,
        *,
        chat: bool = False,
        system: Sequence[Mapping[str, str]] = (),
        shown: bool = False,
    ):
        """chat: prompts are messages of a user, behind the `system` message. shown: on a terminal, as they come."""
        self.speakers, self.judge, self.seed, self.chat, self.shown = speakers, judge, seed, chat, shown
        self.system, self.number = list(system), 0

    def converse(self) -> None:
        """Ask for prompts until an empty line, Ctrl-D or Ctrl-C at the prompt."""
        with suppress(ImportError):  # Windows has none; its import gives `input` line editing and a history
            import readline  # noqa: F401
        tokens = self.speakers[0].sampling.max_tokens
        print(
            f"Type a prompt and Enter: replies have up to {tokens} tokens. An empty line or Ctrl-D leaves, and Ctrl-C"
        )
        alone = "each prompt begins a new conversation" if self.chat else "each prompt stands alone"
        print(f"stops a reply; {alone}.")
        while True:
            try:
                line = input("> ")
            except (EOFError, KeyboardInterrupt):
                print()
                return
            if not line.strip():
                return
            try:
                self.answer(line)
            except KeyboardInterrupt:
                print(" [stopped]")
            except OperantError as error:  # a prompt that is too long, say
                print(f"operant: {plain(str(error))}")

    def answer(self, text: str) -> None:
        """Print the reply of each model to `text`; the number of the prompt gives all the same random numbers."""
        key, self.number = task_key(self.seed, "probe", 0, text, self.number), self.number + 1
        for speaker in self.speakers:
            task = Task("prompt", [*self.system, {"role": "user", "content": text}] if self.chat else text)
            ids = encode_prompt(speaker.policy.tokenizer, task.prompt)
            opening = "" if self.chat else text
            if self.shown:
                name = f"{speaker.name}: " if len(self.speakers) > 1 else ""
                _write(name + opening)
            grown = ReplyText(speaker.policy.tokenizer, ids, speaker.sampling)
            for token in self._tokens(speaker, ids, key):
                if self.shown:
                    _write(grown.add(token))
                else:
                    grown.action.append(token)
            score = self._score(speaker, task, ids, grown)
            if self.shown:
                _write(
                    grown.rest() + (f"  [{self.judge.name} {score:.3g}]" if self.judge and score is not None else "")
                )
                print(flush=True)
            else:
                name = [speaker.name] if len(self.speakers) > 1 else []
                number = [] if self.judge is None else ["" if score is None else f"{score:.6g}"]
                emit("\t".join([*name, plain(opening + grown.whole), *number]), sys.stdout)
        if self.judge is not None and self.judge.why:
            print(f"operant: the reward is not shown: {plain(self.judge.why)}", file=sys.stderr)
            self.judge.why = None

    def _tokens(self, speaker: Speaker, ids: list[int], key: int) -> Iterator[int]:
        """The tokens of a reply, one by one if the engine can do that."""
        if self.shown and hasattr(speaker.engine, "stream"):
            yield from speaker.engine.stream(ids, speaker.sampling, key)
        else:
            yield from speaker.engine.generate([ids], speaker.sampling, [key])[0].action

    def _score(self, speaker: Speaker, task: Task, ids: list[int], grown: ReplyText) -> float | None:
        if self.judge is None:
            return None
        tokenizer, turns = speaker.policy.tokenizer, [Turn(ids, grown.action)]
        query = tokenizer.decode(ids, skip_special_tokens=True)
        task = replace(task, target=self.judge.target)
        return self.judge(Rollout(task, 0, turns, [grown.whole], query=query), speaker.sampling, tokenizer)

    def close(self) -> None:
        """End the reward's processes."""
        if self.judge is not None:
            self.judge.close()


def _write(text: str) -> None:
    """Write text without characters that would move the cursor or change its colour, and those the terminal lacks."""
    safe = "".join(c if c.isprintable() or c == "\n" else " " for c in text)
    encoding = sys.stdout.encoding or "utf-8"
    print(safe.encode(encoding, errors="replace").decode(encoding), end="", flush=True)
