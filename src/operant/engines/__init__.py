"""Engines by name. Each is a package of this one; other packages add theirs as entry points of `operant.engines`."""

from operant.import_by_name import Table

ENGINES = Table(
    "engine",
    "operant.engines",
    {
        "native": "operant.engines.native.engine:NativeEngine",
        "own": "operant.engines.transformers:OwnEngine",
        "transformers": "operant.engines.transformers:TransformersEngine",
        "openai": "operant.engines.openai:OpenAIEngine",
        "vllm": "operant.engines.vllm:VLLMEngine",
        "ray": "operant.engines.ray:RayEngine",
    },
)
"""The class or function that makes each engine from the policy; its other arguments are the options `engine.*`."""
