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
from texts import parts

pytest.importorskip("accelerate")
from trl_compat.models import tiny, tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")
SCRIPTS = parts("trl_compat/examples.txt")
COMMON = SCRIPTS.pop("all")


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, str]:
    """A tiny GPT-2, a tiny classifier and, if peft is there, an adapter of a reward model on the GPT-2."""
    root, found = tmp_path_factory.mktemp("models"), {}
    words = tokenizer(padding=False)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    classifier = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=1024, **sizes))
    for name, model in {"LM": tiny("GPT2LMHeadModel"), "JUDGE": classifier}.items():
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
