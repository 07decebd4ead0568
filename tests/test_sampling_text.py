"""Stop strings, text, transformers' argument names, and that decoding agrees with the training forward."""

import pytest
import torch
from cases import cases
from toys import PIECES, letters, lm

from operant import Learner, OperantError, Policy, Rollout, Task
from operant.engines.native.engine import NativeEngine
from operant.rollouts.external import to_rollouts
from operant.rollouts.generation_kwargs import declared, drawn_with, from_generation_kwargs
from operant.sampling import Sampling, reply_text


class Forced:
    """A policy with a tokenizer that generates a script: its logits leave `NativeEngine` no choice."""

    def __init__(self, script):
        self.policy = Policy(lm("llama", len(PIECES)), letters())
        self.script, self.place = script, 0
        self.policy.logits = self.logits

    def logits(self, states):
        out = torch.full((len(states), len(PIECES)), -1e4)
        out[:, self.script[self.place]] = 0.0
        self.place += 1
        return out


def ids_of(*pieces):
    return [PIECES.index(p) for p in pieces]


@cases(
    (("d.",), ["s", "d.", "a"], {}, 2, "s"),  # one token is the string
    (("end",), "senda", {}, 4, "s"),  # spans three tokens
    (("d.",), ["t", "end.a", "b"], {}, 2, "ten"),  # inside a token: the ids keep the whole of it, the text is cut
    (("n d", "! b"), ["!", " b", "c"], {}, 2, ""),  # a token that begins with a space completes it
    (("en", "d."), ["b", "en", "d."], {}, 2, "b"),  # the first of several
    ((" the",), ["a", " ", "the", "b"], {}, 3, "a"),
    (("zz",), "azbzac", {}, 6, "azbzac"),  # never
    (("en",), "enaenb", {}, 2, ""),
    (("en",), "enaenb", {"min_tokens": 3}, 5, "ena"),  # the first came too early: it neither ends nor cuts the reply
    (("en",), "enaenb", {"min_tokens": 2}, 2, ""),
    (("en",), "enaenb", {"fixed_length": True}, 6, "enaenb"),
)
def test_a_stop_string_keeps_the_last_token_and_cuts_the_text(strings, pieces, more, length, text):
    script = ids_of(*pieces)
    sampling = Sampling(max_tokens=len(script), stop_strings=strings, **more)
    (c,) = NativeEngine(Forced(script).policy).generate([[5]], sampling, [0])
    assert c.action == script[:length]
    assert c.end == ("stop" if length < len(script) or text != "".join(pieces) else "length")
    assert reply_text(letters(), [5], c.action, sampling) == text


def test_the_text_has_no_stop_token_and_keeps_a_leading_space():
    tokenizer = letters()
    assert reply_text(tokenizer, ids_of("a"), [*ids_of(" b", "c"), 2], Sampling(stop_tokens=(2,))) == " bc"
    assert reply_text(tokenizer, ids_of("a"), ids_of("c", "d"), Sampling(stop_tokens=tuple(ids_of("d")))) == "c"


def test_trls_generation_arguments_are_taken_as_they_are():
    given = {"min_length": -1, "top_k": 0.0, "top_p": 1.0, "do_sample": True, "pad_token_id": 2, "max_new_tokens": 32}
    sampling = from_generation_kwargs(Sampling(max_tokens=7), given)
    assert sampling == Sampling(max_tokens=32) and sampling.for_training() is sampling
    assert from_generation_kwargs(Sampling(), {"do_sample": False, "top_k": 50}).top_k == 1  # greedy, as there
    with pytest.raises(OperantError, match=r"length_sampler=.*max_new_tokens=sampler\(\)"):
        from_generation_kwargs(Sampling(), {"length_sampler": lambda: 3})
    learner = Learner(lm(), max_tokens=7)
    assert {len(r.ids) for r in learner.generate([[4, 5]] * 8, **given | {"eos_token_id": -1})} == {32}


def test_a_method_of_trls_trainer_is_answered_with_ours():
    learner = Learner(lm())
    with pytest.raises(AttributeError, match=r"'save_pretrained': operant\.export\(learner\.policy"):
        learner.save_pretrained("folder")
    with pytest.raises(AttributeError, match=r"'polcy'$"):
        learner.polcy  # noqa: B018


def test_the_names_of_transformers_mean_what_they_say_there(recwarn):
    given = {"min_new_tokens": 2, "eos_token_id": [4, 5], "temperature": 0.7, "top_k": 5.0}
    given |= dict.fromkeys(("num_beams", "do_sample"))
    expected = Sampling(min_tokens=2, stop_tokens=(4, 5), temperature=0.7, top_k=5)
    made = from_generation_kwargs(Sampling(), given)
    assert made == expected and type(made.top_k) is int  # torch.topk takes no float
    greedy = from_generation_kwargs(Sampling(), {"do_sample": False})
    with pytest.raises(OperantError, match=r"^do_sample=False.*: a greedy reply is no sample.*evaluation\.sampling="):
        greedy.for_training()
    assert greedy.top_k == 1
    assert from_generation_kwargs(Sampling(stop_tokens=(9,)), {"eos_token_id": None}).stop_tokens == (9,)
    given = {"num_return_sequences": 4, "early_stopping": True, "num_beams": None}
    assert declared(Sampling(), given) == Sampling() and not len(recwarn)


def test_given_replies_keep_the_names_and_the_sampling_that_they_came_with():
    given = {"tokenizer": None, "sampling": Sampling(), "groups": [*torch.tensor([1, 1, 1])]}
    made = to_rollouts([[5]] * 3, [[6]] * 3, episodes=["a", 0.25, "a"], **given)
    assert [len(r.turns) for r in made] == [2, 1] and [r.group for r in made] == [0, 0]
    ways = [Sampling(max_tokens=8), Sampling(max_tokens=16), Sampling(temperature=0.7)]
    with pytest.raises(OperantError, match=r"in 2 ways, as .*max_tokens=16.* and as .*temperature=0\.7"):
        drawn_with([Rollout(Task("a", [5]), 0, [], [], sampling=way) for way in ways], Sampling())
