"""Layer profiles: both forms, the graph's order and cuts, and one line for every fault."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.errors import UserError
from autoddl.pipelines.planners import ProfiledWorkload
from autoddl.pipelines.profile import (
    Cut,
    Profile,
    ProfiledLayer,
    from_document,
    load_profile,
    parse_graph,
    profile_names,
    to_document,
    write_profile,
)

NUMBERS = "forward_compute_time=2, backward_compute_time=4, activation_size=8, parameter_size=16"


def graph(*lines: str) -> Profile:
    return parse_graph("\n".join(lines), 4)


def test_the_profiles_that_come_with_autoddl() -> None:
    assert list(profile_names()) == ["bert-48", "resnet-50", "vgg-19"]
    vgg = load_profile("vgg-19")
    assert (vgg.micro_batch, vgg.num_layers) == (32, 25)
    assert sum(layer.parameter_bytes > 0 for layer in vgg.layers) == 19
    bert = load_profile("bert-48")
    assert bert.micro_batch == 2
    encoders = [layer for layer in bert.layers if layer.name.startswith("layer_")]
    assert len(encoders) == 48
    assert {(layer.forward_s, layer.backward_s, layer.parameter_bytes) for layer in encoders} == {
        (2.69e-3, 4.47e-3, 50384896)
    }
    resnet = load_profile("resnet-50")
    assert (resnet.micro_batch, resnet.num_layers) == (128, 18)  # a stem, 16 residual blocks and a classifier
    assert resnet.parameter_bytes == 4 * 25_557_032  # torchvision's count


def test_text_graph_in_milliseconds_without_its_inputs() -> None:
    profile = graph(f"node1 -- Input0 -- {NUMBERS}", f"node2 -- Conv2d(3, 64) -- {NUMBERS}", "\tnode1 -- node2")
    assert profile.layers == (ProfiledLayer("Conv2d(3, 64)", 2e-3, 4e-3, 8.0, 16.0),)
    assert profile.edges == ()
    assert profile.micro_batch == 4


def test_lists_of_outputs_count_as_their_sum() -> None:
    profile = graph(f"n1 -- split -- {NUMBERS}".replace("activation_size=8", "activation_size=[8; 4; 2]"))
    assert profile.layers[0].activation_bytes == 14


def test_branches_are_put_in_topological_order() -> None:
    # c is written before what it needs; b stays before d, as in the file.
    lines = [f"{name} -- {name} -- {NUMBERS}" for name in "acbd"]
    profile = graph(*lines, "\ta -- b", "\ta -- c", "\tb -- c", "\ta -- d", "\tb -- d")
    assert [layer.name for layer in profile.layers] == ["a", "b", "c", "d"]
    assert set(profile.edges) == {(0, 1), (0, 2), (1, 2), (0, 3), (1, 3)}


def test_a_cut_is_crossed_once_by_every_tensor_that_is_used_behind_it() -> None:
    #     0 -> 1 -> 2 -> 3, and 0 -> 3; layer 0 is the mask: nothing in it is trained.
    sizes = [100.0, 10.0, 7.0, 5.0]
    layers = [ProfiledLayer(f"l{i}", 1.0, 2.0 if i else 0.0, size, 4.0 if i else 0.0) for i, size in enumerate(sizes)]
    profile = Profile("p", 1, tuple(layers), ((0, 1), (1, 2), (2, 3), (0, 3)))
    assert profile.cuts() == (
        Cut(0, 0),
        Cut(100, 0),  # 0 -> 1 and 0 -> 3 are one tensor, which needs no gradient
        Cut(110, 10),
        Cut(107, 7),
        Cut(0, 0),
    )


def test_json_round_trip(tmp_path: Path) -> None:
    for profile in map(load_profile, profile_names()):
        path = tmp_path / f"{profile.name}.json"
        write_profile(path, profile)
        assert load_profile(path) == profile


def as_text(profile: Profile) -> str:
    """The text graph of a profile, which does not say what layers keep."""
    lines = [
        f"node{i} -- {layer.name} -- forward_compute_time={layer.forward_s * 1e3!r}, "
        f"backward_compute_time={layer.backward_s * 1e3!r}, activation_size={layer.activation_bytes}, "
        f"parameter_size={layer.parameter_bytes}"
        for i, layer in enumerate(profile.layers)
    ]
    return "\n".join([*lines, *(f"\tnode{a} -- node{b}" for a, b in profile.edges)])


@pytest.mark.parametrize("name", ["vgg-19", "bert-48"])
def test_text_and_json_agree(name: str, tmp_path: Path) -> None:
    built_in = load_profile(name)
    path = tmp_path / f"{name}-pbs-{built_in.micro_batch}.txt"
    path.write_text(as_text(built_in))
    read = load_profile(path)
    assert (read.name, read.micro_batch, read.edges) == (name, built_in.micro_batch, built_in.edges)
    for mine, theirs in zip(read.layers, built_in.layers):
        assert mine.forward_s == pytest.approx(theirs.forward_s)
        assert mine.parameter_bytes == theirs.parameter_bytes
        assert mine.kept_bytes == theirs.kept_bytes
    # Hence a plan takes the same memory, whichever the profile was read from.
    cluster = load_cluster("v100-a")
    workloads = [ProfiledWorkload(profile, cluster, 2048) for profile in (read, built_in)]
    mine, theirs = (w.stage_bytes(0, 20, 4 * built_in.micro_batch, 2) for w in workloads)
    assert mine == theirs


def encoder(sequence: int, hidden: int, mask: bool, batch: int = 2) -> Profile:
    """An embedding and an encoder, with an attention mask as another input or without."""
    output = 4 * batch * (sequence * hidden + mask * sequence**2)
    lines = [
        f"a -- mask -- {NUMBERS}".replace("backward_compute_time=4", "backward_compute_time=0").replace("=16", "=0"),
        f"b -- embeddings -- {NUMBERS}",
        f"c -- layer_0 -- forward_compute_time=2, backward_compute_time=4, activation_size={output}, "
        f"parameter_size={4 * (12 * hidden**2 + 13 * hidden)}",
        "\tb -- c",
        *(["\ta -- c"] if mask else []),
    ]
    return parse_graph("\n".join(lines), batch)


def test_a_transformer_layer_of_a_text_graph_keeps_more_than_its_output() -> None:
    # BERT-large: 24 encoders of h = 1024, s = 384. DAPPLE's planner is given 1,736,689,664 bytes per sequence.
    for mask in (True, False):
        kept = encoder(384, 1024, mask).layers[-1].kept_bytes
        assert kept == 2 * 4 * (28 * 384 * 1024 + 3 * 16 * 384**2)
        assert 24 * kept / 2 == pytest.approx(1_736_689_664, rel=1e-3)
    # What is no transformer layer keeps its output: other parameters, or an output that is no number of tokens.
    other = encoder(384, 1024, True)
    lines = as_text(other).replace("parameter_size=50384896", "parameter_size=50384900")
    assert parse_graph(lines, 2).layers[-1].stored_bytes is None
    lines = as_text(other).replace(f"activation_size={other.layers[-1].activation_bytes}", "activation_size=4000")
    assert parse_graph(lines, 2).layers[-1].kept_bytes == 4000


def test_kept_bytes_of_a_text_graph_can_be_given_and_operations_in_place_keep_nothing() -> None:
    profile = graph(f"a -- x -- {NUMBERS}, stored_size=99", f"b -- ReLU(inplace) -- {NUMBERS}", f"c -- y -- {NUMBERS}")
    assert [layer.kept_bytes for layer in profile.layers] == [99, 0, 8]
    with pytest.raises(UserError, match="'stored_size' is '-1', should be a number from 0"):
        graph(f"a -- x -- {NUMBERS}, stored_size=-1")


def test_times_below_the_profiled_micro_batch_are_those_of_it() -> None:
    profile = Profile.chain("p", 4, [ProfiledLayer("x", 1.0, 2.0, 8.0, 8.0)])
    assert [profile.times(samples) for samples in (1, 4, 6)] == [[(1.0, 2.0)], [(1.0, 2.0)], [(1.5, 3.0)]]
    # A price knows every number of samples.
    priced = Profile("p", 4, profile.layers, (), price=lambda samples: [(samples + 1.0, samples + 2.0)])
    assert priced.times(1) == [(2.0, 3.0)]
    assert (profile.least_micro_batch, priced.least_micro_batch) == (4, 1)


def test_repeated_layers() -> None:
    document = to_document(Profile.chain("p", 1, [ProfiledLayer("x", 1.0, 2.0, 3.0, 4.0, 9.0)]))
    document["layers"][0]["repeat"] = 3
    profile = from_document(document, "p.json")
    assert [layer.name for layer in profile.layers] == ["x_0", "x_1", "x_2"]
    assert profile.edges == ((0, 1), (1, 2))
    assert profile.layers[1].kept_bytes == 9


@pytest.mark.parametrize(
    ("lines", "fault"),
    [
        ([f"a -- x -- {NUMBERS}", "what is this"], "graph, line 2: 'what is this' should be 'node -- name"),
        ([f"a -- x -- {NUMBERS}", "\ta -- b -- c"], "graph, line 2: 'a -- b -- c' should be an edge"),
        ([f"a -- x -- {NUMBERS}", "\ta -- b"], "graph, line 2: 'b' is not a node of this graph"),
        ([f"a -- x -- {NUMBERS}", f"a -- y -- {NUMBERS}"], "graph, line 2: 'a' is defined a second time"),
        (["a -- x -- forward_compute_time=1"], "graph, line 1: backward_compute_time is missing"),
        ([f"a -- x -- {NUMBERS}".replace("=4", "=four")], "'backward_compute_time' is 'four', should be a number"),
        ([f"a -- x -- {NUMBERS}".replace("=4", "=nan")], "'backward_compute_time' is 'nan', should be a number from 0"),
        ([f"a -- x -- {NUMBERS}".replace("=4", "=-1")], "'backward_compute_time' is '-1', should be a number from 0"),
        ([f"a -- x -- {NUMBERS}".replace("=4", "")], "line 1: 'backward_compute_time' should read 'field=number'"),
        (
            [f"a -- x -- {NUMBERS}", f"b -- y -- {NUMBERS}", "\ta -- b", "\tb -- a"],
            "the edges form a cycle through or before layer 'x'",
        ),
        ([f"a -- Input -- {NUMBERS}"], "has no layers"),
        (
            ["a -- x -- forward_compute_time=0, backward_compute_time=0, activation_size=1, parameter_size=1"],
            "any time",
        ),
    ],
)
def test_faults_of_a_text_graph(lines: list[str], fault: str) -> None:
    with pytest.raises(UserError) as error:
        graph(*lines)
    assert fault in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"micro_batch": 0}, "micro_batch is 0, should be a whole number of at least 1"),
        ({"layers": [{"name": "x"}]}, "layers[0]: field"),
        ({"layers": []}, "has no layers"),
        ({"edges": [[1, 0]]}, "edge 1 -> 0 should lead from a layer to a later one"),
        ({"edges": [[0]]}, "edges holds [0], should hold pairs of layer positions"),
        ({"speed": 1}, "speed"),
        ({"version": 2}, "version 2 is not supported"),
        ({"format": "autoddl-plan"}, "autoddl-profile"),
    ],
)
def test_faults_of_a_json_profile(tmp_path: Path, change: dict[str, object], fault: str) -> None:
    layers = [ProfiledLayer(name, 1.0, 2.0, 3.0, 4.0) for name in "ab"]
    path = tmp_path / "p.json"
    path.write_text(json.dumps({**to_document(Profile.chain("p", 1, layers)), **change}))
    with pytest.raises(UserError) as error:
        load_profile(path)
    assert fault in str(error.value)


def test_a_profile_needs_a_place_and_a_micro_batch(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="profile 'nowhere' is neither a file nor one of bert-48, resnet-50, vgg-19"):
        load_profile("nowhere")
    path = tmp_path / "graph.txt"
    path.write_text(f"a -- x -- {NUMBERS}")
    with pytest.raises(UserError, match="its name has no pbs-N"):
        load_profile(path)
    assert load_profile(path, micro_batch=3).micro_batch == 3
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="cannot be read"):
        load_profile(path)
