"""Supervised fine-tuning of a language model in one file: everything that happens, and nothing else.

    python recipes/minimal_sft.py                    # a tiny random model of letters learns an answer; under a minute
    python recipes/minimal_sft.py --model gpt2 --lr 5e-5 --steps 30     # any causal LM of transformers

Read it from `main` upwards. Replies are given, and nobody judges them: one step

    takes a few pairs of prompt and reply -> makes each token of the replies likelier, given all that stands before it

What is descended on is cross-entropy, -log of the probability of the given token, averaged over the tokens of all
replies of the step. Its smallest value is reached where the policy says each reply as often as the data do. The prompt
is read and not learnt: its tokens cost nothing. The end token behind a reply is learnt like any other, or the model
never stops.

The other methods of this folder move a policy by the same log-probs: times an advantage, which may be negative, and on
replies of its own (minimal_ppo.py, minimal_grpo.py, minimal_rloo.py).

Shapes: B replies, P prompt tokens (padded on the left), A reply tokens (padded on the right), V vocabulary.
`mask[b, a]` is 1 where a token belongs to the reply; it comes from lengths, never from comparing ids with a padding id,
because that id may be the end token, which is to be learnt.
"""

import argparse
import random
import string

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

# --- from texts to tokens ---------------------------------------------------------------------------------------


def laid_out(pairs: list[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs of prompt and reply as one rectangle: (tokens, attention) [B, P + A] and mask [B, A]."""
    before, behind = (max(map(len, side)) for side in zip(*pairs))
    rows, seen, mask = [], [], []
    for prompt, reply in pairs:
        left, right = before - len(prompt), behind - len(reply)
        rows.append([0] * left + prompt + reply + [0] * right)
        seen.append([0] * left + [1] * len(prompt + reply) + [0] * right)
        mask.append([1.0] * len(reply) + [0.0] * right)
    return torch.tensor(rows), torch.tensor(seen), torch.tensor(mask)


# --- the arithmetic ---------------------------------------------------------------------------------------------


def score_tokens(lm: nn.Module, tokens: Tensor, attention: Tensor, num_actions: int) -> Tensor:
    """Log-probs of the reply's tokens [B, A]."""
    positions = (attention.cumsum(1) - 1).clamp(min=0)  # left padding must not move the positions
    logits = lm(tokens, attention_mask=attention, position_ids=positions).logits
    distribution = logits[:, -num_actions - 1 : -1].log_softmax(-1)  # what stands before a token predicts it
    return distribution.gather(-1, tokens[:, -num_actions:, None]).squeeze(-1)


def cross_entropy(logprobs: Tensor, mask: Tensor) -> Tensor:
    """The mean over all tokens of all replies: a long reply weighs more than a short one, and every token the same."""
    return -(logprobs * mask).sum() / mask.sum()


# --- one step ---------------------------------------------------------------------------------------------------


def sft_step(lm, optimizer, pairs, *, epochs=1, minibatches=1):
    """One step on given pairs of prompt and reply; returns what is worth watching."""
    tokens, attention, mask = laid_out(pairs)
    losses = []
    for _ in range(epochs):
        for rows in torch.randperm(len(tokens)).chunk(minibatches):
            loss = cross_entropy(score_tokens(lm, tokens[rows], attention[rows], mask.shape[1]), mask[rows])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.detach())
    return {"loss": torch.stack(losses).mean(), "length": mask.sum(1).mean()}


@torch.no_grad()
def held_out_loss(lm: nn.Module, pairs: list[tuple[list[int], list[int]]]) -> Tensor:
    """Cross-entropy of replies that are not learnt: where it rises while the other falls, pairs are learnt by heart."""
    tokens, attention, mask = laid_out(pairs)
    return cross_entropy(score_tokens(lm, tokens, attention, mask.shape[1]), mask)


@torch.no_grad()
def likeliest(lm: nn.Module, prompt: list[int], num_actions: int, end: int | None) -> list[int]:
    """The reply that takes the likeliest token every time."""
    reply: list[int] = []
    while len(reply) < num_actions and (not reply or reply[-1] != end):
        reply.append(int(lm(torch.tensor([prompt + reply])).logits[0, -1].argmax()))
    return reply


# --- the job ----------------------------------------------------------------------------------------------------


class Letters:
    """A vocabulary of letters for the tiny model; token 0 ends the text."""

    words, eos_token_id = " " + string.ascii_lowercase, 0

    def __len__(self) -> int:
        return len(self.words) + 1

    def encode(self, text: str) -> list[int]:
        return [self.words.index(letter) + 1 for letter in text]

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(self.words[i - 1] for i in ids if i)


def load(name: str | None) -> tuple[nn.Module, Letters | AutoTokenizer]:
    """A folder or a name that transformers knows; without one, a tiny random GPT-2 of letters."""
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32), AutoTokenizer.from_pretrained(name)
    tokenizer = Letters()
    shape = {"n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **shape)), tokenizer


def examples(count: int) -> list[tuple[str, str]]:
    """What is to be learnt, pairs of prompt and reply: here, the last letter of the prompt, twice."""
    prompts = ["".join(random.choices(string.ascii_lowercase, k=random.randint(3, 5))) for _ in range(count)]
    return [(prompt, prompt[-1] * 2) for prompt in prompts]


def main(argv: list[str] | None = None) -> list[dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or Hub name of a causal LM; default: a tiny random one")
    for name, default in {"steps": 120, "batch": 64, "tokens": 6, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=3e-3)
    args = parser.parse_args(argv)

    torch.manual_seed(args.seed)
    random.seed(args.seed)
    lm, tokenizer = load(args.model)
    lm.eval()  # no dropout
    optimizer = torch.optim.Adam(lm.parameters(), lr=args.lr)
    end, history = tokenizer.eos_token_id, []
    pairs = [(tokenizer.encode(a), [*tokenizer.encode(b), end]) for a, b in examples(2000)]
    pairs, held = pairs[:-100], pairs[-100:]

    for step in range(args.steps):
        stats = sft_step(lm, optimizer, random.sample(pairs, args.batch)) | {"held out": held_out_loss(lm, held)}
        history.append({name: float(value) for name, value in stats.items()})
        prompt, _ = held[step % len(held)]
        said = tokenizer.decode(likeliest(lm, prompt, args.tokens, end), skip_special_tokens=True)
        told = (f"{name} {x:6.3f}" for name, x in history[-1].items())
        print(f"{step:3d}", *told, f"{tokenizer.decode(prompt)!r} -> {said!r}", flush=True)
    return history


if __name__ == "__main__":
    main()
