"""Positive film reviews by PPO, as scripts of 2023 were written for TRL: generate, score with a pipeline, step.

python sentiment_2023.py --model_name LM --reward_model sentiment-analysis:CLASSIFIER --query_dataset OPENINGS.txt
"""

import json
import sys
import warnings

import torch
from transformers import AutoModelForSequenceClassification, HfArgumentParser, PreTrainedTokenizerFast, pipeline
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, create_reference_model, set_seed

warnings.simplefilter("ignore")
(config,) = HfArgumentParser(PPOConfig).parse_args_into_dataclasses()
set_seed(config.seed)

tokenizer = PreTrainedTokenizerFast(tokenizer_file=f"{config.model_name}/tokenizer.json", eos_token="<|endoftext|>")
tokenizer.pad_token = tokenizer.eos_token


class Openings(torch.utils.data.Dataset):
    def __init__(self, path):
        with open(path, encoding="utf-8") as file:
            texts = [line.strip() for line in file if line.strip()]
        self.rows = [
            {"query": text, "input_ids": tokenizer(text, return_tensors="pt")["input_ids"][0]} for text in texts
        ]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def collator(data):
    return {key: [row[key] for row in data] for key in data[0]}


task, judge = config.reward_model.split(":")
sentiment_pipe = pipeline(
    task,
    model=AutoModelForSequenceClassification.from_pretrained(judge).float(),
    tokenizer=PreTrainedTokenizerFast.from_pretrained(judge),
    device="cpu",
)
head = {"v_head_init_strategy": "normal", "v_head_initializer_range": 0.0}
model = AutoModelForCausalLMWithValueHead.from_pretrained(config.model_name, **head)
ref_model = create_reference_model(model)
ppo_trainer = PPOTrainer(
    config, model, ref_model, tokenizer, dataset=Openings(config.query_dataset), data_collator=collator
)

sent_kwargs = {"top_k": None, "function_to_apply": "none", "batch_size": 32}
generation_kwargs = {
    "min_length": -1,
    "top_k": 0.0,
    "top_p": 1.0,
    "do_sample": True,
    "pad_token_id": tokenizer.eos_token_id,
    "max_new_tokens": 20,
}

done = 0
while done < config.total_ppo_epochs:
    for batch in ppo_trainer.dataloader:
        query_tensors = batch["input_ids"]
        response_tensors = ppo_trainer.generate(
            query_tensors, return_prompt=False, batch_size=config.batch_size, **generation_kwargs
        )
        batch["response"] = tokenizer.batch_decode(response_tensors)
        texts = [query + response for query, response in zip(batch["query"], batch["response"])]
        outputs = sentiment_pipe(texts, **sent_kwargs)
        positive = [item["score"] for output in outputs for item in output if item["label"] == "positive"]
        rewards = [torch.tensor(score) for score in positive]
        stats = ppo_trainer.step(query_tensors, response_tensors, rewards)
        ppo_trainer.log_stats(stats, batch, rewards)
        shown = {
            "reward": float(stats["ppo/mean_scores"]),
            "kl": float(stats["objective/kl"]),
            "kl_coef": float(stats["objective/kl_coef"]),
            "value_loss": float(stats["ppo/loss/value"]),
            "tokens": float(stats["tokens/responses_len_mean"]),
        }
        print(json.dumps(shown), flush=True)
        done += 1
        if done == config.total_ppo_epochs:
            sys.exit()
