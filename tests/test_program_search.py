"""Programs at test time: pass@k and n@k by enumeration, and searches whose right answer is known."""

import itertools
from dataclasses import dataclass, field
from fractions import Fraction
from math import comb, prod

import pytest
from cases import cases
from tokenizers_of_words import spaced
from toys import letters, lm

from operant import Completion, OperantError, Policy, Sampling, Task
from operant.apps.code.search import Candidate, Search, SearchOptions, Writer, chosen
from operant.engines.native.engine import NativeEngine
from operant.metrics.passes import n_at_k, numbers_in, pass_at_k
from operant.sandbox.jail import Verdict


def test_pass_at_k_is_the_share_of_all_subsets():
    for n in range(1, 8):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
            assert pass_at_k(n, c, k) == float(Fraction(sum(map(any, subsets)), len(subsets))), (n, c, k)


def test_pass_at_k_of_many_samples_is_a_product():
    """1 - prod(1 - k / i), as Chen et al. compute it, and no rounding where that has some."""
    product = 1 - prod(1 - 100 / i for i in range(10_000 - 3 + 1, 10_001))
    assert pass_at_k(10_000, 3, 100) == pytest.approx(product, rel=1e-12) and pass_at_k(10**5, 1, 1) == 1e-5
    assert pass_at_k(2000, 1000, 1000) == 1.0 and pass_at_k(2000, 0, 2000) == 0.0


@pytest.mark.parametrize("samples", [1, 3, 5, 6])
def test_n_at_k_is_the_share_of_all_draws_and_submissions(samples):
    """Every k of the samples, and of each every n of those that pass the examples."""
    for kept, n, k in itertools.product(range(samples + 1), range(1, samples + 1), range(1, samples + 1)):
        for right in range(kept + 1):
            if n > k:
                continue
            kinds = ["right"] * right + ["kept"] * (kept - right) + ["out"] * (samples - kept)
            chances = []
            for drawn in itertools.combinations(kinds, k):
                passing = [kind for kind in drawn if kind != "out"]
                tries = list(itertools.combinations(passing, min(n, len(passing))))
                chances.append(Fraction(sum("right" in submitted for submitted in tries), len(tries)))
            assert n_at_k(samples, kept, right, n, k) == float(sum(chances) / comb(samples, k)), (kept, right, n, k)


def test_names_of_metrics():
    found = [numbers_in(name) for name in ("pass@8", "5@100", "bleu", "pass@", "@3")]
    assert found == [(None, 8), (5, 100), None, None, None]


@cases(
    (lambda: pass_at_k(4, 5, 1), "pass@1 of 4 samples, 5 of them right"),
    (lambda: pass_at_k(4, 1, 5), "at most the samples"),
    (lambda: pass_at_k(4, 1, 0), "pass@0"),
    (lambda: n_at_k(4, 2, 3, 1, 4), "2 are kept and 3 right"),
    (lambda: n_at_k(4, 2, 1, 3, 2), "3@2"),
    (lambda: numbers_in("9@8"), "1 <= n <= k"),
    (lambda: SearchOptions(rounds=0), "rounds=0: it must be at least 1"),
)
def test_wrong_numbers_get_a_sentence(wrong, words):
    with pytest.raises(OperantError, match=words.replace("(", r"\(")):
        wrong()


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_a_reply_goes_on_with_its_own_numbers(kind):
    """With the key of the whole reply, what follows its own beginning is its own rest, whatever the batch."""
    policy = Policy(lm(kind, len(letters())), letters())
    engine, sampling = NativeEngine(policy, batch=3), Sampling(max_tokens=12, stop_tokens=(2,), min_tokens=3)
    prompts, keys = [[5, 6, 7], [8, 9], [5, 6, 7], [11]], [1, 2, 3, 4]
    whole = engine.generate(prompts, sampling, keys)
    begun = [c.action[: len(c.action) // 2] for c in whole]
    rest = engine.generate_more(prompts, begun, [12] * 4, sampling, keys)
    for first, ids, second in zip(whole, begun, rest, strict=True):
        assert (first.action, first.end) == (ids + second.action, second.end)
        assert second.logprobs == pytest.approx(first.logprobs[len(ids) :], abs=2e-5)
    other = engine.generate_more(prompts, begun, [12] * 4, sampling, [7, 8, 9, 10])
    assert [c.action for c in other] != [c.action for c in rest]
    with pytest.raises(OperantError, match=r"has 12 tokens, and sampling.max_tokens=12 leaves no room: raise"):
        engine.generate_more([[5]], [[6] * 12], [1], sampling, [1])


WORDS = ["<pad>", "</s>", "P", "Q", "a", "b", "c", "d", "x", ";\n"]


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(WORDS.index(word) for word in text.split(" "))


@dataclass
class Script:
    """An engine that says the next of its lines, behind what was begun, and keeps what it was asked."""

    lines: list[str]
    asked: list = field(default_factory=list)

    def generate(self, prompts, sampling, keys):
        return self.generate_more(prompts, [()] * len(prompts), None, sampling, keys)

    def generate_more(self, prompts, begun, more, sampling, keys):
        made = []
        for prompt, ids, key in zip(prompts, begun, keys, strict=True):
            self.asked.append((tuple(prompt), tuple(ids), key))
            made.append(Completion([*ids_of(self.lines.pop(0))], [], None, "stop", 0))
        return made


def judge(programs) -> list[Verdict]:
    """A program passes if it holds a `d`, fails a test if it holds an `x`, and else does not compile."""
    classes = {"d": ("passed", ""), "x": ("failed test", "saw x")}
    sources = [program.source for program in programs]
    found = [next((classes[c] for c in "dx" if c in s), ("compile error", "nothing")) for s in sources]
    return [Verdict(outcome, (outcome,), message) for outcome, message in found]


class Count:
    """A critic that scores each beginning by its number of `b`, less a tenth for each token behind the second."""

    def prefixes(self, problem, reply, tokenizer):
        assert problem == "P"
        return [list(reply[:n]).count(WORDS.index("b")) - 0.1 * max(n - 2, 0) for n in range(1, len(reply) + 1)]


TASK = Task("t", "P", target={"tests": ["0"], "examples": ["0"]})


def search(lines, options, **more):
    script = Script(lines)
    writer = Writer(spaced(WORDS), script, Sampling(max_tokens=8, stop_tokens=(1,)))
    return Search(SearchOptions(**options), writer, judge, **more)([TASK])[0], script


def texts(candidates) -> list[str]:
    return [c.text.replace(" ", "") for c in candidates]


def test_programs_that_pass_are_cut_at_the_critics_best():
    """Of 4 samples 2 pass: each has two of the 4 drafts of the round, from the token behind which it scores best."""
    first = ["a b a d </s>", "x </s>", "b d d d </s>", "a </s>"]
    found, script = search([*first, *["c d </s>"] * 4], {"samples": 4, "refine": "critic"}, critic=Count())
    assert texts(found[:4]) == ["abad", "x", "bddd", "a"]
    # "a b a d": 0 1 .9 .8 -> behind "a b". "b d d d": 1 1 .9 .8 -> behind "b", the shortest of equal ones. The whole
    # programs score -.1 lower with their stop token each, so "b d d d" and "a b a d" are equal, and the first leads.
    assert [ids for _, ids, _ in script.asked[4:]] == [ids_of("a b"), ids_of("b"), ids_of("a b"), ids_of("b")]
    assert texts(found[4:]) == ["abcd", "bcd", "abcd", "bcd"]
    assert [(c.how, c.round, c.sample, c.parent, c.kept) for c in found[4:]] == [
        ("refined", 1, 0, 0, 2), ("refined", 1, 1, 2, 1), ("refined", 1, 2, 0, 2), ("refined", 1, 3, 2, 1)
    ]  # fmt: skip
    assert len({key for *_, key in script.asked}) == 8


@cases(("line", {"a ;\n", "a ;\n b ;\n"}), ("random", {"a", "a ;\n", "a ;\n b", "a ;\n b ;\n"}))
def test_a_program_is_cut_at_the_end_of_a_line_or_anywhere(cut, allowed):
    _, script = search(["a ;\n b ;\n d </s>"] + ["x </s>"] * 31 + ["d </s>"] * 32, {"samples": 32, "refine": cut})
    assert {ids for _, ids, _ in script.asked[32:]} == {ids_of(text) for text in allowed}


def test_the_best_failures_are_repaired_by_what_became_of_them():
    """No sample passes: by the critic `b b x` is best and `b x` second; then the repaired ones of round 1 are."""
    template = "{prompt} {program} Q {message} {outcome}{"
    first = ["a </s>", "b x </s>", "b b x </s>"]
    second, third = ["b c </s>", "c </s>", "b </s>"], ["d </s>", "a </s>", "a </s>"]
    options = {"samples": 3, "repair": 2, "rounds": 2}
    found, script = search([*first, *second, *third], options, critic=Count(), template=template)
    read = [spaced(WORDS).decode(list(prompt)) for prompt, *_ in script.asked]
    # "saw x" and "failed test{" are no words of this vocabulary but `x`: they read as <pad>.
    assert read[3:6] == [f"P {program} Q <pad> x <pad> <pad>" for program in ("b b x", "b x", "b b x")]
    # "b" scores 1 to its end, and "b c" loses a tenth by its stop token.
    assert read[6:] == ["P b Q <pad> <pad> <pad>", "P b c Q <pad> <pad> <pad>", "P b Q <pad> <pad> <pad>"]
    assert [(c.how, c.parent, c.writer) for c in found[3:6]] == [("repaired", parent, 1) for parent in (2, 1, 2)]
    assert texts(chosen(found, 2)) == ["d", "bbx"]


@cases(
    (["d </s>"] * 2, {"repair": 1}, 2),  # a program passes, and nothing is to be repaired
    (["x </s>"] * 2, {"refine": "line"}, 2),  # none passes, and nothing is to be refined
    (["d </s>"] * 2, {"refine": "random"}, 2),  # a single token cannot be cut
    (["a d </s>"] * 20, {"refine": "random", "rounds": 3, "budget": 5}, 5),
    (["a d </s>"] * 20, {"refine": "random", "rounds": 3}, 8),
    (["x </s>"] * 20, {"repair": 1, "rounds": 2, "budget": 2}, 2),
)
def test_how_many_programs_are_made(lines, options, made):
    found, script = search(list(lines), {"samples": 2, **options})
    assert len(found) == len(script.asked) == made


def test_a_failure_that_is_too_long_to_be_read_is_passed_over():
    script = Script(["x x x </s>", "x </s>", "a </s>", "a </s>"])
    writer = Writer(spaced(WORDS), script, Sampling(max_tokens=8, stop_tokens=(1,)), fits=lambda size: size < 4)
    made = Search(SearchOptions(samples=2, repair=1), writer, judge, template="{prompt} {program}")
    assert (made([TASK])[0][2].parent, made.unread) == (1, 1)


def test_a_repaired_program_is_refined_by_its_writer():
    """It goes on behind the prompt that it was written for, with the tokens of that model."""
    own, theirs = Script(["x </s>"] * 2), Script(["a d </s>", "a a d </s>", "d </s>", "d </s>"])
    sampling = Sampling(max_tokens=8, stop_tokens=(1,))
    options = SearchOptions(samples=2, refine="critic", repair=1, rounds=2)
    made = Search(options, Writer(spaced(WORDS), own, sampling), judge, critic=Count(), template="{prompt} Q {program}",
                  repairer=Writer(spaced(WORDS), theirs, sampling))  # fmt: skip
    assert [(c.how, c.writer) for c in made([TASK])[0][2:]] == [("repaired", 1)] * 2 + [("refined", 1)] * 2
    assert {(prompt, begun) for prompt, begun, _ in theirs.asked[2:]} == {(ids_of("P Q x"), ids_of("a"))}


def test_the_choice_is_by_examples_then_critic_then_how_often():
    def candidate(text, outcome, *scores, results=()):
        return Candidate(text, (), Verdict(outcome, results or (outcome,)), scores=scores)

    some = [candidate(t, "passed") for t in "abba"] + [candidate("b", "passed"), candidate("c", "passed")]
    some.append(candidate("f", "failed test", results=("passed", "failed test")))
    assert texts(chosen(some, 9)) == ["b", "a", "c", "f"]
    scored = [candidate("a", "passed", 0.1), candidate("b", "passed", 0.9, 0.3), candidate("c", "failed test", 1.0)]
    assert texts(chosen(scored, 2)) == ["b", "a"]


def test_a_search_is_the_same_for_every_batch_of_tasks():
    """Of a real engine: the candidates of a task do not depend on the others, and other seeds differ."""
    policy = Policy(lm("gpt2", len(WORDS), spread=0.05), spaced(WORDS))
    writer = Writer(policy.tokenizer, NativeEngine(policy, batch=5), Sampling(max_tokens=6, stop_tokens=(1,)))
    tasks = [Task(f"t{i}", prompt, target=TASK.target) for i, prompt in enumerate(["P", "P Q", "x", "a b"])]
    options = SearchOptions(samples=2, refine="random", repair=1, rounds=2)

    def run(tasks, seed=0):
        found = Search(options, writer, judge, seed=seed)(tasks)
        return [[(c.text, c.ids, c.how, c.parent) for c in some] for some in found]

    together = run(tasks)
    assert together == [run([task])[0] for task in tasks]
    assert {how for some in together for *_, how, _ in some} == {"sampled", "refined", "repaired"}
    assert together != run(tasks, seed=1)
