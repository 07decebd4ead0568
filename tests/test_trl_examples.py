"""Programs that call what the published examples of TRL 0.11.4 call, in their order, on tiny models of this machine.

sentiment script (`ppo.py`): two dataclasses parsed, a reference that answers too, columns of `log_stats`, score
    options, the accelerator's device and DeepSpeed plugin.
sentiment notebook (`gpt2-sentiment.ipynb`): a single query to `generate`, `squeeze`, `generate` of the models
    themselves, `save_pretrained`.
controlled sentiment (`gpt2-sentiment-control.ipynb`): the default collator, `respond_to_batch`,
    `build_bert_batch_from_txt`, steps of fixed length.
multi-adapter (`ppo_multi_adapter.py`): `peft_config`, `reward_adapter`, `compute_reward_score`.
best of n (`best_of_n.ipynb`, and the page of the docs): copies of a query, `BestOfNSampler`.

`hello_world.py` and a whole sentiment run are in `test_compat_trl.py`.
"""

import sys
from unittest.mock import patch

import pytest
import torch
import transformers

pytest.importorskip("accelerate")
from trl_compat.models import tiny, tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")
COMMON = """
import numpy as np
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, HfArgumentParser, pipeline
from operant.compat.trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
from operant.compat.trl import create_reference_model, set_seed
from operant.compat.trl.core import LengthSampler
from operant.compat.trl.import_utils import is_npu_available, is_xpu_available

tokenizer = AutoTokenizer.from_pretrained(LM)
tokenizer.pad_token = tokenizer.eos_token
input_size = LengthSampler(2, 6)
texts = ["this is a test", "this is another, longer test", "hello world goodbye world", "This morning I went to the "]


class Rows(torch.utils.data.Dataset):
    def __init__(self, fixed=False):
        self.ids = [tokenizer.encode(text)[: 2 if fixed else input_size()] for text in texts * 2]
        self.fixed = fixed

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        row = {"query": tokenizer.decode(self.ids[i])}
        return row | ({"tokens": self.ids[i]} if self.fixed else {"input_ids": torch.tensor(self.ids[i])})


def collator(data):
    return dict((key, [d[key] for d in data]) for key in data[0])


sent_kwargs = {"top_k": None, "function_to_apply": "none", "batch_size": 16}
gen_kwargs = {"min_length": -1, "top_k": 0.0, "top_p": 1.0, "do_sample": True, "pad_token_id": tokenizer.eos_token_id}
"""
SCRIPTS = {
    "sentiment script": """
from dataclasses import dataclass, field
from typing import Optional
@dataclass
class ScriptArguments:
    use_seq2seq: bool = field(default=False)
    trust_remote_code: bool = field(default=False)
    use_peft: bool = field(default=False)
    lora_r: Optional[int] = field(default=16)
words = f"--model_name {LM} --reward_model sentiment-analysis:{JUDGE} --batch_size 4 --mini_batch_size 2 --log_with"
parser = HfArgumentParser((ScriptArguments, PPOConfig))
args, ppo_config = parser.parse_args_into_dataclasses([*words.split()[:-1], "--use_score_scaling", "True"])
set_seed(ppo_config.seed)
loaded = dict(trust_remote_code=args.trust_remote_code)
ref_model = AutoModelForCausalLMWithValueHead.from_pretrained(ppo_config.model_name, **loaded)
model = AutoModelForCausalLMWithValueHead.from_pretrained(
    ppo_config.model_name, device_map=None, peft_config=None, **loaded
)
tokenizer.pad_token_id = tokenizer.eos_token_id
ppo_trainer = PPOTrainer(ppo_config, model, ref_model, tokenizer, dataset=Rows(), data_collator=collator)
device = ppo_trainer.accelerator.device
if ppo_trainer.accelerator.num_processes == 1:
    device = "xpu:0" if is_xpu_available() else "npu:0" if is_npu_available() else "cpu"
ds_plugin = ppo_trainer.accelerator.state.deepspeed_plugin
assert ds_plugin is None
task, model_name = ppo_config.reward_model.split(":")
sentiment_pipe = pipeline(task, model=model_name, device=device)
for _epoch, batch in enumerate(ppo_trainer.dataloader):
    query_tensors = batch["input_ids"]
    response_tensors, ref_response_tensors = ppo_trainer.generate(
        query_tensors, return_prompt=False, generate_ref_response=True, max_new_tokens=5, **gen_kwargs
    )
    batch["response"] = tokenizer.batch_decode(response_tensors)
    batch["ref_response"] = tokenizer.batch_decode(ref_response_tensors)
    outputs = sentiment_pipe([q + r for q, r in zip(batch["query"], batch["response"])], **sent_kwargs)
    rewards = [torch.tensor(output[1]["score"]) for output in outputs]
    outputs = sentiment_pipe([q + r for q, r in zip(batch["query"], batch["ref_response"])], **sent_kwargs)
    batch["ref_rewards"] = [torch.tensor(output[1]["score"]) for output in outputs]
    stats = ppo_trainer.step(query_tensors, response_tensors, rewards)
    ppo_trainer.log_stats(stats, batch, rewards, columns_to_log=["query", "response", "ref_response", "ref_rewards"])
""",
    "sentiment notebook": """
config = PPOConfig(model_name=LM, learning_rate=1.41e-5, batch_size=4, mini_batch_size=4)
model = AutoModelForCausalLMWithValueHead.from_pretrained(config.model_name)
ref_model = AutoModelForCausalLMWithValueHead.from_pretrained(config.model_name)
ppo_trainer = PPOTrainer(config, model, ref_model, tokenizer, dataset=Rows(), data_collator=collator)
sentiment_pipe = pipeline("sentiment-analysis", model=JUDGE, device="cpu")
output_length_sampler = LengthSampler(4, 8)
for epoch, batch in enumerate(ppo_trainer.dataloader):
    response_tensors = []
    for query in batch["input_ids"]:
        gen_kwargs["max_new_tokens"] = output_length_sampler()
        query_response = ppo_trainer.generate(query, **gen_kwargs).squeeze()
        response_tensors.append(query_response[len(query) - len(query_response) :])
        assert query_response[: len(query)].tolist() == query.tolist()
    batch["response"] = [tokenizer.decode(r.squeeze()) for r in response_tensors]
    pipe_outputs = sentiment_pipe([q + r for q, r in zip(batch["query"], batch["response"])], **sent_kwargs)
    scores = [item["score"] for output in pipe_outputs for item in output if item["label"] == "LABEL_1"]
    rewards = [torch.tensor(score) for score in scores]
    stats = ppo_trainer.step(batch["input_ids"], response_tensors, rewards)
    ppo_trainer.log_stats(stats, batch, rewards)
query = batch["input_ids"][0]
kwargs = gen_kwargs | {"max_new_tokens": 3}
for one in (ref_model, model):
    query_response = one.generate(query.unsqueeze(dim=0), **kwargs).squeeze()
    tokenizer.decode(query_response[len(query) :])
model.save_pretrained(OUT)
tokenizer.save_pretrained(OUT)
""",
    "controlled sentiment": """
from random import choices
from operant.compat.trl.core import build_bert_batch_from_txt, respond_to_batch
config = PPOConfig(model_name=LM, steps=8, learning_rate=1.41e-5, remove_unused_columns=False, batch_size=4,
                   forward_batch_size=2)
np.random.seed(1)
judge = AutoModelForSequenceClassification.from_pretrained(JUDGE)
judge_tokenizer = AutoTokenizer.from_pretrained(JUDGE)
model = AutoModelForCausalLMWithValueHead.from_pretrained(config.model_name)
model_ref = create_reference_model(model)
ctrl_str = ["[negative]", "[positive]"]
ctrl_tokens = {s: torch.tensor(tokenizer.encode(s)[:3]) for s in ctrl_str}
ppo_trainer = PPOTrainer(config, model, model_ref, tokenizer, Rows(fixed=True))
fbs = config.forward_batch_size
for epoch in range(int(np.ceil(config.steps / config.batch_size))):
    batch = next(iter(ppo_trainer.dataloader))
    task_list = choices(ctrl_str, k=config.batch_size)
    task_tensors = torch.stack([ctrl_tokens[t] for t in task_list])
    query_tensors = torch.cat((task_tensors, torch.stack(batch["tokens"], axis=1)), axis=1)
    parts = [respond_to_batch(model, query_tensors[i : i + fbs], txt_len=4) for i in range(0, config.batch_size, fbs)]
    response_tensors = torch.cat(parts)
    assert response_tensors.shape == (4, 4)
    answers = [tokenizer.decode(response_tensors[i, :]) for i in range(config.batch_size)]
    inputs, masks = build_bert_batch_from_txt([q + r for q, r in zip(batch["query"], answers)], judge_tokenizer, "cpu")
    logits = judge.forward(inputs, masks)[0][:, 1].detach()
    rewards = torch.where(torch.tensor([t == ctrl_str[0] for t in task_list]), -logits, logits)
    stats = ppo_trainer.step([q for q in query_tensors], [r for r in response_tensors], [r for r in rewards])
""",
    "multi-adapter": """
from accelerate import PartialState
from peft import LoraConfig
config = PPOConfig(model_name=LM, learning_rate=1e-5, batch_size=8, mini_batch_size=2, gradient_accumulation_steps=2,
                   optimize_cuda_cache=True, seed=0, use_score_scaling=True, use_score_norm=True, score_clip=1.0)
lora_config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.05, bias="none", task_type="CAUSAL_LM")
model = AutoModelForCausalLMWithValueHead.from_pretrained(
    LM, device_map={"": "cpu"}, peft_config=lora_config, reward_adapter=ADAPTER, use_safetensors=True
)
with PartialState().local_main_process_first():
    dataset = Rows()
ppo_trainer = PPOTrainer(config, model, ref_model=None, tokenizer=tokenizer, dataset=dataset, data_collator=collator)
kwargs = {"top_k": 0.0, "top_p": 0.9, "do_sample": True, "pad_token_id": tokenizer.pad_token_id, "max_new_tokens": 4}
for _epoch, batch in enumerate(ppo_trainer.dataloader):
    response_tensors = ppo_trainer.generate(batch["input_ids"], return_prompt=False, **kwargs)
    batch["response"] = tokenizer.batch_decode(response_tensors, skip_special_tokens=True)
    joined = [q + r for q, r in zip(batch["query"], batch["response"])]
    inputs = tokenizer(joined, padding=True, truncation=True, return_tensors="pt").to(ppo_trainer.accelerator.device)
    raw_rewards = ppo_trainer.accelerator.unwrap_model(ppo_trainer.model).compute_reward_score(**inputs)
    assert raw_rewards.shape == (8, inputs["input_ids"].shape[1], 2)
    rewards = [raw_rewards[i, -1, 1] for i in range(len(raw_rewards))]
    stats = ppo_trainer.step(batch["input_ids"], response_tensors, rewards)
    ppo_trainer.log_stats(stats, batch, rewards)
""",
    "best of n": """
from operant.compat.trl.extras import BestOfNSampler
ref_model = AutoModelForCausalLMWithValueHead.from_pretrained(LM)
reward_pipe = pipeline("sentiment-analysis", model=JUDGE, device="cpu")
query_tensors = [row["input_ids"].tolist() for row in Rows()]
best = []
for ids in query_tensors[:2]:
    queries = torch.tensor(ids).repeat((4, 1))
    output = ref_model.generate(queries.to("cpu"), max_new_tokens=4, **gen_kwargs).squeeze()
    answers = tokenizer.batch_decode(output)
    scores = torch.tensor([output[0]["score"] for output in reward_pipe(answers, **sent_kwargs)])
    best.append(answers[scores.argmax().item()])
def queries_to_scores(list_of_strings):
    return [output["score"] for output in reward_pipe(list_of_strings)]
sampler = BestOfNSampler(ref_model, tokenizer, queries_to_scores, length_sampler=LengthSampler(4, 6), sample_size=3)
stats = {"objective/kl": 0.0}
assert [len(found) for found in sampler.generate(query_tensors[:2], device="cpu", **gen_kwargs)] == [1, 1]
""",
}


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, str]:
    """A tiny GPT-2, a tiny classifier and, if peft is there, an adapter of a reward model on the GPT-2."""
    root, found = tmp_path_factory.mktemp("models"), {}
    words = tokenizer(padding=False)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    classifier = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=1024, **sizes))
    made = {"LM": tiny("GPT2LMHeadModel"), "JUDGE": classifier}
    for name, model in made.items():
        found[name] = str(root / name)
        model.save_pretrained(found[name])
        words.pad_token = words.eos_token if name == "JUDGE" else None
        words.save_pretrained(found[name])
    try:
        import peft
    except ImportError:
        return found
    config = transformers.AutoConfig.from_pretrained(found["LM"], num_labels=2)
    scored = transformers.AutoModelForSequenceClassification.from_pretrained(found["LM"], config=config)
    found["ADAPTER"] = str(root / "adapter")
    peft.get_peft_model(scored, peft.LoraConfig(task_type="SEQ_CLS", r=2)).save_pretrained(found["ADAPTER"])
    return found


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_runs_with_its_import_changed(name, places, tmp_path):
    if "peft" in SCRIPTS[name] and "ADAPTER" in SCRIPTS[name]:
        pytest.importorskip("peft")
    space = places | {"OUT": str(tmp_path / "out"), "__name__": "example"}
    with patch.dict(sys.modules):
        # A dataclass looks its module up by name.
        sys.modules["example"] = type(sys)("example")
        exec(COMMON + SCRIPTS[name], space)
    assert torch.isfinite(torch.as_tensor(space["stats"]["objective/kl"]))
    if (tmp_path / "out").exists():
        assert "v_head.summary.weight" in space["model"].state_dict()
