"""PPO for a language model in one file: everything that happens, and nothing else.

    python recipes/minimal_ppo.py                    # a tiny random model of letters learns to say "e"; under a minute
    python recipes/minimal_ppo.py --model gpt2 --lr 1.41e-5 --batch 128   # any causal LM of transformers

Read it from `main` upwards. One step of PPO (https://arxiv.org/abs/1707.06347, for language models
https://arxiv.org/abs/1909.08593) is

    replies are sampled -> judged -> charged for leaving the reference -> compared with what the critic expected
    -> the policy is moved towards what went better than expected, but never far in one step

Shapes: B replies, P prompt tokens (padded on the left), A reply tokens ("actions", padded on the right), V vocabulary.
Every [B, A] tensor says something about the reply token at the same place: `values[b, a]` is what the critic expected
*before* that token. `mask[b, a]` is 1 where the policy chose the token; it comes from lengths, never from comparing ids
with a padding id, because that id may be the end token, which the policy did choose.
"""

import argparse
import copy
import random
import string

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel


class Policy(nn.Module):
    """A language model, and beside it a critic: one linear layer that starts at zero, so it has no opinion at first."""

    def __init__(self, lm: nn.Module):
        super().__init__()
        self.lm = lm
        self.value = nn.Linear(lm.config.hidden_size, 1)
        nn.init.zeros_(self.value.weight)
        nn.init.zeros_(self.value.bias)
        self.eval()  # no dropout, ever: the ratio must be 1 where the weights have not changed

    def forward(self, tokens: Tensor, attention: Tensor, num_actions: int) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs of the reply's tokens, the critic's values before them, and the entropy there, each [B, A]."""
        positions = (attention.cumsum(1) - 1).clamp(min=0)  # left padding must not move the positions
        out = self.lm(tokens, attention_mask=attention, position_ids=positions, output_hidden_states=True)
        before = slice(-num_actions - 1, -1)  # the state before a token is what predicts it: the one shift by one
        distribution = out.logits[:, before].log_softmax(-1)
        logprobs = distribution.gather(-1, tokens[:, -num_actions:, None]).squeeze(-1)
        values = self.value(out.hidden_states[-1][:, before]).squeeze(-1)
        return logprobs, values, -(distribution.exp() * distribution).sum(-1)


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


def token_rewards(scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """Each token is charged `kl_coef * (log policy - log reference)`; the score [B] lands on the reply's last token.

    Summed over a reply the charge estimates KL(policy || reference), so the return is score - kl_coef * KL.
    """
    rewards = -kl_coef * (logprobs - ref_logprobs) * mask
    last = mask.sum(1).long() - 1
    rewards[torch.arange(len(scores)), last] += scores
    return rewards


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float = 1.0, lam: float = 0.95) -> tuple[Tensor, Tensor]:
    """Advantages and returns [B, A] (generalised advantage estimation, https://arxiv.org/abs/1506.02438).

    `surprise` is how much better one token made things; the advantage sums the surprises that follow, fading by `lam`.
    Nothing follows the last token: the mask makes the value 0 there, and rewards are 0 there already.
    """
    values = values * mask
    advantages, ahead, next_value = torch.zeros_like(rewards), torch.zeros(len(rewards)), torch.zeros(len(rewards))
    for a in reversed(range(rewards.shape[1])):
        surprise = rewards[:, a] + gamma * next_value - values[:, a]
        ahead = surprise + gamma * lam * ahead
        advantages[:, a], next_value = ahead, values[:, a]
    return advantages, advantages + values


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """Mean 0 and biased variance 1 over the tokens that count: the learning rate then means the same every step."""
    mean = masked_mean(x, mask)
    variance = masked_mean((x - mean) ** 2, mask)
    return (x - mean) * torch.rsqrt(variance + 1e-8) * mask


def policy_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip: float = 0.2) -> Tensor:
    """Per token [B, A]: raise what went well, lower what went badly, until the ratio has moved by `clip`.

    The smaller of the two gains: beyond the bound there is nothing to win, and mistakes are still undone.
    """
    ratio = torch.exp(logprobs - old_logprobs)
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float = 0.2) -> Tensor:
    """Per token [B, A]: half the squared error, of the worse of the value and the value held near the old one."""
    near = old_values + (values - old_values).clamp(-clip, clip)
    return 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2)


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    return (x * mask).sum() / mask.sum()


# --- one step ---------------------------------------------------------------------------------------------------


def ppo_step(policy, reference, optimizer, replies, scores, *, kl_coef, epochs=4, minibatches=2, value_coef=0.1):
    """One PPO step on replies that the current policy sampled; returns what is worth watching."""
    tokens, attention, mask = replies
    num_actions, losses = mask.shape[1], []
    with torch.no_grad():
        old_logprobs, old_values, entropy = policy(tokens, attention, num_actions)
        ref_logprobs, _, _ = reference(tokens, attention, num_actions)
        rewards = token_rewards(scores, old_logprobs, ref_logprobs, mask, kl_coef)
        advantages, returns = gae(rewards, old_values, mask)
        advantages = whiten(advantages, mask)

    for _ in range(epochs):
        for rows in torch.randperm(len(tokens)).chunk(minibatches):
            logprobs, values, _ = policy(tokens[rows], attention[rows], num_actions)
            loss = policy_loss(logprobs, old_logprobs[rows], advantages[rows])
            loss = loss + value_coef * value_loss(values, old_values[rows], returns[rows])
            loss = masked_mean(loss, mask[rows])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.detach())

    error, spread = masked_mean((old_values - returns) ** 2, mask), masked_mean(returns**2, mask)
    return {
        "reward": scores.mean(),
        "kl": ((old_logprobs - ref_logprobs) * mask).sum(1).mean(),  # nats a reply; stays between 0 and about 10
        "entropy": masked_mean(entropy, mask),  # falling to 0 means that it has stopped trying things
        "explained": 1 - error / (spread - masked_mean(returns, mask) ** 2 + 1e-8),  # of the critic: towards 1
        "length": mask.sum(1).mean(),
        "loss": torch.stack(losses).mean(),
    }


def adapt(kl_coef: float, kl: float, num_replies: int, target: float = 6.0, horizon: float = 10_000.0) -> float:
    """Raise the price of KL where it is above its target, lower it below: at most 20 % of the error at a time."""
    error = min(max(kl / target - 1, -0.2), 0.2)
    return kl_coef * (1 + error * num_replies / horizon)


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
    for name, default in {"steps": 40, "batch": 64, "tokens": 20, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--kl-coef", type=float, default=0.2)
    args = parser.parse_args(argv)

    torch.manual_seed(args.seed)
    random.seed(args.seed)
    lm, tokenizer = load(args.model)
    policy = Policy(lm)
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = torch.optim.Adam(policy.parameters(), lr=args.lr)
    openings, kl_coef, history = ["the", "i saw", "we went to", "a", "my friend", "it was"], args.kl_coef, []

    for step in range(args.steps):
        prompts = [tokenizer.encode(random.choice(openings)) for _ in range(args.batch)]
        replies = sample(policy.lm, prompts, args.tokens, tokenizer.eos_token_id)
        tokens, _, mask = replies
        said = [row[-args.tokens :][: int(n)].tolist() for row, n in zip(tokens, mask.sum(1))]
        texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in said]
        scores = torch.tensor([judge(text) for text in texts])
        stats = ppo_step(policy, reference, optimizer, replies, scores, kl_coef=kl_coef)
        stats = {name: float(value) for name, value in stats.items()}
        kl_coef = adapt(kl_coef, stats["kl"], args.batch)
        history.append(stats)
        print(f"{step:3d}", *(f"{name} {value:6.3f}" for name, value in stats.items()), repr(texts[0]), flush=True)
    return history


if __name__ == "__main__":
    main()
