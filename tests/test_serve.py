"""The live page of a run: a real server, real requests."""

import pytest

from operant.cli import main


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["report"], "say which run"),
        (["report", "a", "--sreve"], "did you mean 'serve'"),
        (["report", "a", "--port", "80"], "--serve"),
        (["report", "--serve", "nowhere"], "nowhere is no run folder"),
        (["report", "a", "--serve", "--port", "many"], "port='many'"),
    ],
)
def test_a_wrong_word_to_report_gets_a_sentence(words, sentence, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert sentence in capsys.readouterr().err
