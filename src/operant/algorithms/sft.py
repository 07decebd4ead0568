r"""SFT: supervised training on demonstrations; no reward, no reference.

```
operant train sft --policy ./my-model --tasks replies.jsonl --evaluate held-out.jsonl
```

trains on replies that somebody else wrote. There is no reward and no reference; the run folder, the report, `--resume`,
packing and LoRA are those of every run. A row holds one of

| form | what is trained on |
|---|---|
| `{"prompt": "2 + 2 =", "completion": " 4"}`, texts, ids or messages | the completion, and the stop token behind it |
| `{"messages": [{"role": "user", ...}, {"role": "assistant", ...}, ...]}` | each assistant message with its end |
| `{"text": "Once upon a time"}`, or a line of a .txt | every token behind the first |
| any two fields, with `--text-field question --reply-field answer` | the second |

`--data.loss-on all` trains on prompts, too; `--data.max-length 512` cuts longer rows (without it a row that does not
fit the model is refused, by name, before the first step). A reply is encoded behind its prompt; a turn of a chat goes
on from the ids before it. From Python: `Task("1", "2 + 2 =", replies=(" 4",))`, and `learner.step(queries,
responses)`.

`supervised/loss` is the cross-entropy in nats a token, `supervised/bits_per_byte` the same over the bytes of the
text, comparable between tokenizers. Held-out rows are measured before and after, and every `--evaluate-every` steps;
a held-out loss that has turned is a finding. With a `--reward` the policy's own replies to held-out prompts are
judged besides. `sampling.*` is about the samples that are shown: the loss knows neither temperature nor minimum
length nor bans.
"""

from operant.algorithms.base import Algorithm
from operant.objectives import losses

DEFAULTS: dict[str, object] = {"update.epochs": 1, "kl.coef": 0.0}

ALGORITHM = Algorithm(losses.sft, source="data", defaults=DEFAULTS)

PRESETS: dict[str, dict[str, object]] = {}
