"""Lockstep tests need vLLM's wheel, so they run only when asked for: `pytest -m vllm`.

Two guards, because either may be missing: where `-m "not vllm"` stands in pytest's addopts, a plain run deselects these
tests and `-m vllm` on the command line replaces it; where it does not, they are skipped here.
"""

from collections import Counter

import pytest

TOTALS = {}


def pytest_collection_modifyitems(config, items):
    if "vllm" in config.option.markexpr:
        return
    for item in items:
        if item.get_closest_marker("vllm"):
            item.add_marker(pytest.mark.skip(reason="downloads vLLM's wheel: run with -m vllm"))


@pytest.fixture
def counts(request):
    """A Counter of what happened in this test's workloads; the sums are printed at the end of the run."""
    return TOTALS.setdefault(request.function.__name__, Counter())


def pytest_terminal_summary(terminalreporter):
    for name, counts in TOTALS.items():
        terminalreporter.write_line(f"{name}: " + ", ".join(f"{count} {what}" for what, count in counts.items()))
