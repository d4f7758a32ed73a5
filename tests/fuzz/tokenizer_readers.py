# SPDX-License-Identifier: Apache-2.0
"""The readers of tokenizers and chat templates, each with valid files and a function that changes them."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from megatron.training.data import chat_dataset
from megatron.training.data.chat_template import ChatTemplate
from megatron.training.data.tokenizer import build_tokenizer
from megatron.training.settings.config import DataConfig
from tests.chats import CHATML, LLAMA3, make_tokenizer
from tests.fuzz import mutations
from tests.fuzz.data_readers import bare_json, limited, reader, text
from tests.unit.test_genome import make

TEXT = "The ring sends keys on. äöü 12\n"
OPTIONS = {  # entries of published tokenizer_config.json files; some name code to run
    "auto_map": {"AutoTokenizer": ["harm.Harm", "harm.Harm"]},
    "tokenizer_class": "Harm",
    "trust_remote_code": True,
    "chat_template": "{{ ''.__class__.__mro__ }}",
    "name_or_path": "someone/harm",
    "_commit_hash": "0" * 40,
    "custom_pipelines": {"a": {"impl": "harm.Harm"}},
    "processor_class": "Harm",
    "tokenizer_file": "/etc/passwd",
    "vocab_file": "/etc/passwd",
}
CLASSES = [
    "LlamaTokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast", "GPT2Tokenizer", "BertTokenizer",
    "T5Tokenizer", "TokenizersBackend", "MarianTokenizer", "RagTokenizer", "TapexTokenizer", "PythonBackend",
    "os.system",
]  # fmt: skip
HARM = b"open('ran', 'w').write('harm')\nimport os\nos.system('touch ran')\nclass Harm:\n    pass\n"
EXPRESSIONS = [
    "''.__class__.__mro__[1].__subclasses__()", "cycler.__init__.__globals__.os.system('touch ran')",
    "lipsum.__globals__['os'].popen('touch ran')", "namespace.__init__", "messages.append(1)",
    "self._TemplateReference__context", "range(10**12)|list", "'a' * 10**4", "raise_exception('no')",
    "'a'|center(10**9)", "'a' * 10**10", "strftime_now('%Y')", "x.y.z", "messages[0]|attr('__class__')",
    "''|attr('format')", "'{0.__class__}'.format(1)", "messages|tojson", "loop.cycle(1)", "1/0", "''.join",
]  # fmt: skip
PUT = [
    "{{ %s }}", "{%% set x = %s %%}", "{%% if %s %%}{%% endif %%}", "{%% for a in %s %%}{{ a }}{%% endfor %%}",
    "{%% import 'harm.py' as a %%}%s", "{%% include 'harm.py' %%}%s",
    "{%% for a in [[[]]] recursive %%}{{ loop([a]) }}{%% endfor %%}%s",
    "{%% macro m() %%}{{ m() }}{%% endmacro %%}{{ m() }}%s",
]  # fmt: skip


ENDLESS = [
    b"{% for a in range(10**5) %}{% for b in range(10**5) %}{% endfor %}{% endfor %}", b"{{ 9**(9**9) }}",
    b"{% set n = namespace(x='ab') %}{% for a in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
]  # fmt: skip


@cache
def files(kind: str) -> dict[str, bytes]:
    """The files of a tokenizer, by name."""
    with tempfile.TemporaryDirectory() as folder:
        if kind == "chats":
            make_tokenizer(Path(folder))
        else:
            make(kind, Path(folder))
        result = {path.name: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}
    return result


def without(kind: str, name: str) -> dict[str, bytes]:
    return {other: data for other, data in files(kind).items() if other != name} | {"harm.py": HARM}


def read(kind: str, **settings: Any) -> Any:
    def build(folder: Path) -> None:
        data = DataConfig(tokenizer_type=kind, tiktoken_num_special_tokens=10, **settings)
        tokenizer = build_tokenizer(data, None)
        if tokenizer.vocab_size < 100_000:  # a program creates a model of this size before it tokenizes
            tokenizer.detokenize(tokenizer.tokenize(TEXT))

    return build


def config(random: Random, data: bytes) -> bytes:
    """Add entries that name code to a tokenizer_config.json, or change it as JSON."""
    if random.random() < 0.4:
        return mutations.json_text(random, data)
    value = json.loads(data)
    for name in random.sample(sorted(OPTIONS), random.choice([1, 2, 4])):
        value[name] = OPTIONS[name] if random.random() < 0.7 else random.choice(mutations.TEXTS)
    if random.random() < 0.4:
        value["tokenizer_class"] = random.choice(CLASSES)
    return mutations.changed_json(random, value).encode() if random.random() < 0.2 else json.dumps(value).encode()


def template(random: Random, data: bytes) -> bytes:
    """Add expressions that access Python to a Jinja template, or change it as text."""
    if random.random() < 0.4:
        return text(random, data)
    new = (random.choice(PUT) % random.choice(EXPRESSIONS)).encode()
    if random.random() < 0.04:  # few, because each takes as long as it may
        new = random.choice(ENDLESS)
    at = random.choice([0, len(data), random.randrange(len(data))])
    return data[:at] + new + data[at:]


CHAT = [{"role": role, "content": text} for role, text in (("system", "s"), ("user", "a"), ("assistant", "b c"))]
NUMBERS = """{%- set n = namespace(x=3) %}{% for i in range(2) %}{% for j in range(2, 5, 1) %}{{ i * 2 ** n.x }}
{%- endfor %}{% endfor %}{{ 'ab' * 2 }}{{ 'ab' | center(8) | indent(4) | truncate(9) }}
{{- '%5d' | format(7) }}{{ 1.5 | round(1) }}
{%- for m in messages | batch(1) %}{% for o in m %}{% generation %}{{ o.content[0:9] }}{% endgeneration %}{% endfor %}
{%- endfor %}{{ messages | tojson(indent=2) }}"""


@cache
def of_chats(folder: str) -> Any:
    return build_tokenizer(DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=folder), None)


def render(folder: Path) -> None:
    given = (folder / "file").read_text(errors="replace")
    template = ChatTemplate(of_chats(str(folder)).transformers, given, "a tokenizer")
    with limited(chat_dataset, MEMORY=128 << 20, SECONDS=1):
        chat_dataset.render("chats.jsonl", "--data-path", template, pairs=False)


BPE = {"vocab_file": "vocab.json", "merge_file": "merges.txt"}
HF = read("HuggingFaceTokenizer", tokenizer_model=".")
READERS = [
    reader("tokenizer_json", lambda: [files("TokenizerFromFile")["tokenizer.json"]], bare_json,
           read("TokenizerFromFile", tokenizer_model="tokenizer.json"), "tokenizer.json", memory=1024),
    reader("gpt2_vocab", lambda: [files("GPT2BPETokenizer")["vocab.json"]], bare_json,
           read("GPT2BPETokenizer", **BPE), "vocab.json",
           other_files=without("GPT2BPETokenizer", "vocab.json"), memory=1024),
    reader("gpt2_merges", lambda: [files("GPT2BPETokenizer")["merges.txt"]], text,
           read("GPT2BPETokenizer", **BPE), "merges.txt",
           other_files=without("GPT2BPETokenizer", "merges.txt"), memory=1024),
    reader("tiktoken", lambda: [files("TikTokenizer")["tik.json"]], bare_json,
           read("TikTokenizer", tokenizer_model="tik.json"), "tik.json", memory=1024),
    reader("sentencepiece", lambda: [files("SentencePieceTokenizer")["sp.model"]], mutations.any_bytes,
           read("SentencePieceTokenizer", tokenizer_model="sp.model"), "sp.model", memory=1024),
    reader("hf_tokenizer", lambda: [files("HuggingFaceTokenizer")["tokenizer.json"]], bare_json, HF,
           "tokenizer.json", other_files=without("HuggingFaceTokenizer", "tokenizer.json"), memory=1024),
    reader("hf_tokenizer_config", lambda: [files("HuggingFaceTokenizer")["tokenizer_config.json"]], config, HF,
           "tokenizer_config.json", other_files=without("HuggingFaceTokenizer", "tokenizer_config.json"), memory=1024,
           trusted=("transformers",)),
    reader("chat_template", lambda: [CHATML.encode(), LLAMA3.encode(), NUMBERS.encode()], template, render,
           other_files=files("chats") | {"harm.py": HARM, "chats.jsonl": json.dumps({"messages": CHAT}).encode()},
           seconds=0.5, trusted=("jinja2",)),
]  # fmt: skip
