from __future__ import annotations

import pytest

#: Cases that the usual limit of a test is for.
_USUAL_CASES = 2000


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """More cases than usual may take longer in proportion."""
    times = config.getoption("--fuzz-cases") / _USUAL_CASES
    for item in items:
        if times > 1 and item.name.startswith("test_mutated_input"):
            item.add_marker(pytest.mark.timeout(times * float(config.getini("timeout"))))
