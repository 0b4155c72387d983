"""What a script draws that seeds nothing itself."""

import os
import subprocess
import sys

import pytest

from perfsearch.instrument.seeds import hash_seed

DRAWS = """
import os, random
from perfsearch.instrument.seeds import seed_process
seed_process({seed}, {rank})
import numpy, torch
print(random.random(), numpy.random.rand(), torch.rand(1).item(), hash("text"))
numpy.random.seed(5), torch.manual_seed(5), random.seed(5)
print(random.random(), numpy.random.rand(), torch.rand(1).item())
"""


def drawn(seed, rank, environ=()):
    environment = {**os.environ, **dict(environ), **hash_seed(seed, dict(environ))}
    code = DRAWS.format(seed=seed, rank=rank)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    first, second = done.stdout.splitlines()
    return first.split(), second.split()


@pytest.fixture(autouse=True)
def no_hash_seed(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)


def test_each_start_draws_the_same_and_each_rank_its_own():
    first, again, other = drawn(7, 0), drawn(7, 0), drawn(7, 1)
    assert first == again
    assert all(a != b for a, b in zip(first[0][:3], other[0][:3], strict=True))
    assert first[0][3] == other[0][3], "sets are gone through in the same order on all ranks"
    assert first[1] == other[1], "what a script seeds itself stays its own"


def test_the_largest_seed_has_room_for_ranks_and_the_users_hash_seed_stays():
    assert drawn(2**32 - 1, 1)[0][:3] == drawn(0, 0)[0][:3]
    assert hash_seed(3, {"PYTHONHASHSEED": "random"}) == {}
