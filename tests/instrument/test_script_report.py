from perfsearch.instrument.facts import Facts
from perfsearch.instrument.report import lines, without_effect

DDP = Facts(["ddp"], 1, ["AdamW"], {"bucket_cap_mb": 25.0, "dataloader_workers": 0}, backend="gloo")


def test_without_knobs_it_says_what_could_be_changed():
    offers, hint = lines({}, {}, DDP)
    assert "bucket_cap_mb=25.0" in offers and "optimizer_implementation" in offers
    assert "--search" in hint


def test_a_script_that_builds_nothing_known_is_told_so():
    (line,) = lines({}, {}, Facts())
    assert "nothing could be" in line and "DistributedDataParallel" in line


def test_what_was_asked_for_is_told_apart_from_what_has_no_effect():
    asked = {"bucket_cap_mb": 25.0, "dataloader_workers": 2, "zero_stage": 3, "pin_memory": None}
    told = lines(asked, {"nccl_algo": "environment (NCCL_ALGO=Ring)"}, DDP)
    assert told[0] == "in force: bucket_cap_mb=25.0 (DistributedDataParallel)"
    assert any("dataloader_workers=2 was asked for, 0 is in force" in line for line in told)
    assert any("zero_stage=3: the script makes nothing that takes it" in line for line in told)
    assert any("nccl_algo: the ranks talk over gloo" in line for line in told)


def test_a_refusal_of_the_library_is_the_reason():
    facts = Facts(
        optimizers=["LBFGS"], ignored={"optimizer_implementation": "LBFGS has no foreach"}
    )
    found = without_effect({"optimizer_implementation": "foreach"}, facts)
    assert found == {"optimizer_implementation": "LBFGS has no foreach"}
