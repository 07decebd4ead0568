"""Moves a script of TRL or trlX, or a configuration of RL4LMs, to operant: what `operant migrate` prints."""

from pathlib import Path

from operant.types import require


def migrated(text: str, path: Path) -> str:
    """The text of the file at `path`, moved to operant: a script's, or the recipe for a YAML configuration.

    Raises: OperantError for a file of another kind, a syntax error, or one that uses none of the libraries.
    """
    if path.suffix in (".yml", ".yaml"):
        from operant.tools.migrate.rl4lms import recipe

        return recipe(text, path)
    require(path.suffix == ".py", f"{path} is no Python script (.py) and no YAML file (.yml, .yaml): give one of these")
    from operant.tools.migrate.script import moved

    return moved(text, str(path))
