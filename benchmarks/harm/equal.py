"""Whether two finished run folders are bit-identical.

    differences(whole, other)             one sentence per difference; empty if they are equal

Everything in a run folder is compared: metrics, distributions, rollouts, probes, checkpoints with weights, optimizer
and counters, the exported model, and the list of files. Times and machine information are not compared, nor the log,
which records that a run was resumed.
"""

from pathlib import Path
from typing import Any

from operant.storage import atomic_io

TIMES = ("time/", "tokens/", "memory/")
"""Prefixes of metrics that differ between any two runs."""
NOT_COMPARED = {"log.txt", "report.html", "environment.json", "manifest.json", "lock"}


def differences(whole: Path, other: Path) -> list[str]:
    """The differences between two finished run folders, one sentence each; empty if they are equal."""
    ours, theirs = _names(whole), _names(other)
    found = [f"{name} is missing" for name in sorted(ours - theirs)]
    found += [f"{name} is left over" for name in sorted(theirs - ours)]
    for name in sorted(ours & theirs):
        found += _compare(name, whole, other)
    return found


def _names(folder: Path) -> set[str]:
    found = (path for path in folder.rglob("*") if path.is_file() and path.name not in NOT_COMPARED)
    return {str(path.relative_to(folder)) for path in found}


def _compare(name: str, whole: Path, other: Path) -> list[str]:
    ours, theirs = whole / name, other / name
    match ours.suffix:
        case ".jsonl":
            return _lines(name, _untimed(ours), _untimed(theirs))
        case ".json" | ".yaml":
            same = _placeless(ours, whole) == _placeless(theirs, other)
        case ".safetensors":
            return [f"{name}: {tensor} differs" for tensor in _tensors(ours, theirs)]
        case _:
            same = ours.read_bytes() == theirs.read_bytes()
    return [] if same else [f"{name} differs"]


def _lines(name: str, ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> list[str]:
    if [line["step"] for line in ours] != [line["step"] for line in theirs]:
        return [f"{name} has the steps {[line['step'] for line in theirs]}"]
    found = []
    for a, b in zip(ours, theirs):
        odd = [key for key in sorted(a.keys() | b.keys()) if repr(a.get(key)) != repr(b.get(key))]
        if odd:
            found.append(f"{name}, step {a['step']}: {', '.join(odd[:4])} of {len(odd)} differ")
    return found


def _untimed(path: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if not k.startswith(TIMES)} for line in atomic_io.records(path)]


def _placeless(path: Path, folder: Path) -> str:
    return path.read_text(encoding="utf-8").replace(str(folder), "")


def _tensors(ours: Path, theirs: Path) -> list[str]:
    """Names of the tensors that differ."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    if ours.read_bytes() == theirs.read_bytes():
        return []
    try:
        a, b = load_file(ours), load_file(theirs)
    except SafetensorError as error:
        return [str(error)]
    return [n for n in sorted(a.keys() | b.keys()) if n not in a or n not in b or a[n].tobytes() != b[n].tobytes()]
