"""TRL 0.11.4's classic loop, generate + step: one step per line of standard input.

Run by the Python of TRL's environment.
"""

import json
import os
import sys
import time
import warnings

warnings.simplefilter("ignore")
OUT = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)  # the output of libraries goes to standard error

import torch  # noqa: E402
from tokenizers import Tokenizer, models  # noqa: E402
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast  # noqa: E402
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer  # noqa: E402


def answer(**fields: object) -> None:
    OUT.write(json.dumps(fields) + "\n")
    OUT.flush()


def words(vocabulary: int) -> PreTrainedTokenizerFast:
    """A tokenizer with one word per id; end and padding are behind the vocabulary, so that no reply ends early."""
    known = {f"t{i}": i for i in range(vocabulary + 2)}
    end, pad = f"t{vocabulary}", f"t{vocabulary + 1}"
    core = Tokenizer(models.WordLevel(known, unk_token="t1"))
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=end, pad_token=pad, padding_side="left")


def main() -> None:
    spec = json.loads(sys.stdin.readline())
    torch.manual_seed(0)
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": None}
    base = GPT2LMHeadModel(GPT2Config(**spec["shape"], **quiet))
    cuda, low = spec["device"] == "cuda", spec["precision"] == "bfloat16"
    config = PPOConfig(
        exp_name="bench",
        batch_size=len(spec["prompts"]),
        mini_batch_size=spec["minibatch"],
        gradient_accumulation_steps=1,
        ppo_epochs=spec["epochs"],
        accelerator_kwargs=({} if cuda else {"cpu": True}) | ({"mixed_precision": "bf16"} if low else {}),
    )
    model = AutoModelForCausalLMWithValueHead.from_pretrained(base)
    tokenizer = words(spec["shape"]["vocab_size"])
    trainer = PPOTrainer(config, model, ref_model=None, tokenizer=tokenizer)
    prompts = [torch.tensor(ids, device=spec["device"]) for ids in spec["prompts"]]
    generation = {"max_new_tokens": spec["tokens"], "min_new_tokens": spec["tokens"], "do_sample": True, "top_k": 0}
    generation |= {"pad_token_id": tokenizer.pad_token_id, "batch_size": len(prompts), "return_prompt": False}
    answer(trl_trained=sum(p.numel() for p in trainer.model.parameters() if p.requires_grad))
    while sys.stdin.readline():
        start = time.perf_counter()
        with torch.no_grad(), torch.autocast(spec["device"], torch.bfloat16, enabled=low):
            replies = trainer.generate(prompts, **generation)
        trainer.step(prompts, replies, [(r % 2 == 0).float().mean().cpu() for r in replies])
        if cuda:
            torch.cuda.synchronize()
        counts = {
            "tokens": sum(len(r) for r in replies),
            "gb": torch.cuda.max_memory_allocated() / 1e9 if cuda else 0.0,
        }
        answer(seconds=time.perf_counter() - start, **counts)


if __name__ == "__main__":
    main()
