"""The pages of a report: answers, tables and rows of its parts, as files and as one file of HTML."""

from __future__ import annotations

import json

import pandas as pd
import pytest

from benchmarks import report
from benchmarks.lib.tables import environment_lines
from benchmarks.parts.page import write_pages
from cs336_systems.profiling.environment import collect_environment

PIXEL = bytes.fromhex("89504e470d0a1a0a0000000d49484452")


@pytest.fixture
def folder(tmp_path):
    """A part with rows that answer a question, and a part that failed and answers none."""
    environment = collect_environment("cpu", commit="abc")
    columns = (
        "case,dtype,mask,length,head_dim,status,reason,provider,pass,median_ms,held_mib,round_ms,speedup_over_naive\n"
    )
    figures = (
        "ok,,flash,forward,2.5,,2.5;2.5,2",
        "ok,,naive,forward,5.0,,5.0;5.0,1",
        "ok,,flash,backward,3.5,7.0,3.5;3.5,8",
        "oom,full,naive,backward,,,,",
    )
    rows = "".join(f"a,float32,full,256,16,{each}\n" for each in figures)
    for name in ("attention", "host"):
        (tmp_path / name / "plots").mkdir(parents=True)
        environment.write(tmp_path / name / "environment.json")
        lines = "\n".join(environment_lines(environment))
        table = "## float32 <b>\n\n| a | ms |\n|:--|--:|\n| x\\|y | 2.5 |\n"
        (tmp_path / name / "tables.md").write_text(f"# Attention\n\n{lines}\n\n- by hand & <by> heart\n\n{table}")
        (tmp_path / name / "plots/median-ms-forward-float32-full-d64.png").write_bytes(PIXEL)
    (tmp_path / "attention/results.csv").write_text(columns + rows)
    report.write_outcome(tmp_path / "host", report.Outcome("failed", "exit status 1: <no> memory", 3.0))
    return tmp_path


def test_a_question_has_a_page_with_the_answer_the_table_and_the_rows(folder):
    (folder / "answers").mkdir()
    (folder / "answers/attention.md").write_text("It costs *much*.\n")
    write_pages(folder)
    text = (folder / "attention.md").read_text()
    title, answer, *_ = text.split("\n\n")
    assert (title, answer) == ("# What does attention cost, and where does memory end?", "It costs *much*.")
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| 256")
    ]
    assert lines[:2] == [["256", "16", "5.00", "2.50", "oom", "3.50"], ["256", "16", "oom", "7.00", "oom"]]
    assert ["256", "16", "float32", "naive", "backward", "oom"] in [line[:6] for line in lines]
    assert "![attention backward ms](attention-backward-ms.png)" in text
    assert "by hand" not in text
    assert "Rows: [attention.csv](attention.csv), [attention.json](attention.json)" in text
    rows = pd.read_csv(folder / "attention.csv")
    assert [*rows["median_ms"]][:3] == [2.5, 5.0, 3.5]
    assert set(rows["part"]) == {"attention"}
    assert "round_ms" not in rows
    assert "recompute_every" not in rows
    again = json.loads((folder / "attention.json").read_text())
    assert [row[again["columns"].index("held_mib")] for row in again["data"]] == [None, None, 7.0, None]
    assert again["columns"] == [*rows]


@pytest.mark.parametrize("missing", [False, True])
def test_rows_of_two_devices_are_never_in_one_table_or_plot(folder, missing):
    rows = pd.read_csv(folder / "attention/results.csv")
    (folder / "attention-backward-ms.png").touch()  # of the one device that there was
    (folder / "attention-limit").mkdir()
    others = rows.assign(device="NVIDIA B", median_ms=rows["median_ms"] * 100)
    others.to_csv(folder / "attention-limit/results.csv", index=False)
    rows.assign(**{} if missing else {"device": "NVIDIA A"}).to_csv(folder / "attention/results.csv", index=False)
    write_pages(folder)
    one, plot = ("unknown device", "unknown-device") if missing else ("NVIDIA A", "nvidia-a")
    page = (folder / "attention.md").read_text()
    tables = [each.partition("\n") for each in page.split("\n## ")[1:] if not each.startswith("Measured")]
    times = {title: text for title, _, text in tables if title.endswith("float32, without a mask, ms")}
    title = "Attention alone, float32, without a mask, ms"
    assert {name: " 350 " in text for name, text in times.items()} == {
        f"{one}: {title}": False,
        f"NVIDIA B: {title}": True,
    }
    assert all(name.startswith((f"{one}: ", "NVIDIA B: ")) for name, *_ in tables)
    drawn = {path.name for path in folder.glob("attention-*-ms.png")}
    assert drawn == {
        f"attention-{each}-{which}-ms.png" for each in (plot, "nvidia-b") for which in ("forward", "backward")
    }
    assert len(pd.read_csv(folder / "attention.csv")) == 2 * len(rows)


def test_other_parts_have_pages_of_their_own_and_the_first_page_leads_to_all(folder):
    paths = write_pages(folder)
    assert [path.name for path in paths] == [
        *("report.md", "report.html", "attention.md", "attention.html", "host.md", "host.html"),
    ]
    index, host = paths[0].read_text(), (folder / "host.md").read_text()
    assert "- [What does attention cost, and where does memory end?](attention.md)\n" in index
    assert "- [host](host.md)\n" in index
    parts = [[cell.strip() for cell in line.split("|")[1:-1]] for line in index.splitlines() if line.startswith("| ")]
    assert ["attention", "–", "–", "–", "3 of 4"] in parts
    assert ["host", "failed", "exit status 1: <no> memory", "3.00", "–"] in parts
    assert ["attention", "flash forward", "speedup over naive", "2.00", "1"] in parts
    assert "naive forward" not in index  # what the others are compared with
    assert host.startswith("# host\n\n**failed: exit status 1: <no> memory**")
    assert "# Attention" not in host
    assert "- device: " not in host
    assert "## float32 <b>" in host
    assert host.count("- by hand & <by> heart") == 1


def test_a_page_as_one_file_of_html(folder):
    write_pages(folder)
    html = (folder / "host.html").read_text()
    assert "<b>" not in html
    assert "&lt;no&gt; memory" in html
    assert '<td style="text-align:right">2.5</td>' in html
    assert '<td style="text-align:left">x|y</td>' in html
    assert html.count('<div class="scroll"') == html.count("</table></div>") == 2
    assert "<figcaption>median ms forward float32 full d64, of host</figcaption></figure>" in html
    assert 'src="data:image/png;base64,' in html
    assert '<a href="report.html">All pages</a>' in html
    assert '<a href="host.html">host</a>' in (folder / "report.html").read_text()
    for anchor in (part.split('"')[0] for part in html.split('href="#')[1:]):
        assert f'id="{anchor}"' in html
    (folder / "host/tables.md").write_text("![gone](gone.png)\n")
    write_pages(folder)
    assert "gone: there is no such file." in (folder / "host.html").read_text()


def test_a_part_whose_rows_came_later_has_no_page_of_its_own(folder):
    (folder / "transformer-warmup").mkdir()
    report.write_outcome(folder / "transformer-warmup", report.Outcome("not started"))
    write_pages(folder)
    assert (folder / "transformer-warmup.md").exists()
    rows = "case,model,batch,length,parameters,mode,warmup_steps,status,median_ms\na,small,4,128,9,step,1,ok,2.5\n"
    (folder / "transformer-warmup/results.csv").write_text(rows)
    write_pages(folder, plots=False)
    assert (folder / "warm-up.md").exists()
    assert not (folder / "transformer-warmup.md").exists()
    assert not (folder / "transformer-warmup.html").exists()


def test_the_pages_are_made_again_of_any_folders(folder, capsys):
    (folder / "host/tables.md").write_text("# A\n\nchanged\n")
    assert report.main(["--redraw", str(folder)]) == 0
    assert capsys.readouterr().out == f"wrote {folder / 'report.md'}\nwrote {folder / 'report.html'}\n"
    assert "<p>changed</p>" in (folder / "host.html").read_text()
    assert report.main(["--redraw", str(folder / "attention")]) == 2
    assert "must have folders with one of outcome.json" in capsys.readouterr().err
