"""RLOO for a language model in one file: the complete method, and nothing else.

    python recipes/minimal_rloo.py                    # a tiny random model of letters learns to say "e"; under a minute
    python recipes/minimal_rloo.py --model gpt2 --lr 1e-5 --batch 128   # any causal LM of transformers

Read it from `main` upwards. One step of RLOO, "REINFORCE leave-one-out" (https://arxiv.org/abs/2402.14740), is

    several replies to every prompt are sampled -> scored -> charged for leaving the reference
    -> compared with the mean of the other replies to the same prompt -> the policy is moved towards the better ones

PPO learns a critic, which predicts the score of a prompt. Here the prediction is the mean of the other replies. They
are drawn independently of the reply itself, so the gradient is unbiased: that of the mean return. GRPO
(minimal_grpo.py) also compares within a group, and differs in three points:

    |                          | RLOO                                     | GRPO                                 |
    |--------------------------|------------------------------------------|--------------------------------------|
    | a reply is compared with | the mean of the others                   | the mean of its group, itself        |
    |                          |                                          | included, in units of its deviation  |
    | KL is charged            | in the return, before the comparison     | in the loss, for each token          |
    | a reply counts           | as the sum over its tokens: one decision | as the mean over its tokens          |

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


def returns_of(scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """[B] each score less `kl_coef` times the log-ratio of policy and reference for the whole reply.

    The mean of this log-ratio is KL(policy || reference), so the mean return is the same objective as PPO's.
    """
    return scores - kl_coef * ((logprobs - ref_logprobs) * mask).sum(1)


def leave_one_out(returns: Tensor, groups: Tensor) -> Tensor:
    """[B] each return less the mean of the others of its group; `groups` [B] are ids.

    It is 0 in a group of one, which has no others.
    """
    advantages = torch.zeros_like(returns)
    for group in groups.unique():
        mine = groups == group
        others = int(mine.sum()) - 1
        if others:
            advantages[mine] = returns[mine] - (returns[mine].sum() - returns[mine]) / others
    return advantages


def policy_loss(ratio: Tensor, advantages: Tensor, clip: float = 0.2) -> Tensor:
    """Per token [B, A]: raise replies better than the others, lower worse ones, until the ratio has moved by `clip`.

    In the first update after sampling the ratio is 1 and the gradient that of REINFORCE, -advantage * log-prob. The
    bound matters only if replies are used again (epochs and minibatches above 1).
    """
    gain = advantages[:, None]  # the same for every token of a reply
    return -torch.minimum(ratio * gain, ratio.clamp(1 - clip, 1 + clip) * gain)


def sum_over_tokens(x: Tensor, mask: Tensor) -> Tensor:
    """Average over replies the sum over the tokens of each, as the log-prob of a reply is the sum over its tokens."""
    return (x * mask).sum(1).mean()


# --- one step ---------------------------------------------------------------------------------------------------


def rloo_step(lm, reference, optimizer, replies, scores, groups, *, kl_coef, epochs=1, minibatches=1):
    """One RLOO step on replies that the current policy sampled; returns metrics that are worth watching."""
    tokens, attention, mask = replies
    num_actions, losses = mask.shape[1], []
    with torch.no_grad():
        old_logprobs, entropy = score_tokens(lm, tokens, attention, num_actions)
        ref_logprobs, _ = score_tokens(reference, tokens, attention, num_actions)
        returns = returns_of(scores, old_logprobs, ref_logprobs, mask, kl_coef)
        advantages = leave_one_out(returns, groups)  # before the split, as a minibatch may have parts of groups

    for _ in range(epochs):
        for rows in torch.randperm(len(tokens)).chunk(minibatches):
            logprobs, _ = score_tokens(lm, tokens[rows], attention[rows], num_actions)
            ratio = torch.exp(logprobs - old_logprobs[rows])
            loss = sum_over_tokens(policy_loss(ratio, advantages[rows]), mask[rows])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.detach())

    return {
        "reward": scores.mean(),
        "kl": ((old_logprobs - ref_logprobs) * mask).sum(1).mean(),  # nats per reply
        "entropy": (entropy * mask).sum() / mask.sum(),  # near 0 the policy no longer explores
        "return": returns.mean(),  # reward less the KL penalty: the objective
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
    for name, default in {"steps": 40, "batch": 64, "samples": 4, "tokens": 20, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--kl-coef", type=float, default=0.1)
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
        stats = rloo_step(lm, reference, optimizer, replies, scores, groups, kl_coef=args.kl_coef)
        history.append({name: float(value) for name, value in stats.items()})
        print(f"{step:3d}", *(f"{name} {x:6.3f}" for name, x in history[-1].items()), repr(texts[0]), flush=True)
    return history


if __name__ == "__main__":
    main()
