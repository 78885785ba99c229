"""The shares of the ranks: together the global batch, and random only by seed, step and place."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from launcher import genome
from launcher.batch import Cut
from launcher.genome import alphabet
from launcher.schema import Data, Objective, Tail
from launcher.steps import Steps, sequence_keys
from launcher.worker.objectives import Bases, Custom
from launcher.worker.windows import GenomeSource, MicroBatch, Share, Shares, Source, TorchSource, mask_bases, read_ahead

CUTS = [(12, 1, 1), (6, 2, 1), (1, 12, 1), (3, 2, 2), (1, 6, 2), (4, 1, 3), (2, 2, 3), (1, 3, 4)]
"""A global batch of 12 as micro-batch, accumulation steps and ranks."""

COMPLEMENTS = dict(zip("ACGTRYKMBVDHSWNacgtrykmbvdhswn", "TGCAYRMKVBHDSWNtgcayrmkvbhdswn", strict=True))
"""NC-IUB 1984."""

BASES = "GATTACAnnnacgtRYKMSWBDHVNNACGTTGCAAGGTCCgattacaTTTGACCA"
LENGTH = 10
WINDOWS = [BASES[start : start + LENGTH] for start in range(0, len(BASES), LENGTH)]

AUGMENTED = 5


class Numbers(Dataset[Any]):
    """Item i holds i, and as labels i of them that count."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = torch.full((self.count,), -100)
        labels[:index] = 1
        return {"inputs": torch.tensor(index), "labels": labels}


class Pairs(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([index, 10 * index]), -index


class Augmented(Dataset[Any]):
    """Draws from the generators of torch, Python and numpy."""

    def __len__(self) -> int:
        return AUGMENTED

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        drawn = [float(torch.rand(())), random.random(), np.random.random()]
        return {"inputs": torch.tensor([index, *drawn], dtype=torch.float64)}


def count_items(logits: Any, batch: Any) -> Any:
    """A loss; its weight is what ``Custom`` counts."""
    raise NotImplementedError("shares are weighed, not trained on")


def shares(source: Source, micro: int, accumulation: int, ranks: int, seed: int = 3, tail: Tail = Tail.CARRY) -> Any:
    """The shares of each rank."""
    cut = Cut(micro * accumulation * ranks, micro, accumulation, ranks)
    steps = Steps(len(source), cut.train_batch_size, tail, 100, seed)
    objective = Bases(Data()) if isinstance(source, GenomeSource) else Custom(count_items)
    return [Shares(source, objective, steps, cut, rank) for rank in range(ranks)]


def dealt(of_ranks: Iterable[Shares], step: int) -> Iterator[MicroBatch]:
    """The micro-batches of all ranks as the global batch is dealt out: one to each rank, then the next."""
    for round_ in zip(*(of_rank[step].micro_batches for of_rank in of_ranks), strict=True):
        yield from round_


def joined(of_ranks: Iterable[Shares], step: int) -> dict[str, torch.Tensor]:
    """The global batch of a step."""
    batches = [micro_batch.batch for micro_batch in dealt(of_ranks, step) if not micro_batch.is_empty]
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def inputs(share: Share) -> list[list[int]]:
    return [micro_batch.batch["inputs"].tolist() for micro_batch in share.micro_batches]


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> genome.Genome:
    fasta = tmp_path_factory.mktemp("genome") / "genome.fa"
    fasta.write_text(f">one\n{BASES}\n")
    return genome.load(Data(fasta=str(fasta), sequence_length=LENGTH, validation=None, max_n_fraction=1.0))


def masked_windows(read: genome.Genome) -> GenomeSource:
    data = Data(objective=Objective.MASKED, mask_fraction=0.5)
    return GenomeSource(read.train, data, reverse_complement=True)


# Which sequences


def test_every_rank_reads_its_own_places_of_the_global_batch() -> None:
    first, second = shares(TorchSource(Numbers(12)), micro=2, accumulation=3, ranks=2)
    order = Steps(12, 12, Tail.CARRY, 100, 3).sequences(4).tolist()
    assert inputs(first[4]) == [[order[place] for place in places] for places in ([0, 1], [4, 5], [8, 9])]
    assert inputs(second[4]) == [[order[place] for place in places] for places in ([2, 3], [6, 7], [10, 11])]


@pytest.mark.parametrize("cut", CUTS)
def test_the_shares_of_all_ranks_are_the_global_batch(cut: tuple[int, int, int]) -> None:
    of_ranks = shares(TorchSource(Numbers(30)), *cut)
    seen: list[int] = []
    for step in range(5):  # two epochs
        seen += joined(of_ranks, step)["inputs"].tolist()
        every = [of_rank[step] for of_rank in of_ranks]
        assert {share.num_sequences for share in every} == {12}
        # Item i has i labels that count.
        assert sum(share.weight.weight for share in every) == sum(share.weight.tokens for share in every)
        assert sum(share.weight.tokens for share in every) == sum(seen[-12:])
    assert Counter(seen[:30]) == Counter(seen[30:]) == Counter(range(30))
    assert seen == [i for step in range(5) for i in Steps(30, 12, Tail.CARRY, 100, 3).sequences(step).tolist()]


def test_the_short_last_batch_of_an_epoch_leaves_micro_batches_short_or_empty() -> None:
    """13 sequences in batches of 8: the second has five, and its last micro-batch none."""
    first, second = shares(TorchSource(Numbers(13)), micro=2, accumulation=2, ranks=2, seed=4, tail=Tail.FLUSH)
    order = Steps(13, 8, Tail.FLUSH, 100, 4).sequences(1).tolist()
    assert len(order) == 5
    assert order[0] > 0, "what stands in for an empty micro-batch would be seen in the weight"
    assert inputs(first[1]) == [[order[0], order[1]], [order[4]]]
    assert [micro_batch.is_empty for micro_batch in first[1].micro_batches] == [False, False]
    assert inputs(second[1])[0] == [order[2], order[3]]
    assert [micro_batch.is_empty for micro_batch in second[1].micro_batches] == [False, True]
    assert len(inputs(second[1])[1]) == 1, "something to run the model on"
    assert first[1].num_sequences == second[1].num_sequences == 5
    assert first[1].weight.weight == order[0] + order[1] + order[4]
    assert second[1].weight.weight == order[2] + order[3]


@pytest.mark.parametrize(("micro", "ranks"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4)])
@pytest.mark.parametrize("tail", Tail)
def test_a_batch_schedule_changes_the_accumulation_and_nothing_else(micro: int, ranks: int, tail: Tail) -> None:
    """Batches of 4, 12 and 8 sequences, whatever the cut; dropout masks go by the step and the first sequence."""
    source, steps = TorchSource(Numbers(30)), Steps(30, 4, tail, 100, 3).grown(2, 12).grown(4, 8)
    cut = Cut(8, micro, 8 // (micro * ranks), ranks)
    of_ranks = [Shares(source, Custom(count_items), steps, cut, rank) for rank in range(ranks)]
    for step, size in enumerate([4, 4, 12, 12, 8, 8, 8]):
        order = steps.sequences(step)
        assert {len(of_rank[step].micro_batches) for of_rank in of_ranks} == {size // (micro * ranks)}
        assert {of_rank[step].num_sequences for of_rank in of_ranks} == {len(order)}
        assert joined(of_ranks, step)["inputs"].tolist() == order.tolist()
        keys = sequence_keys(3, step, np.arange(0, size, micro))
        assert [micro_batch.dropout_seed for micro_batch in dealt(of_ranks, step)] == [int(key) >> 1 for key in keys]


@pytest.mark.parametrize("cut", [cut for cut in CUTS if cut[0] * 2 < 12])
def test_an_epoch_under_flush_is_every_sequence_once_in_every_cut(cut: tuple[int, int, int]) -> None:
    of_ranks = shares(TorchSource(Numbers(17)), *cut, tail=Tail.FLUSH)
    for first_step in (0, 2):
        seen = [i for step in (first_step, first_step + 1) for i in joined(of_ranks, step)["inputs"].tolist()]
        assert Counter(seen) == Counter(range(17))
        assert sum(share[first_step + 1].weight.tokens for share in of_ranks) == sum(seen[12:])


# What is random about them


@pytest.mark.parametrize("cut", CUTS)
def test_strands_and_masks_are_the_same_in_every_cut(read: genome.Genome, cut: tuple[int, int, int]) -> None:
    source = masked_windows(read)
    whole, parts = shares(source, 12, 1, 1), shares(source, *cut)
    for step in range(3):
        expected, found = joined(whole, step), joined(parts, step)
        assert set(found) == {"codes", "inputs", "targets"}
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0)


def test_a_sequence_is_masked_otherwise_at_another_place_step_or_seed(tmp_path: Path) -> None:
    """One sequence, again and again; two patterns over its 40 targets at 50 % agree once in 2^40."""
    fasta = tmp_path / "genome.fa"
    fasta.write_text(f">one\n{'ACGT' * 10}\n")
    one = masked_windows(genome.load(Data(fasta=str(fasta), sequence_length=40, validation=None)))
    assert len(one) == 1
    batches = [joined(shares(one, 12, 1, 1, seed=seed), step) for seed in (1, 2) for step in (0, 1, 2)]
    patterns = [tuple(targets) for batch in batches for targets in batch["targets"].tolist()]
    assert len(set(patterns)) == len(patterns) == 2 * 3 * 12


def test_masking_does_not_change_which_strand_is_read(read: genome.Genome) -> None:
    causal = GenomeSource(read.train, Data(), reverse_complement=True)
    ours = joined(shares(causal, 12, 1, 1), 0)["codes"]
    torch.testing.assert_close(ours, joined(shares(masked_windows(read), 12, 1, 1), 0)["codes"])


def test_the_strand_of_a_sequence_says_nothing_about_its_masks(read: genome.Genome) -> None:
    """Half are reversed and half have their first base masked: both or neither, half of the time."""
    keys = sequence_keys(1, 2, np.arange(1000))
    batch = masked_windows(read).fetch(np.zeros(1000, dtype=np.int64), keys)
    assert WINDOWS[0] == "GATTACAnnn"
    is_reversed = np.array([alphabet.decode(codes.numpy()).startswith("n") for codes in batch["codes"]])
    first = np.where(is_reversed, 3, 0)  # the first base that can be a target
    is_masked = batch["targets"].numpy()[np.arange(1000), first]
    assert abs(int((is_reversed == is_masked).sum()) - 500) < 5 * math.sqrt(1000 * 0.5 * 0.5)


@pytest.mark.parametrize("cut", CUTS)
def test_datasets_that_draw_from_any_generator_are_the_same_in_every_cut(cut: tuple[int, int, int]) -> None:
    source = TorchSource(Augmented())
    for step in range(2):
        expected = joined(shares(source, 12, 1, 1), step)["inputs"]
        assert joined(shares(source, *cut), step)["inputs"].tolist() == expected.tolist()


def test_every_draw_of_a_dataset_is_a_new_one() -> None:
    drawn = torch.cat([joined(shares(TorchSource(Augmented()), 12, 1, 1, seed), 0)["inputs"] for seed in (1, 2)])
    for column in range(1, 4):
        assert len(set(drawn[:, column].tolist())) == len(drawn) == 24


@pytest.mark.parametrize("kind", ["genome", "dataset"])
def test_processes_that_read_ahead_change_nothing(read: genome.Genome, kind: str) -> None:
    source: Source = masked_windows(read) if kind == "genome" else TorchSource(Augmented())
    here, ahead = (
        list(read_ahead(shares(source, 3, 2, 2)[1], range(5), num_workers=num_workers)) for num_workers in (0, 2)
    )
    assert len(here) == len(ahead) == 5
    for ours, theirs in zip(here, ahead, strict=True):
        assert (ours.weight, ours.num_sequences) == (theirs.weight, theirs.num_sequences)
        for mine, other in zip(ours.micro_batches, theirs.micro_batches, strict=True):
            assert (mine.is_empty, mine.dropout_seed) == (other.is_empty, other.dropout_seed)
            assert {name: value.tolist() for name, value in mine.batch.items()} == {
                name: value.tolist() for name, value in other.batch.items()
            }


def test_equal_micro_batches_have_equal_dropout_seeds_and_no_others_have() -> None:
    source = TorchSource(Numbers(30))
    seeds = {
        (ranks, step): [micro_batch.dropout_seed for micro_batch in dealt(shares(source, 3, 4 // ranks, ranks), step)]
        for ranks, step in itertools.product((1, 2, 4), (0, 1))
    }
    assert seeds[1, 0] == seeds[2, 0] == seeds[4, 0]
    assert seeds[1, 1] == seeds[2, 1] == seeds[4, 1]
    assert len({*seeds[1, 0], *seeds[1, 1]}) == 8
    assert all(0 <= seed < 2**63 for seed in seeds[1, 0]), "what torch.manual_seed takes"


# Windows of a genome


def test_windows_are_read_from_either_strand(read: genome.Genome) -> None:
    forward = [window.ljust(LENGTH, "_") for window in WINDOWS]
    backward = ["".join(COMPLEMENTS[base] for base in reversed(window)).ljust(LENGTH, "_") for window in WINDOWS]
    source = GenomeSource(read.train, Data(), reverse_complement=True)
    assert len(source) == len(WINDOWS) == 6
    keys = sequence_keys(1, 2, np.arange(400))
    for index, (ahead, back) in enumerate(zip(forward, backward, strict=True)):
        letters = [alphabet.decode(row.numpy()) for row in source.fetch(np.full(400, index), keys)["codes"]]
        assert set(letters) == {ahead, back}
        backwards = letters.count(back)
        assert abs(backwards - 200) < 5 * math.sqrt(400 * 0.5 * 0.5)


def test_without_reverse_complement_every_window_is_read_forwards(read: genome.Genome) -> None:
    source = GenomeSource(read.train, Data(), reverse_complement=False)
    batch = source.fetch(np.arange(6).repeat(50), sequence_keys(1, 2, np.arange(300)))
    letters = [alphabet.decode(row.numpy()) for row in batch["codes"]]
    assert letters == [window.ljust(LENGTH, "_") for window in WINDOWS for _ in range(50)]
    assert set(batch) == {"codes"}


def test_a_masked_window_keeps_its_bases_and_says_which_are_targets(read: genome.Genome) -> None:
    batch = masked_windows(read).fetch(np.arange(6).repeat(50), sequence_keys(1, 2, np.arange(300)))
    assert batch["targets"].any()
    untouched = ~batch["targets"]
    assert batch["inputs"][untouched].tolist() == batch["codes"][untouched].tolist()
    assert batch["inputs"].tolist() != batch["codes"].tolist()
    for codes, targets in zip(batch["codes"], batch["targets"], strict=True):
        assert set(alphabet.decode(codes[targets].numpy())) <= set("ACGTacgt")


# Masks


def test_masked_bases_read_mask_another_base_or_themselves_as_in_bert() -> None:
    """80, 10 and 10 % (Devlin et al. 2019); a random base is the same one again in a quarter of the cases."""
    number, fraction = 400_000, 0.15
    generator = np.random.Generator(np.random.PCG64(1))
    letters = "".join(random.Random(1).choices("ACGTacgtNnRy", k=number))
    codes = alphabet.encode(letters)
    seen, targets = codes.copy(), np.zeros(number, dtype=bool)
    mask_bases(seen, targets, fraction, generator)

    def check(count: int, trials: int, probability: float) -> None:
        assert abs(count - trials * probability) < 5 * math.sqrt(trials * probability * (1 - probability))

    is_base = np.array([letter in "ACGTacgt" for letter in letters])
    assert not targets[~is_base].any()
    assert (seen[~targets] == codes[~targets]).all()
    check(int(targets.sum()), int(is_base.sum()), fraction)
    shown, hidden = seen[targets], np.array([letter.upper() for letter in letters])[targets]
    is_mask = shown == 1
    check(int(is_mask.sum()), len(shown), 0.8)
    bases = np.array([alphabet.decode(shown[~is_mask]).upper()]).view("<U1")
    is_other = bases != hidden[~is_mask]
    check(int(is_other.sum()), len(shown), 0.1 * 3 / 4)
    for true, drawn in itertools.permutations("ACGT", 2):
        pairs = (hidden[~is_mask] == true) & (bases == drawn)
        check(int(pairs.sum()), int((hidden == true).sum()), 0.1 / 4)


@pytest.mark.parametrize(("fraction", "expected"), [(0.0, ""), (1.0, "ACGTacgt")])
def test_the_fraction_of_targets_is_exact_at_its_ends(fraction: float, expected: str) -> None:
    codes = alphabet.encode("ACGTNacgtn")
    targets = np.zeros(10, dtype=bool)
    mask_bases(codes.copy(), targets, fraction, np.random.Generator(np.random.PCG64(1)))
    assert alphabet.decode(codes[targets]) == expected


# Datasets of torch


def test_items_of_a_dataset_may_be_dicts() -> None:
    source = TorchSource(Numbers(4))
    batch = source.fetch(np.array([2, 0, 3]), sequence_keys(0, 0, np.arange(3)))
    assert len(source) == 4
    assert batch["inputs"].tolist() == [2, 0, 3]
    assert batch["labels"].tolist() == [[1, 1, -100, -100], [-100] * 4, [1, 1, 1, -100]]


def test_items_of_a_dataset_may_be_pairs_of_inputs_and_labels() -> None:
    batch = TorchSource(Pairs()).fetch(np.array([3, 1]), sequence_keys(0, 0, np.arange(2)))
    assert set(batch) == {"inputs", "labels"}
    assert batch["inputs"].tolist() == [[3, 30], [1, 10]]
    assert batch["labels"].tolist() == [-3, -1]


def test_shares_are_read_in_the_order_of_the_steps_asked_for() -> None:
    (only,) = shares(TorchSource(Numbers(12)), 12, 1, 1)
    read = [inputs(share)[0] for share in read_ahead(only, [5, 2], num_workers=0)]
    assert read == [Steps(12, 12, Tail.CARRY, 100, 3).sequences(step).tolist() for step in (5, 2)]
