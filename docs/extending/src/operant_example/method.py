"""Leave one out, without clipping: an advantage is a score minus the mean of the others' (arXiv:2402.14740)."""

from torch import Tensor

from operant.algorithms import Algorithm, Needs
from operant.objectives.groups import with_leave_one_out
from operant.types import Batch, Outputs


def likelihood(out: Outputs, batch: Batch, *, entropy_coef: float = 0.0) -> dict[str, Tensor]:
    """Raise the log-prob of each token by its advantage. Options: --algorithm leave_one_out --loss.entropy-coef 0.01"""
    assert batch.advantages is not None and out.entropy is not None
    policy = -batch.advantages * out.logprobs
    return {"loss": policy - entropy_coef * out.entropy, "loss/policy": policy}


ALGORITHM = Algorithm(
    likelihood,
    with_leave_one_out,
    per="episode",
    copies={"reference": "frozen"},
    needs=Needs(samples=2),
    kl=("reward", "loss"),
    defaults={"samples": 4, "update.epochs": 1, "kl.coef": 0.05},
)
