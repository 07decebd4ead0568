# duck-typed parts against the protocol
import torch, transformers, operant
from operant.types import Completion, Step
from operant.models.policy import Policy
from operant.models.safe_loading import load_tokenizer, load_model
from operant.storage.hub import find_model
import copy
folder = find_model("builtin:reviews-lm")
class Gen(Policy):
    """A Policy (docs: `Policy` wraps any transformers model) with a generate of its own"""
    def generate(self, prompts, sampling, keys):
        from operant.engines.native.engine import NativeEngine
        e = NativeEngine(self); return e.generate(prompts, sampling, keys)
tok = load_tokenizer(folder)
pol = Gen(load_model(folder), tok)
from operant.engines.own import OwnEngine
try:
    print(OwnEngine(pol))
except Exception as e: print("own engine:", type(e).__name__, e)
try:
    run = operant.train(pol, ["a b", "c d", "e f"], own.short if 0 else (lambda rs: [len(r.reply)/100 for r in rs]), engine="own", steps=1, batch=4, max_tokens=4, probes=0, out="runs/own-%s" % ("old" if "old" in operant.__file__ else "new"))
    print(run)
except Exception as e: print("own run:", type(e).__name__, e)
