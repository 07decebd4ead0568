"""Supervised fine-tuning of a language model in one file: the complete method, and nothing else.

    python recipes/minimal_sft.py                    # a tiny random model of letters learns an answer; under a minute
    python recipes/minimal_sft.py --model gpt2 --lr 5e-5 --steps 30     # any causal LM of transformers

Read it from `main` upwards. The replies come from a data set, and there is no reward. One step

    takes a few pairs of prompt and reply -> makes each token of the replies more likely, given all tokens before it

The loss is cross-entropy, the -log of the probability of each token, averaged over the tokens of all replies of the
step. It is smallest if the policy generates each reply as often as it occurs in the data. Tokens of the prompt are read
but not trained on. The end token of a reply is trained on like any other; otherwise the model would never stop.

The other methods of this folder train with the same log-probs, but multiply them by an advantage, which may be
negative, and use replies of the policy itself (minimal_ppo.py, minimal_grpo.py, minimal_rloo.py).

Shapes: B replies, P prompt tokens (padded on the left), A reply tokens (padded on the right), V vocabulary.
`mask[b, a]` is 1 where a token belongs to the reply. It comes from lengths, never from comparing ids with a padding id,
because that id may be the end token, which is trained on.
"""

import argparse
import random
import string

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

# --- from texts to tokens ---------------------------------------------------------------------------------------


def collate(pairs: list[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor, Tensor]:
    """Pad pairs of prompt and reply to one rectangle: (tokens, attention) [B, P + A] and mask [B, A]."""
    longest_prompt, longest_reply = (max(map(len, side)) for side in zip(*pairs))
    rows, attention, mask = [], [], []
    for prompt, reply in pairs:
        left, right = longest_prompt - len(prompt), longest_reply - len(reply)
        rows.append([0] * left + prompt + reply + [0] * right)
        attention.append([0] * left + [1] * len(prompt + reply) + [0] * right)
        mask.append([1.0] * len(reply) + [0.0] * right)
    return torch.tensor(rows), torch.tensor(attention), torch.tensor(mask)


# --- the arithmetic ---------------------------------------------------------------------------------------------


def score_tokens(lm: nn.Module, tokens: Tensor, attention: Tensor, num_actions: int) -> Tensor:
    """Return the log-probs [B, A] of the reply's tokens."""
    positions = (attention.cumsum(1) - 1).clamp(min=0)  # left padding must not move the positions
    logits = lm(tokens, attention_mask=attention, position_ids=positions).logits
    distribution = logits[:, -num_actions - 1 : -1].log_softmax(-1)  # the state before a token predicts it
    return distribution.gather(-1, tokens[:, -num_actions:, None]).squeeze(-1)


def cross_entropy(logprobs: Tensor, mask: Tensor) -> Tensor:
    """Average over all tokens of all replies: every token has the same weight, so a long reply has a larger one."""
    return -(logprobs * mask).sum() / mask.sum()


# --- one step ---------------------------------------------------------------------------------------------------


def sft_step(lm, optimizer, pairs, *, epochs=1, minibatches=1):
    """One training step on pairs of prompt and reply; returns metrics that are worth watching."""
    tokens, attention, mask = collate(pairs)
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
    """Cross-entropy of replies not trained on: if it rises while that of training falls, the model overfits."""
    tokens, attention, mask = collate(pairs)
    return cross_entropy(score_tokens(lm, tokens, attention, mask.shape[1]), mask)


@torch.no_grad()
def greedy(lm: nn.Module, prompt: list[int], num_actions: int, end: int | None) -> list[int]:
    """Greedy decoding: take the most likely token at each position."""
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
    """Load a model by folder or Hub name; without a name, make a tiny random GPT-2 whose tokens are letters."""
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32), AutoTokenizer.from_pretrained(name)
    tokenizer = Letters()
    shape = {"n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **shape)), tokenizer


def examples(count: int) -> list[tuple[str, str]]:
    """Training data: pairs of prompt and reply. Here the reply is the last letter of the prompt, twice."""
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
    pairs, held_out = pairs[:-100], pairs[-100:]

    for step in range(args.steps):
        stats = sft_step(lm, optimizer, random.sample(pairs, args.batch)) | {"held out": held_out_loss(lm, held_out)}
        history.append({name: float(value) for name, value in stats.items()})
        prompt, _ = held_out[step % len(held_out)]
        reply = tokenizer.decode(greedy(lm, prompt, args.tokens, end), skip_special_tokens=True)
        shown = (f"{name} {x:6.3f}" for name, x in history[-1].items())
        print(f"{step:3d}", *shown, f"{tokenizer.decode(prompt)!r} -> {reply!r}", flush=True)
    return history


if __name__ == "__main__":
    main()
