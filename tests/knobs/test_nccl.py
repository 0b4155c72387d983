from perfsearch.knobs import nccl


def test_environment_sets_only_what_is_named():
    configuration = {"nccl_buffsize": 4194304, "nccl_max_ctas": None, "bucket_cap_mb": 25.0}
    assert nccl.environment(configuration) == {"NCCL_BUFFSIZE": "4194304"}


def test_read_back_keeps_to_the_configuration():
    environ = {"NCCL_ALGO": "Ring", "NCCL_BUFFSIZE": "1024", "NCCL_MAX_CTAS": "8"}
    configuration = {"nccl_algo": "Ring", "nccl_buffsize": 1024, "nccl_proto": None}
    found = nccl.read_back(environ, configuration)
    assert found == {"nccl_algo": "Ring", "nccl_buffsize": 1024, "nccl_proto": None}


def test_effective_algorithm_is_that_of_most_bytes():
    """NVIDIA/nccl#1304, #1661: a pair that NCCL does not take falls back silently."""
    log = [
        "host:1:2 [0] NCCL INFO AllReduce: 26214400 Bytes -> Algo RING proto LL "
        "channel{Lo..Hi}={0..15}",
        "host:1:2 [0] NCCL INFO AllReduce: 4 Bytes -> Algo TREE proto SIMPLE time 12.3",
        "host:1:2 [0] NCCL INFO Broadcast: 99999999 Bytes -> Algo RING proto SIMPLE",
        "something else",
    ]
    assert nccl.effective(log) == {"nccl_algo": "Ring", "nccl_proto": "LL"}


def test_effective_of_versions_that_print_numbers():
    log = ["NCCL INFO AllReduce: 1048576 Bytes -> Algo 0 proto 2 time 61.7"]
    assert nccl.effective(log) == {"nccl_algo": "Tree", "nccl_proto": "Simple"}
    assert nccl.effective(["NCCL INFO AllReduce: 8 Bytes -> Algo NVLS_TREE proto SIMPLE"]) == {
        "nccl_algo": "NVLSTree",
        "nccl_proto": "Simple",
    }


def test_nothing_is_claimed_without_a_log():
    assert nccl.effective([]) == {}
