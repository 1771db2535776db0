import pytest

from splitveil.evaluation import judge_network


@pytest.fixture(autouse=True)
def short_judges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judges learn for four steps: what they say is not looked at here, and they would take most of the time."""
    monkeypatch.setattr(judge_network, "EPOCHS", 1)
    monkeypatch.setattr(judge_network, "STEPS", 4)
