"""Two gloo ranks train through all four stages: the same losses and weights, and fewer bytes."""

import pytest
import torch
from support.zero_ranks import launch, launch_forms

from perfsearch.metrics.memory import Layout, MemoryFacts, at_rest
from perfsearch.runners.zero.export import Job, training_code
from perfsearch.training.memory_probe import describe_job
from perfsearch.workloads import gpt
from perfsearch.workloads.spec import WorkloadSpec

pytestmark = pytest.mark.slow

LOSS_TOLERANCE = 1e-5
"""Of losses that are about 6; float32 sums in another order differ by less than a tenth of it."""
WEIGHT_TOLERANCE = 3e-4
"""One optimizer step. Adam moves a weight by up to the learning rate (3e-4) whatever the size of
its gradient, so where the true gradient is next to nothing, rounding decides on the direction."""

PLAIN = [{"zero_stage": stage, "micro_batch": 4} for stage in (0, 1, 2, 3)]
VARIANTS = [
    {"zero_stage": 0, "micro_batch": 2, "activation_checkpointing": 1},
    {"zero_stage": 1, "micro_batch": 1, "gradient_as_bucket_view": True, "bucket_cap_mb": 1.0},
    {"zero_stage": 2, "micro_batch": 2, "activation_checkpointing": 2, "blocks_per_unit": 2},
    {"zero_stage": 3, "micro_batch": 1, "activation_checkpointing": 1, "forward_prefetch": 1,
     "backward_prefetch": 1, "optimizer_implementation": "foreach"},
    {"zero_stage": 3, "micro_batch": 2, "gradient_sync_each": True},
    {"zero_stage": 3, "micro_batch": 4, "cpu_offload": True, "mixed_precision": "autocast"},
    {"zero_stage": 0, "micro_batch": 4},
]  # fmt: skip
CONFIGURATIONS = PLAIN + VARIANTS


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return launch(tmp_path_factory.mktemp("zero"), 2, CONFIGURATIONS)


@pytest.mark.parametrize(
    "place", range(1, len(CONFIGURATIONS)), ids=lambda p: str(CONFIGURATIONS[p])
)
def test_every_configuration_trains_what_the_baseline_trains(ranks, place):
    for found in ranks:
        assert found[place]["losses"] == pytest.approx(found[0]["losses"], rel=LOSS_TOLERANCE)
    expected = ranks[0][0]["weights"]
    weights = ranks[0][place]["weights"]
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.allclose(weights[name], tensor, rtol=0, atol=WEIGHT_TOLERANCE), name
    everything = torch.cat([(weights[n] - t).flatten().abs() for n, t in expected.items()])
    assert everything.mean() < 1e-6


def test_repeating_the_baseline_gives_the_same_bits(ranks):
    first, last = ranks[0][0]["weights"], ranks[0][-1]["weights"]
    assert all(torch.equal(first[name], last[name]) for name in first)
    assert ranks[0][0]["losses"] == ranks[0][-1]["losses"]


def test_what_was_asked_for_is_read_back(ranks):
    for place, configuration in enumerate(CONFIGURATIONS):
        found = ranks[0][place]["in_force"]
        for name in configuration.keys() & found.keys():
            assert found[name] == configuration[name], (configuration, found)
        assert found["micro_batch_seen"] == configuration["micro_batch"]
        assert found["gradient_accumulation"] == 4 // configuration["micro_batch"]
    widths = [ranks[0][place]["in_force"]["resharded_to"] for place in (2, 3)]
    assert widths == [1, 2]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_formula_gives_the_bytes_of_real_tensors(ranks, stage):
    job = gpt.build(WorkloadSpec("gpt", "tiny"), 0)
    facts = MemoryFacts.from_json(describe_job(job, "cpu"))
    expected = at_rest(facts, Layout(stage, 2, 4, shard_group=2, bucket_view=True))
    fullest = {
        name: max(found[stage]["bytes"][f"resident_{name}_gib"] for found in ranks)
        for name in ("parameters", "gradients", "optimizer", "buffers")
    }
    counters = 4 * len(facts.parameters)  # Adam counts its steps in a tensor for each parameter
    assert fullest["parameters"] == expected.parameters
    assert fullest["gradients"] == expected.gradients
    assert 0 <= fullest["optimizer"] - expected.optimizer <= counters
    assert fullest["buffers"] == expected.buffers


def test_the_exported_lines_build_exactly_what_was_measured(ranks, tmp_path):
    job = Job(world_size=2, nodes=1, on_gpu=False, half=False, block_class="Block")
    places = [p for p in range(len(CONFIGURATIONS)) if not CONFIGURATIONS[p].get("cpu_offload")]
    forms = []
    for place in places:
        micro = CONFIGURATIONS[place]["micro_batch"]
        whole = {**CONFIGURATIONS[place], "gradient_accumulation": 4 // micro}
        forms.append((training_code(whole, job), micro, 4 // micro))
    for place, weights in zip(places, launch_forms(tmp_path, 2, forms), strict=True):
        for name, tensor in ranks[0][place]["weights"].items():
            assert torch.equal(weights[name], tensor), (CONFIGURATIONS[place], name)


HALF = [
    {"zero_stage": 0, "micro_batch": 4},
    {"zero_stage": 2, "micro_batch": 4},
    {"zero_stage": 3, "micro_batch": 2, "mixed_precision": "autocast"},
    {"zero_stage": 3, "micro_batch": 2, "blocks_per_unit": 2, "activation_checkpointing": 1},
]


def test_mixed_precision_keeps_master_weights_and_the_losses(tmp_path):
    """bfloat16 has three digits; the search's own tolerance (1e-3) holds."""
    ranks = launch(tmp_path, 2, HALF, half=True)
    expected = ranks[0][0]["losses"]
    plain = launch(tmp_path, 2, HALF[:1])[0][0]["losses"]
    assert expected != plain  # it is really lower
    for found in ranks[0][1:]:
        assert found["losses"] == pytest.approx(expected, rel=1e-3)
        assert {w.dtype for w in found["weights"].values()} == {torch.float32}


SCALE_MATTERS = [
    {"zero_stage": 0, "micro_batch": 4},
    {"zero_stage": 0, "micro_batch": 1},
    {"zero_stage": 1, "micro_batch": 2},
    {"zero_stage": 2, "micro_batch": 1},
    {"zero_stage": 3, "micro_batch": 2, "gradient_sync_each": True},
]


def assert_all_as_the_first(found):
    """Each configuration has the losses and the weights of the first one."""
    start, *others = found
    for other in others:
        assert other["losses"] == pytest.approx(start["losses"], rel=LOSS_TOLERANCE)
        for name, tensor in start["weights"].items():
            assert torch.allclose(other["weights"][name], tensor, rtol=1e-4, atol=1e-6), name


def test_accumulated_gradients_have_the_size_of_the_whole_batch(tmp_path):
    """With plain SGD, unlike Adam, a gradient of twice the size moves a weight twice as far."""
    ranks = launch(tmp_path, 2, SCALE_MATTERS, workload="dlrm")
    assert_all_as_the_first(ranks[0])


def test_parameters_stay_in_the_groups_that_the_users_optimizer_has(tmp_path):
    """Grouped by number, order and shape, which a rank's share alone would not show."""
    ranks = launch(tmp_path, 2, PLAIN, workload="grouped")
    assert_all_as_the_first(ranks[0])
    job = Job(world_size=2, nodes=1, on_gpu=False, half=False, block_class="Block")
    form = training_code({**PLAIN[1], "gradient_accumulation": 1}, job)
    (weights,) = launch_forms(tmp_path, 2, [(form, 4, 1)], "grouped")
    assert all(torch.equal(weights[n], t) for n, t in ranks[0][1]["weights"].items())
