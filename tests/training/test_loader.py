import itertools

import pytest

from perfsearch.training.state import RankBatches


def indices(rank, world_size=2, micro_batch=2, steps=6, samples=20, global_batch=8, seed=3):
    batches = RankBatches(samples, global_batch, rank, world_size, micro_batch, seed)
    each = global_batch // world_size // micro_batch
    return list(itertools.islice(batches, steps * each))


def test_a_step_trains_the_same_samples_however_it_is_shared():
    def steps(world_size, micro_batch):
        shares = [indices(r, world_size, micro_batch) for r in range(world_size)]
        each = 8 // world_size // micro_batch
        return [
            sorted(i for share in shares for b in share[s * each : (s + 1) * each] for i in b)
            for s in range(6)
        ]

    assert steps(1, 8) == steps(2, 4) == steps(2, 2) == steps(4, 1)


def test_every_epoch_visits_each_sample_once_in_another_order():
    flat = [i for batch in indices(0, world_size=1, micro_batch=8, steps=5) for i in batch]
    first, second = flat[:20], flat[20:40]
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second


def test_each_iteration_starts_at_the_same_place():
    batches = RankBatches(20, 8, 1, 2, 4, seed=0)
    one = list(itertools.islice(batches, 7))
    assert list(itertools.islice(batches, 7)) == one


@pytest.mark.parametrize(("world_size", "micro_batch"), [(3, 1), (2, 3)])
def test_an_uneven_share_is_refused(world_size, micro_batch):
    with pytest.raises(ValueError, match="a global batch of 8 cannot be shared by"):
        RankBatches(20, 8, 0, world_size, micro_batch, seed=0)
