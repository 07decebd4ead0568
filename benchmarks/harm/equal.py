"""What two finished run folders do not share, bit for bit.

    differences(whole, other)             a sentence each; empty where they are equal

Everything that a run leaves is compared: metrics, distributions, rollouts, probes, checkpoints with weights, optimizer
and counters, the exported model, and that nothing else lies there. Only what tells times or machines is not, nor the
log, which says that a run was resumed.
"""

from pathlib import Path
from typing import Any

from operant.storage import atomic_io

TIMES = ("time/", "tokens/", "memory/")
"""Metrics that no two runs share."""
NOT_COMPARED = {"log.txt", "report.html", "environment.json", "manifest.json", "lock"}


def differences(whole: Path, other: Path) -> list[str]:
    """What is not the same in two finished run folders, a sentence each; empty where they are equal."""
    ours, theirs = _names(whole), _names(other)
    told = [f"{name} is missing" for name in sorted(ours - theirs)]
    told += [f"{name} is left over" for name in sorted(theirs - ours)]
    for name in sorted(ours & theirs):
        told += _compare(name, whole, other)
    return told


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
    told = []
    for a, b in zip(ours, theirs):
        odd = [key for key in sorted(a.keys() | b.keys()) if repr(a.get(key)) != repr(b.get(key))]
        if odd:
            told.append(f"{name}, step {a['step']}: {', '.join(odd[:4])} of {len(odd)} differ")
    return told


def _untimed(path: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if not k.startswith(TIMES)} for line in atomic_io.records(path)]


def _placeless(path: Path, folder: Path) -> str:
    return path.read_text(encoding="utf-8").replace(str(folder), "")


def _tensors(ours: Path, theirs: Path) -> list[str]:
    """Names of what differs, where the bytes of the files do."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    if ours.read_bytes() == theirs.read_bytes():
        return []
    try:
        a, b = load_file(ours), load_file(theirs)
    except SafetensorError as error:
        return [str(error)]
    return [n for n in sorted(a.keys() | b.keys()) if n not in a or n not in b or a[n].tobytes() != b[n].tobytes()]
