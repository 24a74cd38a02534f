"""A /metrics page: what is asked for is what the library that parses it finds."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from harness.collectors.prometheus import Metrics

PAGE = """# HELP hits_total Tokens that were hit.
# TYPE hits_total counter
hits_total{source="device",rank="0"} 64.0
hits_total{source="host",rank="0"} 128.0
hits_total{rank="1",source="host"} 256.0
# TYPE hits_total_age gauge
hits_total_age 3.0
# TYPE wait_seconds histogram
wait_seconds_bucket{le="0.1"} 2.0
wait_seconds_bucket{le="+Inf"} 3.0
wait_seconds_sum 0.75
wait_seconds_count 3.0
config_info{model="a b{c}\\"d\\"",size="5"} 1.0
idle NaN
"""


def test_totals_by_name_and_labels() -> None:
    metrics = Metrics(PAGE)
    assert metrics.total("hits_total") == 448
    assert metrics.total("hits_total", source="host") == 384
    assert metrics.total("hits_total", source="host", rank="1") == 256
    assert metrics.total("hits_total", source="storage") is None, "no such sample"
    assert metrics.total("hits") is None, "no such metric"
    assert metrics.by_label("hits_total", "source") == {"device": 64, "host": 384}
    assert metrics.total("wait_seconds_count") == 3


def test_labels_may_hold_what_ends_a_name() -> None:
    assert Metrics(PAGE).labels("config_info") == {"model": 'a b{c}"d"', "size": "5"}
    assert Metrics(PAGE).labels("hits_total_age") == {}


def test_every_sample_is_what_the_library_finds_in_the_whole_page() -> None:
    metrics = Metrics(PAGE)
    samples = [sample for family in text_string_to_metric_families(PAGE) for sample in family.samples]
    counted = [sample for sample in samples if sample.name != "idle"]  # a NaN is no total
    assert {sample.name for sample in counted} >= {"hits_total", "wait_seconds_bucket", "wait_seconds_sum"}
    for sample in counted:
        assert metrics.total(sample.name, **sample.labels) == round(sample.value)


def test_an_empty_page_has_nothing() -> None:
    assert Metrics("").total("hits_total") is None
    assert Metrics("").labels("config_info") == {}
