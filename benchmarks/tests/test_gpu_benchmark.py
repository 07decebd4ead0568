"""Every code path of the GPU benchmark runs, here with tiny models and without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.gpu import parts
from cases import cases, slow

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_part_of_the_gpu_benchmark_runs(tmp_path):
    out = tmp_path / "gpu.json"
    command, env = [ROOT / "benchmarks/gpu.sh", "--tiny", "--out", str(out)], os.environ | {"PYTHON": sys.executable}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    results = json.loads(out.read_text(encoding="utf-8"))
    parts = {name: part for name, part in results.items() if isinstance(part, dict)}
    errors = {f"{name}/{key}": part[key] for name, part in parts.items() for key in part if key.endswith("error")}
    assert not errors and done.returncode == 0, (errors, done.stdout[-2000:], done.stderr[-2000:])
    assert len(parts) == 12


@cases(
    ("raise RuntimeError('no kernel')", "RuntimeError: no kernel (odd.py:3)"),
    slow("import time; time.sleep(60)", "stopped after 20 s"),
)
def test_the_error_of_a_part_is_reported_with_its_results(ending, message, tmp_path, monkeypatch):
    (tmp_path / "odd.py").write_text(f"def main(place, report):\n    report(found=1)\n    {ending}\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(parts, "PRELOADED", [])
    monkeypatch.setitem(parts.PARTS, "odd", parts.Part("odd", 9))
    results = parts.run("odd", True, 20.0)
    assert results["found"] == 1 and results["error"] == message
