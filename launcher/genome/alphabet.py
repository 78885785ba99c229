"""Single nucleotides as numbers: the vocabulary, the one-byte code of a base, and the tables between them.

A code is the token id of a base, plus ``LOWER`` where the base is soft-masked (lower case). Ids are part of every
checkpoint: they never change.
"""

import numpy as np
from numpy.typing import NDArray

Codes = NDArray[np.uint8]
"""Bases, one code each."""

PAD = 0
"""Fills a window that is shorter than sequence_length, on the right."""
MASK = 1
"""Stands for a target in the input of the masked objective."""
A, C, G, T = 2, 3, 4, 5
N = 6

VOCABULARY = ("PAD", "MASK", "A", "C", "G", "T", "N", "R", "Y", "S", "W", "K", "M", "B", "D", "H", "V")
"""Names of the tokens; a token's id is its place."""

LOWER = 0x20
"""Set in the code of a soft-masked base."""
NO_BASE = 255
"""What ``FROM_ASCII`` gives for a byte that is no IUPAC DNA letter."""

_LETTERS = {name: token for token, name in enumerate(VOCABULARY) if len(name) == 1}
_COMPLEMENTS = dict(zip("ACGTNRYSWKMBDHV", "TGCANYRSWMKVHDB", strict=True))


def _from_ascii() -> Codes:
    table = np.full(256, NO_BASE, dtype=np.uint8)
    for letter, token in (_LETTERS | {"U": T}).items():
        table[ord(letter)] = token
        table[ord(letter.lower())] = token | LOWER
    return table


def _to_ascii() -> Codes:
    table = np.full(256, ord("?"), dtype=np.uint8)
    table[PAD] = ord("_")
    for letter, token in _LETTERS.items():
        table[token] = ord(letter)
        table[token | LOWER] = ord(letter.lower())
    return table


def _complement() -> Codes:
    table = np.arange(256, dtype=np.uint8)
    for letter, opposite in _COMPLEMENTS.items():
        table[_LETTERS[letter]] = _LETTERS[opposite]
        table[_LETTERS[letter] | LOWER] = _LETTERS[opposite] | LOWER
    return table


FROM_ASCII = _from_ascii()
"""(256,) ASCII to code, either case; U reads as T; NO_BASE for everything that is not IUPAC DNA."""
TO_ASCII = _to_ascii()
"""(256,) code to ASCII; PAD is '_', MASK '?'."""
COMPLEMENT = _complement()
"""(256,) code to the code of the opposite strand, for all IUPAC codes; case, PAD and MASK are kept."""
TOKEN = np.where(ord("?") == TO_ASCII, MASK, np.arange(256) & ~LOWER).astype(np.uint8)
"""(256,) code to token id."""
IS_TARGET: NDArray[np.bool_] = np.isin(TOKEN, (A, C, G, T))
"""(256,) whether a code can be a target of the loss: A, C, G or T, either case."""


def encode(sequence: str | bytes) -> Codes:
    """The codes (n,) of a sequence of n letters, case kept. Raises ValueError for a letter that is no IUPAC code."""
    text = sequence.encode("latin-1", "replace") if isinstance(sequence, str) else sequence
    codes = text.translate(_FROM_ASCII_BYTES)
    wrong = codes.find(NO_BASE)
    if wrong >= 0:
        raise ValueError(f"{chr(text[wrong])!r} at {wrong} is not an IUPAC DNA letter")
    return np.frombuffer(codes, dtype=np.uint8)


def decode(codes: Codes) -> str:
    """The letters of codes (n,), soft-masked bases in lower case, PAD as '_' and MASK as '?'."""
    return codes.tobytes().translate(TO_ASCII.tobytes()).decode("ascii")


def reverse_complement(codes: Codes) -> Codes:
    """The same bases (n,) read from the opposite strand."""
    return np.frombuffer(codes.tobytes().translate(_COMPLEMENT_BYTES), dtype=np.uint8)[::-1]


# bytes.translate looks a table up several times faster than numpy's indexing does.
_FROM_ASCII_BYTES = FROM_ASCII.tobytes()
_COMPLEMENT_BYTES = COMPLEMENT.tobytes()
