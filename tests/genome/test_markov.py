"""Markov baselines, against counts made letter by letter."""

import math
from collections import Counter
from pathlib import Path

import pytest

from launcher import genome
from launcher.genome import markov
from launcher.schema import Data
from tests.genome.files import ECOLI, LAMBDA, text_of


def bits_by_hand(train: list[str], validation: list[str], order: int) -> float:
    def runs(windows: list[str]) -> Counter[str]:
        return Counter(
            window[place - order : place + 1]
            for window in windows
            for place in range(max(order, 1), len(window))
            if set(window[place - order : place + 1]) <= set("ACGT")
        )

    seen = runs(train)
    total, number = 0.0, 0
    for run, count in runs(validation).items():
        context = sum(seen[run[:-1] + base] for base in "ACGT")
        total -= count * math.log2((seen[run] + 1) / (context + 4))
        number += count
    return total / number


@pytest.mark.parametrize("order", [0, 1, 2, 5])
@pytest.mark.parametrize("chunk", [100, 1 << 20])
def test_the_baseline_equals_counts_by_hand(
    tmp_path: Path, order: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(markov, "CHUNK_BASES", chunk)
    sequence = "".join(text_of(LAMBDA).values())[:6000].lower()
    sequence = sequence[:2000] + "NNNNNRYnn" + sequence[2000:].upper()
    path = tmp_path / "x.fa"
    path.write_text(f">a\n{sequence}\n")
    found = genome.load(Data(fasta=str(path), sequence_length=50, validation=0.2))
    cut = len(sequence) - round(len(sequence) * 0.2)
    train, validation = (
        [part[start : start + 50].upper() for start in range(0, len(part), 50)]
        for part in (sequence[:cut], sequence[cut:])
    )
    assert found.validation is not None
    bits = markov.markov_bits_per_base(found.train, found.validation, order)
    assert bits == pytest.approx(bits_by_hand(train, validation, order), rel=1e-12)


def test_the_baselines_of_e_coli(tmp_path: Path) -> None:
    found = genome.load(Data(fasta=str(ECOLI), sequence_length=8192, validation=0.02, cache_dir=str(tmp_path)))
    assert found.validation is not None
    assert markov.markov_bits_per_base(found.train, found.validation, 0) == pytest.approx(2.000, abs=1e-3)
    assert markov.markov_bits_per_base(found.train, found.validation, 1) == pytest.approx(1.981, abs=1e-3)


def test_a_validation_split_without_bases_has_no_baseline(tmp_path: Path) -> None:
    path = tmp_path / "x.fa"
    path.write_text(">a\nACGTACGTAC\n>b\nNNNNNN\n")
    found = genome.load(Data(fasta=str(path), sequence_length=4, validation=["b"], max_n_fraction=1))
    assert found.validation is not None
    assert math.isnan(markov.markov_bits_per_base(found.train, found.validation, 1))
