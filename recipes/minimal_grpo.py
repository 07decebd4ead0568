"""GRPO for a language model in one file: everything that happens, and nothing else.

    python recipes/minimal_grpo.py                    # a tiny random model of letters learns to say "e"; under a minute
    python recipes/minimal_grpo.py --model gpt2 --lr 1e-5 --batch 128   # any causal LM of transformers

Read it from `main` upwards. One step of GRPO (https://arxiv.org/abs/2402.03300) is

    several replies to every prompt are sampled -> judged -> compared with the other replies to the same prompt
    -> the policy is moved towards what was better than its group, and by a term of the loss back to the reference

PPO learns a critic, which says what was to be expected of a prompt. Here the mean score of the group says it, so there
is no critic, and every token of a reply has the same advantage. RLOO (minimal_rloo.py) compares within a group as well,
and differs in three places:

    |                          | GRPO                                   | RLOO                                      |
    |--------------------------|----------------------------------------|-------------------------------------------|
    | a reply is compared with | the mean of its group, itself included | the mean of the others                    |
    |                          | and divided by the group's deviation   |                                           |
    | KL stands                | in the loss, a token at a time         | in the return, before replies are compared|
    | a reply counts           | as the mean over its tokens            | as the sum over its tokens                |

Shapes: B replies, P prompt tokens (padded on the left), A reply tokens ("actions", padded on the right), V vocabulary.
Every [B, A] tensor says something about the reply token at the same place. `mask[b, a]` is 1 where the policy chose the
token; it comes from lengths, never from comparing ids with a padding id.
"""

import argparse
import copy
import random
import string

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel


def score_tokens(lm: nn.Module, tokens: Tensor, attention: Tensor, num_actions: int) -> tuple[Tensor, Tensor]:
    """Log-probs of the reply's tokens and the entropy before them, each [B, A]."""
    positions = (attention.cumsum(1) - 1).clamp(min=0)  # left padding must not move the positions
    logits = lm(tokens, attention_mask=attention, position_ids=positions).logits
    distribution = logits[:, -num_actions - 1 : -1].log_softmax(-1)  # what stands before a token predicts it
    logprobs = distribution.gather(-1, tokens[:, -num_actions:, None]).squeeze(-1)
    return logprobs, -(distribution.exp() * distribution).sum(-1)


# --- from prompts to replies ------------------------------------------------------------------------------------


@torch.no_grad()
def sample(lm: nn.Module, prompts: list[list[int]], num_actions: int, end: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Draw replies at temperature 1 from the whole distribution: (tokens, attention) [B, P + A] and mask [B, A].

    A reply ends with the end token, which belongs to it. No top-k, no top-p: what is trained is what is sampled.
    """
    width = max(map(len, prompts))
    tokens = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    attention = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    alive, mask, cache, fresh = torch.ones(len(prompts), dtype=torch.long), [], None, tokens
    for _ in range(num_actions):
        positions = (attention.cumsum(1) - 1).clamp(min=0)[:, -fresh.shape[1] :]
        out = lm(fresh, attention_mask=attention, position_ids=positions, past_key_values=cache, use_cache=True)
        fresh, cache = torch.multinomial(out.logits[:, -1].softmax(-1), 1), out.past_key_values
        tokens, attention = torch.cat([tokens, fresh], 1), torch.cat([attention, alive[:, None]], 1)
        mask.append(alive)
        if end is not None:
            alive = alive * (fresh.squeeze(1) != end).long()
    return tokens, attention, torch.stack(mask, 1).float()


# --- the arithmetic ---------------------------------------------------------------------------------------------


def group_advantages(scores: Tensor, groups: Tensor) -> Tensor:
    """[B] how many deviations of its group each score lies above the group's mean; `groups` [B] are numbers.

    A group whose scores are all equal says nothing about its replies, and neither does a group of one: 0.
    """
    advantages = torch.zeros_like(scores)
    for group in groups.unique():
        mine = groups == group
        if scores[mine].max() > scores[mine].min():
            centred = scores[mine] - scores[mine].mean()
            advantages[mine] = centred / (centred.square().mean().sqrt() + 1e-6)
    return advantages


def policy_loss(ratio: Tensor, advantages: Tensor, clip: float = 0.2) -> Tensor:
    """Per token [B, A]: raise what was better than its group, lower what was worse, until the ratio moved by `clip`.

    The smaller of the two gains: beyond the bound there is nothing to win, and mistakes are still undone.
    """
    gain = advantages[:, None]  # the same for every token of a reply
    return -torch.minimum(ratio * gain, ratio.clamp(1 - clip, 1 + clip) * gain)


def kl_loss(ratio: Tensor, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Per token [B, A]: an estimate of KL(policy || reference) that is never negative (k3).

    The ratio makes its gradient that of this KL. The paper leaves the ratio out; what is then descended on is
    KL(reference || policy), and the policy ends elsewhere.
    """
    gap = ref_logprobs - logprobs
    return ratio * (gap.exp() - 1 - gap)


def mean_over_replies(x: Tensor, mask: Tensor) -> Tensor:
    """The mean over replies of the mean over a reply's tokens: a long reply weighs as much as a short one."""
    return ((x * mask).sum(1) / mask.sum(1)).mean()


# --- one step ---------------------------------------------------------------------------------------------------


def grpo_step(lm, reference, optimizer, replies, scores, groups, *, kl_coef, epochs=1, minibatches=1):
    """One GRPO step on replies that the current policy sampled; returns what is worth watching."""
    tokens, attention, mask = replies
    num_actions, losses = mask.shape[1], []
    advantages = group_advantages(scores, groups)  # before the cut: a minibatch may hold parts of groups
    with torch.no_grad():
        old_logprobs, entropy = score_tokens(lm, tokens, attention, num_actions)
        ref_logprobs, _ = score_tokens(reference, tokens, attention, num_actions)

    for _ in range(epochs):
        for rows in torch.randperm(len(tokens)).chunk(minibatches):
            logprobs, _ = score_tokens(lm, tokens[rows], attention[rows], num_actions)
            ratio = torch.exp(logprobs - old_logprobs[rows])
            loss = policy_loss(ratio, advantages[rows]) + kl_coef * kl_loss(ratio, logprobs, ref_logprobs[rows])
            loss = mean_over_replies(loss, mask[rows])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.detach())

    return {
        "reward": scores.mean(),
        "kl": ((old_logprobs - ref_logprobs) * mask).sum(1).mean(),  # nats a reply
        "entropy": (entropy * mask).sum() / mask.sum(),  # falling to 0 means that it has stopped trying things
        "silent": (advantages == 0).to(scores).mean(),  # share of replies that teach nothing: one score in the group
        "length": mask.sum(1).mean(),
        "loss": torch.stack(losses).mean(),
    }


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


def judge(text: str) -> float:
    """The reward: any function of the text. Here, how often the letter e stands in it."""
    return float(text.count("e"))


def main(argv: list[str] | None = None) -> list[dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or Hub name of a causal LM; default: a tiny random one")
    for name, default in {"steps": 40, "batch": 64, "samples": 8, "tokens": 20, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--kl-coef", type=float, default=0.04)
    args = parser.parse_args(argv)

    torch.manual_seed(args.seed)
    random.seed(args.seed)
    lm, tokenizer = load(args.model)
    lm.eval()  # no dropout, ever: the ratio must be 1 where the weights have not changed
    reference = copy.deepcopy(lm).requires_grad_(False)
    optimizer = torch.optim.Adam(lm.parameters(), lr=args.lr)
    openings, history = ["the", "i saw", "we went to", "a", "my friend", "it was"], []

    for step in range(args.steps):
        asked = [tokenizer.encode(random.choice(openings)) for _ in range(args.batch // args.samples)]
        prompts = [prompt for prompt in asked for _ in range(args.samples)]
        groups = torch.arange(len(asked)).repeat_interleave(args.samples)
        replies = sample(lm, prompts, args.tokens, tokenizer.eos_token_id)
        tokens, _, mask = replies
        said = [row[-args.tokens :][: int(n)].tolist() for row, n in zip(tokens, mask.sum(1))]
        texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in said]
        scores = torch.tensor([judge(text) for text in texts])
        stats = grpo_step(lm, reference, optimizer, replies, scores, groups, kl_coef=args.kl_coef)
        history.append({name: float(value) for name, value in stats.items()})
        print(f"{step:3d}", *(f"{name} {x:6.3f}" for name, x in history[-1].items()), repr(texts[0]), flush=True)
    return history


if __name__ == "__main__":
    main()
