import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models import units
from cost_models.errors import UnitError

QUANTITIES = [
    (units.parse_bytes, "80GiB", 80 * 2**30),
    (units.parse_bytes, "80GB", 80 * 10**9),
    (units.parse_bytes, "1.5 kB", 1500),
    (units.parse_bandwidth, "3200Gbit/s", 400e9),
    (units.parse_bandwidth, "450GB/s", 450e9),
    (units.parse_bandwidth, "3.35TB/s", 3.35e12),
    (units.parse_bandwidth, "1GiB/s", 2.0**30),
    (units.parse_flops, "312TFLOP/s", 312e12),
    (units.parse_flops, "1978.9TOP/s", 1978.9e12),
    (units.parse_time, "1us", 1e-6),
    (units.parse_time, "1.3µs", 1.3e-6),
    (units.parse_power, "0.7kW", 700.0),
    (units.parse_fraction, "80%", 0.8),
    (units.parse_fraction, 0.8, 0.8),
]


@pytest.mark.parametrize(("parse", "text", "value"), QUANTITIES, ids=[q[1] for q in QUANTITIES])
def test_a_quantity_is_read_exactly(parse, text, value):
    assert parse(text) == value


REFUSED = [
    (units.parse_bytes, 80, "80 has no unit; write a size in bytes as a number and a unit, such as 80GiB"),
    (units.parse_bytes, "80", "'80' has no unit"),
    (units.parse_bytes, "80Gb", "unit 'Gb' of '80Gb' is ambiguous between bits and bytes; write Gbit or GB"),
    (units.parse_bytes, "80gib", "unknown unit 'gib' of '80gib' for a size in bytes (did you mean 'GiB'?)"),
    (units.parse_bytes, "lots", "'lots' is not a size in bytes; write a number and a unit, such as 80GiB"),
    (units.parse_bandwidth, "450GB", "unknown unit 'GB' of '450GB' for a bandwidth (did you mean 'GB/s'?)"),
    (units.parse_bandwidth, "400Gb/s", "ambiguous between bits and bytes; write Gbit/s or GB/s"),
    (units.parse_bandwidth, "400Gbps", "ambiguous between bits and bytes; write Gbit/s or GB/s"),
    (
        units.parse_flops,
        "312TFLOPS",
        "unknown unit 'TFLOPS' of '312TFLOPS' for a compute rate (did you mean 'TFLOP/s'?)",
    ),
    (units.parse_time, "1sec", "known units: s, ms, us, ns"),
    (units.parse_time, True, "True has no unit"),
]


@pytest.mark.parametrize(("parse", "text", "message"), REFUSED, ids=[str(r[1]) for r in REFUSED])
def test_a_wrong_unit_is_refused_with_the_way_out(parse, text, message):
    with pytest.raises(UnitError) as caught:
        parse(text)

    assert message in str(caught.value)


@given(st.integers(min_value=0, max_value=2**60))
def test_exact_bytes_read_back_equal(value):
    assert units.parse_bytes(units.exact_bytes(value)) == value


@given(st.floats(min_value=1e-9, max_value=1e18))
def test_exact_rates_and_times_read_back_equal(value):
    assert units.parse_bandwidth(units.exact_bandwidth(value)) == value
    assert units.parse_flops(units.exact_flops(value)) == value
    assert units.parse_time(units.exact_seconds(value)) == value


@given(st.floats(min_value=1e-8, max_value=1e5))
def test_text_for_people_reads_back_to_four_digits(value):
    assert units.parse_time(units.format_seconds(value)) == pytest.approx(value, rel=1e-3)
    assert units.parse_bandwidth(units.format_rate(value * 1e9)) == pytest.approx(value * 1e9, rel=1e-3)


def test_bytes_for_people_have_two_decimals():
    assert units.format_bytes(93 * 2**30) == "93.00 GiB"
    assert units.format_bytes(512) == "512 B"
    assert units.parse_bytes(units.format_bytes(80 * 2**30)) == 80 * 2**30
