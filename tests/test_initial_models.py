"""The models that a run began from: kept once, had again on resume, and named where they were changed."""

import json
import shutil

import pytest
import torch
from cases import cases
from disks import FULL, Watched, quiet
from toys import lm, on_disk
from transformers import AutoModelForCausalLM

from operant import OperantError, ValueOptions, export, load_policy, train
from operant.models import lora
from operant.models.adapters import LoraOptions, base_of
from operant.models.options import ModelOptions
from operant.models.reference import fingerprint
from operant.runs.config import configure
from operant.runs.named_models import copy_initial_models, pin_names, with_copies
from operant.storage import atomic_io, manifest

TASKS = [[1, 2, 3], [4, 5], [6], [8, 9]]
SMALL = {"steps": 2, "batch": 4, "minibatch": 4, "epochs": 1, "max_tokens": 4, "fixed_length": True, "probes": 0}


def e(rollouts):
    return [float(r.ids.count(7)) for r in rollouts]


def config_of(**given):
    return configure({"tasks": "t.jsonl", "reward": "letters:e"} | given)


@pytest.fixture
def model(tmp_path):
    """A model's folder with its tokenizer, beside things that loading does not read."""
    folder = tmp_path / "model"
    on_disk(folder, lm("gpt2", 40))
    (folder / "optimizer.pt").write_bytes(b"large")
    (folder / "runs").mkdir()
    return folder


@pytest.fixture
def run(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def names(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


# --- what is kept -----------------------------------------------------------------------------------------------------
def test_a_plain_folder_is_kept_with_its_tokenizer_alone(model, run):
    config = config_of(policy=str(model))
    copy_initial_models(config, run)
    kept = names(run / "start")
    assert {f"policy/{name}" for name in ("model.safetensors", "tokenizer.json", "config.json")} <= {*kept}
    assert not any("optimizer" in name or "runs" in name for name in kept)
    before = fingerprint(load_policy(str(model)))
    with open(model / "model.safetensors", "r+b") as file:
        file.write(b"\0" * 64)  # in place, as transformers writes: a link would have changed along
    assert fingerprint(load_policy(str(run / "start" / "policy"))) == before
    shutil.rmtree(model)
    again = with_copies(config, run, quiet)
    assert again.train.policy == str(run / "start" / "policy") and again.train.tasks == config.train.tasks
    policy = load_policy(again.train.policy)
    assert fingerprint(policy) == before and policy.tokenizer is not None


def test_each_model_by_name_is_kept_in_its_place(model, run, tmp_path):
    other = shutil.copytree(model, tmp_path / "run of other" / "export").parent  # a run: what it exported is kept
    (other / "config.yaml").touch()
    config = config_of(policy=str(model), reference=str(other), **{"value.critic": str(other)})
    copy_initial_models(config, run)
    weights = {name for name in names(run / "start") if name.endswith("model.safetensors")}
    assert weights == {f"{place}/model.safetensors" for place in ("policy", "reference", "critic")}
    again, start = with_copies(config, run, quiet), run / "start"
    assert (again.train.reference, again.learner["value"].critic) == (str(start / "reference"), str(start / "critic"))


def test_names_of_the_hub_are_pinned_and_nothing_is_kept(cache, run, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    cache("a/model", "1111", config__json="{}", model__safetensors="")
    cache("a/critic", "2222", config__json="{}", model__safetensors="")
    built = config_of(policy="builtin:reviews-lm", reference="copy", **{"value.critic": "copy"})
    assert pin_names(built) == built
    named = pin_names(config_of(policy="a/model", reference="a/model", **{"value.critic": "a/critic"}))
    assert named.train.policy == named.train.reference == "a/model@1111"
    assert named.learner["value"].critic == "a/critic@2222"
    for config in (built, named):
        copy_initial_models(config, run)
        heard = []
        assert names(run) == [] and with_copies(config, run, heard.append) == config and heard == []


def test_a_critic_beside_the_model_is_kept(tmp_path, run):
    export(load_policy(lm("gpt2", 40), value=ValueOptions(init="normal")), tmp_path / "out")
    copy_initial_models(config_of(policy=str(tmp_path / "out")), run)
    assert "policy/critic/head.safetensors" in names(run / "start")
    before = load_policy(str(tmp_path / "out"), value=ValueOptions()).value_head.net[0].weight
    after = load_policy(str(run / "start/policy"), value=ValueOptions()).value_head.net[0].weight
    assert torch.equal(before, after) and float(before.detach().norm()) > 0


# --- adapters ---------------------------------------------------------------------------------------------------------
def an_adapter(base, folder):
    pytest.importorskip("peft")
    policy = load_policy(str(base), lora=LoraOptions(rank=2))
    with torch.no_grad():
        for name, p in policy.model.named_parameters():
            if ".lora_B" in name:
                p.fill_(0.1)
    lora.save(policy.model, folder)
    return fingerprint(policy)


def test_the_model_of_an_adapter_is_kept_with_it(model, run, tmp_path):
    before = an_adapter(model, tmp_path / "adapter")
    theirs = load_policy(AutoModelForCausalLM.from_pretrained(tmp_path / "adapter"))  # which transformers has put on
    assert fingerprint(theirs) == before and theirs.trainable()
    assert load_policy(export(theirs, tmp_path / "merged")).trainable()
    critic = str(shutil.copytree(model, tmp_path / "critic"))  # of that name beside the adapter, and not saved with it
    config = config_of(policy=str(tmp_path / "adapter"), **{"value.critic": critic})
    copy_initial_models(config, run)
    assert {"policy/base/model.safetensors", "policy/adapter_model.safetensors"} <= set(names(run / "start"))
    shutil.rmtree(model)
    shutil.rmtree(tmp_path / "adapter")
    kept = with_copies(config, run, quiet)
    assert fingerprint(load_policy(kept.train.policy, value=kept.learner["value"])) == before
    with pytest.raises(OperantError, match="an adapter is trained alone"):
        load_policy(kept.train.policy, options=ModelOptions(train_head=True))


def test_an_adapter_for_the_policy_is_kept_alone(model, run, tmp_path):
    an_adapter(model, tmp_path / "adapter")
    config = config_of(policy=str(model), **{"lora.adapter": str(tmp_path / "adapter")})
    copy_initial_models(config, run)
    assert "adapter/adapter_model.safetensors" in names(run / "start")
    assert not any(name.startswith("adapter/base") for name in names(run / "start"))
    assert with_copies(config, run, quiet).learner["lora"].adapter == str(run / "start/adapter")


def test_an_adapter_names_the_commit_of_a_model_of_the_hub(cache, model, run, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    shutil.copytree(model, cache("a/base", "1111"), dirs_exist_ok=True)
    pytest.importorskip("peft")
    lora.save(load_policy("a/base@1111", lora=LoraOptions(rank=2)).model, tmp_path / "pinned")
    told = json.loads((tmp_path / "pinned/adapter_config.json").read_text())
    assert (told["base_model_name_or_path"], told["revision"]) == ("a/base", "1111")
    assert base_of(tmp_path / "pinned") == "a/base@1111"

    lora.save(load_policy("a/base", lora=LoraOptions(rank=2)).model, tmp_path / "open")
    assert base_of(tmp_path / "open") == "a/base"
    copy_initial_models(config_of(policy=str(tmp_path / "open")), run)
    assert base_of(run / "start/policy") == "a/base@1111"
    assert manifest.problem(run / "start") is None


# --- what is said -----------------------------------------------------------------------------------------------------
def change(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@cases(
    (lambda start: change(start / "policy/model.safetensors"), "policy/model.safetensors was changed since"),
    (lambda start: (start / "policy/config.json").unlink(), "config.json is missing"),
    (lambda start: shutil.rmtree(start / "policy"), "is missing"),
    (lambda start: (start / "manifest.json").unlink(), "manifest.json is missing"),
    (lambda start: (start / "manifest.json").write_text("{}"), "manifest.json cannot be read"),
)
def test_a_kept_model_that_was_changed_is_named(damage, said, model, run):
    config = config_of(policy=str(model))
    copy_initial_models(config, run)
    damage(run / "start")
    with pytest.raises(OperantError, match=rf"start, the copy of the initial model, is damaged: .*{said}.*restore it"):
        with_copies(config, run, quiet)


def test_without_a_copy_the_folder_is_used_with_a_warning(model, run, tmp_path):
    config, heard = config_of(policy=str(model)), []
    assert with_copies(config, run, heard.append) == config
    assert len(heard) == 1 and f"{model} is loaded as it is now" in heard[0]
    copy_initial_models(config, run)
    other = config_of(policy=str(tmp_path / "other"))  # another model that is given on resume
    assert with_copies(other, run, quiet) == other


@pytest.mark.parametrize("stays", [False, True])
def test_a_full_disk_or_a_kill_leaves_all_of_it_or_nothing(model, run, monkeypatch, stays):
    config, seam = config_of(policy=str(model)), Watched()
    monkeypatch.setattr(atomic_io, "seam", seam)
    copy_initial_models(config, run)
    operations = len(seam.seen)
    shutil.rmtree(run / "start")
    for at in range(operations):
        monkeypatch.setattr(atomic_io, "seam", Watched(at, FULL, stays=stays))
        with pytest.raises(OperantError, match=r"cannot copy the model that the run starts from to .*no space left"):
            copy_initial_models(config, run)
        monkeypatch.undo()
        assert not (run / "start").exists() or manifest.problem(run / "start") is None
        copy_initial_models(config, run)
        assert manifest.problem(run / "start") is None and names(run) == [f"start/{n}" for n in names(run / "start")]
        shutil.rmtree(run / "start")


# --- a whole run ------------------------------------------------------------------------------------------------------
def test_a_run_resumes_without_the_folder_that_it_began_from(model, tmp_path):
    other = shutil.copytree(model, tmp_path / "other")
    given = SMALL | {"reference": str(other), "model": {"train_layers": 1}}
    copied = str(shutil.copytree(model, tmp_path / "same"))
    whole = train(copied, TASKS, e, out=tmp_path / "whole", **given | {"steps": 3})
    run = train(str(model), TASKS, e, out=tmp_path / "run", **given)
    assert {p.name for p in (run.path / "start").iterdir()} == {"policy", "reference", "manifest.json"}
    shutil.rmtree(model)
    lm("gpt2", 40, seed=9).save_pretrained(other)
    again = train(tasks=TASKS, reward=e, out=run.path, resume=True, steps=3)
    for (name, a), (_, b) in zip(whole.policy.named_parameters(), again.policy.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    change(run.path / "start/policy/model.safetensors")
    with pytest.raises(OperantError, match=r"policy/model\.safetensors was changed"):
        train(tasks=TASKS, reward=e, out=run.path, resume=True, steps=5)
