import pytest

from perfsearch.knobs.ddp import arguments as arguments_of


@pytest.mark.parametrize(
    ("configuration", "arguments"),
    [
        ({}, {}),
        ({"bucket_cap_mb": None, "first_bucket_mb": None}, {}),
        ({"bucket_cap_mb": 25.0, "first_bucket_mb": 1.0}, {}),
        ({"bucket_cap_mb": 64.0}, {"bucket_cap_mb": 64.0}),
        ({"bucket_cap_mb": 64.0, "first_bucket_mb": 64.0}, {"bucket_cap_mb": 64.0}),
        ({"bucket_cap_mb": 64.0, "first_bucket_mb": 1.0}, {"bucket_cap_mb_list": [1.0, 64.0]}),
        ({"bucket_cap_mb": 25.0, "first_bucket_mb": 4.0}, {"bucket_cap_mb_list": [4.0, 25.0]}),
        (
            {"gradient_as_bucket_view": True, "static_graph": False},
            {"gradient_as_bucket_view": True},
        ),
    ],
)
def test_arguments(configuration, arguments):
    assert arguments_of(configuration) == arguments
