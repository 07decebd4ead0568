"""Calls of a task model a second of processor time, one prompt with one text each: `python -m benchmarks.prompt_calls`.

Compares `rewards.PromptReward`'s task model, with sentences that are read once and without, with RLPrompt's own loop
(`fsc_reward.py`), written plainly: one prompt at a time with all texts in one padded batch, the logits of every
position over the whole vocabulary, the last one picked. The causal model is `builtin:reviews-lm`, the masked one of the
same size with random weights. Prompts are random tokens, other ones in every round; the ways take turns, and the median
of the rounds counts. Prints a table, and with --write keeps it in `benchmarks/results/prompt-calls.json`.
"""

import argparse
import copy
import gzip
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertForMaskedLM

from operant.apps.prompts.baselines import Vocabulary
from operant.apps.prompts.task_models import task_model
from operant.apps.prompts.templates import PromptTemplate
from operant.machine import about

WORDS = ("terrible", "great")
CAUSAL, MASKED = PromptTemplate("{sentence}{prompt}"), PromptTemplate("{sentence}{prompt} {mask} .")


def rlprompt(model: Any, template: PromptTemplate, prompts: list[str], texts: list[str]) -> torch.Tensor:
    """[P, E, C] as RLPrompt computes it: prompt by prompt, with the logits of all positions."""
    tokenizer, columns, found = model.tokenizer, model.word_ids(WORDS), []
    for prompt in prompts:
        filled = [template.render(prompt, text, model.mask) for text in texts]
        batch = tokenizer(filled, padding="longest", truncation=True, return_tensors="pt")
        with torch.no_grad():
            logits = model.model(**batch.to(model.model.device)).logits
        if model.kind == "masked":
            place = (batch["input_ids"] == tokenizer.mask_token_id).int().argmax(1)
        else:
            place = batch["attention_mask"].sum(1) - 1
        found.append(logits[torch.arange(len(texts)), place].log_softmax(-1)[:, columns].double().cpu())
    return torch.stack(found)


def sentences(folder: str | None, count: int) -> list[str]:
    """Sentences of SST-2 from its folder, or as many invented ones."""
    if folder is None:
        chance = random.Random(0)
        words = "a film that was great and the story is boring but moving account of love with no plot".split()
        return [" ".join(chance.choices(words, k=chance.randint(4, 30))) for _ in range(count)]
    with gzip.open(Path(folder) / "sst2_train.jsonl.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line)["text"] for line in file][:count]


def masked_like(model: Any) -> Any:
    """A masked model with random weights, as large as a causal one, with its tokens and one for the mask."""
    tokenizer = copy.deepcopy(model.tokenizer)
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    config = model.model.config
    shape = {"hidden_size": config.n_embd, "num_hidden_layers": config.n_layer, "num_attention_heads": config.n_head}
    size = {"vocab_size": len(tokenizer), "intermediate_size": 4 * config.n_embd}
    torch.manual_seed(0)
    return task_model((BertForMaskedLM(BertConfig(**shape, **size)).to(model.model.device), tokenizer))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder of SST-2; without it, invented sentences")
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true")
    own = parser.parse_args()
    texts = sentences(own.data, own.texts)
    ways_to_share = [(False, 0.5), (True, 0.5), (True, 0.0)]
    made: list[Any] = [task_model("builtin:reviews-lm", share=share, cache_gb=gb) for share, gb in ways_to_share]
    plain, shared, forgetful = made
    masked = masked_like(plain)
    vocabulary = Vocabulary(plain.tokenizer)
    ways: dict[str, Callable[[list[str]], torch.Tensor]] = {
        "causal, RLPrompt's loop": lambda prompts: rlprompt(plain, CAUSAL, prompts, texts),
        "causal, whole texts": lambda prompts: plain.word_logprobs(CAUSAL, prompts, texts, WORDS),
        "causal, sentences read once a call": lambda prompts: forgetful.word_logprobs(CAUSAL, prompts, texts, WORDS),
        "causal, sentences kept over calls": lambda prompts: shared.word_logprobs(CAUSAL, prompts, texts, WORDS),
        "masked, RLPrompt's loop": lambda prompts: rlprompt(masked, MASKED, prompts, texts),
        "masked, batched": lambda prompts: masked.word_logprobs(MASKED, prompts, texts, WORDS),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    far = 0.0
    for turn in range(own.rounds + 1):  # the first one warms up
        prompts = [vocabulary.write(ids) for ids in vocabulary.draw(own.prompts, 5, 0, turn)]
        found = {}
        for name, way in ways.items():
            start = time.process_time()
            found[name] = way(prompts)
            seconds[name].append(time.process_time() - start)
        for name, numbers in found.items():
            far = max(far, float((numbers - found[f"{name.split(',')[0]}, RLPrompt's loop"]).abs().max()))
    calls = own.prompts * len(texts)
    rates = {name: calls / statistics.median(found[1:]) for name, found in seconds.items()}
    rows = []
    for name, rate in rates.items():
        theirs = rates[f"{name.split(',')[0]}, RLPrompt's loop"]
        rows.append({"way": name, "calls a second": round(rate), "over RLPrompt's loop": round(rate / theirs, 2)})
    result = {
        "command": "python -m benchmarks.prompt_calls",
        "machine": about(),
        "prompts": own.prompts,
        "texts": len(texts),
        "rounds": own.rounds,
        "threads": torch.get_num_threads(),
        "device": str(plain.model.device),
        "largest difference of a log-prob": far,
        "rows": rows,
    }
    print(json.dumps(result, indent=1))
    if own.write:
        place = Path(__file__).parent / "results/prompt-calls.json"
        place.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
