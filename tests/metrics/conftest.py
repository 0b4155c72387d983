from __future__ import annotations

import pytest
from support.fake_nvml import FakeNvml, install


@pytest.fixture
def four_cards(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """Four whole cards, GPU-a to GPU-d, of which the job sees what the test says."""
    return install(monkeypatch, [{"uuid": f"GPU-{letter}0"} for letter in "abcd"])
