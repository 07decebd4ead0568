"""A run's page over HTTP, live while the run goes on: `operant report runs/x --serve`."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Serving:
    """Where the live page is served: `Serving(serve=True, port=8265)`."""

    serve: bool = False
    """Serve the page with every reply, instead of writing report.html."""
    host: str = "127.0.0.1"
    """The address to listen at. 0.0.0.0 shows the run to everyone who can reach this machine."""
    port: int = 8265
    """0: any free one."""


def serve(folder: str | Path, options: Serving) -> int:
    """Serve the page of a run folder until Ctrl-C; returns the exit code."""
    raise NotImplementedError
