"""Baselines: the strategies that each gives to every kind of layer."""

from __future__ import annotations

import pytest

from autoddl.costmodel.assessment import assess
from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.pricing import PriceBook
from autoddl.costmodel.strategy import Choices, Strategy, data_parallel
from autoddl.costmodel.workload import Workload
from autoddl.search.baselines import BASELINES, OF_CHOICES, Baseline, baselines, family_names
from autoddl.search.planner import Options, make_plan
from autoddl.zoo import Transformer, bert, gpt, llama, mlp, resolve_model, vgg
from autoddl.zoo.layers import BLOCK_INPUT, GraphBuilder, linear

GPT = gpt(Transformer("gpt", 2, 64, 8, 8, 128))


def family(graph, level_sizes, name) -> list[Baseline]:
    return [member for member in baselines(graph, level_sizes) if member.name == name]


def member(graph, level_sizes, mesh) -> dict[str, Strategy]:
    (found,) = [one for one in baselines(graph, level_sizes) if one.mesh == mesh]
    return found.strategies


def test_members_of_one_level():
    found = [(one.name, one.mesh) for one in baselines(GPT, (8,))]
    assert found == [
        ("data parallel", "dp 8"),
        ("megatron", "dp 4 x mp 2"),
        ("megatron", "dp 2 x mp 4"),
        ("megatron", "dp 1 x mp 8"),
        ("summa", "r 4 x c 2"),
        ("summa", "r 2 x c 4"),
    ]
    assert {name for name, _ in found} == set(BASELINES) - set(OF_CHOICES) - {"expert parallel"}


def test_members_that_divide_parameters():
    """Over all devices, and inside nodes; the table, which the head shares, has divided optimizer states only."""
    members = [one for one in baselines(GPT, (2, 4), Choices((0, 1, 2, 3))) if one.name in OF_CHOICES]
    assert [(one.name, one.mesh) for one in members] == [
        ("zero-1", "dp 8"),
        ("zero-2", "dp 8"),
        ("zero-2", "dp 8, divided inside nodes"),
        ("fsdp", "dp 8"),
        ("fsdp", "dp 8, divided inside nodes"),
    ]
    inside = members[-1].strategies
    assert inside["h.0.mlp.c_fc"] == Strategy(((2, 1, 1), (4, 1, 1)), zero=3, hybrid=True)
    assert inside["wte"] == Strategy(((2, 1, 1), (4, 1, 1)), zero=1)
    assert inside["h.0.attn"] == data_parallel((2, 4))


DENSE = set(BASELINES) - {"expert parallel"}


@pytest.mark.parametrize("shardings, names", [((0,), DENSE - set(OF_CHOICES)), ((0, 1, 2, 3), DENSE)])
def test_families_that_plans_are_compared_with(shardings, names):
    assert set(family_names(baselines(GPT, (8,), Choices(shardings)))) == names
    assert "fsdp" not in family_names(baselines(GPT, (1,), Choices(shardings)))


def test_members_of_two_levels():
    """(4 x 8): 3 * 4 meshes; all but dp = 32; Summa without those that have r = 1 or c = 1."""
    assert len(family(GPT, (4, 8), "megatron")) == 11
    assert len(family(GPT, (4, 8), "summa")) == 10
    assert "dp 4 x mp 1 | dp 1 x mp 8" in [one.mesh for one in family(GPT, (4, 8), "megatron")]
    assert [one.name for one in baselines(GPT, (1,))] == ["data parallel"]


def test_data_parallel():
    (only,) = family(GPT, (4, 2), "data parallel")
    assert set(only.strategies.values()) == {data_parallel((4, 2))}
    assert list(only.strategies) == [layer.name for layer in GPT.layers]


def test_megatron_alternates_inside_a_block():
    strategies = member(GPT, (8,), "dp 2 x mp 4")
    column, row = Strategy(((2, 4, 1),)), Strategy(((2, 1, 4),))
    for k in range(2):
        chosen = [strategies[f"h.{k}.{role}"] for role in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")]
        assert chosen == [column, row, column, row]
    # Vocabulary over mp at both ends of the shared table; the rest on whole heads and features over mp.
    assert (strategies["wte"], strategies["lm_head"]) == (row, column)
    assert strategies["h.0.attn"] == strategies["h.0.ln_1"] == strategies["loss"] == column


def test_megatron_repeats_itself_from_block_to_block():
    """Blocks of three matrices: each block starts with a column-parallel one, so that tied repetitions agree."""
    builder = GraphBuilder("odd", "row")
    block = [(linear("a", 1, 8, 8), [BLOCK_INPUT]), (linear("b", 1, 8, 8), ["a"]), (linear("c", 1, 8, 8), ["b"])]
    builder.repeat("h", 2, block, builder.add(linear("in", 1, 8, 8)))
    graph = builder.build()
    strategies = member(graph, (4,), "dp 2 x mp 2")
    for role in "abc":
        assert strategies[f"h.0.{role}"] == strategies[f"h.1.{role}"]
    problem = PriceBook(graph, load_cluster("dgx-a100").resized(1, 4), Workload(1, 1, "mixed")).problem(4, 4)
    assert problem.strategies(problem.choice(strategies)) == strategies


def test_megatron_splits_a_table_of_two_rows_by_its_features():
    strategies = member(bert(Transformer("bert", 1, 64, 8, 8, 128)), (8,), "dp 2 x mp 4")
    assert strategies["embeddings.token_type_embeddings"] == Strategy(((2, 4, 1),))
    assert strategies["embeddings.word_embeddings"] == Strategy(((2, 1, 4),))


def test_summa():
    strategies = member(GPT, (8,), "r 2 x c 4")
    on_mesh, canonical = Strategy(((2, 4, 1),), summa=True), Strategy(((2, 4, 1),))
    assert strategies["h.1.mlp.c_fc"] == on_mesh
    assert strategies["h.1.ln_1"] == strategies["wte"] == canonical
    # The output projection shares the table: it cannot be replicated differently.
    assert strategies["lm_head"] == Strategy(((2, 1, 4),))
    untied = gpt(Transformer("gpt", 1, 64, 8, 8, 128, tied=False))
    assert member(untied, (8,), "r 2 x c 4")["lm_head"] == on_mesh


def test_convolutions_stay_data_parallel():
    graph = vgg(11, image=32)
    for one in baselines(graph, (8,)):
        assert {one.strategies[x.name] for x in graph.layers if x.kind in ("conv2d", "opaque")} == {data_parallel((8,))}
    strategies = member(graph, (8,), "dp 2 x mp 4")
    assert [strategies[f"classifier.{i}"] for i in (0, 3, 6)] == [
        Strategy(((2, 4, 1),)),
        Strategy(((2, 1, 4),)),
        Strategy(((2, 4, 1),)),
    ]


@pytest.mark.parametrize(
    "graph",
    [
        GPT,
        bert(Transformer("bert", 2, 64, 8, 8, 128)),
        llama(Transformer("llama", 2, 64, 8, 8, 128)),
        mlp([64, 32, 16]),
    ],
    ids=["gpt", "bert", "llama", "mlp"],
)
@pytest.mark.parametrize("level_sizes", [(4,), (2, 2)], ids=str)
def test_what_divides_can_be_assessed(graph, level_sizes):
    preset = load_cluster("dgx-a100")
    cluster = preset.resized(*level_sizes) if len(level_sizes) == 2 else preset.resized(1, *level_sizes)
    problem = PriceBook(graph, cluster, Workload(1, 1, "mixed"), summa=True).problem(16, 16)
    for one in baselines(graph, level_sizes):
        truth = assess(graph, cluster, problem.workload, one.strategies)
        table_cost = problem.table.evaluate(problem.choice(one.strategies))
        assert table_cost == pytest.approx(truth.step_s, rel=1e-10)


def test_what_does_not_divide_says_so():
    problem = PriceBook(GPT, load_cluster("dgx-a100").resized(1, 16), Workload(1, 1, "mixed")).problem(16, 16)
    strategies = member(GPT, (16,), "dp 1 x mp 16")
    with pytest.raises(UserError, match=r"attn \(attention, 8 heads of 8\) does not divide by \(1,16,1\)"):
        problem.choice(strategies)


# ---- Experts -----------------------------------------------------------------------------------------------------------------

MIXTURE = resolve_model("moe:2x256", heads=4, sequence=64, vocabulary=512)  # 8 experts


def test_members_of_expert_parallelism():
    """On 2 x 4 devices mp is inside nodes; the experts are divided over neighbours among the dp devices, inside nodes first."""
    members = family(MIXTURE, (2, 4), "expert parallel")
    found = {one.mesh: {s.experts for s in one.strategies.values() if s.experts} for one in members}
    assert found == {
        "dp 2 x mp 1 | dp 4 x mp 1, ep 2": {(1, 2)},
        "dp 2 x mp 1 | dp 4 x mp 1, ep 4": {(1, 4)},
        "dp 2 x mp 1 | dp 4 x mp 1, ep 8": {(2, 4)},
        "dp 2 x mp 1 | dp 2 x mp 2, ep 2": {(1, 2)},
        "dp 2 x mp 1 | dp 2 x mp 2, ep 4": {(2, 2)},
        "dp 2 x mp 1 | dp 1 x mp 4, ep 2": {(2, 1)},
    }
    others = {name: s for name, s in members[3].strategies.items() if MIXTURE[name].kind != "experts"}
    plain = member(MIXTURE, (2, 4), "dp 2 x mp 1 | dp 2 x mp 2")
    assert others == {name: plain[name] for name in others}
    divided_states = [m for m in baselines(MIXTURE, (2, 4), Choices((0, 1))) if m.name == "expert parallel"]
    assert all(any(s.zero == 1 for s in one.strategies.values()) for one in divided_states)


def test_no_plan_of_a_mixture_is_slower_than_expert_parallelism():
    """The row is the best of its members, priced one by one; the plan is at least as fast."""
    cluster = load_cluster("dgx-a100").resized(2, 4)
    planned = make_plan(MIXTURE, cluster, Options(batch=16, micro_batch=16, recompute=False, zero="auto"))
    (row,) = (figures for figures in planned.baselines if figures.name == "expert parallel")
    costs = []
    for one in baselines(MIXTURE, (2, 4), planned.options.choices):
        if one.name == "expert parallel":
            costs.append(assess(MIXTURE, cluster, planned.workload, one.strategies).step_s)
    assert row.assessment.step_s == pytest.approx(min(costs)) and planned.cost <= min(costs)
