"""PPO for a language model in one file: the complete method, and nothing else.

    python recipes/minimal_ppo.py                    # a tiny random model of letters learns to say "e"; under a minute
    python recipes/minimal_ppo.py --model gpt2 --lr 1.41e-5 --batch 128   # any causal LM of transformers

Read it from `main` upwards. One step of PPO (https://arxiv.org/abs/1707.06347, for language models
https://arxiv.org/abs/1909.08593) is

    replies are sampled -> scored -> charged for leaving the reference -> compared with the critic's prediction
    -> the policy is moved towards tokens that went better than predicted, but never far in one step

Shapes: B replies, P prompt tokens (padded on the left), A reply tokens ("actions", padded on the right), V vocabulary.
Every [B, A] tensor belongs to the reply token at the same position: `values[b, a]` is the critic's prediction *before*
that token. `mask[b, a]` is 1 where the policy chose the token; it comes from lengths, never from comparing ids
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
    """A language model and a critic, which is one linear layer that starts at zero and so predicts 0 at first."""

    def __init__(self, lm: nn.Module):
        super().__init__()
        self.lm = lm
        self.value = nn.Linear(lm.config.hidden_size, 1)
        nn.init.zeros_(self.value.weight)
        nn.init.zeros_(self.value.bias)
        self.eval()  # no dropout at any time: with unchanged weights the ratio must be 1

    def forward(self, tokens: Tensor, attention: Tensor, num_actions: int) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs of the reply's tokens, and the critic's values and the entropy before them, each [B, A]."""
        positions = (attention.cumsum(1) - 1).clamp(min=0)  # left padding must not move the positions
        out = self.lm(tokens, attention_mask=attention, position_ids=positions, output_hidden_states=True)
        before = slice(-num_actions - 1, -1)  # the state before a token predicts it: the only shift by one
        distribution = out.logits[:, before].log_softmax(-1)
        logprobs = distribution.gather(-1, tokens[:, -num_actions:, None]).squeeze(-1)
        values = self.value(out.hidden_states[-1][:, before]).squeeze(-1)
        return logprobs, values, -(distribution.exp() * distribution).sum(-1)


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


def token_rewards(scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """Each token is charged `kl_coef * (log policy - log reference)`; the score [B] is added to the last token.

    Summed over a reply the charge estimates KL(policy || reference), so the return is score - kl_coef * KL.
    """
    rewards = -kl_coef * (logprobs - ref_logprobs) * mask
    last = mask.sum(1).long() - 1
    rewards[torch.arange(len(scores)), last] += scores
    return rewards


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float = 1.0, lam: float = 0.95) -> tuple[Tensor, Tensor]:
    """Advantages and returns [B, A] (generalised advantage estimation, https://arxiv.org/abs/1506.02438).

    `delta` is by how much a token improved on the prediction; the advantage sums the deltas from there on, weighted
    by powers of `lam`. After the last token the value is 0 because of the mask, and rewards are 0 already.
    """
    values = values * mask
    advantages, ahead, next_value = torch.zeros_like(rewards), torch.zeros(len(rewards)), torch.zeros(len(rewards))
    for a in reversed(range(rewards.shape[1])):
        delta = rewards[:, a] + gamma * next_value - values[:, a]
        ahead = delta + gamma * lam * ahead
        advantages[:, a], next_value = ahead, values[:, a]
    return advantages, advantages + values


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """Scale to mean 0 and biased variance 1 over the masked tokens, so that advantages have one size in every step."""
    mean = masked_mean(x, mask)
    variance = masked_mean((x - mean) ** 2, mask)
    return (x - mean) * torch.rsqrt(variance + 1e-8) * mask


def policy_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip: float = 0.2) -> Tensor:
    """Per token [B, A]: raise good tokens and lower bad ones, until the ratio has moved by `clip`.

    The minimum of the two gains removes the gradient beyond the bound, except where it corrects a move in the wrong
    direction.
    """
    ratio = torch.exp(logprobs - old_logprobs)
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float = 0.2) -> Tensor:
    """Per token [B, A]: half the larger squared error, of the value or of the value clipped near the old one."""
    near = old_values + (values - old_values).clamp(-clip, clip)
    return 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2)


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    return (x * mask).sum() / mask.sum()


# --- one step ---------------------------------------------------------------------------------------------------


def ppo_step(policy, reference, optimizer, replies, scores, *, kl_coef, epochs=4, minibatches=2, value_coef=0.1):
    """One PPO step on replies that the current policy sampled; returns metrics that are worth watching."""
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
        "kl": ((old_logprobs - ref_logprobs) * mask).sum(1).mean(),  # nats per reply; stays between 0 and about 10
        "entropy": masked_mean(entropy, mask),  # near 0 the policy no longer explores
        "explained": 1 - error / (spread - masked_mean(returns, mask) ** 2 + 1e-8),  # by the critic; rises towards 1
        "length": mask.sum(1).mean(),
        "loss": torch.stack(losses).mean(),
    }


def adapt(kl_coef: float, kl: float, num_replies: int, target: float = 6.0, horizon: float = 10_000.0) -> float:
    """Raise the coefficient if KL is above its target, else lower it; the relative error counts as at most 20 %."""
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
        actions = [row[-args.tokens :][: int(n)].tolist() for row, n in zip(tokens, mask.sum(1))]
        texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in actions]
        scores = torch.tensor([judge(text) for text in texts])
        stats = ppo_step(policy, reference, optimizer, replies, scores, kl_coef=kl_coef)
        stats = {name: float(value) for name, value in stats.items()}
        kl_coef = adapt(kl_coef, stats["kl"], args.batch)
        history.append(stats)
        print(f"{step:3d}", *(f"{name} {value:6.3f}" for name, value in stats.items()), repr(texts[0]), flush=True)
    return history


if __name__ == "__main__":
    main()
