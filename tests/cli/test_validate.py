"""`autopar validate`: tables or JSON on stdout, one message and status 2 for files that cannot be read."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from autopar.api.validating import price_steps
from autopar.cli import main
from autopar.report.validation import validation_text
from cost_models.published import Priced
from tests.support.training_row import ROW

DATA = Path(__file__).parents[2] / "benchmarks" / "data"
ROWS = """gpu,dtype,achieved,best_shape_mxnxk
NVIDIA H100 SXM,bf16,794.5,2048x2048x13312
Intel Gaudi 3,bf16,1243.0,16384x4096x768
"""

Out = pytest.CaptureFixture[str]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.csv"
    path.write_text(ROWS)
    return path


def test_skipped_rows_are_listed_and_no_failure(rows: Path, capsys: Out):
    assert main(["validate", str(rows)]) == 0

    out, err = capsys.readouterr()
    assert "bf16 matmul 2048 x 2048 x 13312 on NVIDIA H100 SXM" in out
    assert "skipped: 1\n  line 3: gpu 'Intel Gaudi 3' names no device of the catalogue" in out
    assert err == ""


def test_json_has_every_row_priced_or_skipped(rows: Path, capsys: Out):
    assert main(["validate", str(rows), "--json"]) == 0

    document = json.loads(capsys.readouterr().out)
    assert (document["rows"], document["skipped"]) == (1, 1)
    assert document["skipped_rows"][0]["line"] == 3
    assert document["sources"]["matmul_achievable"]["rows"] == 1


def test_the_published_collectives_fit_the_terminal(capsys: Out):
    assert main(["validate", str(DATA / "collectives.csv")]) == 0

    out = capsys.readouterr().out
    assert "1 MiB and above" in out
    assert "rank correlation" in out
    assert max(map(len, out.splitlines()[:20])) <= 120


WRONG = [
    ("", "is empty; its first line must name the columns"),
    ("hardware,speed\nH100,1\n", "its columns are those of no known table (as collectives, it lacks source, nodes"),
    ('gpu,dtype,achieved,best_shape_mxnxk\n"NVIDIA\n', "is no CSV file"),
]


@pytest.mark.parametrize(("text", "message"), WRONG, ids=[message for _, message in WRONG])
def test_a_file_of_no_known_table_is_a_wrong_input(rows: Path, capsys: Out, text: str, message: str):
    rows.write_text(text)

    assert main(["validate", str(rows)]) == 2

    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"autopar: {rows}: ")
    assert message in err


def test_training_steps_are_priced_and_reported_by_source(tmp_path: Path, capsys: Out):
    path = tmp_path / "rows.csv"
    small = ROW | {"layers": "2", "hidden": "128", "heads": "8", "kv_heads": "8", "ffn_hidden": "512", "vocab": "1024"}
    rows = [small | {"measured_peak_gib": "2"}, small | {"device": "abacus"}]
    path.write_text("\n".join([",".join(ROW), *(",".join(row.values()) for row in rows)]) + "\n")

    assert main(["validate", str(path), "--json"]) == 0

    document = json.loads(capsys.readouterr().out)
    assert (document["format"], document["rows"], document["skipped"]) == ("training steps", 1, 1)
    assert document["sources"]["somebody"]["rows"] == 1
    assert document["memory_mean_abs_rel_error"] is not None
    assert "device 'abacus' is not in the catalogue" in document["skipped_rows"][0]["reason"]


SMALL = ROW | {"layers": "2", "hidden": "128", "heads": "8", "kv_heads": "8", "ffn_hidden": "512", "vocab": "1024"}


def test_what_is_assumed_of_a_framework_is_said(tmp_path: Path, capsys: Out):
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        # A column more than the format has, and a note with a comma: neither is in the way.
        writer = csv.DictWriter(file, [*ROW, "remark"])
        writer.writeheader()
        writer.writerow(SMALL | {"framework": "abacus", "remark": "from a blog, see there"})

    assert main(["validate", str(path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)

    what = "framework 'abacus' is not known: priced as plain PyTorch"
    assert document["rows"] == 1
    assert document["assumptions"] == [{"what": what, "lines": [2]}]
    more = document | {"assumptions": [{"what": what, "lines": [2, 3, 5]}]}
    assert f"assumed: {what}: line 2\n" in validation_text(document)
    assert f"assumed: {what}: line 2 and 2 more\n" in validation_text(more)


def test_parameters_that_ranks_do_not_divide_are_held_in_parts_all_the_same(tmp_path: Path):
    def peak(dp: int) -> float:
        few = {"tp": "1", "pp": "1", "dp": str(dp), "gpus": str(dp), "global_batch": str(dp), "vocab": "65536"}
        (found,) = price_steps([(2, SMALL | few | {"zero": "3", "recompute": "none"})])
        assert isinstance(found, Priced), found
        assert found.predicted_bytes is not None
        return found.predicted_bytes

    # 6 does not divide hidden 128: a sixth of what rests is more than an eighth and less than a quarter.
    assert peak(8) < peak(6) < peak(4)


def test_help_explains_the_columns(capsys: Out):
    assert main(["validate", "--help"]) == 0

    assert "Too large" in " ".join(capsys.readouterr().out.split())


def test_a_report_of_nothing_says_so():
    empty = {"rows": 0, "median_abs_rel_error": None, "mean_abs_rel_error": None, "bias": None}
    document = {
        "format": "collectives",
        **empty,
        "rank_correlation": None,
        "parts": {},
        "sources": {},
        "worst": [],
        "skipped_rows": [{"line": line, "reason": "why"} for line in range(2, 25)],
    }

    text = validation_text(document)

    assert "worst rows" not in text
    assert "skipped: 23" in text
    assert text.endswith("and 3 more (--json lists all)\n")
