"""RLPrompt's policy: a frozen LM with a trained MLP between its states and its head."""

import torch
from torch import nn
from toys import PIECES, letters, lm
from transformers.modeling_outputs import CausalLMOutputWithPast

from operant import Learner, Policy
from operant.engines.native.capabilities import try_decoding


class Adapted(nn.Module):
    """hidden state -> state + MLP(state) -> the LM's own head (arXiv:2205.12548, section 2.2)."""

    def __init__(self, base, width=64):
        super().__init__()
        self.base, self.config = base.requires_grad_(False), base.config
        size = base.config.hidden_size
        self.mlp = nn.Sequential(nn.Linear(size, width), nn.ReLU(), nn.Linear(width, size))
        nn.init.zeros_(self.mlp[2].weight)
        nn.init.zeros_(self.mlp[2].bias)

    def get_output_embeddings(self):
        return self.base.get_output_embeddings()

    def forward(self, **kwargs):
        out = self.base.base_model(**kwargs)
        states = out.last_hidden_state
        logits = self.base.lm_head(states + self.mlp(states))
        return CausalLMOutputWithPast(logits=logits, past_key_values=out.past_key_values)


def test_only_the_mlp_learns_and_the_reward_rises():
    base = lm("gpt2", len(PIECES), spread=0.1)
    weights = {name: w.clone() for name, w in base.state_dict().items()}
    adapted = Adapted(base)
    options = {"optimizer.lr": 1e-2, "max_tokens": 5, "fixed_length": True, "kl.coef": 0.0, "score.scale": True}
    learner = Learner(adapted, tokenizer=letters(), **options)
    assert try_decoding(learner.policy).cached and try_decoding(learner.policy).left
    before = [w.clone() for w in adapted.mlp.parameters()]
    means = []
    for step in range(8):
        replies = learner.generate(["a"] * 32)
        scores = [float(reply.reply.count("e")) for reply in replies]
        means.append(sum(scores) / len(scores))
        assert learner.step(replies, scores)["rollout/logprob_gap"] < 1e-4
        if step == 0:
            assert all(not torch.equal(a, b) for a, b in zip(before, adapted.mlp.parameters(), strict=True))
    assert all(torch.equal(w, weights[name]) for name, w in base.state_dict().items())
    parts = (adapted.mlp, learner.policy.value_head)
    assert {id(p) for p in learner.policy.trainable()} == {id(p) for part in parts for p in part.parameters()}
    assert means[-1] > means[0] + 0.5
    # The reference is the frozen LM as it was, and a fresh Policy of the same weights is a fresh start.
    assert Policy(Adapted(lm("gpt2", len(PIECES), spread=0.1))).vocabulary == len(PIECES)
