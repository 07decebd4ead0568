"""The files of recipes/cluster: shell that parses, YAML whose parts fit together, commands that operant understands."""

import re
import shlex
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from operant.runs.config import configure
from operant.tools.cli.arguments import parse
from operant.tools.cli.commands import COMMANDS
from operant.training.options import LearnerOptions

ROOT = Path(__file__).parents[1]
FILES = ROOT / "recipes/cluster"
SHELL = ["one-node.sh", "nodes.sh", "ray-job.sh", "slurm.sbatch"]
MANIFESTS = ["kubernetes-job.yaml", "ray-job.yaml"]


def words_of(name: str) -> list[str]:
    """The words of the command that a file starts; of a shell file with the values that its variables have alone."""
    text = (FILES / name).read_text(encoding="utf-8")
    if name in MANIFESTS:
        *_, manifest = yaml.safe_load_all(text)
        spec = manifest["spec"]
        return shlex.split(spec["entrypoint"]) if "entrypoint" in spec else pods(name)[0]["containers"][0]["command"]
    (command,) = re.findall(r"^(?:exec|srun) .*?(?:\n(?=\n)|\Z)", text.replace("\\\n", " "), re.S | re.M)
    return shlex.split(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", command).replace('"$@"', ""))


def pods(name: str) -> list[dict]:
    *_, manifest = yaml.safe_load_all((FILES / name).read_text(encoding="utf-8"))
    cluster = manifest["spec"].get("rayClusterSpec")
    groups = [manifest["spec"]] if cluster is None else [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]


@pytest.mark.parametrize("name", [*SHELL, *MANIFESTS])
def test_the_command_of_each_file_is_understood(name):
    words = words_of(name)
    operant = words.index("train") - 1
    assert words[operant] == "operant"
    if name != "ray-job.yaml" and "job submit" not in " ".join(words):
        assert words[operant - 1] == "-m" and "torchrun" in words
    flags = [name for name, about in COMMANDS["train"].options.items() if about.get("action") == "store_true"]
    recipe, options = parse(words[operant + 2 :], flags=flags, several=[])
    assert options.pop("resume_if_there") and options.pop("out")
    later = {"parallel"} - {field.name for field in fields(LearnerOptions)}
    if "engine" in options and not (ROOT / "src/operant/engines/ray.py").exists():
        later |= {name for name in options if name == "rollouts_ahead" or name.startswith("engine")}
    configure({name: value for name, value in options.items() if name not in later}, recipe[0])


@pytest.mark.parametrize("name", SHELL)
def test_shell_parses(name):
    text = (FILES / name).read_text(encoding="utf-8")
    subprocess.run(["bash" if "bash" in text.splitlines()[0] else "sh", "-n", str(FILES / name)], check=True)
    assert "set -eu" in text


def test_sbatch_reads_every_directive():
    """It reads none behind the first command."""
    lines = (FILES / "slurm.sbatch").read_text(encoding="utf-8").splitlines()
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert not any("#SBATCH" in line for line in lines[first:])
    given = dict(re.fullmatch(r"#SBATCH --([\w-]+)=?(.*)", line).groups() for line in lines if "#SBATCH" in line)
    assert given["ntasks-per-node"] == "1" and "requeue" in given and re.fullmatch(r"TERM@\d+", given["signal"])


def test_what_torchrun_is_told_it_knows():
    from torch.distributed.run import get_args_parser

    for name in ("one-node.sh", "nodes.sh", "slurm.sbatch", "kubernetes-job.yaml"):
        words = words_of(name)
        given = words[words.index("torchrun") + 1 :]
        args = get_args_parser().parse_args([word.replace("$SLURM_JOB_NUM_NODES", "2") for word in given])
        assert args.training_script == "operant" and args.module and args.max_restarts == 3
        assert args.standalone or args.rdzv_id != "none"  # a restart on another machine is known by it


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_parts_of_a_manifest_fit_together(name):
    documents = list(yaml.safe_load_all((FILES / name).read_text(encoding="utf-8")))
    assert all({"apiVersion", "kind", "metadata", "spec"} == set(document) for document in documents)
    spec = documents[-1]["spec"]
    if name == "ray-job.yaml":
        cluster = spec["rayClusterSpec"]
        groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
        assert all(isinstance(value, str) for group in groups for value in group["rayStartParams"].values())
        assert all(group["minReplicas"] <= group["replicas"] <= group["maxReplicas"] for group in groups[1:])
        actors = int(re.search(r"--engine.actors (\d+)", spec["entrypoint"])[1])
        assert actors == sum(group["replicas"] for group in groups[1:])
    else:
        service, job = documents
        assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"]
        assert service["spec"]["selector"]["job-name"] == job["metadata"]["name"]
        assert f"--nnodes={spec['completions']}" in words_of(name)
    for pod in pods(name):
        (container,) = pod["containers"]
        assert container["image"] == "operant:0.1.0"
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_the_container_file_copies_what_there_is_and_pins_versions():
    lines = (FILES / "Containerfile").read_text(encoding="utf-8").splitlines()
    steps = [line.split() for line in lines if line and not line.startswith("#")]
    assert all((ROOT / file).exists() for step in steps if step[0] == "COPY" for file in step[1:-1])
    (install,) = [step for step in steps if step[0] == "RUN"]
    assert install[install.index("--constraint") + 1] == "constraints.txt"
