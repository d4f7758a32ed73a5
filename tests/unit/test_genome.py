# SPDX-License-Identifier: Apache-2.0
"""Genomes: FASTA to nucleotide and codon tokens and back, and every way a file can be wrong."""

from __future__ import annotations

import gzip
import itertools
import sys
import tracemalloc
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron.training.arguments.config import DataConfig
from megatron.training.data import encoding
from megatron.training.data.genome import CODES
from megatron.training.data.text_files import Reader, parse
from megatron.training.data.tokenizer import build_tokenizer

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import preprocess_data  # noqa: E402

FASTA = b""">chr1 the first\r
ACGT\r
acgtnNRy\r

U\r
>chr2\r
TTTGGGCC\r
"""
CODONS = ["".join(codon) for codon in itertools.product("ACGT", repeat=3)]


def tokenizer(kind: str):
    return build_tokenizer(DataConfig(tokenizer_type=kind), None)


def preprocess(folder: Path, *inputs: object, kind: str = "NucleotideTokenizer", flags: str = "--append-eod") -> list:
    """The documents that the tool makes of some files."""
    argv = ["--input", *map(str, inputs), "--output-prefix", str(folder / "out"), "--tokenizer-type", kind]
    preprocess_data.main([*argv, "--overwrite", "--workers", "1", *flags.split()])
    return [document.tolist() for document in IndexedDataset(str(folder / "out_text_document"))]


def refused(capsys: pytest.CaptureFixture, *args: object, **options: object) -> str:
    with pytest.raises(SystemExit) as stop:
        preprocess(*args, **options)
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


# ---- tokenizers


def test_ids_of_nucleotides():
    nucleotides = tokenizer("NucleotideTokenizer")
    assert (nucleotides.vocab_size, nucleotides.eod) == (6, 5)
    assert nucleotides.tokenize("ACGTacgtUu") == [0, 1, 2, 3, 0, 1, 2, 3, 3, 3]
    assert nucleotides.tokenize("NRYSWKMBDHVn") == [4] * 12
    assert nucleotides.detokenize([0, 1, 2, 3, 4, 5, 0]) == "ACGTNA"


def test_ids_of_codons():
    codons = tokenizer("CodonTokenizer")
    assert (codons.vocab_size, codons.eod) == (66, 65)
    assert codons.tokenize("".join(CODONS)) == list(range(64))
    assert [codons.detokenize([i]) for i in range(66)] == [*CODONS, "NNN", ""]
    assert codons.tokenize("ATGNACaugTT") == [14, 64, 14] == codons.tokenize("ATGNACaugT")
    assert codons.tokenize("AC") == []


@given(st.text(alphabet=CODES.decode() + CODES.decode().lower() + " \n", max_size=50))
def test_sequences_come_back(text: str):
    """As they were read: upper case, U as T, ambiguous bases as N, no white space; whole codons."""
    read = "".join(text.split()).upper().replace("U", "T")
    bases = "".join(base if base in "ACGT" else "N" for base in read)
    mine = tokenizer("NucleotideTokenizer")
    ids = mine.tokenize(text)
    assert all(type(i) is int for i in ids) and mine.detokenize([*ids, mine.eod]) == bases
    codons = [bases[at : at + 3] for at in range(0, len(bases) - len(bases) % 3, 3)]
    mine = tokenizer("CodonTokenizer")
    wanted = "".join("NNN" if "N" in codon else codon for codon in codons)
    assert mine.detokenize([*mine.tokenize(text), mine.eod]) == wanted


@pytest.mark.parametrize("kind", ["NucleotideTokenizer", "CodonTokenizer"])
@pytest.mark.parametrize("text", ["ACGX", "AC-GT", "ACé", "AC\x00"])
def test_what_is_no_nucleotide_is_no_token(kind: str, text: str):
    with pytest.raises(ValueError, match="is not a nucleotide code"):
        tokenizer(kind).tokenize(text)


# ---- files


@pytest.mark.parametrize("suffix", [".fa", ".fasta", ".fna", ".FFN", ".fas", ".frn", ".fa.gz", ".fna.zst"])
def test_a_document_a_record(tmp_path: Path, suffix: str):
    path = tmp_path / f"genome{suffix}"
    half = zstandard.ZstdCompressor().compress
    pack = {".gz": lambda x: gzip.compress(x[:30]) + gzip.compress(x[30:]), ".zst": lambda x: half(x[:9]) + half(x[9:])}
    path.write_bytes(pack.get(path.suffix, bytes)(FASTA))  # bgzip, for one, writes .gz of several members
    assert preprocess(tmp_path, path) == [[0, 1, 2, 3, 0, 1, 2, 3, 4, 4, 4, 4, 3, 5], [3, 3, 3, 2, 2, 2, 1, 1, 5]]


@pytest.mark.parametrize("frame, wanted", [(0, [6, 49, 64, 64]), (1, [27, 6, 64, 64]), (2, [44, 27, 64])])
def test_frames(tmp_path: Path, frame: int, wanted: list[int]):
    (tmp_path / "x.fa").write_bytes(FASTA)
    first, second = preprocess(tmp_path, tmp_path / "x.fa", kind="CodonTokenizer", flags=f"--codon-frame {frame}")
    assert first == wanted, [CODONS[i] for i in first if i < 64]
    assert len(second) == (8 - frame) // 3


@pytest.mark.parametrize(
    "content, documents",
    [
        (b">a\nACGT", [[0, 1, 2, 3]]),
        (b"\n\n>a\nA\n C\tG\n\n\n>b\nT\n", [[0, 1, 2], [3]]),
        (b"\xef\xbb\xbf>a\nA\n", [[0]]),
        (b">\nA\n", [[0]]),
        (b">a >b\nA\n", [[0]]),
        (b">a\n" + b"ACGT" * 300_000 + b"\n>b\nC\n", [[0, 1, 2, 3] * 300_000, [1]]),
    ],
    ids=["no line end", "blank lines", "byte order mark", "no name", "sign in a name", "one long line"],
)
def test_layouts_of_files(tmp_path: Path, content: bytes, documents: list):
    (tmp_path / "x.fa").write_bytes(content)
    assert preprocess(tmp_path, tmp_path / "x.fa", flags="") == documents


BAD = {
    b">a\nACGT\nACXT\n": "line 1: record 'a': 'X' is not a nucleotide code (line 3)",
    b">a\nAC-T\n": "line 1: record 'a': '-' is not a nucleotide code (line 2)",
    b">a\nACGT\n>b\n\nMKV*L\n": "line 3: record 'b': '*' is not a nucleotide code (line 5)",
    b"ACGT\nACGT\n": "line 1: not FASTA: a sequence without a '>' header before it",
    b"\n{}\n": "line 2: not FASTA",
    b">a\n>b\nACGT\n": "line 1: record 'a' has no sequence",
    b">a\nACGT\n>b c\n \n": "line 3: record 'b' has no sequence",
    b">\n": "line 1: a record without a name has no sequence",
    b">a\rACGT\r": "line 1: record 'a' has no sequence",
}


@pytest.mark.parametrize("content", BAD, ids=[text.split(": ")[-1] for text in BAD.values()])
def test_files_that_are_wrong(tmp_path: Path, capsys: pytest.CaptureFixture, content: bytes):
    path = tmp_path / "x.fa"
    path.write_bytes(content)
    line = refused(capsys, tmp_path, path)
    assert f"{path}, {BAD[content]}" in line
    assert "--skip-bad-lines" in line and not list(tmp_path.glob("out*"))
    (tmp_path / "good.fa").write_bytes(FASTA)
    assert len(preprocess(tmp_path, path, tmp_path / "good.fa", flags="--skip-bad-lines")) >= 2
    assert "1 bad" in capsys.readouterr().out


def test_options_that_do_not_go_together(tmp_path: Path, capsys: pytest.CaptureFixture):
    (tmp_path / "x.fa").write_bytes(FASTA)
    (tmp_path / "x.faa").write_bytes(b">p\nMKV\n")
    (tmp_path / "x.jsonl").write_text('{"text": "ACGT"}\n{"text": "hello"}\n')
    assert "amino acids" in refused(capsys, tmp_path, tmp_path / "x.faa")
    assert "--json-keys a does not go with" in refused(capsys, tmp_path, tmp_path / "x.fa", flags="--json-keys a")
    assert "--codon-frame 1 needs --tokenizer-type CodonTokenizer" in refused(
        capsys, tmp_path, tmp_path / "x.fa", flags="--codon-frame 1"
    )
    line = refused(capsys, tmp_path, tmp_path / "x.jsonl")
    assert "x.jsonl, line 2: NucleotideTokenizer cannot tokenize the text" in line


def test_other_tokenizers_read_genomes_too(tmp_path: Path):
    (tmp_path / "x.fa").write_bytes(b">a\nac\nGU\n")
    assert preprocess(tmp_path, tmp_path / "x.fa", kind="ByteLevelTokenizer", flags="") == [[*b"ACGU"]]


def settings_of(kind: str) -> encoding.Settings:
    return encoding.Settings((("tokenizer_type", kind),), None, "uint16", ("text",), False, 0)


def test_memory_of_a_long_record(tmp_path: Path):
    """What reading and tokenizing hold at once, in bytes a base of the longest record."""
    path, bases = tmp_path / "x.fa", 3_000_000
    path.write_bytes(b">chr\n" + b"ACGTN" * 12 + b"\n" + (b"ACGTACGTAC" * 6 + b"\n") * (bases // 60))
    for kind, limit in (("NucleotideTokenizer", 8), ("CodonTokenizer", 8)):
        settings = settings_of(kind)
        encoding.tokenizer_of(settings.tokenizer, settings.vocab_size)
        tracemalloc.start()
        for records, _ in encoding.batches(Reader([str(path)])):
            encoded = encoding.encode(settings, records)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert sum(encoded.lengths["text"]) * (3 if kind == "CodonTokenizer" else 1) == bases + 60
        assert peak < limit * bases, peak / bases


def test_long_records_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With workers, no more than the limit and one record wait; the documents are the same."""
    monkeypatch.setattr(encoding, "WAITING_BYTES", 1500)
    monkeypatch.setattr(encoding, "BATCH_BYTES", 1)
    records = [f">{i}\n{'ACGT' * 250}\n".encode() for i in range(12)]
    (tmp_path / "x.fa").write_bytes(b"".join(records))
    settings = settings_of("NucleotideTokenizer")
    reader = Reader([str(tmp_path / "x.fa")])
    ahead = []
    for done, (encoded, _) in enumerate(encoding.encode_all(settings, reader, 2, "fork"), 1):
        assert encoded.lengths["text"] == [1000]
        ahead.append(reader.bytes_read - done * len(records[0]))
    assert len(ahead) == 12 and max(ahead) < len(records[0]) + 3000


def test_parse_is_the_sequence(tmp_path: Path):
    (tmp_path / "x.fa").write_bytes(FASTA)
    assert [parse(record, ("text",)) for record in Reader([str(tmp_path / "x.fa")])] == [
        {"text": "ACGTACGTNNRYU"},
        {"text": "TTTGGGCC"},
    ]
