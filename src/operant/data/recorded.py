"""Makes rollouts of conversations that were recorded elsewhere, with the ids and log-probs that a server returned.

{"responses": [{...}, {...}], "reward": 1.0}     # what the server answered, one body a turn
{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "...", "prompt_token_ids": [...],
              "token_ids": [...], "logprobs": {...}}], "reward": [0.0]}
{"prompt_token_ids": [...], "token_ids": [...], "logprobs": [...], "reward": 1.0}           # a single turn
{"messages": [...], "reward": 1.0}               # without ids: the chat template makes tokens of the texts

`reward` is paid at the end, or a list pays each turn. A record may also have `group`, the `version` of the weights, a
`target` for a reward, and the `temperature`, `top_k`, `top_p` and `min_p` that it was sampled with.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from operant.data.demonstrations import MOST_REPLIES, Demonstrations
from operant.data.replies import task_with_reply
from operant.sampling import Sampling, check_ids, reply_end, reply_text
from operant.types import OperantError, Rollout, Task, Tokenizer, TrainablePolicy, Turn, is_real, require, shown

LONGEST = 200
"""Most characters of the name of a group."""
NEUTRAL = {"top_k": (0, -1, None), "top_p": (1, None), "min_p": (0, None)}
"""Values with which sampling cuts nothing off."""
UNKNOWN = -1
"""The version of turns whose weights are not known: one step older than those that the run begins with."""


@dataclass(frozen=True)
class RecordedReplies:
    """Recorded conversations as rollouts, by group."""

    groups: dict[str, list[Rollout]]
    """Those that are compared, by the id of their task. Rewards are in turns; versions count from the policy's."""
    paid: bool
    """Whether the records have rewards."""
    unscored: str
    """Where the first reply without log-probs stands; empty: all have some."""
    notes: tuple[str, ...]
    """What is lost, in sentences."""

    @property
    def tasks(self) -> list[Task]:
        """One for each group, with the first prompt of its conversations."""
        return [group[0].task for group in self.groups.values()]

    def at(self, ids: Sequence[str], part: Sequence[int]) -> list[Rollout]:
        """The conversations of some tasks, as those of one step. part: the places in `ids` of this rank."""
        return [
            replace(rollout, group=place, place=place * MOST_REPLIES + number)
            for place in part
            for number, rollout in enumerate(self.groups[ids[place]])
        ]


@dataclass
class _Record:
    where: str
    turns: list[Turn]
    said: list[str]
    """The text of each turn, if the record has one."""
    weights: set[str]
    """The fingerprints that a server gave."""
    fields: Mapping[str, Any]
    texts: list[str] | None = None
    """Of each turn, where texts were tokenised."""


def has_logprobs(rows: Iterable[tuple[int, object]], name: str) -> bool:
    """Whether the first record has log-probs. Raises: OperantError for a record that cannot be read."""
    return any(turn.logprobs is not None for turn in next((_record(*row, name).turns for row in rows), ()))


def read_recorded(
    rows: Iterable[tuple[int, object]],
    name: str,
    policy: Any,
    sampling: Sampling,
    *,
    weights: str = "",
    version: int | None = None,
) -> RecordedReplies:
    """Read recorded conversations: rows with their numbers, of a source with this name.

    policy: what is trained: its tokenizer, vocabulary, context. sampling: how it scores them. weights: its fingerprint.
    version: what the records call its weights; None: the newest that they name. A turn of no version is current if the
    server gave the same fingerprint, else one step old.
    Raises: OperantError that names the row, for a field that is missing or cannot be right.
    """
    tokenizer, stop = policy.tokenizer, next(iter(sorted(sampling.stops)), None)
    demonstrations = Demonstrations(tokenizer, stop, encoder_decoder=policy.encoder_decoder)
    records = [_record(*row, name, tokenizer, sampling) for row in rows]
    require(records, f"{name} has no conversations: it is empty")
    known = [of for record in records if (of := _version(record)) is not None]
    newest = max(known, default=0) if version is None else version
    if max(known, default=0) > newest:
        raise OperantError(f"{name} has replies of version {max(known)}, newer than replies_version={newest}: raise it")
    paid, again = "reward" in records[0].fields, list[int]()
    groups, ids = dict[str, list[Rollout]](), dict[Any, Task]()
    for record in records:
        fields, where = record.fields, record.where
        same = ("reward" in fields) == paid
        require(same, f"{where}: all records have a reward, or none; {'it has none' if paid else 'this has one'}")
        if (temperature := fields.get("temperature")) not in (None, sampling.temperature):
            raise OperantError(
                f"{where}: it was sampled at temperature {shown(temperature)}, and the run scores at "
                f"{sampling.temperature:g}: --sampling.temperature {shown(temperature)}, with log-probs of that "
                "temperature (of vLLM with --logprobs-mode processed_logprobs)"
            )
        if not record.turns:
            made, *more = demonstrations.rollouts([task_with_reply(fields, where, "text", None, where)])
            require(not more, f"{where}: it has {1 + len(more)} replies: make a record of each, with one `group`")
            record.turns, record.texts = made.turns, made.texts
            again += [len(turn.action) for turn in made.turns]
        age = UNKNOWN if not weights or record.weights != {weights} else 0
        of = _version(record)
        record.turns = [
            replace(turn, reward=reward, version=age if of is None else of - newest)
            for turn, reward in zip(record.turns, _rewards(record), strict=True)
        ]
        rollout = _rollout(record, name, policy, sampling)
        key = rollout.task.id if fields.get("group") is not None else tuple(record.turns[0].prompt)
        task = ids.setdefault(key, rollout.task)
        rollout = replace(rollout, task=replace(task, target=fields.get("target")))
        groups.setdefault(task.id, []).append(rollout)
    first = next((r.where for r in records if any(turn.logprobs is None for turn in r.turns)), "")
    numbered = {task: [replace(r, group=i) for r in group] for i, (task, group) in enumerate(groups.items())}
    return RecordedReplies(numbered, paid, first, _notes(records, again, name))


def _rollout(record: _Record, name: str, policy: TrainablePolicy, sampling: Sampling) -> Rollout:
    """Raises: OperantError for ids that there are not, that read otherwise than the text, or that do not fit."""
    tokenizer, turns, where = policy.tokenizer, record.turns, record.where
    for turn, text in zip(turns, record.said):
        check_ids([*turn.prompt, *turn.action], policy.vocabulary, where)
        read = [tokenizer.decode(turn.action, skip_special_tokens=skip) for skip in (True, False)] if tokenizer else []
        if read and not any("".join(text.split()) in "".join(one.split()) for one in read):
            said = f"its text is {shown(text)}: are they of another tokenizer?"
            raise OperantError(f"{where}: its token_ids read {shown(read[1])}, and {said}")
    for turn in turns:
        if (why := policy.misfit(len(turn.prompt), len(turn.action))) is not None:
            raise OperantError(f"{where} {why}; leave the record out")
    texts = record.texts or record.said
    if tokenizer is not None and record.texts is None:
        texts = [reply_text(tokenizer, turn.prompt, turn.action, sampling) for turn in turns]
    query = tokenizer.decode(turns[0].prompt, skip_special_tokens=True) if tokenizer is not None else ""
    group = record.fields.get("group")
    good = group is None or (isinstance(group, (str, int)) and 0 < len(str(group)) <= LONGEST)
    require(good, f"{where}: group={shown(group)}; it must be a number, or a text of at most {LONGEST} letters")
    task = Task(where if group is None else f"{name}/{group}", turns[0].prompt)
    return Rollout(task, 0, turns, texts, turns[-1].end if len(turns) == 1 else "world", query=query)


def _record(number: int, row: object, name: str, *how: Any) -> _Record:
    where = f"{name}, {'line' if '.jsonl' in name else 'row'} {number + 1}"
    if not isinstance(row, Mapping):
        raise OperantError(f"{where} is {shown(row)}; a recorded conversation is an object")
    if "responses" in row:
        bodies = [(f"response {i}", b) for i, b in enumerate(_objects(row["responses"], "responses", where), 1)]
    elif "messages" in row:
        messages = enumerate(_objects(row["messages"], "messages", where), 1)
        own = [(f"message {i}", m) for i, m in messages if m.get("role") == "assistant"]
        bodies = [(at, message) for at, message in own if message.get("token_ids") is not None]
        if not bodies and (odd := [at for at, message in own if message.get("logprobs") is not None]):
            raise OperantError(f"{where}, {odd[0]}: it has logprobs and no token_ids, so nobody knows of which tokens")
    else:
        bodies = [("", row)] if "token_ids" in row or "choices" in row else []
    found = [_turn(body, f"{where}, {at}" if at else where, *how) for at, body in bodies]
    weights = {str(body.get("system_fingerprint")) for _, body in bodies}
    return _Record(where, [turn for turn, _ in found], [text for _, text in found], weights, row)


def _objects(value: object, what: str, where: str) -> list[Mapping[str, Any]]:
    if not isinstance(value, list) or not value or not all(isinstance(part, Mapping) for part in value):
        raise OperantError(f"{where}: {what} is {shown(value)}; it must be a list of at least one object")
    return value


def _turn(
    body: Mapping[str, Any], where: str, tokenizer: Tokenizer | None = None, sampling: Sampling = Sampling()
) -> tuple[Turn, str]:
    """A turn and its text, of a server's answer, or of a message that has the fields of its choice."""
    choice = body
    if "choices" in body:
        choice, *more = _objects(body["choices"], "choices", where)
        require(not more, f"{where}: it has {1 + len(more)} choices: make a record of each, and give them one `group`")
    message = choice.get("message") or choice
    require(isinstance(message, Mapping), f"{where}: message is {shown(message)}; it must be an object")
    text = message.get("content") or choice.get("text")
    text = text if isinstance(text, str) and not message.get("tool_calls") else ""  # calls were cut out of the text
    prompt = choice.get("prompt_token_ids") or body.get("prompt_token_ids")
    ids = {"prompt_token_ids": prompt, "token_ids": choice.get("token_ids")}
    for what, value in ids.items():
        good = isinstance(value, list) and value and all(type(token) is int for token in value)
        require(good, f"{where}: {what} is {shown(value)}; ask the server for the ids, with return_token_ids=true")
    action, given = ids["token_ids"], choice.get("logprobs")
    if isinstance(given, Mapping):
        content = given.get("content")
        of_tokens = _objects(content, "logprobs.content", where) if content else []
        given = [part.get("logprob") for part in of_tokens] if content is not None else given.get("token_logprobs")
    if given is not None:
        given = given if isinstance(given, list) else [given]
        odd = [x for x in given if not is_real(x) or x > 1e-4]
        require(not odd, f"{where}: {odd and shown(odd[0])} is no log-prob; each is a finite number, and at most 0")
        have, want = len(given), len(action)
        require(have == want, f"{where}: {have} log-probs for {want} token_ids; give one for each")
    reason = choice.get("finish_reason")
    end = reply_end(tokenizer, action, sampling) if reason is None else "length" if reason == "length" else "stop"
    return Turn(ids["prompt_token_ids"], action, given, end=end), text


def _rewards(record: _Record) -> list[float]:
    value, count, where = record.fields.get("reward", 0.0), len(record.turns), record.where
    rewards = value if isinstance(value, list) else [0.0] * (count - 1) + [value]
    odd = [x for x in rewards if not is_real(x)]
    require(not odd, f"{where}: the reward {odd and shown(odd[0])} must be a finite number")
    require(len(rewards) == count, f"{where}: {len(rewards)} rewards for {count} turns that are trained on")
    return [float(x) for x in rewards]


def _version(record: _Record) -> int | None:
    version = record.fields.get("version")
    good = version is None or (type(version) is int and version >= 0)
    require(good, f"{record.where}: version={shown(version)}; it must be a number of training steps, from 0")
    return version


def _notes(records: Sequence[_Record], again: Sequence[int], name: str) -> tuple[str, ...]:
    turns = [turn for record in records for turn in record.turns]
    later = [pair for record in records for pair in pairwise(record.turns)]
    unscored = sum(turn.logprobs is None for turn in turns)
    fresh = sum(b.prompt[: len(a.prompt + a.action)] != a.prompt + a.action for a, b in later)
    cuts = Counter(f"{k}={r.fields[k]}" for r in records for k, idle in NEUTRAL.items() if r.fields.get(k) not in idle)
    sentences = {
        f"{len(again)} of {len(turns)} replies of {name} have no token ids: their texts were tokenised again, "
        f"{sum(again)} tokens, which need not be those that were sampled": again,
        f"{unscored} of {len(turns)} replies of {name} have no log-probs: those of the current policy stand in, so "
        "nothing corrects for the weights that sampled them, and their staleness is not measured": unscored,
        f"{fresh} of {len(later)} later turns of {name} do not continue the tokens of the turn before, and begin a row "
        "of their own": fresh,
    } | {
        f"{times} records of {name} were sampled with {cut}, and are scored as if nothing had been cut off: ratios and "
        "KL are biased": times
        for cut, times in cuts.items()
    }
    return tuple(sentence for sentence, holds in sentences.items() if holds)
