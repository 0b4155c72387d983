import pytest
import torch

from perfsearch.instrument.script import Switches
from perfsearch.knobs import process
from perfsearch.knobs.process import ATTENTION, PRECISION


@pytest.fixture(autouse=True)
def as_before():
    attention, precision = ATTENTION.get(), torch.get_float32_matmul_precision()
    yield
    ATTENTION.put(attention)
    torch.set_float32_matmul_precision(precision)


@pytest.mark.parametrize("value", ["default", "flash", "efficient", "cudnn", "math",
                                   "flash+efficient+math"])  # fmt: skip
def test_attention_is_read_back_as_it_was_put(value):
    ATTENTION.put(value)
    assert ATTENTION.get() == value
    assert torch.backends.cuda.math_sdp_enabled()  # computes what the kernels cannot


@pytest.mark.parametrize("value", ["flash", "math", "default"])
def test_the_lines_that_are_handed_over_do_the_same(value):
    ATTENTION.put("efficient")
    exec("\n".join(process.code_lines({ATTENTION.name: value})), {"torch": torch})
    assert ATTENTION.get() == value


def test_what_the_script_had_is_put_back_by_a_change():
    torch.backends.cuda.enable_cudnn_sdp(False)
    switches = Switches({ATTENTION.name: "math", PRECISION.name: "high"})
    switches.put_into_force()
    assert (ATTENTION.get(), PRECISION.get()) == ("math", "high")
    switches.change({})
    assert (ATTENTION.get(), PRECISION.get()) == ("flash+efficient+math", "highest")


@pytest.mark.parametrize(
    ("asked", "seen", "lost"),
    [
        ("flash", ["flash"], ""),
        ("flash", None, ""),
        (None, [], ""),
        ("default", ["cudnn"], ""),
        ("math", [], ""),
        ("flash", [], "computes attention by math, since flash does not take its inputs"),
        ("cudnn", ["efficient"], "by efficient, since cudnn does not take"),
        ("math", ["flash"], "attention_backend=math was asked for, and torch computes attention"),
    ],
)
def test_a_kernel_that_is_not_used_is_told(asked, seen, lost):
    why = process.why_not_attending(asked, seen)
    assert lost in why and bool(lost) == bool(why)


def test_only_what_is_not_torchs_own_is_code():
    given = {"cudnn_benchmark": False, "omp_num_threads": 4, ATTENTION.name: "flash",
             PRECISION.name: None}  # fmt: skip
    assert process.changed(given) == {ATTENTION.name: "flash"}
    assert set(process.set_by_code(given)) == {"cudnn_benchmark", ATTENTION.name}


def test_a_precision_that_torch_refuses_to_tell_is_not_told(monkeypatch):
    def refuse():
        raise RuntimeError("mix of the legacy and new APIs")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", refuse)
    assert PRECISION.name not in process.values()
