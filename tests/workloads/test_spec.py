import pytest

from perfsearch.workloads.spec import TRAITS, WorkloadSpec, check_factory


def test_auto_size_follows_the_hardware():
    assert WorkloadSpec("gpt").resolve("cpu", None, 2).size == "tiny"
    assert WorkloadSpec("gpt").resolve("cuda", 80.0, 4).size == "small"
    assert WorkloadSpec("gpt").resolve("cuda", 8.0, 4).size == "tiny"


def test_global_batch_follows_the_ranks():
    assert WorkloadSpec("gpt").resolve("cpu", None, 2).global_batch == 8
    assert WorkloadSpec("gpt", size="small").resolve("cuda", 80.0, 4).global_batch == 32


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (WorkloadSpec("gtp"), r"workload.name=gtp: unknown. Did you mean 'gpt'"),
        (WorkloadSpec("gpt", size="smal"), r"workload.size=smal: unknown. Did you mean 'small'"),
        (
            WorkloadSpec("gpt", global_batch=9),
            r"global_batch=9: 2 ranks cannot .* Nearest possible: 8 or 10",
        ),
        (WorkloadSpec("gpt", global_batch=1), r"global_batch=1: .* Nearest possible: 2\."),
        (WorkloadSpec("gpt", global_batch=0), r"global_batch=0: .* Nearest possible: 2\."),
        (WorkloadSpec("gpt", samples_per_step=0), r"samples_per_step=0: must be at least 1"),
        (WorkloadSpec("gpt", options={"hedas": 2}), r"hedas: unknown to gpt. .*'workload.heads'"),
        (WorkloadSpec("gpt", factory="a:b"), "only workload=custom has a factory"),
        (WorkloadSpec("custom"), "workload.factory: .* Set workload.factory=MODULE:FUNCTION"),
    ],
)
def test_bad_input_names_key_value_and_remedy(spec, message):
    with pytest.raises(ValueError, match=message):
        spec.resolve("cpu", None, 2)


def test_config_groups_split_into_common_and_own_keys():
    spec = WorkloadSpec.from_mapping({"name": "mlp", "size": "tiny", "width": 8, "factory": None})
    assert spec.size == "tiny"
    assert spec.options == {"width": 8}


def test_custom_workloads_draw_in_the_loader_unless_they_say_otherwise():
    assert WorkloadSpec("custom").traits.draws_in_loader
    assert not WorkloadSpec("custom", options={"draws_in_loader": False}).traits.draws_in_loader
    assert WorkloadSpec("custom", options={"convolutional": True}).traits.convolutional


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("raise SystemExit('must not run')")
    (tmp_path / "package" / "train.py").write_text("def build():\n    raise SystemExit\n")
    (tmp_path / "broken.py").write_text("def build(:\n")
    return tmp_path


def test_a_factory_is_found_without_running_anything(here):
    check_factory("package.train:build")


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("package.train", "give it as module:function"),
        ("package/train:build", "give it as module:function"),
        ("package.train:biuld", r"train.py defines no 'biuld'. Did you mean 'build'"),
        ("package.tarin:build", "there is no module 'package.tarin' in the current directory"),
        ("nowhere.train:build", "there is no module 'nowhere.train'"),
        ("broken:build", "broken.py line 1: invalid syntax"),
        ("os:system('x')", "give it as module:function"),
    ],
)
def test_a_factory_that_cannot_be_imported_is_refused(here, factory, message):
    with pytest.raises(ValueError, match=message):
        check_factory(factory)


def test_every_workload_has_its_module_and_options_file():
    from importlib.util import find_spec
    from pathlib import Path

    from omegaconf import OmegaConf

    import perfsearch.conf

    directory = Path(perfsearch.conf.__file__).parent / "workload"
    for name, traits in TRAITS.items():
        assert find_spec(f"perfsearch.workloads.{name}")
        values = OmegaConf.to_container(OmegaConf.load(directory / f"{name}.yaml"))
        spec = WorkloadSpec.from_mapping(values)
        assert spec.name == name
        assert set(spec.options) == traits.options
        if name != "custom":
            spec.resolve("cpu", None, 2)
