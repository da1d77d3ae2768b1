"""Small tokenizers, trained on a few lines, and chat templates."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = [
    "",
    " ",
    "Hello world",
    "  two  spaces\n\n\tand tabs\r\n",
    "don't we'll I'M HE'S",
    "1234567 3.14 1,000,000",
    "naïve café 北京 こんにちは мир مرحبا नमस्ते",
    "🎉🥳👩‍👩‍👧 flags 🇫🇷",
    "def f(x):\n    return x**2  # comment\n",
    "a" * 300,
    "\x00\x01\ufeff\u200b\u202e",
    "https://example.com/path?q=1&r=2#frag",
]


def random_texts(count: int) -> list[str]:
    rng = random.Random(1)
    alphabets = ["abc ABC'.,\n", "0123456789 ", "éàüß北京🎉👍🏽\u0301 ", "{}[]()<>|/\\_-=+*&^%$#@!~`\"'", "\t\n\r   "]
    alphabets.append("".join(alphabets))
    return ["".join(rng.choice(rng.choice(alphabets)) for _ in range(rng.randint(1, 60))) for _ in range(count)]


CORPUS = [*TEXTS, *random_texts(300), "the quick brown fox jumps over the lazy dog " * 20]


def byte_level(tmp_path: Path, *, split: str | None = None, template: str | None = None) -> Path:
    """Return a byte-level BPE like Llama 3's or SmolLM's, trained on a few lines."""
    backend = tokenizers.Tokenizer(models.BPE(ignore_merges=split is not None))
    first: list[Any] = [pre_tokenizers.Split(Regex(split), "isolated")] if split else [pre_tokenizers.Digits(True)]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)]
    )
    backend.decoder = decoders.ByteLevel()
    special = ["<|begin_of_text|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>"]
    backend.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=600,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    backend.add_tokens([AddedToken("<｜User｜>", special=False, normalized=False)])
    backend.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    backend.add_tokens([AddedToken("        ", special=False, normalized=False)])  # a run of spaces is ordinary text
    backend.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", backend.token_to_id("<|begin_of_text|>"))]
    )
    return saved(backend, tmp_path, template)


def sentencepiece(tmp_path: Path, template: str | None = None) -> Path:
    """Return a BPE in SentencePiece's style, like Llama 2's, TinyLlama's and Mistral's."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend.train_from_iterator(
        [text for text in CORPUS if text.isascii()],
        trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False),
    )
    rebuilt = tokenizers.Tokenizer.from_str(backend.to_str())
    # Byte tokens are vocabulary, not added tokens.
    state = json.loads(rebuilt.to_str())
    state["added_tokens"] = [entry for entry in state["added_tokens"] if not entry["content"].startswith("<0x")]
    backend = tokenizers.Tokenizer.from_str(json.dumps(state))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return saved(backend, tmp_path, template, bos="<s>", eos="</s>")


def saved(
    backend: tokenizers.Tokenizer,
    directory: Path,
    template: str | None,
    bos: str = "<|begin_of_text|>",
    eos: str = "<|eot_id|>",
) -> Path:
    backend.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": {"__type": "AddedToken", "content": eos},
    }
    if template is not None:
        config["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def metadata_of(directory: Path, pre: str) -> dict[str, Any]:
    """Return the metadata that llama.cpp's converter writes for a byte-level tokenizer.json."""
    state = json.loads((directory / "tokenizer.json").read_text())
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    vocabulary = sorted(backend.get_vocab(True).items(), key=lambda item: item[1])
    added = {entry["content"]: entry["special"] for entry in state["added_tokens"]}
    kinds = [(3 if added[text] else 4) if text in added else 1 for text, _ in vocabulary]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [text for text, _ in vocabulary],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in state["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": backend.token_to_id("<|begin_of_text|>"),
        "tokenizer.ggml.eos_token_id": backend.token_to_id("<|eot_id|>"),
        "tokenizer.ggml.add_bos_token": True,
    }


CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

ZEPHYR = (
    "{% for message in messages %}\n{% if message['role'] == 'user' %}\n"
    "{{ '<|user|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'system' %}\n{{ '<|system|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n"
    "{% endif %}\n{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
)

THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
    "{% endif %}"
)
