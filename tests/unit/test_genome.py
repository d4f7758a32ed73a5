# SPDX-License-Identifier: Apache-2.0
"""Genomes: FASTA to nucleotide and codon tokens and back, and all kinds of invalid files."""

from __future__ import annotations

import base64
import gzip
import itertools
import json
import socket
import sys
import tracemalloc
from pathlib import Path

import pytest
import sentencepiece
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron.training.data import encoding
from megatron.training.data.genome import CODES
from megatron.training.data.text_files import Reader, fields_of
from megatron.training.data.tokenizer import Tokenizer, build_tokenizer, check_vocab, padded_vocab_size
from megatron.training.refusal import Refusal
from megatron.training.settings.config import DataConfig
from tools import preprocess_data

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))


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
    """The documents that tools/preprocess_data.py makes from some files, as lists of ids."""
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
def test_sequences_survive_a_round_trip(text: str):
    """Decoded sequences have upper case, T for U, N for ambiguous bases, no white space and only complete codons."""
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
def test_letters_that_are_no_nucleotides_get_no_token(kind: str, text: str):
    with pytest.raises(ValueError, match="is not a nucleotide code"):
        tokenizer(kind).tokenize(text)


# ---- files


@pytest.mark.parametrize("suffix", [".fa", ".fasta", ".fna", ".FFN", ".fas", ".frn", ".fa.gz", ".fna.zst"])
def test_each_record_is_a_document(tmp_path: Path, suffix: str):
    path = tmp_path / f"genome{suffix}"
    compress = zstandard.ZstdCompressor().compress
    pack = {
        ".gz": lambda x: gzip.compress(x[:30]) + gzip.compress(x[30:]),
        ".zst": lambda x: compress(x[:9]) + compress(x[9:]),
    }
    path.write_bytes(pack.get(path.suffix, bytes)(FASTA))  # bgzip, for example, writes .gz with several members
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
def test_invalid_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture, content: bytes):
    path = tmp_path / "x.fa"
    path.write_bytes(content)
    line = refused(capsys, tmp_path, path)
    assert f"{path}, {BAD[content]}" in line
    assert "--skip-bad-lines" in line and not list(tmp_path.glob("out*"))
    (tmp_path / "good.fa").write_bytes(FASTA)
    assert len(preprocess(tmp_path, path, tmp_path / "good.fa", flags="--skip-bad-lines")) >= 2
    assert "1 bad" in capsys.readouterr().out


def test_options_that_exclude_each_other(tmp_path: Path, capsys: pytest.CaptureFixture):
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
    """Peak memory of reading and tokenizing, in bytes per base of the longest record."""
    path, bases = tmp_path / "x.fa", 900_000
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


def test_parsed_text_is_the_sequence(tmp_path: Path):
    (tmp_path / "x.fa").write_bytes(FASTA)
    assert [fields_of(record, "text") for record in Reader([str(tmp_path / "x.fa")])] == [
        {"text": "ACGTACGTNNRYU"},
        {"text": "TTTGGGCC"},
    ]


# All tokenizers that need no network, and all refusals.


TEXTS = ["def f(x):\n    return x  # größer, 数字 12\n", "a  b\t c\n\n", "the cat sat on the mat " * 20]
END = "<|endoftext|>"


def train_sentencepiece(path, **ids):
    """A small model with byte fallback that keeps white space."""
    with open(path, "wb") as model:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(line for text in TEXTS for line in text.splitlines() if line),
            model_writer=model,
            vocab_size=300,
            hard_vocab_limit=False,
            model_type="bpe",
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            minloglevel=2,
            **ids,
        )
    return str(path)


def train_bpe(special):
    """A tiny byte-level BPE of the tokenizers library."""
    from tokenizers import Tokenizer as Model
    from tokenizers import decoders, models, pre_tokenizers, trainers

    model = Model(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=290, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator(TEXTS, trainer)
    return model


def make(kind, folder, special=(END,)):
    """(settings of a tokenizer of this kind, its --vocab-size or None); its files are written to ``folder``."""
    data = DataConfig(tokenizer_type=kind)
    if kind == "ByteLevelTokenizer":
        return data, None
    if kind == "NullTokenizer":
        return data, 100
    if kind == "HuggingFaceTokenizer":
        from transformers import PreTrainedTokenizerFast

        eos = {"eos_token": special[0]} if special else {}
        PreTrainedTokenizerFast(tokenizer_object=train_bpe(list(special)), **eos).save_pretrained(folder / "hf")
        data.tokenizer_model = str(folder / "hf")
    elif kind in ("GPT2BPETokenizer", "QwenTokenizer"):
        train_bpe(list(special)).model.save(str(folder))
        data.vocab_file, data.merge_file = str(folder / "vocab.json"), str(folder / "merges.txt")
    elif kind.startswith("TokenizerFromFile"):
        train_bpe(list(special)).save(str(folder / "tokenizer.json"))
        data.tokenizer_model = str(folder / "tokenizer.json")
    elif kind == "TikTokenizer":
        pieces = [bytes([i]) for i in range(256)] + [b"th", b"the", b"at"]
        entries = [
            {"rank": i, "token_bytes": base64.b64encode(p).decode(), "token_str": p.decode("latin-1")}
            for i, p in enumerate(pieces)
        ]
        (folder / "tik.json").write_text(json.dumps(entries))
        data.tokenizer_model, data.tiktoken_num_special_tokens = str(folder / "tik.json"), 10
    else:
        data.tokenizer_model = train_sentencepiece(folder / "sp.model")
    return data, None


KINDS = [
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "HuggingFaceTokenizer",
    "GPT2BPETokenizer",
    "QwenTokenizer",
    "TikTokenizer",
    "TokenizerFromFile",
    "TokenizerFromFileWithFIM",
    "ByteLevelTokenizer",
]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """A tokenizer of each kind, made without network access."""
    connect = socket.socket.connect
    socket.socket.connect = lambda *_: pytest.fail("a tokenizer tried to use the network")
    try:
        return {kind: build_tokenizer(*make(kind, tmp_path_factory.mktemp(kind))) for kind in KINDS}
    finally:
        socket.socket.connect = connect


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip(tokenizers, kind):
    tokenizer = tokenizers[kind]
    for text in TEXTS:
        ids = tokenizer.tokenize(text)
        assert ids and all(type(i) is int and 0 <= i < tokenizer.vocab_size for i in ids)
        assert tokenizer.eod not in ids and 0 <= tokenizer.eod < tokenizer.vocab_size
        assert tokenizer.detokenize(ids) == text
    assert tokenizer.tokenize("") == []


@given(text=st.text(st.characters(codec="utf-8"), max_size=40))
def test_bytes_keep_any_text(text):
    tokenizer = build_tokenizer(DataConfig(tokenizer_type="ByteLevelTokenizer"), None)
    assert tokenizer.vocab_size == 257 and tokenizer.eod == 256
    assert tokenizer.tokenize(text) == list(text.encode())
    assert tokenizer.detokenize([*tokenizer.tokenize(text), tokenizer.eod]) == text


def test_the_null_tokenizer():
    tokenizer = build_tokenizer(DataConfig(tokenizer_type="NullTokenizer"), 100)
    assert (tokenizer.vocab_size, tokenizer.eod) == (101, 100)
    assert tokenizer.tokenize("1 2 99") == [1, 2, 99] and tokenizer.detokenize([1, 2]) == "1 2"
    assert check_vocab(100, tokenizer) == 101


def test_tiktoken_vocabulary_is_cut_as_in_megatron(tmp_path):
    data, _ = make("TikTokenizer", tmp_path)
    assert build_tokenizer(data, None).vocab_size == 259 + 10
    cut = build_tokenizer(data, 256 + 10)
    assert cut.vocab_size == 266 and max(cut.tokenize("the cat")) < 266
    with pytest.raises(Refusal, match="larger than the 269 ids"):
        check_vocab(1000, build_tokenizer(data, 1000))
    data.tiktoken_pattern = "v3"
    with pytest.raises(Refusal, match="--tiktoken-pattern v3"):
        build_tokenizer(data, None)


def test_a_file_of_the_tokenizers_library_as_in_bigcode(tmp_path):
    """Ids and special tokens as transformers' PreTrainedTokenizerFast gives them, which BigCode's Megatron-LM wraps."""
    from transformers import PreTrainedTokenizerFast

    fim = [END, "<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>"]
    for kind, special in (("TokenizerFromFile", [END]), ("TokenizerFromFileWithFIM", fim)):
        data, _ = make(kind, tmp_path, special=())  # the file has no special tokens
        ours = build_tokenizer(data, None)
        theirs = PreTrainedTokenizerFast(tokenizer_file=data.tokenizer_model)
        theirs.add_special_tokens({"additional_special_tokens": special})
        assert (ours.vocab_size, ours.eod) == (len(theirs), theirs.vocab[END])
        for text in (*TEXTS, f"a{END}b<fim_pad>"):
            assert ours.tokenize(text) == theirs.encode(text)


def test_qwens_words_and_ids_as_in_transformers(tmp_path):
    from transformers import Qwen2Tokenizer

    data, _ = make("QwenTokenizer", tmp_path, special=())
    ours, theirs = build_tokenizer(data, None), Qwen2Tokenizer(data.vocab_file, data.merge_file)
    assert (ours.vocab_size, ours.eod) == (len(theirs), theirs.eos_token_id)
    for text in (*TEXTS, "12345 don't\r\n\r\n  e\u0301t\u00e9 {}", f"a{END}b"):
        assert ours.tokenize(text) == theirs.encode(text)


def test_hugging_face_ids_with_gaps(tmp_path):
    data, _ = make("HuggingFaceTokenizer", tmp_path)
    path = tmp_path / "hf" / "tokenizer.json"
    content = json.loads(path.read_text())
    last = max(content["model"]["vocab"], key=content["model"]["vocab"].get)
    content["model"]["vocab"][last] = 999
    path.write_text(json.dumps(content))
    assert build_tokenizer(data, None).vocab_size == 1000


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "ByteLevelTokenizer"])
def test_missing_options_and_files(kind, tmp_path):
    needed = ["vocab_file", "merge_file"] if kind in ("GPT2BPETokenizer", "QwenTokenizer") else ["tokenizer_model"]
    for name in needed:
        flag = "--" + name.replace("_", "-")
        data, vocab_size = make(kind, tmp_path)
        setattr(data, name, None)
        with pytest.raises(Refusal, match=f"{kind} needs {flag}") as refusal:
            build_tokenizer(data, vocab_size)
        assert "\n" not in str(refusal.value)
        setattr(data, name, "/no/such/thing.json")
        with pytest.raises(Refusal, match=f"{flag} /no/such/thing.json: no such"):
            build_tokenizer(data, vocab_size)


def test_broken_files(tmp_path):
    broken = tmp_path / "broken.json"
    broken.write_text("nonsense")
    (tmp_path / "empty").mkdir()
    for kind in ("SentencePieceTokenizer", "TikTokenizer"):
        with pytest.raises(Refusal, match="broken.json") as refusal:
            build_tokenizer(DataConfig(tokenizer_type=kind, tokenizer_model=str(broken)), None)
        assert "\n" not in str(refusal.value)
    with pytest.raises(Refusal, match="empty: cannot be read"):
        build_tokenizer(
            DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path / "empty")), None
        )
    with pytest.raises(Refusal, match="not a folder"):
        build_tokenizer(DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(broken)), None)
    with pytest.raises(Refusal, match="not GPT-2 BPE files"):
        build_tokenizer(
            DataConfig(tokenizer_type="GPT2BPETokenizer", vocab_file=str(broken), merge_file=str(broken)), None
        )


def test_a_tokenizer_without_an_end_of_document_is_refused_only_where_it_is_needed(tmp_path, capsys):
    path = train_sentencepiece(tmp_path / "sp.model", bos_id=-1, eos_id=-1)
    for data, size in (
        (DataConfig(tokenizer_type="Llama2Tokenizer", tokenizer_model=path), None),
        make("HuggingFaceTokenizer", tmp_path, special=()),
        make("GPT2BPETokenizer", tmp_path, special=()),
    ):
        tokenizer = build_tokenizer(data, size)
        assert tokenizer.tokenize("the cat") and tokenizer.eod == -1
        with pytest.raises(Refusal, match=r"has no token that ends a document \(eos\), which --sft needs: give"):
            tokenizer.end_for("--sft")
    source = tmp_path / "x.txt"
    source.write_text("the cat")
    argv = ["--input", str(source), "--output-prefix", str(tmp_path / "x"), "--workers", "1"]
    argv += ["--tokenizer-type", "Llama2Tokenizer", "--tokenizer-model", path]
    preprocess_data.main(argv)
    with pytest.raises(SystemExit):
        preprocess_data.main([*argv, "--append-eod", "--overwrite"])
    assert "which --append-eod needs" in capsys.readouterr().err


def test_a_normalizer_that_would_fill_the_memory_is_refused(tmp_path):
    """The library would end the process."""
    from tokenizers import Regex, decoders, normalizers

    data, _ = make("TokenizerFromFile", tmp_path)
    model = json.loads(Path(data.tokenizer_model).read_text())

    def built(**parts):
        written = {name: json.loads(part.__getstate__()) for name, part in parts.items()}
        Path(data.tokenizer_model).write_text(json.dumps(model | written))
        return build_tokenizer(data, None)

    grow = [normalizers.Replace("a", "a" * 1000)] * 3
    for parts in ({"normalizer": normalizers.Sequence(grow)}, {"decoder": decoders.Replace("a", "a" * 101)},
                  {"normalizer": normalizers.Replace(Regex("x*"), "a" * 100)}):  # fmt: skip
        with pytest.raises(Refusal, match="its replacements can make a text [0-9,]+ times as long"):
            built(**parts)
    usual = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁"), normalizers.NFKC()])
    assert built(normalizer=usual).tokenize("the cat")


def test_check_vocab():
    tokenizer = Tokenizer("Llama2Tokenizer", "Llama2Tokenizer t.model", 300, 2, str.encode, bytes.decode)
    assert check_vocab(None, tokenizer) == check_vocab(300, tokenizer) == 300
    with pytest.raises(Refusal, match="--vocab-size 299 is smaller than the 300 ids of Llama2Tokenizer t.model"):
        check_vocab(299, tokenizer)
    with pytest.raises(Refusal, match="--vocab-size 301 is larger than the 300 ids"):
        check_vocab(301, tokenizer)


@given(vocab=st.integers(1, 300_000), by=st.integers(1, 256), tensor=st.integers(1, 16))
def test_padded_vocabulary_sizes(vocab, by, tensor):
    padded = padded_vocab_size(vocab, by, tensor)
    assert padded % (by * tensor) == 0 and vocab <= padded < vocab + by * tensor
    assert padded_vocab_size(50257, 128, 1) == 50304
