"""Redistributions on real ranks: random pairs of distributions, values both ways, and the bytes of the step list."""

from __future__ import annotations

import random
from collections import Counter
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from autoddl.costmodel.distribution import canonical
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.exchange import Exchange
from autoddl.costmodel.redistribution import redistribute
from autoddl.costmodel.sbp import Broadcast

from ..costmodel.simulated_ranks import all_distributions
from .moving_jobs import is_primary
from .sent_bytes import Sent, check_sent

JOBS = Path(__file__).with_name("moving_jobs.py")
MESHES = {2: [(2,)], 4: [(4,), (2, 2)], 6: [(6,), (2, 3), (3, 2)], 8: [(8,), (2, 4), (4, 2), (2, 2, 2)]}
VALUES, GRADIENTS = 997, 991  # small whole numbers, exact in any order of summation


def whole(parts, lying, shape):
    """The logical tensor: copies once, summands added up."""
    total = np.zeros(shape)
    for rank, part in enumerate(parts):
        if is_primary(lying, rank, Broadcast):
            total[lying.slices(rank, shape)] += part
    return total


def random_pairs(num_ranks, count, seed, shape):
    """Distributions between which there is a way; half of them on two different meshes."""
    rng = random.Random(seed)
    everything = [lying for mesh in MESHES[num_ranks] for lying in all_distributions(mesh, len(shape))]
    pairs = []
    while len(pairs) < count:
        pair = rng.choice(everything), rng.choice(everything)
        try:
            redistribute(*pair, shape)
        except UserError:
            continue
        pairs.append(pair)
    return pairs


def check(pairs, results, shape):
    value = np.arange(np.prod(shape)).reshape(shape) % VALUES
    gradient = np.arange(np.prod(shape)).reshape(shape) * 7 % GRADIENTS
    for i, (source, target) in enumerate(pairs):
        found = [result[i] for result in results]
        what = f"{source} -> {target}"
        assert np.array_equal(whole([f["forward"] for f in found], target, shape), value), what
        assert np.array_equal(whole([f["backward"] for f in found], source.dual(), shape), gradient), what
        for f in found:
            assert Counter(f["ran"]) == Counter(f["expected"]), what
            assert f["forward"].shape == target.local_shape(shape), what


@pytest.mark.parametrize("num_ranks", [2, 4, 6, 8])
@pytest.mark.parametrize("shape", [(64, 192), (16, 8, 24)], ids=str)
def test_values_forward_and_backward(ranks, num_ranks, shape):
    """Six ranks are those of eight, which other tests start anyway."""
    if num_ranks == 6:
        shape = tuple(3 * length for length in shape)
    pairs = random_pairs(num_ranks, 25 if num_ranks <= 4 else 12, num_ranks, shape)
    texts = [(str(source), str(target)) for source, target in pairs]
    results = ranks(8 if num_ranks == 6 else num_ranks).run(f"{JOBS}:move_pairs", texts, shape, num_ranks, False)
    check(pairs, results[:num_ranks], shape)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_bytes_are_those_of_the_step_list(counted_ranks, num_ranks):
    shape = (512, 768)
    pairs = random_pairs(num_ranks, 16 if num_ranks == 4 else 8, 100 + num_ranks, shape)
    texts = [(str(source), str(target)) for source, target in pairs]

    def count():
        results, found = counted_ranks(num_ranks).run(f"{JOBS}:move_pairs", texts, shape, num_ranks, True), []
        check(pairs, results, shape)
        for i, text in enumerate(texts):
            sent, messages = (sum(result[i][field] for result in results) for field in ("sent_bytes", "messages"))
            payload = results[0][i]["payload"]
            found.append(Sent(f"{text}", payload, sent, messages))
            if sent / max(messages, 1) > 32 * 1024:
                found.append(Sent(f"{text}, raw", payload, sent, num_readings=0))
        return found

    check_sent(num_ranks, count(), count)


def test_changes_of_the_samples_split_are_one_exchange(ranks):
    """The canonical layout is made for this: a factor of p0 moves in one all-to-all along one axis."""
    shape = (16, 48)
    ends = [((8, 1),), ((4, 2),), ((2, 4),), ((1, 8),)]
    pairs = [(canonical(a), canonical(b)) for a, b in zip(ends, ends[1:])]
    results = ranks(8).run(f"{JOBS}:move_pairs", [(str(a), str(b)) for a, b in pairs], shape, 8, False)
    check(pairs, results, shape)
    for result in results[0]:
        assert len(result["expected"]) == 2 and all("all-to-all over 2" in step for step in result["expected"])


def exchanged_pairs(*levels):
    """The pairs of canonical layouts between which ranks exchange unequal pieces."""
    ends = list(product(*([(p0, size // p0) for p0 in range(1, size + 1) if size % p0 == 0] for size in levels)))
    pairs = [(canonical(a), canonical(b)) for a, b in product(ends, ends)]
    return [pair for pair in pairs if any(isinstance(part, Exchange) for part in redistribute(*pair, (36, 36)))]


@pytest.mark.parametrize("first_rank", [0, 2])
def test_exchanges_of_unequal_pieces(ranks, first_rank):
    """On six of eight ranks: every element where plain slicing has it, and each gradient where its element came from."""
    pairs = exchanged_pairs(6) + exchanged_pairs(2, 3)
    assert {(str(a), str(b)) for a, b in pairs} >= {("(S1:3@1, S1:2@3)", "(S0:3, S1:2)")}
    shape = (12, 36)
    texts = [(str(source), str(target)) for source, target in pairs]
    results = ranks(8).run(f"{JOBS}:move_pairs", texts, shape, 6, False, first_rank)[first_rank : first_rank + 6]
    check(pairs, results, shape)
    value = np.arange(np.prod(shape)).reshape(shape) % VALUES
    gradient = np.arange(np.prod(shape)).reshape(shape) * 7 % GRADIENTS
    for i, (source, target) in enumerate(pairs):
        for rank, result in enumerate(results):
            assert np.array_equal(result[i]["forward"], value[target.slices(rank, shape)])
            assert np.array_equal(result[i]["backward"], gradient[source.slices(rank, shape)])


def test_exchanges_are_recorded_as_communication(ranks):
    """Forward and backward, each as one communication, whatever the number of network levels."""
    pairs = exchanged_pairs(6)[:3] + exchanged_pairs(3, 2)[:3]
    texts = [(str(source), str(target)) for source, target in pairs]
    for result in ranks(6).run(f"{JOBS}:record_pairs", texts, (36, 36)):
        for (sent, expected, kinds), text in zip(result, texts):
            assert sum(sent) == pytest.approx(expected) and expected > 0, text
            assert kinds == {"communication"} and len(sent) % 2 == 0, text


def test_bytes_of_exchanges_are_those_of_the_step_list(counted_ranks):
    """On six ranks of one network level, and of three nodes of two: on average as priced for the busiest rank, or less."""
    shape = (576, 768)
    pairs = exchanged_pairs(6) + exchanged_pairs(3, 2)
    texts = [(str(source), str(target)) for source, target in pairs]
    assert len(exchanged_pairs(3, 2)) > 0

    def count():
        results = counted_ranks(6).run(f"{JOBS}:move_pairs", texts, shape, 6, True)
        check(pairs, results, shape)
        found = []
        for i, text in enumerate(texts):
            sent, messages = (sum(result[i][field] for result in results) for field in ("sent_bytes", "messages"))
            found.append(Sent(f"{text}", results[0][i]["payload"], sent, messages))
        replayed = counted_ranks(6).run(f"{JOBS}:replay_exchanges", texts, shape)[0]
        return [*found, *(Sent(f"{text}, replayed", *counts) for text, counts in zip(texts, replayed))]

    check_sent(6, count(), count)
