"""Real processes, real faults: clients whose cluster is killed, stopped and cut under them get the right answers, and nothing is left behind."""

from pathlib import Path

import pytest
from chaos_run import ChaosReport, run_chaos

SEED = 1
NUM_FAULTS = 30


@pytest.mark.timeout(900)
async def test_30_faults_under_8_clients_cost_time_and_nothing_else(tmp_path: Path) -> None:
    report = ChaosReport(SEED, tmp_path)
    try:
        await run_chaos(report, num_faults=NUM_FAULTS, num_cases=48)
    finally:
        print(report, flush=True)
    assert report.problems == [], report.log_tails()
    assert len(report.faults) == NUM_FAULTS
    assert report.num_healed > 0, "no fault has hit a request: the test shows nothing"
    assert report.num_replays_in_timings == report.total("replays")
