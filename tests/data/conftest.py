from collections.abc import Iterator

import pytest
from local_site import Site, serving

from fedmoe.data import fetch as fetching


@pytest.fixture
def site(monkeypatch) -> Iterator[Site]:
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(fetching, "PAUSE", 0.0)
    monkeypatch.setattr(fetching, "TIMEOUT", 20.0)
    with serving(Site()) as one:
        yield one
