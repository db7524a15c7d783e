"""Models for the tests: tiny random ones, made once a session, and the demo model where it can be had."""

import pytest
from tiny_models import CONFIGS, save_model


@pytest.fixture(scope="session", params=CONFIGS)
def tiny_model(request, tmp_path_factory):
    """(folder, transformers model) for each architecture in turn."""
    folder = tmp_path_factory.mktemp(request.param)
    return str(folder), save_model(CONFIGS[request.param](), folder)


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    """(folder, transformers model) of one tiny Llama."""
    folder = tmp_path_factory.mktemp("llama")
    return str(folder), save_model(CONFIGS["llama"](), folder)


@pytest.fixture(scope="session")
def demo_folder():
    from nanoserve.demo_model import demo_model_path

    try:
        return demo_model_path()
    except RuntimeError as error:
        pytest.skip(f"the demo model could not be downloaded: {error}")


@pytest.fixture
def figures(monkeypatch):
    """Every figure that was saved, as matplotlib's objects."""
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    saved, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **more: (saved.append(self), save(self, *args, **more)))
    return saved
