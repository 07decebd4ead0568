"""TRL 0.11.4 on the demo task: the same model folders, prompts, reward and hyper-parameters, in its own loop."""

import random
import time
import warnings
from itertools import pairwise

warnings.simplefilter("ignore")

import torch  # noqa: E402
from protocol import Pipe, Steps  # noqa: E402
from shapes import trained  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
)
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer  # noqa: E402


class Judge:
    """The classifier's probability of `positive`, in float32, over batches of similar length."""

    def __init__(self, folder: str, batch: int = 32):
        self.model = BertForSequenceClassification.from_pretrained(folder, torch_dtype=torch.float32).eval()
        self.words = PreTrainedTokenizerFast.from_pretrained(folder, truncation_side="left", padding_side="right")
        self.batch = batch

    @torch.inference_mode()
    def __call__(self, texts: list) -> torch.Tensor:
        rows = self.words(texts, truncation=True, max_length=512)["input_ids"]
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        scores = torch.zeros(len(rows))
        for start in range(0, len(rows), self.batch):
            part = order[start : start + self.batch]
            inputs = self.words.pad({"input_ids": [rows[i] for i in part]}, return_tensors="pt")
            logits = self.model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
            scores[part] = logits.softmax(-1)[:, 1]
        return scores


def make(spec: dict, words) -> PPOTrainer:
    torch.manual_seed(spec["seed"])
    config = PPOConfig(exp_name="bench", seed=spec["seed"], accelerator_kwargs={"cpu": True}, **spec["ppo"])
    base = AutoModelForCausalLM.from_pretrained(spec["policy"], torch_dtype=torch.float32)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(
        base, v_head_init_strategy="normal", v_head_initializer_range=0.0
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=config.learning_rate)
    falling = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / spec["steps"]))
    trainer = PPOTrainer(config, model, ref_model=None, tokenizer=words, optimizer=optimizer, lr_scheduler=falling)
    trainer.model_params = list(model.parameters())  # a list: the first clipping would exhaust the generator
    return trainer


def main() -> None:
    pipe = Pipe()
    spec = pipe.spec
    end = "<|endoftext|>"
    words = PreTrainedTokenizerFast(tokenizer_file=f"{spec['policy']}/tokenizer.json", eos_token=end, pad_token=end)
    trainer, judge = make(spec, words), Judge(spec["reward"])
    prompts = [torch.tensor(words(text)["input_ids"]) for text in spec["prompts"]]
    random.seed(spec["seed"])
    batch, order = trainer.config.batch_size, []
    generation = {"do_sample": True, "top_k": 0, "top_p": 1.0, "return_prompt": False, "batch_size": batch}
    generation |= {"pad_token_id": words.pad_token_id, "eos_token_id": words.eos_token_id, **spec["generate"]}
    steps = Steps(trainer.optimizer)
    pipe.next(trained=trained(trainer.model.parameters()), precision=str(next(trainer.model.parameters()).dtype))
    while True:
        if len(order) < batch:  # the next pass over the prompts
            order += random.sample(range(len(prompts)), len(prompts))
        chosen, order = [prompts[i] for i in order[:batch]], order[batch:]
        clock = [time.perf_counter()]
        replies = trainer.generate(chosen, **generation)
        clock.append(time.perf_counter())
        rows = [torch.cat([query, reply]) for query, reply in zip(chosen, replies)]
        scores = judge([words.decode(row, skip_special_tokens=True) for row in rows])
        clock.append(time.perf_counter())
        trainer.running.update(scores)  # what `use_score_norm` would do, which raises an error
        normal = (scores - trainer.running.mean) / (trainer.running.std + torch.finfo(torch.float32).eps)
        stats = trainer.step(chosen, replies, list(normal))
        clock.append(time.perf_counter())
        phases = dict(zip(("generate", "reward", "step"), (b - a for a, b in pairwise(clock))))
        answer = {"reward": scores.mean().item(), "kl": float(stats["objective/kl"]), "phases": phases}
        pipe.next(tokens=sum(len(r) for r in replies), optimizer_steps=steps.take(), **answer)


if __name__ == "__main__":
    main()
