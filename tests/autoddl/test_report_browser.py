"""The report in a real browser: nothing is cut off on phones, on large screens or on paper, and all texts are readable.

Chromium loads a copy of the page with a script that measures the elements and writes the result into the page. The original page
allows no scripts but its own. The browser then prints the elements of the page.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from autoddl.explain import explain, view_of
from autoddl.planfile import load_plan
from autoddl.report import report_page

from .sample_plans import gpt_plan, pipeline_plan, written

#: Each start of the browser takes a second.
pytestmark = pytest.mark.slow

NAMES = ("chromium", "google-chrome", "google-chrome-stable", "chromium-browser")

OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars",
)  # fmt: skip
#: The sections of all pages; pages of pipelines have one more.
SECTIONS = {"time", "layers", "memory", "alternatives", "baselines", "certificate", "trust", "provenance"}

PROBE = r"""
<script>
window.faults = [];
addEventListener("error", event => faults.push(String(event.message)));
addEventListener("securitypolicyviolation", event => faults.push("policy: " + event.blockedURI));
addEventListener("load", () => {
  const box = element => element.getBoundingClientRect();
  const rgb = text => (text.match(/[\d.]+/g) || []).map(Number);
  const background = element => {
    for (let e = element; e; e = e.parentElement) {
      const c = rgb(getComputedStyle(e).backgroundColor);
      if (c.length && (c.length < 4 || c[3] > 0)) return c;
    }
    return matchMedia("(prefers-color-scheme: dark)").matches ? [0, 0, 0] : [255, 255, 255];
  };
  const light = c => {
    const [r, g, b] = c.slice(0, 3).map(v => v / 255).map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const contrast = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p); return (x + .05) / (y + .05); };
  const seen = element => { const b = box(element); return b.width > 1 && b.height > 1 && !element.closest("thead.hidden"); };
  const texts = [...document.querySelectorAll("body *")].filter(e => seen(e) && !e.closest("script") &&
    [...e.childNodes].some(n => n.nodeType == 3 && n.data.trim()));
  const dim = [], small = [];
  for (const e of texts) {
    const style = getComputedStyle(e);
    if (style.clipPath != "none" || e.closest("thead") && getComputedStyle(e.closest("thead")).clipPath != "none") continue;
    const inside = e.namespaceURI.endsWith("svg");
    if (inside && e.tagName != "text") continue;
    const before = inside && e.previousElementSibling && (e.getAttribute("class") || "").startsWith("on-");
    const ground = before ? rgb(getComputedStyle(e.previousElementSibling).fill) : background(e);
    const ratio = contrast(rgb(inside ? style.fill : style.color), ground);
    if (ratio < 4.5) dim.push([e.textContent.slice(0, 40), Math.round(ratio * 100) / 100]);
    if (!inside && parseFloat(style.fontSize) < 12) small.push(e.textContent.slice(0, 40));
  }
  const scrolls = e => e.closest(".scroll");
  const outside = [...document.querySelectorAll("body *")].filter(e => !scrolls(e) && box(e).width > 0 &&
    (box(e).right > innerWidth + .5 || box(e).left < -.5) && getComputedStyle(e).position != "absolute");
  const overlaps = [];
  const headings = [...document.querySelectorAll("h1, h2, h3, p, .figures > div, .facts > div, nav, table")].filter(seen);
  for (let i = 0; i < headings.length; i++) for (let j = i + 1; j < headings.length; j++) {
    const [a, b] = [headings[i], headings[j]], [p, q] = [box(a), box(b)];
    if (a.contains(b) || b.contains(a) || scrolls(a) || scrolls(b)) continue;
    if (Math.min(p.right, q.right) - Math.max(p.left, q.left) > 1 && Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top) > 1)
      overlaps.push([a.textContent.slice(0, 40), b.textContent.slice(0, 40)]);
  }
  const report = {
    width: innerWidth, scrollWidth: document.documentElement.scrollWidth, faults,
    dark: matchMedia("(prefers-color-scheme: dark)").matches,
    sections: Object.fromEntries([...document.querySelectorAll("section")].map(s => [s.id, [box(s).width, box(s).height]])),
    pictures: [...document.querySelectorAll("svg")].filter(s => !s.closest("details:not([open])"))
      .map(s => [s.getAttribute("class"), box(s).width, box(s).height]),
    marks: [...document.querySelectorAll("svg.timeline rect")].filter(r => box(r).width > 0 && box(r).height > 0).length,
    boxes: [...document.querySelectorAll(".scroll")].map(b => [b.getAttribute("aria-label"), b.clientWidth, b.scrollWidth]),
    requests: performance.getEntriesByType("resource").length,
    outside: outside.map(e => e.tagName + "." + (e.getAttribute("class") || "") + " " + e.textContent.slice(0, 30)),
    buttons: document.querySelectorAll("th button").length,
    nodes: [...document.querySelectorAll(".graph tr:not(.block)")].filter(r => r.querySelector(".node")).map(r => {
      const [row, node, edges] = [box(r), box(r.querySelector(".node")), box(r.querySelector(".edges"))];
      return [row.height, edges.height, Math.abs(node.top + node.height / 2 - (edges.top + edges.height / 2))];
    }),
    overlaps, dim, small,
  };
  const out = document.createElement("pre");
  out.id = "probe";
  out.textContent = JSON.stringify(report);
  document.body.append(out);
});
</script>
"""

#: A window is at least 500 pixels wide, so pages are shown in frames. The result of the script is copied out of each frame.
SHELL = '<!DOCTYPE html><meta charset="utf-8"><meta name="color-scheme" content="light dark">\n'
FRAME = """<iframe style="display:block;width:%dpx;height:900px;border:0" srcdoc="%s"
  onload="this.after(this.contentDocument.getElementById('probe').cloneNode(true))"></iframe>
"""
#: A4 less margins of 14 mm, at 96 pixels per inch.
PAPER = round((210 - 28) / 25.4 * 96)


@pytest.fixture(scope="module")
def browser() -> str:
    """The first browser that runs: the chromium of some distributions only prints where to get it."""
    for path in filter(None, map(shutil.which, NAMES)):
        if subprocess.run([path, "--version"], capture_output=True, timeout=60).returncode == 0:
            return path
    pytest.skip(f"none of {', '.join(NAMES)} is on the path, or none runs")


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("reports")
    found = {}
    for name, document in (
        ("plain", gpt_plan()),
        ("piped", pipeline_plan()),
        ("both", pipeline_plan("chimera", concatenation="direct")),
    ):
        view = view_of(load_plan(written(folder / f"{name}.json", document)))
        found[name] = folder / f"{name}.html"
        found[name].write_text(report_page(explain(view, count=1)), encoding="utf-8")
    return found


def browse(browser: str, folder: Path, page: Path, *options: str) -> subprocess.CompletedProcess[str]:
    profile = folder / "profile"
    return subprocess.run(
        [browser, *OPTIONS, f"--user-data-dir={profile}", *options, page.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip


def framed(page: Path, width: int) -> str:
    """Return a frame of a width in pixels that shows the page with the script.

    On phones and on paper, collapsed elements are open. In a frame of the width of paper, the style rules for printing apply.
    """
    text = page.read_text(encoding="utf-8")
    text, count = re.subn(r'<meta http-equiv="Content-Security-Policy"[^>]*>', lambda _: PROBE, text)
    assert count == 1
    if width in (PAPER, 390):
        text = text.replace("<details>", "<details open>")
    if width == PAPER:
        text = (
            text.replace("@media print", "@media all")
            .replace("@page", "@media none")
            .replace("prefers-color-scheme", "x")
        )
    return FRAME % (width, html.escape(text))


def probed(browser: str, folder: Path, frames: list[str], *options: str) -> list[dict]:
    """Return the result of the script for each frame."""
    copy = folder / "copy.html"
    copy.write_text(SHELL + "".join(frames), encoding="utf-8")
    dom = browse(browser, folder, copy, "--window-size=1400,900", *options, "--dump-dom").stdout
    found = re.findall(r'<pre id="probe">(.*?)</pre>', dom, re.DOTALL)
    assert len(found) == len(frames), dom[-2000:]
    return [json.loads(html.unescape(one)) for one in found]


def assert_is_right(seen: dict, width: int, sections: set[str]) -> None:
    assert seen["width"] == width and seen["scrollWidth"] <= width, seen["outside"]
    assert seen["outside"] == [] and seen["faults"] == [] and seen["requests"] == 0
    assert set(seen["sections"]) == sections
    for name, (wide, high) in seen["sections"].items():
        assert wide > 0.8 * min(width, 1088) - 40 and high > 80, name
    assert seen["buttons"] > 10
    assert seen["pictures"] and all(wide > 1 and high > 1 for _, wide, high in seen["pictures"])
    assert seen["overlaps"] == [] and seen["dim"] == [] and seen["small"] == []
    # The edges of the layer graph fill their rows, and its nodes lie on them.
    assert seen["nodes"] and all(abs(row - edges) < 2.5 and off < 1 for row, edges, off in seen["nodes"])


DARK = "--blink-settings=preferredColorScheme=0"


@pytest.mark.parametrize(
    ("looked_at", "options"),
    [
        ((("plain", 390), ("piped", 1280), ("piped", PAPER)), ()),
        ((("plain", 1280), ("piped", 390), ("both", 1280)), (DARK,)),
    ],
    ids=["light", "dark"],
)
def test_on_screens_and_on_paper(browser, tmp_path, pages, looked_at, options):
    """Paper does not scroll, so all content has to fit."""
    frames = [framed(pages[name], width) for name, width in looked_at]
    for (name, width), seen in zip(looked_at, probed(browser, tmp_path, frames, *options)):
        assert seen["dark"] == bool(options)
        if width == PAPER:
            seen["small"] = []  # small text is readable on paper
        assert_is_right(seen, width, SECTIONS | ({"pipeline"} if name != "plain" else set()))
        if name != "plain":
            assert seen["marks"] > 20
        if width != 390:  # nothing needs scrolling there
            assert all(inner <= outer + 1 for _, outer, inner in seen["boxes"]), seen["boxes"]


def test_print(browser, tmp_path, pages):
    target = tmp_path / "report.pdf"
    browse(browser, tmp_path, pages["piped"], "--no-pdf-header-footer", f"--print-to-pdf={target}")
    content = target.read_bytes()
    assert content.startswith(b"%PDF-") and content.rstrip().endswith(b"%%EOF")
    sizes = re.findall(rb"/MediaBox\s*\[\s*0 0 ([\d.]+) ([\d.]+)\s*\]", content)
    assert 3 <= len(sizes) <= 12
    assert {(round(float(w)), round(float(h))) for w, h in sizes} == {(595, 842)}


SORT = r"""
<script>
addEventListener("load", () => {
  const report = {};
  const look = (name, table, heading, column) => {
    const items = () => table.tBodies.length > 1 ? [...table.tBodies] : [...table.rows].slice(1);
    const row = item => item.rows ? item.rows[0] : item;
    const cells = () => items().map(row).filter(r => !r.classList.contains("block")).map(r => r.cells[column]);
    const now = () => cells().map(c => c.dataset.value === undefined ? c.textContent : Number(c.dataset.value));
    const button = [...table.tHead.querySelectorAll("button")].find(b => b.textContent == heading);
    const seen = [now()];
    for (let i = 0; i < 3; i++) {
      button.click();
      seen.push(now(), button.parentElement.getAttribute("aria-sort"));
    }
    report[name] = seen;
  };
  look("baselines", document.querySelector("#baselines table"), "Step", 1);
  look("names", document.querySelector("#baselines table"), "Plan", 0);
  look("layers", document.querySelector("table.graph"), "Time", 4);
  look("choices", document.querySelector("table.choices"), "Regret", 2);
  const out = document.createElement("pre");
  out.id = "probe";
  out.textContent = JSON.stringify(report);
  document.body.append(out);
});
</script>
"""


def test_tables_are_sorted_by_their_headings(browser, tmp_path, pages):
    """Clicks sort by largest first, then by smallest first, and then restore the order.

    Sorted layers have no block rows. Alternatives stay with their choice.
    """
    (seen,) = probed(browser, tmp_path, [framed(pages["piped"], 1280).replace(html.escape(PROBE), html.escape(SORT))])
    for name, (before, first, how, second, other, third, none) in seen.items():
        assert len(before) > 2 and third == before and none is None
        descending = name != "names"
        assert (how, other) == (("descending", "ascending") if descending else ("ascending", "descending"))
        assert first == sorted(before, reverse=descending, key=lambda x: x if descending else x.lower())
        assert second == first[::-1]
    assert seen["baselines"][0] != seen["baselines"][1] and isinstance(seen["layers"][1][0], float)


def test_the_page_runs_its_own_script_alone(browser, tmp_path, pages):
    """A script that is inserted into the page does not run, because of the page's policy; the page's own script runs."""
    text = pages["plain"].read_text(encoding="utf-8")
    copy = tmp_path / "injected.html"
    copy.write_text(text.replace("</body>", "<script>document.title = 'alive'</script></body>"), encoding="utf-8")
    dom = browse(browser, tmp_path, copy, "--dump-dom").stdout
    assert "<title>small: plan report</title>" in dom and "<title>alive</title>" not in dom
    assert dom.count('<button type="button" title="sort by this column">') > 10
    assert '<button type="button"' not in text
