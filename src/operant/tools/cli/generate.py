"""`operant generate`: replies of a trained model, as they are generated in a terminal, else one on each line."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from operant import rewards
from operant.algorithms import find
from operant.data import DataOptions, load_tasks
from operant.models.loading import Trained
from operant.options import compose, convert
from operant.rewards.bertscore import BertScore
from operant.rewards.classifier import Classifier
from operant.rollouts.play import Opening
from operant.runs import named_parts
from operant.runs.judged_replies import part, scorer
from operant.runs.named_models import divided, load, load_initial, run_options, stated_return
from operant.runs.trackers.console import emit, plain
from operant.sampling import ReplyText, Sampling, encode_prompt, reply_text, task_key, template_of
from operant.tools.cli.arguments import Options, as_spec, counted, refuse, taken
from operant.tools.cli.program_files import OF_TESTS, write_programs
from operant.tools.cli.reply_files import OF_FILES, bound_of, write_replies
from operant.training.learner import default_engine
from operant.types import Engine, EngineParts, OperantError, Rollout, Task, Tokenizer, Turn, require


@dataclass(frozen=True)
class Speaker:
    """A model that replies."""

    name: str
    policy: Trained
    engine: Engine
    """It may have `stream`, which gives one token after the other."""
    sampling: Sampling
    opening: Opening | None = None


def generate(words: Sequence[str], options: Options) -> int:
    """`operant generate runs/x` prints replies to --prompt, or to each line of standard input."""
    require(words, "expected a run folder or model: operant generate runs/sentiment")
    if options.pop("tests", False):
        require("tasks" in options, "--tests is about the programs for the tasks of a file: give --tasks FILE too")
        return write_programs(words, options)
    refuse(options, OF_TESTS, " is about programs that tests judge: give --tests too")
    if "tasks" in options:
        return write_replies(words, options)
    alone = "expected one run folder or model: operant generate runs/sentiment; several models answer --tasks FILE"
    require(len(words) == 1, alone)
    refuse(options, OF_FILES, " is about the replies to a file: give --tasks FILE too")
    shown = sys.stdout.isatty()
    prompt, versus, target = (options.pop(name, None) for name in ("prompt", "versus", "target"))
    seed, best_of = taken(options, "seed", 0), counted(options, "best_of", 1)
    spec = as_spec(options.pop("reward", shown or best_of > 1))
    chat, config = options.pop("chat", None), run_options(words[0])
    speakers = [_speaker(words[0], *load(words[0]), options)]
    if versus is not None:
        loaded = _reference(words[0], config) if versus == "reference" else load(versus)
        speakers.append(_speaker(versus, *loaded, options))
    if (world := config.get("env")) is not None:
        print(f"{words[0]} was trained in the world {world}, which is not played here", file=sys.stderr)
    first = _first_task(config)
    if chat is None:
        chat = not isinstance(first.prompt, str) if first else template_of(speakers[0].policy.tokenizer) is not None
    opening = first.prompt[:1] if first is not None and isinstance(first.prompt, list) else []
    judge = None if spec is False else Judge(config, target, first, spec)
    if best_of > 1:
        if judge is None or judge.why != "":
            why = "--reward false leaves none" if judge is None else judge.why or "the model has no reward of its own"
            raise OperantError(f"--best-of {best_of} needs a score, and {why}: name a reward, as in --reward letters:e")
        print(bound_of(best_of), file=sys.stderr)
    chat = convert(chat, bool, "chat")
    system = [message for message in opening if isinstance(message, dict) and message.get("role") == "system"]
    session = Session(speakers, judge, seed, chat=chat, system=system, shown=shown, best_of=best_of)
    try:
        if isinstance(prompt, str):
            session.answer(prompt)
        elif shown and sys.stdin.isatty():
            session.converse()
        else:
            for line in filter(str.strip, (line.rstrip("\n").removeprefix("\ufeff") for line in sys.stdin)):
                session.answer(line)
    except UnicodeDecodeError as error:
        raise OperantError(f"the prompt is not UTF-8 ({error.reason}): convert it") from error
    finally:
        if judge is not None:
            judge.close()
    return 0


def _speaker(name: str, policy: Trained, engine: Engine, options: Mapping[str, object]) -> Speaker:
    sampling = compose({"": Sampling}, {"stop_tokens": policy.stop_tokens, **options})[""]
    return Speaker(name, policy, engine, sampling, stated_return(name, policy.tokenizer))


def _reference(model: str, config: Mapping[str, Any]) -> tuple[Trained, Engine]:
    """The policy that a run measures its KL to, which is usually the one that it began from."""
    require(config, f"--versus reference needs a run folder, and {model} is none: name the other model")
    adapter = part(config, "lora").get("adapter")
    named = {"reference": config.get("reference"), "lora.adapter": adapter, "policy": config["policy"]}
    option = next(name for name, value in named.items() if value not in (None, "copy", "none") or name == "policy")
    return (policy := load_initial(config, divided(model)[0], option)), default_engine(policy)


def _first_task(config: Mapping[str, object]) -> Task | None:
    """The first task of a run, which shows what its prompts are; None if that cannot be read on this machine."""
    source = config.get("tasks")
    local = isinstance(source, str) and (source.startswith("builtin:") or Path(source).is_file())
    if not local and not (isinstance(source, str) and named_parts.is_object("tasks", source)):
        return None
    with suppress(OperantError):
        rows = named_parts.source(source, named_parts.stored_options("tasks", config))
        one = replace(compose({"": DataOptions}, part(config, "data"))[""], limit=1, shuffle=False, query_tokens=None)
        form = named_parts.stored_form(config)
        return load_tasks(rows, None, one, form=form, **find(config.get("algorithm", "ppo")).rows)[0]
    return None


class Judge:
    """Scores replies by the reward of a run, or by `spec`. Models in it are loaded with the first reply, on the CPU.

    Raises: OperantError for a `spec` that names no reward.
    """

    def __init__(self, config: Mapping[str, Any], target: object, first: Task | None, spec: object = True):
        self.config, self.target = config, target
        self.scorer = None if spec is True else scorer(spec, {})
        self.name, self.why = "", "" if self.scorer else self._obstacle(first)
        """Why there is no score; empty if there may be one, None if the run has no reward at all."""

    def _obstacle(self, first: Task | None) -> str | None:
        reward = self.config.get("reward")
        if self.config.get("env") is not None:
            return f"its world {self.config['env']} pays it"
        if reward is None:
            return None
        if str(reward).startswith("<"):
            return f"it is {reward} of a Python program"
        targets = part(self.config, "data").get("target_field") or (first and first.target is not None)
        if self.target is None and targets:
            return "the tasks of the run have targets for it; give one with --target"
        return ""

    def __call__(self, rollouts: list[Rollout], sampling: Sampling, tokenizer: Tokenizer | None) -> list[float | None]:
        """The scores of replies; None where there is none, and then `why` says the reason."""
        if self.why == "":
            try:
                self.scorer = self.scorer or scorer(True, self.config)
                if not self.name:
                    for one in rewards.every_part(self.scorer.reward):
                        if isinstance(one, (Classifier, BertScore)):
                            one.device = "cpu"  # the GPU may be in use by a run
                    self.name = rewards.name_of(self.scorer.reward)
                return self.scorer(rollouts, sampling, tokenizer)
            except OperantError as error:
                self.why = str(error)
        return [None] * len(rollouts)

    def close(self) -> None:
        """End the processes of isolated rewards."""
        if self.scorer is not None:
            self.scorer.close()


@dataclass
class Session:
    """Prompts and the replies of one or two models to them. Each prompt is answered by itself, as a task of a run."""

    speakers: Sequence[Speaker]
    judge: Judge | None
    seed: int
    chat: bool = False
    """Prompts are messages of a user, behind those of `system`."""
    system: Sequence[Mapping[str, str]] = ()
    shown: bool = False
    """Whether replies are shown on a terminal, as they come."""
    best_of: int = 1
    """Replies of which the one with the best score is shown; above 1, `judge` is needed."""
    number: int = 0
    """Prompts so far."""

    def converse(self) -> None:
        """Ask for prompts until an empty line, Ctrl-D or Ctrl-C at the prompt."""
        with suppress(ImportError):  # Windows has none; its import gives `input` line editing and a history
            import readline  # noqa: F401
        most = self.speakers[0].sampling.max_tokens
        print(f"Type a prompt and Enter: replies have up to {most} tokens. An empty line or Ctrl-D leaves, and Ctrl-C")
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
        keys = [task_key(self.seed, "probe", 0, text, self.number, turn) for turn in range(self.best_of)]
        self.number += 1
        for speaker in self.speakers:
            task = Task("prompt", [*self.system, {"role": "user", "content": text}] if self.chat else text)
            ids = encode_prompt(speaker.policy.tokenizer, task.prompt)
            ids = ids if speaker.opening is None else speaker.opening(task, 0, ids, [])
            opening = "" if self.chat else text
            if self.shown:
                _write((f"{speaker.name}: " if len(self.speakers) > 1 else "") + opening)
            grown = ReplyText(speaker.policy.tokenizer, ids, speaker.sampling)
            if self.best_of > 1:
                score = self._choose(speaker, task, ids, keys, grown)
            else:
                if self.shown and (stream := EngineParts.of(speaker.engine).stream) is not None:
                    for token in stream(ids, speaker.sampling, keys[0]):
                        _write(grown.add(token))
                else:
                    grown.action = list(speaker.engine.generate([ids], speaker.sampling, keys[:1])[0].action)
                (score,) = self._scores(speaker, task, ids, [grown.action])
            if self.shown:
                judged = f"  [{self.judge.name} {score:.3g}]" if self.judge and score is not None else ""
                _write(grown.rest() + judged)
                print(flush=True)
            else:
                name = [speaker.name] if len(self.speakers) > 1 else []
                number = [] if self.judge is None else ["" if score is None else f"{score:.6g}"]
                emit("\t".join([*name, plain(opening + grown.whole), *number]))
        if self.judge is not None and self.judge.why:
            print(f"operant: the reward is not shown: {plain(self.judge.why)}", file=sys.stderr)
            self.judge.why = None

    def _choose(self, speaker: Speaker, task: Task, ids: list[int], keys: list[int], grown: ReplyText) -> float:
        """Let `grown` be the best reply of as many as there are keys; returns its score."""
        actions = [made.action for made in speaker.engine.generate([ids] * len(keys), speaker.sampling, keys)]
        known = {i: score for i, score in enumerate(self._scores(speaker, task, ids, actions)) if score is not None}
        why = (self.judge.why if self.judge else "") or "the reward abstained from all of them"
        require(known, f"--best-of {self.best_of}: no reply has a score: {why}")
        best = max(known, key=known.__getitem__)
        grown.action = actions[best]
        return known[best]

    def _scores(self, speaker: Speaker, task: Task, ids: list[int], actions: Sequence[list[int]]) -> list[float | None]:
        if self.judge is None:
            return [None] * len(actions)
        tokenizer, sampling, task = speaker.policy.tokenizer, speaker.sampling, replace(task, target=self.judge.target)
        query = tokenizer.decode(ids, skip_special_tokens=True)
        texts = [reply_text(tokenizer, ids, action, sampling) for action in actions]
        rollouts = [Rollout(task, 0, [Turn(ids, action)], [text], query=query) for action, text in zip(actions, texts)]
        return self.judge(rollouts, sampling, tokenizer)


def _write(text: str) -> None:
    """Write text without characters that would move the cursor or change its colour, and those the terminal lacks."""
    safe = "".join(c if c.isprintable() or c == "\n" else " " for c in text)
    encoding = sys.stdout.encoding or "utf-8"
    print(safe.encode(encoding, errors="replace").decode(encoding), end="", flush=True)
