"""Stand-ins for the configurations of TRL 1.16, with its own defaults, where there is no TRL."""

import dataclasses
import json
from pathlib import Path
from typing import Any

KEPT = json.loads((Path(__file__).parents[1] / "parity/trl_1_16_surface.json").read_text(encoding="utf-8"))
"""What `tests/parity/trl_1_16_surface.py` wrote of TRL itself."""


def stand_in(kind: str, **usual: Any) -> type:
    """The class `GRPOConfig` or its like. usual: other defaults than TRL's."""
    values = KEPT["defaults"][kind] | usual
    fields = [(name, Any, dataclasses.field(default_factory=lambda value=x: value)) for name, x in values.items()]
    return dataclasses.make_dataclass(f"{kind}Config", fields)
