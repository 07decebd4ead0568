"""VADER: sentiment by a lexicon and a few rules (Hutto and Gilbert, 2014). Needs the extra `vader`."""

from typing import Any

from operant.types import OperantError, Rollout


class Vader:
    """VADER's compound score of each rollout, -1 (negative) to 1 (positive).

    `text`: `text` (query and reply) or `reply`.
    Raises: OperantError for another `text`.
    """

    __name__ = "vader"

    def __init__(self, text: str = "text"):
        if text not in ("text", "reply"):
            raise OperantError(f"reward 'vader:{text}': give vader:text (query and reply) or vader:reply")
        self.text = text
        self._analyser: Any = None

    def __call__(self, rollouts: list[Rollout]) -> list[float]:
        self.check()
        return [self._analyser.polarity_scores(getattr(r, self.text))["compound"] for r in rollouts]

    def check(self) -> None:
        """Load the lexicon. Raises: OperantError if the package is missing."""
        if self._analyser is not None:
            return
        try:
            from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
        except ImportError as error:
            raise OperantError("reward 'vader' needs a package: pip install 'operant[vader]'") from error
        self._analyser = SentimentIntensityAnalyzer()
