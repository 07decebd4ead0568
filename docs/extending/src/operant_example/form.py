"""A row form: what a data set publishes becomes a prompt and its references. Its further arguments are its options."""

from collections.abc import Mapping
from typing import Any


def headline(row: Mapping[str, Any], *, prefix: str = "headline: ") -> dict[str, Any]:
    """Rows with body and headline; other fields are not read. Options: --form headline --form.prefix title:"""
    return {"before": prefix, "prompt": row["body"], "cue": "\n", "references": [row["headline"]]}
