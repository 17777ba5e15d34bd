"""A worker's Prometheus text, as a scraper reads it."""

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from triptych.worker.metrics import make_registry


def test_a_count_by_reason_has_a_sample_for_each_reason_and_a_plain_one_has_none():
    registry = make_registry(
        "E", lambda: {"leases": 2}, lambda: {"items_encoded": 3, "encodes_failed": {"timeout": 1, "stale": 0}}
    )
    families = text_string_to_metric_families(generate_latest(registry).decode())
    samples = {(each.name, each.labels.get("reason")): each.value for family in families for each in family.samples}
    assert samples == {
        ("triptych_worker_leases", None): 2.0,
        ("triptych_worker_items_encoded_total", None): 3.0,
        ("triptych_worker_encodes_failed_total", "timeout"): 1.0,
        ("triptych_worker_encodes_failed_total", "stale"): 0.0,
    }


def test_every_sample_names_the_workers_role():
    registry = make_registry("EP", lambda: {"leases": 2}, lambda: {"encodes_failed": {"timeout": 1}})
    families = text_string_to_metric_families(generate_latest(registry).decode())
    assert {each.labels["role"] for family in families for each in family.samples} == {"EP"}
