r"""SFT: supervised training on demonstrations; no reward, no reference.

```
operant train sft --policy ./my-model --tasks replies.jsonl --evaluate held-out.jsonl
```

This trains on replies from a data set. There is no reward and no reference. The run folder, the report, `--resume`,
packing and LoRA are the same as in every run. A row has one of these forms:

| form | trained tokens |
|---|---|
| `{"prompt": "2 + 2 =", "completion": " 4"}`, texts, ids or messages | the completion and the stop token after it |
| `{"messages": [{"role": "user", ...}, {"role": "assistant", ...}, ...]}` | each assistant message and its end token |
| `{"text": "Once upon a time"}`, or a line of a .txt | every token after the first |
| any two fields, with `--text-field question --reply-field answer` | the second field |

`--data.loss-on all` also trains on prompts. `--data.max-length 512` cuts longer rows; without it, a row that does not
fit the model is refused before the first step, and the error names the row. A reply is tokenised after its prompt, and
each turn of a chat continues the ids of the turns before it. From Python, use
`Task("1", "2 + 2 =", replies=(" 4",))`, or `learner.step(queries, responses)`.

`supervised/loss` is the cross-entropy in nats per token. `supervised/bits_per_byte` is the same in bits per byte of the
text, which is comparable between tokenizers. Held-out rows are measured before and after training, and every
`--evaluate-every` steps; the diagnosis reports a held-out loss that rises again. With a `--reward`, the policy's own
replies to held-out prompts are scored as well. The options `sampling.*` only affect the samples that are shown: the
loss uses no temperature, minimum length or bans.
"""

from operant.algorithms.base import Algorithm
from operant.objectives import losses

ALGORITHM = Algorithm(losses.sft, source="data", defaults={"update.epochs": 1, "kl.coef": 0.0})
