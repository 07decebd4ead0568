"""`operant serve runs/x`: a model behind the OpenAI protocol, for every program that speaks it."""

import os
from collections.abc import Sequence
from typing import Any

from operant.apps.agents.server import ModelServer, ServerOptions
from operant.net.listening import is_local
from operant.options import compose
from operant.runs.named_models import check, load
from operant.training.options import find_device
from operant.types import require


def serve(words: Sequence[str], options: dict[str, Any]) -> int:
    """Serve a run or a model until Ctrl-C."""
    require(len(words) == 1, "expected a run folder or model: operant serve runs/sentiment")
    device, name = find_device(options.pop("device", "auto")), options.pop("name", words[0])
    serving = compose({"": ServerOptions}, options)[""]
    check(words[0])
    policy, engine = load(words[0])
    with ModelServer(policy.to(device), engine, name, serving) as server:
        key = f"with the key of {serving.key_variable}" if os.environ.get(serving.key_variable) else "without a key"
        print(f"{server.url} serves {name} by the OpenAI protocol, {key}; press Ctrl-C to end", flush=True)
        if not is_local(serving.host):
            print("it is not encrypted: use a network you trust, or a proxy with TLS before it", flush=True)
        try:
            server.run()
        except KeyboardInterrupt:
            print()
    return 0
