"""``autoddl report``: the texts of the page, and that no script runs in it but the one that sorts tables."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from importlib import resources

import pytest

from autoddl.__main__ import main
from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.documents import Fields
from autoddl.costmodel.graph import graph_from_document
from autoddl.diffing import compare
from autoddl.explain import explain, view_of
from autoddl.pipelines.joint import JointOptions
from autoddl.pipelines.joint.planner import plan_jointly
from autoddl.planfile import plan_document, plan_from_document
from autoddl.report import report_page
from autoddl.report.charts import graph_gutters
from autoddl.report.markup import Markup, element, join
from autoddl.search.planner import Options
from autoddl.zoo import Transformer, gpt, mlp

from .sample_plans import SMALL, gpt_plan, pipeline_plan, written

HOSTILE = """<script>alert(1)</script>"onload='x' & <img src=x onerror=alert(2)>"""


class Page(HTMLParser):
    """The elements and the text of a page; ``faults`` are tags that are not closed in order."""

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.faults: list[str] = []
        self.stack: list[str] = []
        self.feed(text)
        self.close()
        self.faults += self.stack

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self.stack.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        if not self.stack or self.stack.pop() != tag:
            self.faults.append(f"</{tag}>")

    def handle_data(self, data):
        if not {"style", "script"} & set(self.stack):
            self.text.append(data)

    @property
    def shown(self) -> str:
        return " ".join(" ".join(self.text).split())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def viewed(document):
    return view_of(plan_from_document(Fields(document, "plan"), "plan"))


def page_of(document, count=1):
    return report_page(explain(viewed(document), count=count))


def page_with(document, claims, **changes):
    """Return the page of a plan with changed fields of its document, which a loaded plan could not have, and other changes."""
    plan = plan_from_document(Fields(document, "plan"), "plan")
    return report_page(explain(view_of(replace(plan, document={**document, **claims}, **changes)), count=0))


def packaged(name: str) -> str:
    return resources.files("autoddl.report").joinpath(name).read_text(encoding="utf-8")


def assert_is_dead(text: str) -> None:
    """Check that a page is well-formed, fetches nothing, and runs no script but the one that sorts tables."""
    page = Page(text)
    assert page.faults == []
    names = {tag for tag, _ in page.elements}
    assert not names & {"iframe", "object", "embed", "img", "base", "form", "input", "foreignobject", "use"}
    for tag, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on")], (tag, attributes)
        for name in ("href", "src", "xlink:href", "action", "data"):
            target = attributes.get(name)
            assert target is None or target.startswith("#") or target == "data:,", (tag, attributes)
        assert "url(" not in (attributes.get("style") or "")
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    assert "url(" not in style and "@import" not in style and "http" not in style
    policy = next(m["content"] for m in page.all("meta") if m.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert page.all("script") == [{}] and script.strip() == packaged("sort.js").strip()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy.split("script-src ")[1] == f"'sha256-{digest}'"


@pytest.fixture(scope="module")
def small():
    return gpt_plan()


@pytest.fixture(scope="module")
def piped():
    return pipeline_plan()


# ------------------------------------------------------------------------------------------------------------ what it says


def test_page_of_a_plan(small):
    text = page_of(small)
    assert_is_dead(text)
    page = Page(text)
    anchors = ["baselines", "time", "layers", "memory", "alternatives", "certificate", "trust", "provenance"]
    assert [section["id"] for section in page.all("section")] == anchors
    ids = {attributes["id"] for _, attributes in page.elements if "id" in attributes}
    assert {link["href"][1:] for link in page.all("a")} == set(anchors) <= ids
    for words in (
        "small trains a step in",
        "h: block repeated 2 times",
        "mlp.c_fc",
        "(2,1,1) | (2,1,1)",
        "arithmetic",
        "activations",
        "data parallel",
        "Proven: none of the",
        "is not calibrated",
        small["graph_hash"],
    ):
        assert words in page.shown, words
    assert len(page.all("h1")) == 1 and len(page.all("h2")) == len(anchors)
    assert all(box.get("aria-label") for box in page.all("div") if box.get("class") == "scroll")


def test_page_says_what_the_options_left_out(small):
    assert "Summa meshes; summa=True includes them" not in Page(page_of(small)).shown
    assert "Summa meshes; summa=True includes them" in Page(page_of(gpt_plan(summa=False))).shown


def test_page_of_a_pipeline(piped):
    text = page_of(piped)
    assert_is_dead(text)
    page = Page(text)
    assert "pipeline" in [section["id"] for section in page.all("section")]
    for words in (
        "2 stages under 1f1b: the busiest",
        "Stage 1, recomputed",
        "worker 1",
        "DAPPLE",
        "asynchronous",
        "Not proven",
    ):
        assert words in page.shown, words
    tasks = [words for words in re.findall(r"<title>([^<]*) on worker \d: ", text)]
    # Two workers, four micro-batches: forwards and backwards, recomputation at stage 1, an all-reduce and an update each.
    assert sorted(tasks, key=str)[:3] == ["0A0", "0B0", "0B1"] and len([t for t in tasks if t[1] in "FBR"]) == 20


def test_the_plan_of_a_papers_planner_is_read_by_all():
    """Its space is not counted; the best plan of the same family costs no more than the plan."""
    graph = gpt(Transformer("small", 4, 64, 4, 8, 128))
    cluster = load_cluster("local-cpu").resized(1, 4)
    planned = plan_jointly(graph, cluster, JointOptions(Options(batch=8), "chimera"))
    view = viewed(json.loads(json.dumps(plan_document(planned))))
    page = Page(report_page(explain(view, count=0)))
    assert page.faults == [] and "Not proven: chimera's planner chose this plan" in page.shown
    same = next(rival for rival in view.rivals if rival.name == "Chimera")
    assert same.step_s <= view.step_s
    row = next(row for row in planned.rivals if row.name == "Chimera")
    assert row.paper_step_s == pytest.approx(view.step_s) and row.step_s == same.step_s
    assert planned.evaluation.exposed_communication_s > 0
    assert compare(view, view).is_empty and view.recomputation == "none"


def test_page_of_a_calibrated_cluster(small):
    trust = {
        "calibrated": "2026-01-02T03:04:05",
        "probability": 0.75,
        "expected_regret": 0.012,
        "draws": 200,
        "rivals": [{"name": "megatron", "probability": 0.25}, {"name": "summa", "probability": 0.0}],
        "measurement": {
            "rival": "megatron",
            "collective": "all-reduce",
            "level": "inter-node",
            "ranks": 4,
            "bytes": 1048576.0,
            "share": 0.6,
        },
        "notes": ["outside of what was measured"],
    }
    shown = Page(page_with(small, {"trust": trust})).shown
    for words in (
        "best with probability 75%",
        "expected regret is 1.20%",
        "200 draws",
        "measure all-reduce on inter-node with 4 ranks and 1 MiB: 60% of the uncertainty",
        "outside of what was measured",
    ):
        assert words in shown, words


def test_long_schedules_show_their_beginning_and_end():
    text = page_of(pipeline_plan(num_micro_batches=200), count=0)
    page = Page(text)
    assert page.shown.count("The first") == 1 and page.shown.count("The last") == 1
    assert len(re.findall(r"<title>[^<]* on worker", text)) <= 760
    assert "0F0 on worker 0" in text and "1B199 on worker 1" in text


def test_numbers_are_exact_where_they_are_pointed_at(small, piped):
    """Cells have their exact value in ``data-value`` and in the title; the segments of bars show their values."""
    page = Page(page_of(small))
    cells = [cell for cell in page.all("td") if "data-value" in cell]
    assert len(cells) > 40 and all(cell["title"] for cell in cells)
    (step,) = {cell["data-value"] for cell in cells if cell["title"] == f"{viewed(small).step_s:.9g} s"}
    assert float(step) == viewed(small).step_s
    tips = re.findall(r"<title>([^<]*)</title></rect>", page_of(piped))
    assert any(re.fullmatch(r"computation: [\d.]+ .?s \([\d.]+%\)", tip) for tip in tips)
    assert any(re.fullmatch(r"activations: [\d.]+ [KMG]iB \([\d.]+%\)", tip) for tip in tips)
    assert "limit: 70 GiB" in page_of(piped)


def test_repeated_tables_are_collapsed(piped):
    """Only the table of the first stage is open."""
    text = page_of(piped)
    layers = text[text.index('id="layers"') : text.index('id="pipeline"')]
    assert re.findall(r'<details( open="")?><summary><h3>(Stage \d)', layers) == [
        (' open=""', "Stage 0"),
        ("", "Stage 1"),
    ]
    assert layers.count("<table") == layers.count("</table></div></details>") == 2
    assert "1 settings and their outcomes" not in text
    assert "<summary>Infeasible: WPipe</summary>" in text


def test_one_device_and_no_alternatives():
    text = page_of(gpt_plan(nodes=1, devices=1), count=1)
    assert_is_dead(text)
    assert "The step is 100% computation" in Page(text).shown and 'id="alternatives"' not in text


def test_very_many_layers_are_cut_short():
    text = page_of(gpt_plan(mlp((8,) * 321), nodes=1, devices=1, batch=8, micro_batch=8), count=0)
    assert "20 more rows are not shown" in Page(text).shown
    assert text.count('class="gutter"') == 300


# ------------------------------------------------------------------------------------------------------------ what it must not do


def test_hostile_names_are_harmless():
    document = gpt_plan(replace(gpt(SMALL), name=HOSTILE, sample=HOSTILE, notes=(HOSTILE,)))
    cluster = replace(load_cluster("gcp-a100").resized(2, 2), name=HOSTILE)
    rivals = [{**document["rivals"][0], "name": HOSTILE, "how": HOSTILE}, {"name": "x", "infeasible": HOSTILE}]
    text = page_with(document, {"method": HOSTILE, "rivals": rivals}, cluster=cluster)
    assert_is_dead(text)
    assert Page(text).shown.count("<script>alert(1)</script>") >= 5


def test_hostile_layers_are_harmless(small):
    document = gpt(replace(SMALL, layers=1)).document()
    text = json.dumps(document).replace("ln_f", HOSTILE.replace('"', "'"))
    graph = graph_from_document(json.loads(text), "graph")
    page = page_of(gpt_plan(graph))
    assert_is_dead(page)
    assert "<script>alert(1)" in Page(page).shown


def test_markup_escapes_everything_but_itself():
    assert (
        element("p", "<b>", Markup("<i>x</i>"), None, class_='"a"') == '<p class="&quot;a&quot;">&lt;b&gt;<i>x</i></p>'
    )
    assert element("rect", x=1.0, vector_effect="y") == '<rect x="1" vector-effect="y"/>'
    assert join("a & b", None) == "a &amp; b"


def test_lines_of_the_layer_graph():
    """A residual connection runs beside the spine from its source to its consumer, and frees its lane there."""
    rows, lanes = graph_gutters(5, [(0, 1), (1, 2), (0, 2), (2, 3), (3, 4), (2, 4)])
    assert lanes == 1
    lines = [re.findall(r'd="([^"]*)"', row) for row in rows]
    assert lines[0] == ["M9 50V100", "M9 50C20 50 20 70 20 100"]  # to the next row, and to the lane
    assert lines[1] == ["M9 50V100", "M9 0V50", "M20 0V100"]  # the line of row 0 passes
    assert lines[2] == ["M9 50V100", "M9 0V50", "M20 0C20 30 20 50 9 50", "M9 50C20 50 20 70 20 100"]
    assert lines[4] == ["M9 0V50", "M20 0C20 30 20 50 9 50"]
    crossing, lanes = graph_gutters(6, [(0, 3), (1, 4), (2, 5)])
    assert lanes == 3 and "M9 50V100" not in crossing[0]


# ------------------------------------------------------------------------------------------------------------ the command


def test_command_writes_the_page(tmp_path, capsys, small):
    plan, page = written(tmp_path / "plan.json", small), tmp_path / "report.html"
    assert main(["report", plan, "-o", str(page), "--alternatives", "1"]) == 0
    assert str(page) in capsys.readouterr().out
    assert_is_dead(page.read_text(encoding="utf-8"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json", "report.html"]


@pytest.mark.parametrize("field", ["candidates", "trust", "notes", "rivals"])
def test_broken_documents_leave_no_page(tmp_path, capsys, small, field):
    broken = written(tmp_path / "broken.json", {name: value for name, value in small.items() if name != field})
    page = tmp_path / "report.html"
    page.write_text("before")
    assert main(["report", broken, "-o", str(page), "--alternatives", "0"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and field in err
    assert page.read_text() == "before"


def test_where_it_cannot_write(tmp_path, capsys, small):
    plan = written(tmp_path / "plan.json", small)
    for where in (tmp_path, tmp_path / "none" / "report.html"):
        assert main(["report", plan, "-o", str(where), "--alternatives", "0"]) == 2
        assert "cannot be written" in capsys.readouterr().err
    assert main(["report", plan]) == 2
    assert "-o" in capsys.readouterr().err


def test_style_is_packaged():
    style = packaged("style.css")
    assert "@media print" in style and "prefers-color-scheme: dark" in style and "max-width: 40rem" in style
