"""The calibration reads real streams of its own source, and says what a chunk costs here."""

import pytest

from harness.load import capacity


def test_a_calibration_says_what_a_chunk_costs_and_how_many_that_makes():
    found = capacity.calibrate(8, 400.0, seconds=0.5)
    assert found.chunks_s == pytest.approx(found.processes / found.cpu_per_chunk_s)
    assert 0 < found.cpu_per_chunk_s < 0.01
    # 8 streams of 25 chunks each, 20 ms apart: never faster than planned, and the wall includes the first token's wait.
    assert 0 < found.rate_tried <= 8 / 0.020 * 25 / 24
    assert found.lag_p99_s >= 0


def test_a_rate_that_the_source_cannot_send_is_tried_as_far_as_it_can():
    found = capacity.calibrate(40, 1e6, seconds=0.2)
    assert found.rate_tried <= 15_000 * 1.5
