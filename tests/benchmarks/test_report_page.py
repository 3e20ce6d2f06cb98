"""The report's page: made of folders that are there, whole in one file, and what stands in its tables and sentences."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from benchmarks import report
from benchmarks.report_markdown import headings, html_of, inline, shifted
from benchmarks.report_page import assemble
from benchmarks.report_parts import Outcome, State
from cs336_systems.profiling.environment import collect_environment
from cs336_systems.profiling.report import environment_lines

PIXEL = bytes.fromhex("89504e470d0a1a0a0000000d49484452")


@pytest.fixture
def folder(tmp_path):
    """A report of two parts, one of which did not end, with a plot, a table and figures that speak for themselves."""
    environment = collect_environment("cpu", commit="abc")
    for name in ("attention", "memory"):
        (tmp_path / name).mkdir()
        environment.write(tmp_path / name / "environment.json")
    lines = "\n".join(environment_lines(environment))
    (tmp_path / "attention/tables.md").write_text(
        f"# Attention benchmark\n\n{lines}\n\n- by hand & <by> heart\n\n## float32\n\n### Time, ms\n\n"
        "| who   | d 16 |\n|:------|-----:|\n| naive | 1.5  |\n| a\\|b | oom |\n"
    )
    rows = ["implementation,pass,dtype,mask,batch,length,head_dim,status,median_ms,held_mib"]
    for length, held in ((256, 1), (512, 4)):
        rows += [
            f"naive,{which},float32,full,8,{length},16,ok,{ms},{held}"
            for which, ms in (("forward", 2), ("backward", 5))
        ]
    (tmp_path / "attention/results.csv").write_text("\n".join(rows) + "\n")
    (tmp_path / "attention/time.png").write_bytes(PIXEL)
    (tmp_path / "memory/viewer.html").write_text("<p>another page</p>")
    outcomes = {
        "attention": Outcome("ok", seconds=61.0),
        "memory": Outcome("failed", "exit status 1: <no> room"),
        "breakdown": Outcome("not there", "there is no benchmarks/breakdown.py"),
    }
    facts = {"suite": "quick", "about": "a trial", "device": "cpu", "programs": {name: name for name in outcomes}}
    state = State(tmp_path, facts, {})
    state.write()
    for name, outcome in outcomes.items():
        state.set(name, outcome)
    return tmp_path


def page_of(folder):
    _, path = assemble(folder)
    text = path.read_text()
    return text, ET.fromstring(text.removeprefix("<!DOCTYPE html>"))


def test_the_page_is_well_formed_and_needs_nothing_else(folder):
    text, root = page_of(folder)
    sources = [element.get("src") for element in root.iter() if element.get("src") is not None]
    assert len(sources) == 1
    assert sources[0].startswith("data:image/png;base64,iVBORw0KGgo")
    assert not re.search(r"https?://|@import|url\(", text)
    assert not [element.tag for element in root.iter() if element.tag in ("script", "link", "iframe", "object")]
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text


def test_every_link_within_the_page_has_its_place(folder):
    _, root = page_of(folder)
    places = [element.get("id") for element in root.iter() if element.get("id")]
    links = [element.get("href") for element in root.iter("a")]
    assert len(places) == len(set(places))
    assert {link[1:] for link in links if link.startswith("#")} <= set(places)
    assert all((folder / link).exists() for link in links if not link.startswith("#"))
    assert "memory/viewer.html" in links
    assert "#part-memory" in links


def test_every_table_scrolls_in_a_box_of_its_own(folder):
    _, root = page_of(folder)
    boxes = [element for element in root.iter("div") if element.get("class") == "scroll"]
    assert len(boxes) == len([*root.iter("table")]) == 2
    assert all(len(box.findall("table")) == 1 for box in boxes)


def test_what_became_of_each_part_is_said(folder):
    text = assemble(folder)[0].read_text()
    assert "1 of 3 parts are complete" in text
    assert "**Failed: exit status 1: <no> room.**" in text
    assert "**Not there: there is no benchmarks/breakdown.py.**" in text
    assert "1 min 01 s" in text
    assert "2 of 2" not in text
    assert "4 of 4" in text
    html = assemble(folder)[1].read_text()
    assert "exit status 1: &lt;no&gt; room" in html


def test_the_environment_is_said_once(folder):
    text = assemble(folder)[0].read_text()
    assert text.count("- torch: ") == 1
    assert text.count("commit: abc") == 1
    assert "- by hand & <by> heart" in text
    assert "# Attention benchmark" not in text
    assert "### float32\n\n#### Time, ms" in text


def test_an_environment_of_its_own_is_said_by_the_part(folder):
    collect_environment("cpu", commit="def").write(folder / "memory/environment.json")
    text = assemble(folder)[0].read_text()
    attention, memory = (text.index(f'<a id="part-{name}">') for name in ("attention", "memory"))
    assert "commit: abc" in text[attention:memory]
    assert "commit: def" in text[memory:]


def test_figures_speak_and_what_is_missing_is_named(folder):
    text = assemble(folder)[0].read_text()
    said = text[text.index("## What the figures say") : text.index('<a id="part-attention">')]
    assert "naive 2.50" in said
    assert "quadratic: naive (2.0); linear: none" in said
    assert "**Where bfloat16 pays:** not measured: no two rows differ in dtype alone, float32 and bfloat16" in said
    assert "**How memory grows:** not measured: there are no rows" in said
    assert "**What is not matrix products:** not measured: there are no rows" in said


def test_parts_of_one_program_speak_together(folder):
    (folder / "attention-long").mkdir()
    names, *_ = (folder / "attention/results.csv").read_text().splitlines()
    (folder / "attention-long/results.csv").write_text(f"{names}\nnaive,both,float32,full,8,1024,16,ok,8,8\n")
    state = State.read(folder)
    assert state is not None
    state.facts["programs"]["attention-long"] = "attention"
    state.write()
    state.set("attention-long", Outcome("ok", seconds=1.0))
    text = assemble(folder)[0].read_text()
    said = text[text.index("## What the figures say") : text.index('<a id="part-attention">')]
    assert said.count("### Attention alone") == said.count("Backward beside forward") == 1
    assert "At length 1024 the fastest" in said
    assert "naive 2.50" in said


def test_only_assemble_makes_the_page_again(folder, capsys):
    (folder / "attention/tables.md").write_text("# A\n\nchanged\n")
    assert report.main(["--only-assemble", str(folder)]) == 0
    assert capsys.readouterr().out == f"wrote {folder / 'report.md'}\nwrote {folder / 'report.html'}\n"
    assert "<p>changed</p>" in (folder / "report.html").read_text()


def test_folders_without_a_record_are_found_by_what_is_in_them(folder, capsys):
    (folder / "parts.json").unlink()
    (folder / "attention").rename(folder / "attention-causal")
    assert report.main(["--only-assemble", str(folder)]) == 0
    text = (folder / "report.md").read_text()
    assert "## Attention alone: causal" in text
    assert "naive 2.50" in text
    assert "part-memory" not in text
    empty = folder / "empty"
    empty.mkdir()
    assert report.main(["--only-assemble", str(empty)]) == 2
    assert "has no parts.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("markdown", "expected"),
    [
        ("## A `b` <c>", '<h2 id="x-1">A <code>b</code> &lt;c&gt;</h2>'),
        ("one\ntwo\n\nthree", "<p>one two</p>\n<p>three</p>"),
        ("- a\n  more\n- **b**", "<ul><li>a more</li><li><strong>b</strong></li></ul>"),
        ("```\n# no & heading\n```", '<pre tabindex="0"><code># no &amp; heading</code></pre>'),
        ("![p](none.png)", '<div class="plots"><p>p: there is no such file.</p></div>'),
        ("a\n- b", "<p>a</p>\n<ul><li>b</li></ul>"),
    ],
)
def test_markdown_becomes_html(markdown, expected):
    assert html_of(markdown, "x", lambda path: None) == expected


def test_a_table_right_below_a_line_and_its_columns():
    html = html_of("said\n| a | words | 1 |\n|:--|--:|--:|\n| x\\|y | in it | 2.5 |", "x", lambda path: None)
    assert html.startswith("<p>said</p>\n<div")
    assert '<th scope="row">x|y</th><td>in it</td><td class="number">2.5</td>' in html


def test_pictures_in_a_row_are_one_gallery():
    html = html_of("![a](a.png)\n\n![b](b.png)\n\nend", "x", lambda path: f"data:{path}")
    assert html.count('<div class="plots">') == 1
    assert '<img src="data:b.png" alt="b"/>' in html
    assert html.endswith("<p>end</p>")


def test_links_and_what_looks_like_html():
    assert inline('[a](b.csv) <script> "q"') == '<a href="b.csv">a</a> &lt;script&gt; &quot;q&quot;'


def test_headings_are_shifted_but_not_below_the_lowest():
    assert shifted("# a\n###### b\n#no", 2) == "### a\n###### b\n#no"
    assert [heading.anchor for heading in headings("# a\n```\n# code\n```\n## b", "p")] == ["p-1", "p-2"]
