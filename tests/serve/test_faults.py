"""The short form of tests/chaos/test_chaos.py: each worker is hurt once."""

from pathlib import Path

import pytest
from chaos_run import ChaosReport, run_chaos

SEED = 1
NUM_FAULTS = 6


@pytest.mark.timeout(600)
async def test_a_fault_at_each_worker_costs_8_clients_time_and_nothing_else(tmp_path: Path) -> None:
    report = ChaosReport(SEED, tmp_path)
    try:
        await run_chaos(report, num_faults=NUM_FAULTS, num_cases=16)
    finally:
        print(report)
    assert report.problems == [], report.log_tails()
    assert {done.fault.worker for done in report.faults} == {
        f"{stage}-{number}" for stage in ("encode", "prefill", "decode") for number in (0, 1)
    }
    assert report.num_healed > 0, "no fault has hit a request: the test shows nothing"
