"""What a run says at its start: options that change nothing in it, what limits rewards, what was left out."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from operant import machine
from operant.algorithms import find, left_out_message
from operant.envs.isolated import IsolatedEnv
from operant.models.twins import in_halves
from operant.rewards import parts_of
from operant.rewards.isolated import IsolatedReward
from operant.runs import named_parts
from operant.runs.config import OWN, Config
from operant.runs.folder import RunFolder
from operant.runs.parts import RunParts
from operant.runs.trackers.trackers import Trackers
from operant.sampling import PlainTokenizer
from operant.training.learner import Learner
from operant.training.options import compares_nothing, learner_options
from operant.types import with_defaults

READ_ONLY_WITH: tuple[tuple[str, str, Callable[[Any], bool], str], ...] = (
    ("kl", "kind reward_gradient control", lambda kl: kl.charges, "kl.coef above 0"),
    ("kl", "loss_kind", lambda kl: kl.loss_coef > 0, "kl.loss_coef above 0"),
    ("kl", "target", lambda kl: kl.control in ("adaptive", "per_token"), "kl.control=adaptive or per_token"),
    ("kl", "horizon", lambda kl: kl.control == "adaptive", "kl.control=adaptive"),
    ("kl", "end_coef", lambda kl: kl.control == "linear", "kl.control=linear"),
    ("learner", "importance_cap", lambda own: own.importance != "none", "learner.importance"),
    ("learner", "select_unit", lambda own: own.select is not None, "learner.select"),
    ("score", "overlong_penalty", lambda score: score.overlong_tokens > 0, "score.overlong_tokens"),
    ("score", "missing_stop_mode", lambda score: score.missing_stop is not None, "score.missing_stop"),
    ("score", "truncate_after truncate_penalty", lambda own: own.truncate_token is not None, "score.truncate_token"),
    ("sampling", "top_p_least", lambda sampling: sampling.top_p < 1, "sampling.top_p below 1"),
    ("sampling", "keep_stops", lambda own: own.truncates and own.top_k != 1, "sampling.top_k, top_p or min_p"),
    ("loss", "tie", lambda loss: loss.ties != "none", "loss.ties"),
    ("loss", "forward_share", lambda loss: loss.version != "v1", "loss.version other than v1"),
    ("loss", "freeze_later", lambda loss: "v3" in loss.version, "loss.version=v3 or v2_v3"),
    ("lora", "alpha targets rslora", lambda lora: lora.on, "lora.rank or lora.adapter"),
    ("output_mlp", "gain bias", lambda mlp: mlp.on, "output_mlp.width"),
    ("replay", "capacity", lambda replay: replay.share > 0, "replay.share above 0"),
    ("mask", "every", lambda mask: mask.by == "copy", "mask.by=copy"),
    ("target", "rate", lambda target: target.every == 0, "target.every=0"),
    ("", "evaluate_every", lambda train: train.evaluates, "evaluate"),
    ("", "probe_every", lambda train: train.probes > 0, "probes above 0"),
    ("data", "prompt_keeps", lambda data: data.prompt_tokens is not None, "data.prompt_tokens"),
    ("evaluation", "samples seeds", lambda evaluation: False, "evaluate"),
)
"""Options of a group, when they are read, and what has to be set for that."""


def idle(config: Config) -> list[str]:
    """Sentences on options that change nothing in this run, or something that its user may not expect."""
    name, notes = config.train.algorithm, list[str]()
    known: dict[str, Any] = {**config.learner, "": config.train, "data": config.data}
    known |= {} if config.train.evaluates else {"evaluation": config.evaluation}
    size, rate = (getattr(known.get(at), of, None) for at, of in (("update", "minibatch"), ("optimizer", "lr")))
    notes += [f"optimizer.lr={rate}: the weights stay as they are, as in a control"] * (rate == 0)
    if size and size > config.train.batch and config.train.env is None:
        notes += [f"update.minibatch={size} is above batch={config.train.batch}: each step has one minibatch"]
    if find(name).needs.critic and (select := known["learner"].select) is not None:
        why = "the critic learns from the replies that stay alone, and expects too much of the others"
        notes += [f"learner.select={select}: {why}; a method without a critic fits better"]
    if find(name).source == "data" and known["learner"].on_length != "ended":
        notes += [f"learner.on_length={known['learner'].on_length} changes nothing: {name} learns from given replies"]
    if compares_nothing(find(name)) and (limit := known["update"].ratio_threshold):
        notes += [f"update.ratio_threshold={limit} changes nothing: {name} has no ratio"]
    if find(name).rows["labelled"] and config.data.reply_field:
        notes += [f"data.reply_field={config.data.reply_field} changes nothing: labelled replies have their own names"]
    usual = {**learner_options(name, None, {})[0], **{group: made() for group, made in OWN.items()}}
    for groups in (known, usual):
        groups["loss"] = SimpleNamespace(**groups.get("loss", {}))
    for group, options, read, needed in READ_ONLY_WITH:
        if hasattr(known.get(group), options.split()[0]) and not read(known[group]):
            values = {o: getattr(known[group], o) for o in options.split()}
            changed = [f"{group}.{o}={x}".lstrip(".") for o, x in values.items() if x != getattr(usual[group], o)]
            notes += [f"{', '.join(changed)} without {needed}: nothing reads it"] if changed else []
    train, judged = config.train, {"held-out tasks": config.train.evaluates, "the probe prompts": config.train.probes}
    if train.reward is not None and find(name).source == "data":
        asked = " and ".join(what for what, there in judged.items() if there)
        judges = f"judges the policy's replies to {asked} alone" if asked else "judges nothing"
        notes += [f"the reward {judges}: {name} learns from given replies"]
    return notes


def tell(config: Config, parts: RunParts, folder: RunFolder, trackers: Trackers, *, resumed: bool) -> None:
    """Log what there is to say at the start of a run, also for the report."""
    notes, learner = [*idle(config), *parts.notes], parts.learner
    isolated = [("reward", part) for part in parts_of(parts.reward, IsolatedReward)]
    isolated += [("world", learner.env)] if isinstance(learner.env, IsolatedEnv) else []
    for kind, part in isolated:
        folder.log_message(f"isolation of {kind} {part.__name__!r}: {part.level}")
    if levels := {part.__name__: part.level for _, part in isolated}:
        folder.add_environment(isolation="; ".join(f"{name}: {level}" for name, level in levels.items()))
    notes += high_rate(config, learner) + unknown_prompts(parts)
    model, tokens, auto = learner.policy.model, learner.budget.tokens, learner.own.threads == "auto"
    several = auto and machine.worth(tokens, machine.largest(model)) > 1 and not in_halves(model, tokens)
    on_cpu = learner.policy.device.type == "cpu"
    if several and on_cpu and (crowd := machine.crowded()):
        one = "--threads 1 (in Python threads=1) is likely faster here, and changes the last bits of a run"
        notes.append(f"{crowd}; {one} (docs/fast.md)")
    if on_cpu and config.learner["model"].precision != "float32" and str(machine.about()["machine"]).endswith("AVX2"):
        notes.append("model.precision=bfloat16: without instructions for it here, float32 is many times faster")
    for note in notes if resumed else (*notes, *left_out(config, parts)):
        folder.log_message(note)
        trackers.note(note)


def high_rate(config: Config, learner: Learner) -> list[str]:
    """A sentence if the learning rate is ten times what models of this size usually get, or more.

    Rates in use fall about as 1 / parameters: 3e-4 for 5M (the recipes here), 1e-5 for 124M (GPT-2 in TRL), 1e-6 for
    billions. Adapters and supervised training take larger ones.
    """
    sizes = [(weight.numel(), weight.requires_grad) for weight in learner.policy.model.parameters()]
    count = sum(size for size, trained in sizes if trained)
    rate, usual = getattr(config.learner.get("optimizer"), "lr", 0.0), min(1e-3, max(1e-6, 1500 / max(count, 1)))
    few = count < 0.1 * sum(size for size, _ in sizes)
    if few or learner.algorithm.source == "data" or rate < 10 * usual:
        return []
    why = f"is far above {usual:.0e}, about the usual rate of {count / 1e6:.3g}M weights, and training may collapse"
    return [f"optimizer.lr={rate:g} {why} (docs/how-to-train.md)"]


def unknown_prompts(parts: RunParts) -> list[str]:
    """A sentence if the policy can read nothing of some prompts, as all of their tokens stand for unknown words."""
    tokenizer = parts.learner.policy.tokenizer
    read = with_defaults(tokenizer, PlainTokenizer)
    unknown, special = read.unk_token_id, {*read.all_special_ids}
    ends = [getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad")]
    if unknown is None or unknown in ends:
        return []
    prompts = [task.prompt for task in parts.tasks if task.prompt and isinstance(task.prompt[0], int)]
    blank = sum(unknown in prompt and all(token in special for token in prompt) for prompt in prompts)
    what = f"prompts of unknown tokens alone ({tokenizer.convert_ids_to_tokens([unknown])[0]})"
    ask = "Is this the model's own tokenizer, and were these the words that it was made of?"
    return [f"{what}: {blank} of {len(prompts)}; the policy reads nothing of them. {ask}"] if blank else []


def left_out(config: Config, parts: RunParts) -> list[str]:
    """Sentences on rows, and on options of recipe and preset, that do not apply with the algorithm or the world."""
    notes, train = list[str](), config.train
    if parts.left_out:
        why = f"their labels teach {train.algorithm} nothing, as equal labels, or a single reply, are no pair"
        notes.append(f"{parts.left_out} of {parts.left_out + len(parts.tasks)} rows are left out: {why}")
    for source, names in config.left_out.items():
        kind = source.rpartition(", ")[2]
        kind = kind if kind in named_parts.KINDS else "algorithm"
        notes.append(left_out_message(source, names, f"{kind}={getattr(train, kind)}"))
    return notes
