import gc
import random
from collections import UserDict, defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from perfsearch.instrument.loaders import Loaders, count_tokens
from perfsearch.instrument.tape import BatchTape, copy_structure, give_tensor
from perfsearch.knobs.loader import arguments_given

DATA = TensorDataset(torch.arange(12).float().reshape(12, 1))


@pytest.fixture
def make():
    made = []

    def loaders(**knobs):
        made.append(Loaders(knobs))
        return made[-1]

    yield loaders
    for one in made:
        one.undo()


@pytest.mark.parametrize(
    ("own", "knobs", "made"),
    [
        ({"num_workers": 2, "prefetch_factor": 4}, {}, {"num_workers": 2, "prefetch_factor": 4}),
        ({"num_workers": 2, "prefetch_factor": 4, "persistent_workers": True, "timeout": 5},
         {"dataloader_workers": 0},
         {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False, "timeout": 0}),
        ({}, {"dataloader_workers": 1, "prefetch_factor": 8},
         {"num_workers": 1, "prefetch_factor": 8}),
    ],
)  # fmt: skip
def test_arguments_stay_consistent(own, knobs, made):
    found = arguments_given(own, knobs)
    assert {name: found[name] for name in made} == made


def test_iterable_data_is_told_from_data_with_places(make):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(4))

    loaders = make()
    list(DataLoader(DATA, 4))
    assert not loaders.shared_out
    list(DataLoader(Stream(), 4))
    assert loaders.shared_out


def test_workers_are_set_and_ended(make):
    loaders = make(dataloader_workers=1, persistent_workers=True)
    loader = DataLoader(DATA, 4, False, num_workers=0)
    batches = iter(loader)
    first = next(batches)[0].flatten().tolist()
    assert first == [0, 1, 2, 3] and loaders.values()["dataloader_workers"] == 1
    process = batches._workers[0]
    loaders.close()
    assert not process.is_alive()


def test_a_loader_that_nothing_is_left_of_is_known(make):
    """As of ``for batch in DataLoader(...)``, whose iterator keeps only what it needs of it."""
    loaders = make(pin_memory=False)
    for _ in DataLoader(DATA, 4, pin_memory=True):
        gc.collect()
        assert loaders.made == 1
        assert loaders.values() == {
            "dataloader_workers": 0, "persistent_workers": False, "pin_memory": False
        }  # fmt: skip


def test_batches_samples_and_tokens_are_counted(make):
    loaders = make()
    marks = []
    loaders.mark = marks.append
    assert len(list(DataLoader(DATA, 5))) == 3
    used = loaders.accounting.read()
    assert (loaders.pulls, used.samples, used.tokens) == (3, 12, 0)
    assert marks[:2] == ["other", "dataloader_next"]


def test_making_an_iterator_and_its_end_are_loading(make):
    """Worker processes are started by the one and ended by the other, in each epoch."""
    loaders = make()
    marks = []
    loaders.mark = marks.append
    iterator = iter(DataLoader(DATA, 12))
    assert marks == ["other", "dataloader_next"]
    next(iterator)
    del marks[:]
    with pytest.raises(StopIteration):
        next(iterator)
    assert marks == ["other", "dataloader_next"]
    loaders.counting = False
    iter(DataLoader(DATA, 12))
    assert len(marks) == 2


class Drawing(Dataset):
    def __init__(self, draw):
        self.draw = draw

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return self.draw()


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize(
    ("draw", "draws"), [(lambda: torch.rand(1), True), (random.random, True), (lambda: 1.0, False)]
)
def test_it_is_seen_whether_loading_draws_random_numbers(make, draw, draws, workers):
    loaders = make()
    list(DataLoader(Drawing(draw), 2, shuffle=True, num_workers=workers))
    assert loaders.draws is draws


def test_what_the_processes_that_load_draw_is_unknown_where_they_are_not_forked(make):
    loaders = make()
    list(DataLoader(DATA, 12, num_workers=1, multiprocessing_context="spawn"))
    assert loaders.draws is None


MASK = torch.tensor([[1, 1, 1], [1, 0, 0]])


@pytest.mark.parametrize(
    ("batch", "counted"),
    [
        ({"input_ids": torch.ones(2, 3, dtype=torch.int64), "attention_mask": MASK}, 4),
        ({"input_ids": torch.ones(2, 3, dtype=torch.int64)}, 6),
        ([torch.ones(4, 3), torch.ones(4)], 0),
        (torch.ones(2, 5, dtype=torch.int64), 10),
        (("text", {"x": torch.ones(3, 2)}), 0),
        ({}, 0),
    ],
)
def test_padding_is_no_token(batch, counted):
    assert count_tokens(batch) == counted


class Graphs:
    """A batch of the script's own class, without a tensor that has a row a sample."""

    def __init__(self, items):
        self.nodes = torch.cat([item[0].repeat(3, 1) for item in items])


def rows_of_three(items):
    """A batch whose first dimension is another than the samples."""
    return torch.stack([item[0] for item in items]).reshape(-1, 1).repeat(3, 1)


def the_item_itself(items):
    """One item, which may be a batch."""
    return items[0]


class Batches(Dataset):
    """Gives whole batches by their number."""

    def __len__(self):
        return 4

    def __getitem__(self, place):
        return torch.zeros(16, 3), [torch.zeros(2, 16), torch.zeros(16, 1)]


class Numbers(IterableDataset):
    def __iter__(self):
        mine = torch.utils.data.get_worker_info()
        return iter(torch.arange(10.0).reshape(10, 1)[mine.id if mine else 0 :: 2])


class Ready(Dataset):
    """Gives whole batches by a list of places."""

    def __getitem__(self, places):
        return torch.zeros(7, len(places))


def in_uneven_batches():
    return [[0, 1, 2], [3], [4, 5, 6, 7, 8], [9, 10, 11]]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("loader", "samples", "batches"),
    [
        ({"dataset": DATA, "batch_size": 5}, 12, 3),
        ({"dataset": DATA, "batch_size": 5, "collate_fn": Graphs}, 12, 3),
        ({"dataset": DATA, "batch_size": 5, "collate_fn": rows_of_three}, 12, 3),
        ({"dataset": DATA, "batch_sampler": in_uneven_batches(), "collate_fn": Graphs}, 12, 4),
        ({"dataset": DATA, "batch_size": None}, None, 12),
        ({"dataset": DATA, "batch_size": 1}, 12, 12),
        ({"dataset": DATA, "batch_size": 1, "collate_fn": Graphs}, 12, 12),
        ({"dataset": Batches(), "batch_size": 1, "collate_fn": the_item_itself}, None, 4),
        ({"dataset": Ready(), "sampler": in_uneven_batches(), "batch_size": None}, 12, 4),
    ],
)
def test_samples_are_counted_by_what_the_sampler_names(make, loader, samples, batches, workers):
    loaders = make()
    for epochs in (1, 2):
        made = DataLoader(**loader, num_workers=workers)
        loaders.accounting.begin()
        assert sum(1 for _ in range(epochs) for _ in made) == batches * epochs
        counted = loaders.accounting.read().samples
        assert counted == (None if samples is None else samples * epochs)


@pytest.mark.parametrize(
    ("loader", "workers", "samples"),
    [
        ({"batch_size": 2}, 0, 5),  # of which the last is alone
        ({"batch_size": 2}, 2, 10),
        ({"batch_size": 2, "collate_fn": Graphs}, 0, 6),
        ({"batch_size": 2, "collate_fn": rows_of_three}, 0, 6),
        ({"batch_size": 1}, 0, 5),
        ({"batch_size": 1, "collate_fn": rows_of_three}, 0, None),
        ({"batch_size": None}, 0, None),
        ({"batch_size": None}, 2, None),
    ],
)
def test_streams_are_counted_in_batches_of_the_size_asked_for(make, loader, workers, samples):
    loaders = make()
    for _ in DataLoader(Numbers(), num_workers=workers, **loader):
        pass
    assert loaders.accounting.read().samples == samples


def test_what_was_on_its_way_at_an_epochs_end_is_no_batch_of_the_next(make):
    loaders = make()
    loader = DataLoader(
        DATA, batch_sampler=in_uneven_batches(), num_workers=1, persistent_workers=True
    )
    next(iter(loader))
    loaders.accounting.begin()
    assert len(list(loader)) == 4
    assert loaders.accounting.read().samples == 12


def test_a_tape_gives_the_same_batches_again_while_the_loader_goes_on():
    tape = BatchTape(most=3)
    for number in range(5):
        tape.pass_on({"x": torch.tensor([number])}, DATA)
    assert tape.kept == 3
    tape.rewind(1)
    given = [tape.pass_on({"x": torch.tensor([n])}, DATA)["x"].item() for n in (5, 6, 7)]
    assert given == [1, 2, 7]  # from where the tape ends, what the loader gives


def test_a_script_may_take_a_batch_apart_without_harm_to_the_tape():
    tape = BatchTape()
    tape.pass_on({"x": torch.tensor([1]), "labels": torch.tensor([2])}, DATA).pop("labels")
    tape.rewind(0)
    tape.pass_on({}, DATA).pop("labels")
    tape.rewind(0)
    assert tape.pass_on({}, DATA)["labels"].item() == 2


def test_a_tape_keeps_no_more_than_its_bytes():
    tape = BatchTape(most_bytes=100)
    tape.compares = False
    for _ in range(3):
        tape.pass_on(torch.zeros(20, dtype=torch.uint8).repeat(2), DATA)
    assert tape.kept == 2


def test_a_tape_keeps_more_of_the_steps_that_are_compared():
    tape = BatchTape(most_bytes=100, most_compared_bytes=200)
    for number in range(6):
        tape.compares = number < 3
        tape.pass_on(torch.full((50,), number, dtype=torch.uint8), DATA)
    assert tape.kept == 3
    tape.rewind(0)
    assert [int(tape.pass_on(torch.full((1,), 9), DATA)[0]) for _ in range(4)] == [0, 1, 2, 9]


def test_what_a_tape_will_keep_is_replaced_in_pinned_memory_at_its_first_batch():
    reserved = []
    tape = BatchTape(most_bytes=100, pinned=lambda batch: [b.numel() for b in batch.values()],
                     reserve=reserved.append)  # fmt: skip
    for _ in range(5):
        tape.pass_on({"x": torch.zeros(20, dtype=torch.uint8), "y": torch.zeros(5).byte()}, DATA)
    assert reserved == [[20, 5] * 4]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_no_step_waits_for_new_pinned_memory_since_a_tape_keeps_batches():
    torch.cuda.init()
    tape = BatchTape()
    rows = TensorDataset(torch.zeros(400, 2**18, dtype=torch.uint8))
    made = []
    for (batch,) in DataLoader(rows, 8, pin_memory=True):
        (kept,) = tape.pass_on([batch], rows)
        kept.to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        made.append(torch.cuda.host_memory_stats()["num_host_alloc"])
    assert tape.kept > 40
    assert made[-1] <= made[0] + 4  # what is loaded ahead


def test_a_tape_tells_how_many_shapes_batches_have():
    tape = BatchTape()
    for length in (3, 4, 3, 5):
        tape.pass_on({"ids": torch.zeros(2, length), "labels": [torch.zeros(2)]}, DATA)
    assert tape.shapes() == 3


def _steps(loader, count, begins):
    """Batches and masks of steps whose epochs begin at the steps ``begins``."""
    seen, batches = [], None
    for step in range(count):
        if step in begins:
            batches = iter(loader)
        (batch,) = next(batches)
        seen.append((batch.tolist(), torch.rand(2).tolist(), random.random(), np.random.rand()))
    return seen


def test_a_batch_of_a_worker_is_given_again_as_it_was() -> None:
    tape, data = BatchTape(), [0]
    tape.pass_on([torch.ones(2).share_memory_()], data)[0].mul_(3)
    for _ in range(2):
        tape.rewind(0)
        given = tape.pass_on([torch.zeros(2)], data)[0]
        assert given.tolist() == [1, 1]
        given.mul_(3)  # as a script does that scales its inputs in place


class Words(list):
    """A list whose constructor wants more than its parts."""

    def __init__(self, language: str, parts: list[Any]) -> None:
        super().__init__(parts)
        self.language = language


def test_copies_of_batches_keep_what_their_containers_are_made_with() -> None:
    tensor = torch.zeros(2)
    lists = copy_structure(defaultdict(list, x=tensor), give_tensor)
    words = copy_structure(Words("de", [tensor]), give_tensor)
    encoding = UserDict(x=tensor)
    kept = copy_structure(encoding, give_tensor)
    encoding.pop("x")  # as scripts do with labels
    assert lists["x"] is tensor
    assert lists["y"] == []
    assert words == [tensor]
    assert words.language == "de"
    assert kept["x"] is tensor


@pytest.mark.parametrize("begins", [(0,), (0, 1), (0, 2, 3)])
def test_the_same_steps_draw_the_same_wherever_an_epoch_begins(make, begins):
    """To begin an epoch draws the seed of the loader's workers, and the order of its samples."""
    loaders = make()
    loaders.tape = BatchTape()
    loader = DataLoader(DATA, 2, shuffle=True)
    torch.manual_seed(0)
    first = _steps(loader, 4, (0,))
    loaders.tape.rewind(0)
    assert _steps(loader, 4, begins) == first


def test_random_numbers_are_kept_with_the_compared_steps_only(make):
    loaders = make()
    loaders.tape = BatchTape()
    loader = DataLoader(DATA, 2)
    first = _steps(loader, 1, (0,))
    loaders.tape.compares = False
    later = _steps(loader, 1, (0,))
    loaders.tape.rewind(0)
    again = _steps(loader, 2, (0,))
    assert again[0] == first[0] and again[1] != later[0]


@pytest.mark.parametrize("rebuilt", [False, True])
def test_validation_gets_none_of_the_batches_of_training(make, rebuilt):
    loaders = make()
    loaders.tape = BatchTape()
    train, held_out = TensorDataset(torch.arange(4)), TensorDataset(torch.arange(10, 14))

    def values(dataset):
        return [batch.tolist() for (batch,) in DataLoader(dataset, 2)]

    assert values(train) == [[0, 1], [2, 3]]
    loaders.tape.rewind(0)
    if rebuilt:  # by the script, for each epoch: what the batches came from is gone
        train = TensorDataset(torch.arange(4).flip(0))
    else:
        assert values(held_out) == [[10, 11], [12, 13]]
    assert values(train) == [[0, 1], [2, 3]]


def test_a_validation_set_that_is_gone_leaves_its_batches_to_none_of_training(make):
    loaders = make()
    loaders.tape = BatchTape()
    train = TensorDataset(torch.arange(4))

    def values(dataset):
        return [batch.tolist() for (batch,) in DataLoader(dataset, 2)]

    assert values(train)[:1] == [[0, 1]]
    assert values(TensorDataset(torch.arange(10, 12))) == [[10, 11]]
    loaders.tape.rewind(0)
    assert values(train) == [[0, 1], [2, 3]]
