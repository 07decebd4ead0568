r"""Decision: prompts state the return; replies are imitated behind the return that they reached.

[Chen et al. 2021](https://arxiv.org/abs/2106.01345), the decision transformer, with text in the place of an embedded
number. In play, each prompt asks for a return: `This play through has a return of 1.`, then the prompt. For training,
the wanted return is replaced by the one that was reached from that turn on, discounted by `condition.turn_gamma` a
turn, and the loss is the cross-entropy of the replies as in supervised training. There is no critic and no reference.

```
operant train --algorithm decision --env my_worlds.py:Maze --condition.evaluated 1
```

- **What play asks for**: `condition.wanted`, or by default the best quarter (`condition.top`) of the returns of the
  step before, in turn: a little more than the usual, and never more than was seen. The first step asks for nothing.
- From turn to turn, play asks for what is left: $w_{k+1} = (w_k - r_k) / \gamma_{turn}$. A world that appends text
  states the return once, in the prompt that opens the row; one with fresh prompts states it in each.
- `condition.template` says where the return stands, `condition.digits` to how many digits it is rounded: few numbers
  are seen often. `condition.evaluated` is what evaluation and probes ask for.
- An episode that was cut counts the rewards that it got.
- **Recorded episodes** need no method of their own. Rows with the return of each reply are supervised training, with
  the return in the template of the prompt, and the trained model is asked for a return in the same words:

```
operant train sft --tasks episodes.jsonl --data.text-field prompt --data.reply-field completion \
  --data.template "This play through has a return of {return}.\n{prompt}"
```

Like any imitation, it cannot ask for more than was seen: a return that no episode reached is a prompt like no other.
"""

from operant.algorithms.base import Algorithm
from operant.objectives import losses

ALGORITHM = Algorithm(
    losses.sft, title="Decision", options=("condition",), defaults={"update.epochs": 1, "kl.coef": 0.0}
)
