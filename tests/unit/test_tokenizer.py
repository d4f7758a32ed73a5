# SPDX-License-Identifier: Apache-2.0
"""Every tokenizer that can be made without a network, and each refusal."""

import base64
import json
import socket

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from megatron.training.arguments.config import DataConfig
from megatron.training.data.tokenizer import Tokenizer, build_tokenizer, check_vocab, padded_vocab_size
from megatron.training.refusal import Refusal

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
    """Settings for a tokenizer of this kind, with its files below ``folder``; and --vocab-size."""
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
    """One of each kind, made with the network cut off."""
    connect = socket.socket.connect
    socket.socket.connect = lambda *_: pytest.fail("a tokenizer wanted the network")
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


def test_null():
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
        data, _ = make(kind, tmp_path, special=())  # the file has none of them
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


def test_hugging_face_ids_with_holes(tmp_path):
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
    with pytest.raises(Refusal, match="--tokenizer-type is missing"):
        build_tokenizer(DataConfig(), 100)
    with pytest.raises(Refusal, match="NullTokenizer needs --vocab-size"):
        build_tokenizer(DataConfig(tokenizer_type="NullTokenizer"), None)


def test_no_end_of_document(tmp_path):
    path = train_sentencepiece(tmp_path / "sp.model", bos_id=-1, eos_id=-1)
    with pytest.raises(Refusal, match="sp.model has no end-of-sequence piece"):
        build_tokenizer(DataConfig(tokenizer_type="Llama2Tokenizer", tokenizer_model=path), None)
    with pytest.raises(Refusal, match="has no eos_token"):
        build_tokenizer(*make("HuggingFaceTokenizer", tmp_path, special=()))
    with pytest.raises(Refusal, match="has no <|endoftext|> entry".replace("|", r"\|")):
        build_tokenizer(*make("GPT2BPETokenizer", tmp_path, special=()))


def test_check_vocab():
    tokenizer = Tokenizer("Llama2Tokenizer", "Llama2Tokenizer t.model", 300, 2, str.encode, bytes.decode)
    assert check_vocab(None, tokenizer) == check_vocab(300, tokenizer) == 300
    with pytest.raises(Refusal, match="--vocab-size 299 is smaller than the 300 ids of Llama2Tokenizer t.model"):
        check_vocab(299, tokenizer)
    with pytest.raises(Refusal, match="--vocab-size 301 is larger than the 300 ids"):
        check_vocab(301, tokenizer)


@given(vocab=st.integers(1, 300_000), by=st.integers(1, 256), tensor=st.integers(1, 16))
def test_padding(vocab, by, tensor):
    padded = padded_vocab_size(vocab, by, tensor)
    assert padded % (by * tensor) == 0 and vocab <= padded < vocab + by * tensor
    assert padded_vocab_size(50257, 128, 1) == 50304
