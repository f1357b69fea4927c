import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from cost_models.errors import CostModelError
from cost_models.published import Priced, collective_hops, price_collective, price_matmul, read_collective
from cost_models.training_rows import read_training_row
from cost_models.validation import Row, Skipped, ValidationError, rank_correlation, validate

DATA = Path(__file__).parents[2] / "benchmarks" / "data"
SHARED_COLUMNS = "source,hardware,nodes,gpus,op,bytes,algbw,busbw,notes"
COLLECTIVE = {
    "source": "us",
    "hardware": "A100 SXM 8x NVLink3",
    "nodes": "1",
    "gpus": "8",
    "op": "all_reduce",
    "bytes": "1048576",
    "algbw": "10",
    "busbw": "17.5",
    "notes": "",
}


@pytest.fixture(scope="module")
def collectives():
    return validate(DATA / "collectives.csv").document()


def test_published_collectives_are_predicted_within_the_bounds(collectives):
    parts = collectives["parts"]

    assert parts["1 MiB and above"]["mean_abs_rel_error"] <= 0.06  # asked for: 0.15; seen: 0.039
    assert parts["below 1 MiB"]["mean_abs_rel_error"] <= 0.18  # asked for: 0.30; seen: 0.144
    assert abs(collectives["bias"]) <= 0.04
    assert collectives["rank_correlation"] >= 0.93  # 4 nodes of B200 are slower at 64 KiB than at 16 MiB


def test_every_row_is_priced_or_skipped(collectives):
    rows = len((DATA / "collectives.csv").read_text().splitlines()) - 1

    assert collectives["rows"] + collectives["skipped"] == rows
    assert collectives["rows"] == 91
    assert sum(each["rows"] for each in collectives["sources"].values()) == collectives["rows"]
    assert sum(each["rows"] for each in collectives["parts"].values()) == collectives["rows"]


def test_rows_without_a_device_or_a_collective_are_skipped_with_the_reason(collectives):
    reasons = {each["reason"] for each in collectives["skipped_rows"]}

    assert any("GPU model not stated" in reason and "names no device of the catalogue" in reason for reason in reasons)
    assert any("op 'host-to-device copy' is no collective" in reason for reason in reasons)


def test_published_matmuls_are_predicted_within_five_percent():
    found = validate(DATA / "matmul_achievable.csv")

    assert len(found.priced) == 16
    assert max(abs(each.error) for each in found.priced) <= 0.05
    assert {each.reason.split("'")[1] for each in found.skipped} == {"Intel Gaudi 2", "Intel Gaudi 3"}


def test_the_document_has_the_keys_of_the_contract(collectives):
    keys = ("rows", "skipped", "median_abs_rel_error", "mean_abs_rel_error", "bias", "rank_correlation")

    assert set(keys) | {"memory_mean_abs_rel_error", "sources", "worst"} <= set(collectives)
    assert collectives["memory_mean_abs_rel_error"] is None
    assert len(collectives["worst"]) == 5


def test_the_printed_time_counts_before_the_bandwidth():
    timed = read_collective({**COLLECTIVE, "notes": "time 101.9 us"})
    by_bus, by_algorithm = read_collective(COLLECTIVE), read_collective({**COLLECTIVE, "busbw": ""})

    assert timed.measured_s == pytest.approx(101.9e-6)
    assert by_bus.measured_s == pytest.approx(2**20 * 2 * 7 / 8 / 17.5e9)
    assert by_algorithm.measured_s == pytest.approx(2**20 / 10e9)


ALGORITHMS = [
    ("all_reduce", "auto"),
    ("all_reduce NVLS", "in_switch"),
    ("all_reduce ring (NVLS off)", "ring"),
    ("all_reduce (NCCL_NVLS_ENABLE=0, ring)", "ring"),
    ("AllReduce tree", "tree"),
]


@pytest.mark.parametrize(("text", "algorithm"), ALGORITHMS)
def test_an_algorithm_that_the_row_names_is_the_one_priced(text, algorithm):
    read = read_collective({**COLLECTIVE, "op": text})
    assert (read.op, read.algorithm) == ("all_reduce", algorithm)


# hardware, nodes, gpus: bandwidth in GB/s of every level that the group crosses
HARDWARE = [
    ("H200 SXM NVLink4", 1, 5, [450.0]),
    ("MI300X", 1, 2, [64.0]),
    ("H100 p5.48xlarge (NVLink4; EFA 3200 Gb/s per node)", 2, 16, [450.0, 400.0]),
    ("H100 p5.48xlarge", 2, 2, [50.0]),
    ("A100-80GB p4de.24xlarge (NVLink3; EFA 4x100 Gb/s per node)", 2, 16, [300.0, 50.0]),
    ("H100, 8x200 Gb/s per node", 2, 16, [450.0, 200.0]),
    ("GB200 NVLink5", 1, 4, [900.0]),
]


@pytest.mark.parametrize(("hardware", "nodes", "gpus", "expected"), HARDWARE, ids=[each[0] for each in HARDWARE])
def test_the_hardware_of_a_row_becomes_its_levels(hardware, nodes, gpus, expected):
    read = read_collective({**COLLECTIVE, "hardware": hardware, "nodes": str(nodes), "gpus": str(gpus)})
    assert [hop.bytes_per_s / 1e9 for hop in collective_hops(read)] == expected


WRONG_COLLECTIVES = [
    ({"hardware": "TPU v5p"}, "hardware 'TPU v5p' names no device of the catalogue"),
    ({"hardware": "H100 p4de.24xlarge"}, "is no p4de with 8 devices of h100-sxm-80gb"),
    ({"gpus": "9", "nodes": "2"}, "9 GPUs on 2 nodes: needs at least 2 GPUs, as many on every node"),
    ({"gpus": "1"}, "1 GPUs on 1 nodes"),
    ({"gpus": "eight"}, "gpus is 'eight', not a number above 0"),
    ({"gpus": "7.5"}, "gpus is '7.5', not a whole number"),
    ({"bytes": "-4"}, "bytes is '-4', not a number above 0"),
    ({"bytes": "nan"}, "bytes is 'nan', not a number above 0"),
    ({"op": "all_to_some"}, "op 'all_to_some' is no collective; known: all_reduce, all_gather"),
    ({"op": "all_reduce NVLS"}, "all_reduce has no algorithm 'in_switch' here (no level of this group reduces"),
    ({"busbw": "", "algbw": ""}, "gives no time: none in notes, and busbw and algbw are empty"),
    ({"busbw": "0.00"}, "busbw is '0.00', not a number above 0"),
]


@pytest.mark.parametrize(("change", "message"), WRONG_COLLECTIVES, ids=[message for _, message in WRONG_COLLECTIVES])
def test_a_row_that_cannot_be_priced_says_why(change, message):
    with pytest.raises(CostModelError) as caught:
        price_collective({**COLLECTIVE, **change}, 2)

    assert message in str(caught.value)


MATMUL = {"gpu": "NVIDIA H100 SXM", "dtype": "bf16", "achieved": "794.5", "best_shape_mxnxk": "2048x2048x13312"}
WRONG_MATMULS = [
    ({"gpu": "Intel Gaudi 3"}, "gpu 'Intel Gaudi 3' names no device"),
    ({"dtype": "fp4"}, "unknown data type 'fp4'"),
    ({"achieved": ""}, "achieved is '', not a number above 0"),
    ({"best_shape_mxnxk": "2048x2048"}, "best_shape_mxnxk is '2048x2048', not such as 4096x4096x8192"),
    ({"best_shape_mxnxk": "0x2048x64"}, "best_shape_mxnxk is '0x2048x64'"),
]


@pytest.mark.parametrize(("change", "message"), WRONG_MATMULS, ids=[message for _, message in WRONG_MATMULS])
def test_a_matmul_that_cannot_be_priced_says_why(change, message):
    with pytest.raises(CostModelError) as caught:
        price_matmul({**MATMUL, **change}, 2)

    assert message in str(caught.value)


FILES = [
    ("gpu;dtype;achieved\n1;2;3\n", "its columns are separated by ';'; write commas, and points in numbers"),
    ("", "is empty; its first line must name the columns"),
    ("a,b\n1,2\n", "its columns are those of no known table; known are training steps: framework"),
    ("gpu,dtype,achieved\n", "(as achievable matmuls, it lacks best_shape_mxnxk)"),
    ("gpu,gpu\n", "names column 'gpu' twice"),
    ('gpu,dtype\n"open\n', "is no CSV file: unexpected end of data"),
    (
        "Framework,DEVICE,GPUs,tp,PP,Measured_Step_s\n",
        "rows of training steps are priced by the command autopar validate",
    ),
    (
        "framework,device,gpus,tp,pp,measured_step_s\n",
        "rows of training steps are priced by the command autopar validate",
    ),
]


@pytest.mark.parametrize(("text", "message"), FILES, ids=[message for _, message in FILES])
def test_a_file_that_cannot_be_read_says_why(tmp_path, text, message):
    path = tmp_path / "rows.csv"
    path.write_text(text)

    with pytest.raises(ValidationError) as caught:
        validate(path)

    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)


def test_a_file_of_other_bytes_or_none_is_refused(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_bytes(b"\xff\xfe\x00gpu")

    with pytest.raises(ValidationError, match="is no CSV file"):
        validate(path)
    with pytest.raises(ValidationError, match="cannot be read: No such file or directory"):
        validate(tmp_path / "absent.csv")


def test_a_row_with_missing_cells_is_skipped_by_its_line(tmp_path):
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([list(MATMUL), list(MATMUL.values()), ["NVIDIA H100 SXM", "bf16"]])

    found = validate(path)

    assert len(found.priced) == 1
    assert [(each.line, each.reason) for each in found.skipped] == [(3, "has 2 values for 4 columns")]


def test_a_file_of_no_rows_has_no_errors(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(f"{SHARED_COLUMNS}\n")

    document = validate(path).document()

    assert (document["rows"], document["mean_abs_rel_error"], document["worst"]) == (0, None, [])


def _priced(measured_s: float, predicted_s: float, group: str = "g") -> Priced:
    return Priced(2, "row", "us", group, "", measured_s, predicted_s)


def test_rank_correlation_is_of_the_order_within_groups():
    in_order = [_priced(1, 10), _priced(2, 20), _priced(3, 30)]
    reversed_ = [_priced(1, 30, "h"), _priced(2, 20, "h"), _priced(3, 10, "h")]

    assert rank_correlation(in_order) == pytest.approx(1)
    assert rank_correlation([*in_order, *reversed_]) == pytest.approx(0)
    assert rank_correlation(in_order[:2]) is None
    assert rank_correlation([_priced(1, 5), _priced(2, 5), _priced(3, 5)]) == 0


def test_columns_are_known_in_any_capitals_and_by_their_other_names(tmp_path):
    path, seen = tmp_path / "rows.csv", []
    path.write_text(
        "Framework,Device,GPUs,TP,PP,VPP,MBS,Peak_TFLOP_per_s,memory_gib,MEMORY_GB_PER_S,TGS\nx,y,8,1,1,2,4,300,80,2000,9\n"
    )

    validate(path, lambda rows: seen.extend(rows) or ())

    ((line, row),) = seen
    assert line == 2
    assert {name: row[name] for name in ("interleave", "micro_batch", "tokens_per_s_per_gpu")} == {
        "interleave": "2",
        "micro_batch": "4",
        "tokens_per_s_per_gpu": "9",
    }
    assert {name: row[name] for name in ("peak_TFLOP_per_s", "memory_GiB", "memory_GB_per_s")} == {
        "peak_TFLOP_per_s": "300",
        "memory_GiB": "80",
        "memory_GB_per_s": "2000",
    }


def test_a_column_and_another_name_of_it_are_one_column_twice(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("framework,device,gpus,tp,pp,interleave,vp\n")

    with pytest.raises(ValidationError, match="names column 'interleave' twice, once as 'vp'"):
        validate(path)


def test_tables_of_runs_name_devices_degrees_and_batches_in_more_ways(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(
        "Framework,GPU,num_gpus,tensor_parallel,pipeline_parallel_size,zero_stage,per_device_train_batch_size,GAS,dtype\n"
        "accelerate,A100,8,2,1,3,4,8,bf16\n"
    )
    seen: list[Mapping[str, str]] = []

    def price(rows):
        seen.extend(values for _, values in rows)
        return [Skipped(line, "seen") for line, _ in rows]

    validate(path, price)

    assert seen == [
        {
            "framework": "accelerate", "device": "A100", "gpus": "8", "tp": "2", "pp": "1", "zero": "3",
            "micro_batch": "4", "gradient_accumulation": "8", "precision": "bf16",
        }
    ]  # fmt: skip


@pytest.mark.parametrize("path", sorted(DATA.glob("training_steps*.csv")), ids=lambda each: each.stem)
def test_each_row_of_the_tables_that_travel_with_us_is_read(path: Path):
    given: list[Row] = []

    def priced(rows: Sequence[Row]) -> list[Priced | Skipped]:
        given.extend(rows)
        return []

    found = validate(path, priced)

    assert not found.skipped
    assert len(given) == len(path.read_text().splitlines()) - 1
    for _, row in given:
        read_training_row(row)
