"""The batches that an error names are the nearest valid ones."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.nearest import divisors, nearest_batches, nearest_that_work
from autoddl.costmodel.pricing import PriceBook
from autoddl.costmodel.workload import Workload
from autoddl.zoo import mlp, vgg

#: Convolutions take all devices for the samples; 30 features and 8 classes divide some numbers of devices only.
MODELS = {"vgg": vgg(11, image=32), "mlp": mlp([30, 30, 8])}
DEVICES = {number: load_cluster("piz-daint").resized(number) for number in (1, 4, 6, 7, 8)}
BOOKS = {
    (model, number): PriceBook(graph, cluster, Workload(1, 1, "float32"))
    for model, graph in MODELS.items()
    for number, cluster in DEVICES.items()
}


@given(st.integers(1, 5000))
def test_divisors(number: int) -> None:
    assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]


def test_words() -> None:
    assert nearest_that_work("micro-batch", 7, [6, 1, 8, 12]) == "the nearest micro-batches that work are 6 and 8"
    assert nearest_that_work("batch", 100, [96]) == "the nearest batch that works is 96"
    assert nearest_that_work("batch", 100, []) == "no batch works"


def test_batches_are_searched_within_reach() -> None:
    assert nearest_batches(100, lambda batch: batch % 8 == 0, reach=8) == [96, 104]
    assert nearest_batches(5, lambda batch: batch % 8 == 0, reach=8) == [8]
    assert nearest_batches(100, lambda batch: batch % 8 == 0, reach=3) == []
    assert nearest_batches(100, lambda batch: batch % 8 == 0, reach=8, multiple=12) == [96, 120]
    assert nearest_batches(2**40, lambda batch: True, reach=8) == [2**40 - 1]  # no batch is larger


def works(model: str, number: int, batch: int, micro_batch: int) -> bool:
    """Whether the tables of the searches can be made."""
    try:
        BOOKS[model, number].problem(batch, micro_batch)
    except UserError:
        return False
    return True


def named(message: str) -> tuple[str, list[int]]:
    """The noun and the numbers of a message."""
    found = re.search(r"; the nearest (micro-batch|batch)\w* that works? (?:is|are) (\d+)(?: and (\d+))?$", message)
    assert found, message
    return found[1], [int(number) for number in found.groups()[1:] if number]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(MODELS)), st.sampled_from(sorted(DEVICES)), st.integers(1, 60), st.integers(1, 70))
def test_messages_name_the_nearest_valid_batches(model: str, number: int, batch: int, micro_batch: int) -> None:
    try:
        BOOKS[model, number].problem(batch, micro_batch)
        return
    except UserError as error:
        what, found = named(str(error))
    if what == "micro-batch":
        every = [size for size in range(1, batch + 1) if works(model, number, batch, size)]
        refused = micro_batch
    else:
        assert not any(works(model, number, batch, size) for size in range(1, batch + 1))
        # A micro-batch that works in other batches is kept.
        kept = works(model, number, micro_batch, micro_batch)
        every = [
            other
            for other in range(1, batch + number * micro_batch + 1)
            if any(works(model, number, other, size) for size in ([micro_batch] if kept else divisors(other)))
        ]
        refused = batch
    below, above = [n for n in every if n < refused], [n for n in every if n > refused]
    assert found == [*below[-1:], *above[:1]]


@pytest.mark.parametrize(("micro_batch", "message"), [(7, "6 and 8"), (36, "32 and 48"), (100, "the nearest .* is 96")])
def test_a_workload_names_divisors(micro_batch: int, message: str) -> None:
    with pytest.raises(UserError, match=f"micro-batch {micro_batch} does not divide the batch of 96; .*{message}"):
        Workload(96, micro_batch)
