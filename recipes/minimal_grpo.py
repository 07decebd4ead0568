"""GRPO for a language model in one file: the complete method, and nothing else.

    python recipes/minimal_grpo.py                    # a tiny random model of letters learns to say "e"; under a minute
    python recipes/minimal_grpo.py --model gpt2 --lr 1e-5 --batch 128   # any causal LM of transformers

Read it from `main` upwards. One step of GRPO (https://arxiv.org/abs/2402.03300) is

    several replies to every prompt are sampled -> scored -> compared with the other replies to the same prompt
    -> the policy is moved towards replies better than their group, and by a KL term of the loss towards the reference

PPO learns a critic, which predicts the score of a prompt. Here the prediction is the mean score of the group, so there
is no critic, and every token of a reply has the same advantage. RLOO (minimal_rloo.py) also compares within a group,
and differs in three points:

    |                          | GRPO                                   | RLOO                                      |
    |--------------------------|----------------------------------------|-------------------------------------------|
    | a reply is compared with | the mean of its group, itself included | the mean of the others                    |
    |                          | and divided by the group's deviation   |                                           |
    | KL is charged            | in the loss, for each token            | in the return, before the comparison      |
    | a reply counts           | as the mean over its tokens            | as the sum over its tokens                |

Shapes: B replies, P prompt tokens (padded on the left), A reply tokens ("actions", padded on the right), V vocabulary.
Every [B, A] tensor belongs to the reply token at the same position. `mask[b, a]` is 1 where the policy chose the
token. It comes from lengths, never from comparing ids with a padding id.
"""

import argparse
import copy
import random
import string

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel


def score_tokens(lm: nn.Module, tokens: Tensor, attention: Tensor, num_actions: int) -> tuple[Tensor, Tensor]:
    """Return the log-probs of the reply's tokens and the entropy before them, each [B, A]."""
    positions = (attention.cumsum(1) - 1).clamp(min=0)  # left padding must not move the positions
    logits = lm(tokens, attention_mask=attention, position_ids=positions).logits
    distribution = logits[:, -num_actions - 1 : -1].log_softmax(-1)  # the state before a token predicts it
    logprobs = distribution.gather(-1, tokens[:, -num_actions:, None]).squeeze(-1)
    return logprobs, -(distribution.exp() * distribution).sum(-1)


# --- from prompts to replies ------------------------------------------------------------------------------------


@torch.no_grad()
def sample(lm: nn.Module, prompts: list[list[int]], num_actions: int, end: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Draw replies at temperature 1 from the whole distribution: (tokens, attention) [B, P + A] and mask [B, A].

    The end token ends a reply and belongs to it. There is no top-k or top-p, because the ratio in the loss needs the
    distribution that the tokens were drawn from.
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
    """[B] each score less the mean of its group, divided by the group's standard deviation; `groups` [B] are ids.

    It is 0 in a group of one and in a group of equal scores, which do not show which reply is better.
    """
    advantages = torch.zeros_like(scores)
    for group in groups.unique():
        mine = groups == group
        if scores[mine].max() > scores[mine].min():
            centred = scores[mine] - scores[mine].mean()
            advantages[mine] = centred / (centred.square().mean().sqrt() + 1e-6)
    return advantages


def policy_loss(ratio: Tensor, advantages: Tensor, clip: float = 0.2) -> Tensor:
    """Per token [B, A]: raise replies better than their group, lower the others, until the ratio has moved by `clip`.

    The minimum of the two gains removes the gradient beyond the bound, except where it corrects a move in the wrong
    direction.
    """
    gain = advantages[:, None]  # the same for every token of a reply
    return -torch.minimum(ratio * gain, ratio.clamp(1 - clip, 1 + clip) * gain)


def kl_loss(ratio: Tensor, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Per token [B, A]: an estimate of KL(policy || reference) that is never negative (k3).

    With the ratio its gradient is that of this KL. The paper leaves the ratio out; the gradient is then that of
    KL(reference || policy), which has a different optimum.
    """
    gap = ref_logprobs - logprobs
    return ratio * (gap.exp() - 1 - gap)


def mean_over_replies(x: Tensor, mask: Tensor) -> Tensor:
    """Average over replies the mean over the tokens of each: long and short replies have the same weight."""
    return ((x * mask).sum(1) / mask.sum(1)).mean()


# --- one step ---------------------------------------------------------------------------------------------------


def grpo_step(lm, reference, optimizer, replies, scores, groups, *, kl_coef, epochs=1, minibatches=1):
    """One GRPO step on replies that the current policy sampled; returns metrics that are worth watching."""
    tokens, attention, mask = replies
    num_actions, losses = mask.shape[1], []
    advantages = group_advantages(scores, groups)  # before the split, as a minibatch may have parts of groups
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
        "kl": ((old_logprobs - ref_logprobs) * mask).sum(1).mean(),  # nats per reply
        "entropy": (entropy * mask).sum() / mask.sum(),  # near 0 the policy no longer explores
        "silent": (advantages == 0)
        .to(scores)
        .mean(),  # share of replies without a gradient, as all scores of their group are equal
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
    """Load a model by folder or Hub name; without a name, make a tiny random GPT-2 whose tokens are letters."""
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32), AutoTokenizer.from_pretrained(name)
    tokenizer = Letters()
    shape = {"n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **shape)), tokenizer


def judge(text: str) -> float:
    """The reward may be any function of the text. Here it is the number of letters e."""
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
    lm.eval()  # no dropout at any time: with unchanged weights the ratio must be 1
    reference = copy.deepcopy(lm).requires_grad_(False)
    optimizer = torch.optim.Adam(lm.parameters(), lr=args.lr)
    openings, history = ["the", "i saw", "we went to", "a", "my friend", "it was"], []

    for step in range(args.steps):
        asked = [tokenizer.encode(random.choice(openings)) for _ in range(args.batch // args.samples)]
        prompts = [prompt for prompt in asked for _ in range(args.samples)]
        groups = torch.arange(len(asked)).repeat_interleave(args.samples)
        replies = sample(lm, prompts, args.tokens, tokenizer.eos_token_id)
        tokens, _, mask = replies
        actions = [row[-args.tokens :][: int(n)].tolist() for row, n in zip(tokens, mask.sum(1))]
        texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in actions]
        scores = torch.tensor([judge(text) for text in texts])
        stats = grpo_step(lm, reference, optimizer, replies, scores, groups, kl_coef=args.kl_coef)
        history.append({name: float(value) for name, value in stats.items()})
        print(f"{step:3d}", *(f"{name} {x:6.3f}" for name, x in history[-1].items()), repr(texts[0]), flush=True)
    return history


if __name__ == "__main__":
    main()
