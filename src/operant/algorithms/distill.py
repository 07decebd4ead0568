r"""Distill: learning from language feedback; a teacher that reads a hint corrects the policy's own replies.

The policy plays. Its teacher reads the same replies behind prompts with a hint, which the policy does not see: the
right answer, the outcome, the world's next answer. The loss is the divergence of the policy from the teacher before
each token of the reply $y$, over the whole vocabulary unless `loss.likeliest` is set,

$$\text{loss} = \frac{1}{|y|}\sum_t
  \mathrm{KL}\big(\pi(\cdot \mid x, y_{<t}) \,\|\, \pi_T(\cdot \mid x, h, y_{<t})\big),$$

and there is no reward. A prior system planned to learn from language feedback and never defined how; this is our
reading of it: distillation on the student's own replies
([Agarwal et al. 2024](https://arxiv.org/abs/2306.13649)) of a model that has more in its context
([Snell et al. 2022](https://arxiv.org/abs/2209.15189)).

```
operant train --algorithm distill --tasks questions.jsonl --teacher.hint target
operant train --algorithm distill --env my_worlds.py:Maze --teacher.hint feedback --teacher.rate 0.05
operant train --algorithm distill --tasks questions.jsonl --teacher.hint my_hints.py:hint --reference ./larger-model
```

- **The teacher** is the copy `reference`: the first policy (`--reference copy`), or another model with the same
  vocabulary. With `teacher.rate`, a copy follows the policy by that share of the distance after each step; at 1 it is
  the policy itself, as it was before the step. The teacher has no gradient.
- **The hint** is a function from a rollout to a text: `target` is the task's target, or the `answer` in it; `feedback`
  is `info["feedback"]` of the rollout, or the message of its judgement (the world `feedback`); `answer` is what the
  world answered to each reply. A function of your own (`my_hints.py:hint`) may also return a list with one text for
  each turn. An empty hint tells the teacher nothing.
- **A right reply as the hint**: `sibling` is the best other reply to the same prompt, if it scores at least
  `teacher.right` (1); without one, it is the feedback. With a teacher that follows the policy, this is SDPO
  ([2026](https://arxiv.org/abs/2601.20802)): `--preset sdpo --reward ...`, with the Jensen-Shannon divergence of the
  100 likeliest tokens and the rest, as the authors' code has it in most experiments (reverse and 20 in others). The
  world's feedback and the right reply are alternatives here; there the teacher may read both. TRL's `SDPOTrainer` has
  the same teacher, and by default its log-prob of the drawn token alone (`distillation_mode="full_logits"` is the
  divergence here, `"topk_logits"` that of the likeliest tokens), weights of at most 2 for replies of earlier weights,
  and no loss for a reply without a hint.
- **Where the hint stands** is `teacher.template`, `{hint}\n{prompt}` by default. The prompt keeps its token ids. In a
  chat, the template is applied to the last message. It stands in the prompt that opens a row; later turns of the same
  row go on from there. One hint for each turn needs a world with fresh prompts.
- **The gradient** is that of the divergence in the states that the policy visited. That a reply leads to other states
  is no part of it. `loss.divergence=forward` is KL(teacher || policy), and `jensen_shannon` lies between the two.
- **The likeliest tokens alone**: with `loss.likeliest`, so many tokens that the policy finds likeliest are compared one
  by one, and all others together as one more outcome. That divergence is never larger than the one over the whole
  vocabulary. A teacher in the same process costs no transfer, so it saves nothing here: it is for the numbers of SDPO,
  whose authors' code compares so. Of choices all options are compared.
- A hint helps only a teacher that can use it. If the teacher ignores its hint, the divergence is about 0 from the
  beginning (`distill/divergence`), and nothing is learnt. With `--reward`, the replies are scored as well, and the
  scores are shown and not trained on. `kl/per_reply` is measured to the teacher without the hint.
"""

from torch import Tensor

from operant.algorithms.base import Algorithm, Needs
from operant.objectives.kl import EXACT, exact_kl
from operant.types import Batch, Outputs, require


def distillation(
    out: Outputs, batch: Batch, *, divergence: str = "reverse", likeliest: int | None = None
) -> dict[str, Tensor]:
    """The divergence of the policy from its teacher before each action [B, T].

    `divergence`: reverse, KL(policy || teacher); forward, KL(teacher || policy); or jensen_shannon, the mean of both
    to the mixture of the two in equal parts (arXiv:2306.13649, equations 1 and 4).
    `likeliest`: of so many likeliest tokens of the policy, and all others as one outcome; None: the whole vocabulary.
    """
    require(likeliest is None or likeliest >= 1, f"loss.likeliest={likeliest}: it must be at least 1 token, or none")
    require(divergence in EXACT, f"loss.divergence={divergence!r}: it must be {', '.join(EXACT[:-1])} or {EXACT[-1]}")
    found = exact_kl(out, divergence)
    return {"loss": found, "distill/divergence": found.detach()}


ALGORITHM = Algorithm(
    distillation,
    copies={"reference": "frozen"},
    options=("teacher",),
    needs=Needs(reward=False),
    defaults={"update.epochs": 1, "kl.coef": 0.0},
    title="Distill",
)
