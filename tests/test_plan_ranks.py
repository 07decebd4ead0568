"""The memory of one of several ranks, planned from a config alone and held to sums."""

import json
from dataclasses import replace

import pytest
from cases import cases
from plans import SMALL, four_layers

from operant.runs.config import configure
from operant.tools.cli import main
from operant.tools.memory_plan import FULL, measure
from operant.tools.memory_plan.ranks import CONTEXT, KINDS, Gpu, least, on_ranks

BLOCK = 4 * ((64 + 32 * 96 + 96 + 32 * 32 + 32) + (64 + 32 * 128 + 128 + 128 * 32 + 32))
"""Bytes of a block of GPT-2, 32 wide, in float32: attention and MLP, each with its norm."""
ROOMY = Gpu("roomy", 1e12, 1e12, 1e12)


@pytest.fixture(scope="module")
def config_file(tmp_path_factory):
    """A config.json of four layers under a name of its own, and nothing else."""
    path = tmp_path_factory.mktemp("shape") / "four.json"
    path.write_text(json.dumps(four_layers().config.to_dict()), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def planned(config_file):
    config = configure({"policy": str(config_file), **SMALL})
    return config, measure(config, ranks=4, gpu=True)


def test_a_rank_has_everything_or_its_share(planned):
    """Adam in float32: two moments. DDP keeps a bucket for each gradient; FSDP gathers two blocks and the rest."""
    config, measured = planned
    whole = 4.0 * sum(p.numel() for p in four_layers().parameters())
    head = 4.0 * 32 + 4.0  # the value head
    one, ddp, fsdp = (on_ranks(config, measured, n, kind, ROOMY) for n, kind in ((1, "ddp"), (4, "ddp"), (4, "fsdp")))
    assert "buckets of gradients" not in one.permanent
    parts = {"weights": whole + head, "reference": whole, "optimizer": 2 * (whole + head)}
    for name, size in parts.items():
        assert ddp.permanent[name] == one.permanent[name] == pytest.approx(size, rel=0.01), name
        assert fsdp.permanent[name] == pytest.approx(size / 4, rel=0.01), name
    assert ddp.permanent["buckets of gradients"] == pytest.approx(whole + head, rel=0.01)
    rest = whole + head - 4 * BLOCK
    gathered = {name: parts.get("gathered weights", 0.0) for name, parts in fsdp.phases.items()}
    right = {"generation": whole + head, "scoring": 2 * whole + head, "update": rest + 2 * BLOCK}
    assert gathered == pytest.approx(right, rel=0.01)
    assert not any("gathered weights" in phase for phase in ddp.phases.values())
    assert {plan.permanent["CUDA and NCCL"] for plan in (ddp, fsdp)} == {CONTEXT}


def test_what_is_offloaded_leaves_the_gpu_for_the_host(planned):
    config, measured = planned
    fsdp, both = (on_ranks(config, measured, 4, kind, ROOMY) for kind in ("fsdp", "+ both"))
    away = {name: size for name, size in fsdp.permanent.items() if name not in both.permanent}
    assert away.keys() == {"weights", "reference", "optimizer"}
    assert both.host - fsdp.host == pytest.approx(sum(away.values()))
    assert fsdp.peak - both.peak == pytest.approx(sum(away.values()))


def test_each_rank_has_its_part_of_the_replies(config_file):
    config = configure({"policy": str(config_file), **SMALL, "batch": 64, "minibatch": 16})
    one, four = measure(config, gpu=True), measure(config, ranks=4, gpu=True)
    assert (one.shape.batch, one.shape.rows) == (64, 16) and (four.shape.batch, four.shape.rows) == (16, 4)
    assert one.phases["generation"]["cache"] == pytest.approx(4 * four.phases["generation"]["cache"])
    scaled = on_ranks(config, four, 1, "ddp", ROOMY)  # measured for four ranks, used for one
    assert scaled.phases["update"]["activations"] >= one.phases["update"]["activations"]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "ddp"])
def test_the_fewest_gpus_are_those_that_it_fits_on(planned, kind):
    """A GPU whose memory lies between what 2 and 4 ranks take; DDP, which takes the same on each, fits on none."""
    config, measured = planned
    two, four = (on_ranks(config, measured, n, kind, ROOMY).peak for n in (2, 4))
    assert four < two
    gpu = replace(ROOMY, memory=(two + four) / 2 / FULL)
    assert least(config, measured, kind, gpu) == 4
    if kind == "fsdp":
        assert least(config, measured, "ddp", gpu) is None
    assert least(config, measured, kind, ROOMY) == 1  # one process divides nothing, and trains as with DDP


def test_the_command_plans_from_a_config_alone(config_file, capsys):
    command = ["doctor", "--plan", "--gpus", "4", "--gpu", "l4", "--policy", str(config_file)]
    words = ["--prompt-tokens", "20", "--max-tokens", "6", "--tasks", "a.txt", "--form", "summarize"]
    assert main([*command, *words]) == 0
    printed = capsys.readouterr().out
    assert "4 x L4 24 GB; prompts of up to 20 tokens, replies of 6; 16 replies a rank and step" in printed
    assert [line.split()[-5:] for line in printed.splitlines() if "fits in 90%" in line] == [["yes"] * 5]
    for words, why in (
        (["--gpu", "b9000"], "gpu='b9000' is none that the plan knows"),
        (["--gpus", "2"], "Add --gpu NAME, one of: "),
        (["--gpu", "l4", "--gpus", "65"], "gpus=65 with 64 prompts a step"),
        (["--gpu", "l4", "--gpus", "many"], "gpus='many'"),
        (["--gpu", "l4", "--parallel", "fsdp", "--offload", "nvme"], "learner.offload='nvme': it must be none, "),
        (["--gpu", "l4", "--offload", "both"], "learner.offload=both with learner.parallel=ddp"),
        (["--gpu", "l4", "--prompt-tokens", "4000"], "does not fit into the model's context of"),
        (["--gpu", "l4", "--prompt-tokens", "8", "--algorithm", "sft"], "plan it with its rows, --tasks FILE"),
    ):
        assert main([*command[:2], *words, *command[6:]]) == 2 and why in capsys.readouterr().err


@cases({"model_type": "gpt2", "n_embd": 33, "n_head": 2}, {"model_type": "bert", "num_hidden_layers": 1})
def test_a_config_that_makes_no_language_model_gets_a_sentence(config, tmp_path, capsys):
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    assert main(["doctor", "--plan", "--gpus", "2", "--gpu", "l4", "--policy", str(path)]) == 2
    assert "are the sizes in its config.json right" in " ".join(capsys.readouterr().err.split())
