"""The slots of tokens, against a loop over all choices."""

from __future__ import annotations

import numpy as np
import pytest

from autoddl.pipelines.runtime.load import is_available

available = is_available()
pytestmark = pytest.mark.skipif(not available, reason=available.reason)


@pytest.mark.parametrize(
    ("samples", "rows", "num", "per_token", "capacity"), [(3, 8, 4, 2, 3), (2, 5, 3, 3, 5), (1, 16, 8, 1, 1)]
)
def test_slots_are_those_of_a_loop(samples, rows, num, per_token, capacity):
    from autoddl.pipelines.runtime.routing import assign_slots, choose_experts

    scores = np.random.default_rng(1).standard_normal((samples, rows, num))
    chosen = choose_experts(scores, per_token)
    tokens, places = assign_slots(chosen, num, capacity)
    expected_tokens = np.full((num, samples, capacity), samples * rows)
    expected_places = np.full((samples, rows, per_token), num * samples * capacity)
    for sample in range(samples):
        used = [0] * num
        for choice in range(per_token):
            for row in range(rows):
                expert = sorted(range(num), key=lambda i: -scores[sample, row, i])[choice]
                if used[expert] < capacity:
                    expected_tokens[expert, sample, used[expert]] = sample * rows + row
                    expected_places[sample, row, choice] = (expert * samples + sample) * capacity + used[expert]
                used[expert] += 1
    assert (tokens == expected_tokens.reshape(-1)).all()
    assert (places == expected_places.reshape(-1, per_token)).all()


def test_experts_of_the_best_groups_alone_are_chosen():
    """Groups (0.5, 0.1), (0.3, 0.4), (0.35, 0.0): the best two are those of 0.5 and 0.4."""
    from autoddl.pipelines.runtime.routing import choose_experts

    scores = np.array([[0.5, 0.1, 0.3, 0.4, 0.35, 0.0]])
    assert choose_experts(scores, 3, (3, 2)).tolist() == [[0, 3, 2]]
    assert choose_experts(scores, 3).tolist() == [[0, 3, 4]]
