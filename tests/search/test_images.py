"""Plans of convolutions, batch norms and poolings against all of their strategies, and their steps against hand-worked ones."""

from __future__ import annotations

from itertools import product
from math import gcd, inf, prod

import pytest

from autoddl.costmodel.assessment import assess
from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.collectives import Collective, Step
from autoddl.costmodel.distribution import Axis
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.layerwork import Place, layer_work
from autoddl.costmodel.pricing import PriceBook, edge_steps
from autoddl.costmodel.strategy import Strategy, enumerate_strategies
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.joint.partition import chain_of
from autoddl.pipelines.runtime.stage.plan import StagePlan, check_stages, moved_tensor
from autoddl.search.planner import Options, make_plan
from autoddl.zoo import resnet, vgg
from autoddl.zoo.layers import GraphBuilder, batch_norm, conv2d, pool

CHANNELS, SIDE = 8, 8


def toy(synchronised, width=SIDE):
    builder = GraphBuilder("toy", "image")
    shape = (CHANNELS, SIDE, width)
    builder.chain(
        builder.add(conv2d("first", shape, CHANNELS, kernel_size=3, padding=1, epilogue=("relu",))),
        [
            batch_norm("norm", shape, synchronised=synchronised),
            conv2d("last", shape, 2 * CHANNELS, kernel_size=3, stride=2, padding=1, bias=False),
        ],
    )
    return builder.build()


def by_hand(levels, samples, width=SIDE):
    """All strategies of the first convolution, the batch norm, and the last convolution, whose output is half as long."""
    triples = [
        [t for t in product(range(1, size + 1), repeat=3) if prod(t) == size and CHANNELS % (t[1] * t[2]) == 0]
        for size in levels
    ]
    of_first, of_norms, of_last = [], [], []
    for splits in product(*triples):
        p0, parts = prod(t[0] for t in splits), prod(t[1] * t[2] for t in splits)
        if CHANNELS % parts:
            continue
        q = p0 // gcd(p0, samples)
        is_norm = all(t[2] == 1 for t in splits)
        if q == 1:
            for found in (of_first, of_last, *[of_norms] * is_norm):
                found.append(Strategy(splits))
            continue
        if q * samples != p0:
            continue
        positions = innermost(q, [t[0] for t in splits])
        for found, shrinks in ((of_first, 1), (of_last, 2), *[(of_norms, 1)] * is_norm):
            height, across = SIDE // shrinks, width // shrinks
            grids = [(q // c, c) for c in range(1, q + 1) if q % c == 0 and height % (q // c) == 0 and across % c == 0]
            shortest = min(
                grids, key=lambda grid: ((grid[0] > 1) * across / grid[1] + (grid[1] > 1) * height / grid[0], grid[1])
            )
            for _, c in {shortest, *(grid for grid in grids if grid[1] == 1)}:
                columns = innermost(c, positions) if c > 1 else ()
                way = "tiles" if found is of_norms else "halo"
                is_told = c > 1 or found is not of_norms
                choices = {"sequence": way, "positions": positions, "columns": columns} if is_told else {}
                found.append(Strategy(splits, **choices))
    return of_first, of_norms, of_last


def innermost(count, sizes):
    """How many of the ranks of each level are among the innermost ``count``."""
    found = []
    for size in reversed(sizes):
        found.insert(0, gcd(count, size))
        count //= found[0]
    return tuple(found)


@pytest.mark.parametrize("synchronised", [False, True])
@pytest.mark.parametrize("levels", [(2,), (4,), (2, 2)])
@pytest.mark.parametrize("samples,width", [(1, SIDE), (2, SIDE), (4, SIDE), (1, 32), (1, 12), (2, 32)])
def test_plans_are_the_best_of_all(levels, samples, width, synchronised):
    cluster = load_cluster("gcp-a100").resized(*((1, *levels) if len(levels) == 1 else levels))
    graph, (first, norms, last) = toy(synchronised, width), by_hand(levels, samples, width)
    assert any(strategy.columns for strategy in first) == (width > SIDE and samples < prod(levels))
    workload = Workload(samples, samples, cluster.default_precision)
    assert PriceBook(graph, cluster, workload).space_size(samples) == len(first) * len(norms) * len(last)
    least = inf
    for one, norm, other in product(first, norms, last):
        strategies = {"first": one, "norm": norm, "last": other}
        least = min(least, assess(graph, cluster, workload, strategies).step_s)
    planned = make_plan(graph, cluster, Options(batch=samples, micro_batch=samples, recompute=False))
    assert planned.optimal and planned.cost == pytest.approx(least, rel=1e-9)


def test_a_large_image_is_cut_into_tiles():
    """4 channels of 2048 x 2048 pixels on 4 nodes of 4: boundaries of strips are twice as long."""
    builder, shape = GraphBuilder("large", "image"), (4, 2048, 2048)
    layers = [conv2d(name, shape, 4, kernel_size=3, padding=1) for name in "abc"]
    builder.chain(builder.add(layers[0]), [batch_norm("n", shape), *layers[1:]])
    graph, cluster = builder.build(), load_cluster("gcp-a100").resized(4, 4)
    planned = make_plan(graph, cluster, Options(batch=1, micro_batch=1, recompute=False))
    assert planned.optimal and {strategy.tiles for strategy in planned.strategies.values()} == {(4, 4)}
    strips = {
        layer.name: Strategy(((4, 1, 1), (4, 1, 1)), sequence="halo", positions=(4, 4))
        if layer.kind == "conv2d"
        else Strategy(((4, 1, 1), (4, 1, 1)))
        for layer in graph.layers
    }
    assert assess(graph, cluster, planned.workload, strips).step_s > planned.cost


def test_images_leave_a_stage_as_rows():
    layers = ["a", "b"]
    builder, shape = GraphBuilder("large", "image"), (4, 64, 64)
    convolutions = [conv2d(name, shape, 4, kernel_size=3, padding=1) for name in layers]
    builder.chain(builder.add(convolutions[0]), convolutions[1:])
    graph = builder.build()
    tiles = Strategy(((4, 1, 1),), sequence="halo", positions=(4,), columns=(2,))
    first, whole = chain_of(graph).stage(0, 1).graph, chain_of(graph).stage(0, 2).graph
    assert whole.offers("a", tiles) and whole.offers("b", tiles) and not first.offers("a", tiles)
    cluster = load_cluster("gcp-a100").resized(1, 4)
    with pytest.raises(UserError, match="cross to another stage as rows"):
        assess(first, cluster, Workload(1, 1, cluster.default_precision), {"a": tiles})
    plans = [StagePlan({name: tiles}) for name in layers]
    with pytest.raises(UserError, match="cross to another stage as rows"):
        check_stages(graph, plans)


def steps_of(layer, strategy, samples=4):
    work = layer_work(layer, strategy, Workload(samples, samples, "float32"), samples, Place())
    return work.forward, work.backward, work.gradient


def test_steps_of_a_convolution():
    """4 images of 8 x 8 pixels, 16 -> 32 channels, on (2,2,2): a rank gathers 2 images with half of the channels."""
    layer = conv2d("c", (16, 8, 8), 32, kernel_size=3, padding=1, bias=False)
    forward, backward, gradient = steps_of(layer, Strategy(((2, 2, 2),)))
    gathered, written = 2 * 64 * 8 * 4, 2 * 64 * 16 * 4
    assert forward == (
        Step(Collective.ALL_GATHER, Axis(2, 1), gathered),
        Step(Collective.REDUCE_SCATTER, Axis(2, 2), written),
    ) or forward == (
        Step(Collective.ALL_GATHER, Axis(2, 2), gathered),
        Step(Collective.REDUCE_SCATTER, Axis(2, 1), written),
    )
    assert [(step.collective, step.nbytes) for step in backward] == [
        (Collective.ALL_GATHER, written),
        (Collective.REDUCE_SCATTER, gathered),
    ]
    # 32 x 16 kernels of 9 numbers, a quarter on each rank.
    assert gradient == (Step(Collective.ALL_REDUCE, Axis(2, 4), 32 * 16 * 9 / 4 * 4),)


def test_steps_of_a_halo():
    """One image of 8 x 8 pixels and 16 channels on 2 nodes of 2 ranks: 7 x 7 windows need 3 rows on each side.

    What a node's first rank needs is on the other node: rows pass along the inner axis and then along the outer one.
    """
    strategy = Strategy(((2, 1, 1), (2, 1, 1)), sequence="halo", positions=(2, 2))
    layer = conv2d("c", (16, 12, 8), 16, kernel_size=7, padding=3, bias=False)
    forward, backward, _ = steps_of(layer, strategy, samples=1)
    row = 8 * 16 * 4
    inner, outer = Axis(2, 1, 1), Axis(2, 2, 0)
    assert forward == backward == tuple(Step(Collective.SHIFT, axis, 3 * row) for axis in (inner, outer) * 2)
    # A rank that reads the data has them already.
    first = layer_work(layer, strategy, Workload(1, 1, "float32"), 1, Place(is_first=True))
    assert first.forward == first.backward == ()
    # 3 x 3 windows with stride 2 need a row of the rank before only.
    strided = conv2d("c", (16, 16, 8), 16, kernel_size=3, stride=2, padding=1, bias=False)
    assert steps_of(strided, strategy, samples=1)[0] == tuple(
        Step(Collective.SHIFT, axis, row) for axis in (inner, outer)
    )


def test_steps_of_the_halo_of_a_tile():
    """The same image in 2 x 2 tiles of 6 x 4 pixels: 3 rows of 4 pixels, then 3 columns of 3 + 6 + 3 pixels on each side."""
    strategy = Strategy(((2, 1, 1), (2, 1, 1)), sequence="halo", positions=(2, 2), columns=(1, 2))
    assert strategy.words == ("halo:2x2",)
    assert (strategy.row_axes, strategy.column_axes) == ((Axis(2, 2, 0),), (Axis(2, 1, 1),))
    layer = conv2d("c", (16, 12, 8), 16, kernel_size=7, padding=3, bias=False)
    forward, backward, _ = steps_of(layer, strategy, samples=1)
    pixel = 16 * 4
    rows, columns = (
        Step(Collective.SHIFT, Axis(2, 2, 0), 3 * 4 * pixel),
        Step(Collective.SHIFT, Axis(2, 1, 1), 3 * 12 * pixel),
    )
    assert forward == backward == (rows, rows, columns, columns)
    # A rank keeps its tile with the halo for the backward pass.
    work = layer_work(layer, strategy, Workload(1, 1, "float32"), 1, Place())
    assert work.kept_bytes == 12 * 10 * pixel


def test_images_change_between_strips_and_tiles():
    """From 4 strips of 2 x 8 pixels to 2 x 2 tiles of 4 x 4: ranks of one pair have the same rows, and exchange halves of columns.

    Each axis of 2 takes a digit of the columns for one of the rows; all 4 ranks lie on one axis of the mesh.
    """
    layer = conv2d("c", (8, 8, 8), 8, kernel_size=1)
    strips = Strategy(((4, 1, 1),))
    tiles = Strategy(((4, 1, 1),), sequence="tiles", positions=(4,), columns=(2,))
    assert edge_steps(layer, strips, tiles, Workload(1, 1, "float32"), 1) == (
        Step(Collective.ALL_TO_ALL, Axis(2, 1), 8 * 8 * 8 * 4 / 4),
    )


def test_tiles_of_images_of_one_row_move_as_rows_and_columns():
    """Two images of 1 x 8 pixels on 4 ranks: as many rows as samples, which are rows all the same."""
    layer = conv2d("c", (4, 1, 8), 4, kernel_size=1)
    tiles = Strategy(((4, 1, 1),), sequence="tiles", positions=(2,), columns=(2,))
    moved = moved_tensor(layer, [tiles.rows_and_features, Strategy(((1, 4, 1),)).rows_and_features], samples=2)
    assert moved == ((2, 4, 8), True, True, (0, 1, 2))


def test_images_that_ranks_share_move_as_rows_of_pixels():
    """From 4 strips of an image to 4 blocks of its channels: an all-to-all of a quarter of 8 x 8 x 8 numbers."""
    layer = conv2d("c", (8, 8, 8), 8, kernel_size=1)
    strips, blocks = Strategy(((4, 1, 1),)), Strategy(((1, 4, 1),))
    assert edge_steps(layer, strips, blocks, Workload(1, 1, "float32"), 1) == (
        Step(Collective.ALL_TO_ALL, Axis(4, 1), 8 * 8 * 8 * 4 / 4),
    )


@pytest.mark.parametrize("synchronised", [False, True])
def test_statistics_of_all_ranks(synchronised):
    """Two sums of each of 8 channels, half of them on a rank, in single precision."""
    layer = batch_norm("n", (8, 4, 4), synchronised=synchronised)
    forward, backward, _ = steps_of(layer, Strategy(((4, 2, 1),)))
    assert forward == backward == ((Step(Collective.ALL_REDUCE, Axis(4, 2), 2 * 4 * 4),) if synchronised else ())


def test_poolings_keep_the_place_of_the_largest():
    assert pool("p", (4, 8, 8), kernel_size=2).kept_elements == 4 * 4 * 4
    assert pool("p", (4, 8, 8), kernel_size=8, maximum=False).kept_elements == 0
    assert pool("p", (4, 8, 8), kernel_size=3, stride=2, padding=1).output_shape == (4, 4, 4)


def test_channels_of_sums_divide_not_their_width():
    """7 pixels wide, 512 channels."""
    layer = next(layer for layer in resnet(18).layers if layer.output_shape == (512, 7, 7) and layer.kind == "add")
    assert {s.splits[0] for s in enumerate_strategies(layer, (4,))} == {(4, 1, 1), (2, 2, 1), (1, 4, 1)}
    assert {s.splits[0] for s in enumerate_strategies(layer, (7,))} == {(7, 1, 1)}


@pytest.mark.parametrize("model", [resnet(18), vgg(11)], ids=["resnet", "vgg"])
def test_fewer_images_than_ranks_have_a_plan_that_beats_a_split_of_images_alone(model):
    cluster = load_cluster("piz-daint").resized(4, 1)
    planned = make_plan(model, cluster, Options(batch=2))
    assert planned.optimal
    assert any(strategy.positions for strategy in planned.strategies.values())
    alone = make_plan(model, load_cluster("piz-daint").resized(2, 1), Options(batch=2))
    assert planned.cost < alone.cost
