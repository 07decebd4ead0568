"""Adds `keywords.pyi` to every wheel, sdist and editable installation, where a build has neither torch nor numpy."""

import runpy
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KeywordsHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        sys.path[:0] = [str(root / "src")]
        from operant.tools.cli.without_torch import without_torch

        page = root / "docs/keywords.py"
        without_torch(runpy.run_path)(str(page), run_name="__main__")
        build_data["artifacts"].append("/src/operant/keywords.pyi")
