"""Groups of an optimizer whose parameters are stored together; `test_divided_parameters` trains with groups on ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from autoddl.costmodel.errors import UserError
from autoddl.pipelines.runtime.load import is_available

available = is_available()
pytestmark = pytest.mark.skipif(not available, reason=available.reason)
NAMES = {name: name for name in ("q.weight", "k.weight", "fc.weight")}


def stored(*sources: str) -> Any:
    return SimpleNamespace(
        tensor="+".join(sources), layout=SimpleNamespace(sources=[(source, 4) for source in sources])
    )


def converted(*groups: Any) -> list[dict[str, Any]]:
    from autoddl.pipelines.runtime.optimizergroups import stored_groups

    return stored_groups(groups, None, NAMES, {"q.weight": stored("q.weight", "k.weight"), "fc": stored("fc.weight")})


def test_parameters_that_are_stored_together_are_in_one_group():
    first, second = converted({"params": ["k.weight", "q.weight"], "lr": 0.1}, {"params": ["fc.weight"]})
    assert first == {"params": ["q.weight+k.weight"], "lr": 0.1} and second == {"params": ["fc.weight"]}


def test_groups_with_equal_options_may_divide_them():
    first, second = converted({"params": ["q.weight"], "lr": 0.1}, {"params": ["k.weight"], "lr": 0.1})
    assert (first["params"], second["params"]) == (["q.weight+k.weight"], [])


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        (
            ({"params": ["q.weight"], "lr": 0.1}, {"params": ["k.weight"]}),
            "q.weight and k.weight are stored in one tensor, but are in groups 0 and 1 of the optimizer, whose options differ",
        ),
        (
            ({"params": ["q.weight"]},),
            "k.weight is in no group of the optimizer, but it is stored in one tensor with q.weight",
        ),
    ],
)
def test_other_groups_are_refused(groups, said):
    with pytest.raises(UserError, match=said):
        converted(*groups)
