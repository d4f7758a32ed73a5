# SPDX-License-Identifier: Apache-2.0
"""Genomes: reads FASTA records, and converts sequences to nucleotide or codon ids and back.

Sequences consist of IUPAC nucleotide codes in either case: A, C, G, T (or U), and eleven letters for an unknown or
ambiguous base, most often N. Lower case, which marks repeats ("soft-masked"), has no effect.
"""

from __future__ import annotations

import numpy as np

BASES, AMBIGUOUS = b"ACGT", b"NRYSWKMBDHV"
WHITE = b" \t\r\n"
SUFFIXES = (".fa", ".fasta", ".fas", ".fna", ".ffn", ".frn")
PROTEIN = (".faa",)
CODES = BASES + b"U" + AMBIGUOUS
UPPER = bytes.maketrans(CODES.lower(), CODES)

# Ids of nucleotides: A, C, G, T, an ambiguous base; then the end of a document.
UNKNOWN_BASE, BASE_EOD = 4, 5
# Ids of codons: AAA, AAC, AAG, ... TTT in the order of ACGT, a codon with an ambiguous base; the end of a document.
UNKNOWN_CODON, CODON_EOD = 64, 65

_BASE_OF = np.full(256, 255, np.uint8)
for _index, _base in enumerate(BASES):
    _BASE_OF[_base] = _index
_BASE_OF[ord("U")] = _BASE_OF[ord("T")]
_BASE_OF[list(AMBIGUOUS)] = UNKNOWN_BASE
_LETTERS = np.frombuffer(BASES + b"N", np.uint8)
_CODONS = np.array(
    [[_LETTERS[code // 16], _LETTERS[code // 4 % 4], _LETTERS[code % 4]] for code in range(64)] + [[_LETTERS[4]] * 3],
    np.uint8,
)


class BadSequence(ValueError):
    """A byte is not a nucleotide code. ``at`` is its index."""

    def __init__(self, byte: int, at: int) -> None:
        super().__init__(f"{chr(byte)!r} is not a nucleotide code")
        self.at = at


def clean(text: bytes | bytearray) -> bytes:
    """A sequence in upper case, without white space. Raises BadSequence if a byte is not a nucleotide code."""
    sequence = text.translate(UPPER, WHITE)
    if other := sequence.translate(None, CODES):
        at = min(text.find(bytes([byte])) for byte in set(other))
        raise BadSequence(text[at], at)
    return bytes(sequence)


def read_fasta_record(content: bytes | bytearray, line: int) -> str:
    """The sequence of one record.

    Args:
        content: from ``>`` to the next record, with lines of any length and any line ends.
        line: the number of its first line in the file.

    Raises:
        ValueError: no header, no sequence, or not a nucleotide code; the message names the line.
    """
    if content[:1] != b">":
        raise ValueError("not FASTA: a sequence without a '>' header before it")
    body = content.find(b"\n") + 1 or len(content)
    name = content[1:body].split(maxsplit=1)[:1]
    record = f"record {name[0][:60].decode('utf-8', 'replace')!r}" if name else "a record without a name"
    try:
        sequence = clean(content[body:])
    except BadSequence as error:
        raise ValueError(f"{record}: {error} (line {line + content.count(10, 0, body + error.at)})") from None
    if not sequence:
        raise ValueError(f"{record} has no sequence")
    return sequence.decode("ascii")


def nucleotide_ids(text: str) -> np.ndarray:
    """uint8 ids of a sequence's nucleotides. Raises BadSequence."""
    return _BASE_OF[np.frombuffer(clean(text.encode("utf-8", "surrogatepass")), np.uint8)]


def codon_ids(text: str) -> np.ndarray:
    """uint8 ids of a sequence's codons from its first base on; one or two remaining bases at the end are dropped.

    Raises BadSequence.
    """
    bases = nucleotide_ids(text)
    bases = bases[: len(bases) // 3 * 3].reshape(-1, 3)
    ids = (bases[:, 0] * 4 + bases[:, 1]) * 4 + bases[:, 2]
    ids[(bases == UNKNOWN_BASE).any(1)] = UNKNOWN_CODON
    return ids


def nucleotides(ids: list[int]) -> str:
    """The sequence of nucleotide ids, with N for an ambiguous base and without ends of documents."""
    return _LETTERS[[i for i in ids if i < BASE_EOD]].tobytes().decode("ascii") if ids else ""


def codons(ids: list[int]) -> str:
    """The sequence of codon ids, with NNN for an ambiguous codon and without ends of documents."""
    return _CODONS[[i for i in ids if i < CODON_EOD]].tobytes().decode("ascii") if ids else ""
