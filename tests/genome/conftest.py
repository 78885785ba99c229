from pathlib import Path

import pytest

from launcher.genome import store


@pytest.fixture(autouse=True)
def users_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test touches the cache folder of whoever runs it, nor what another test has left as another user."""
    store.temporary_root.cache_clear()
    folder = tmp_path_factory.mktemp("users_cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder
