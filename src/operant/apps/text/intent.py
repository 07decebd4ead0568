"""RL4LMs' reward of dialogues: the predicted intent of a reply, and another score beside it."""

from dataclasses import dataclass

from operant.apps.text.judged_by_classifier import Intent
from operant.rewards import resolve
from operant.rewards.combine import Weighted, weighted
from operant.types import RewardFn


@dataclass(frozen=True)
class IntentAndScore(Weighted):
    """The sum of an intent and another score, under the name of the first."""

    __name__ = "intent"


def intent(
    model: str | None = None,
    *,
    intent_coef: float = 1.0,
    auto_coef: float = 0.0,
    auto: str = "meteor",
    field: str | None = None,
    text: str = "reply",
    batch: int = 32,
    device: str | None = None,
) -> RewardFn:
    """intent_coef [predicted intent == target] + auto_coef * the reward `auto`, as RL4LMs' `intent_accuracy`.

    The other options are those of `text_scores.Intent`.
    """
    right = Intent(model, field=field, text=text, batch=batch, device=device)
    both = {"intent": (right, intent_coef)} | ({auto: (resolve(auto), auto_coef)} if auto_coef else {})
    return IntentAndScore(weighted(both).rewards)
