"""The vocabulary and the tables between letters, codes and tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.genome import alphabet

IUPAC = {
    "A": "A",
    "C": "C",
    "G": "G",
    "T": "T",
    "N": "ACGT",
    "R": "AG",
    "Y": "CT",
    "S": "CG",
    "W": "AT",
    "K": "GT",
    "M": "AC",
    "B": "CGT",
    "D": "AGT",
    "H": "ACT",
    "V": "ACG",
}
"""Which bases each code stands for (NC-IUB 1984)."""

sequences = st.text("ACGTNRYSWKMBDHVacgtnryswkmbdhv", max_size=200)


def test_the_documented_ids_do_not_change() -> None:
    ids = "PAD=0 MASK=1 A=2 C=3 G=4 T=5 N=6 R=7 Y=8 S=9 W=10 K=11 M=12 B=13 D=14 H=15 V=16"
    assert " ".join(f"{name}={token}" for token, name in enumerate(alphabet.VOCABULARY)) == ids
    code = {name: int(token) for name, token in (pair.split("=") for pair in ids.split())}
    for letter in IUPAC:
        assert alphabet.encode(letter).tolist() == [code[letter]]
        assert alphabet.encode(letter.lower()).tolist() == [code[letter] + 0x20]


@given(sequences)
def test_codes_round_trip_with_their_case(sequence: str) -> None:
    assert alphabet.decode(alphabet.encode(sequence)) == sequence


def test_u_reads_as_t() -> None:
    assert alphabet.decode(alphabet.encode("AUGu")) == "ATGt"


def test_a_complement_stands_for_the_complements_of_its_bases() -> None:
    opposite = str.maketrans("ACGT", "TGCA")
    for letter, bases in IUPAC.items():
        complement = alphabet.decode(alphabet.COMPLEMENT[alphabet.encode(letter)])
        assert set(IUPAC[complement]) == set(bases.translate(opposite))
        lower = alphabet.decode(alphabet.COMPLEMENT[alphabet.encode(letter.lower())])
        assert lower == complement.lower()


def test_pad_and_mask_have_no_opposite() -> None:
    assert alphabet.COMPLEMENT[[alphabet.PAD, alphabet.MASK]].tolist() == [alphabet.PAD, alphabet.MASK]


@given(sequences)
def test_the_reverse_complement_is_an_involution(sequence: str) -> None:
    once = alphabet.reverse_complement(alphabet.encode(sequence))
    assert alphabet.decode(alphabet.reverse_complement(once)) == sequence


def test_the_reverse_complement_of_a_known_sequence() -> None:
    assert alphabet.decode(alphabet.reverse_complement(alphabet.encode("AACgtRN"))) == "NYacGTT"


@given(sequences)
def test_tokens_forget_the_case(sequence: str) -> None:
    tokens = alphabet.TOKEN[alphabet.encode(sequence)]
    assert tokens.tolist() == [alphabet.VOCABULARY.index(letter) for letter in sequence.upper()]


def test_targets_are_the_four_bases_in_either_case() -> None:
    assert {chr(alphabet.TO_ASCII[code]) for code in np.flatnonzero(alphabet.IS_TARGET)} == set("ACGTacgt")


@pytest.mark.parametrize("letter", [byte for byte in map(chr, range(256)) if byte.upper() not in {*IUPAC, "U"}])
def test_nothing_else_is_a_base(letter: str) -> None:
    with pytest.raises(ValueError, match="at 2 is not an IUPAC DNA letter"):
        alphabet.encode(b"AC" + letter.encode("latin-1"))
