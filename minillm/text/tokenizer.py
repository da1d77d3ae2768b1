"""Text to token ids and back.

The work is the ``tokenizers`` library's. What is ours: text that a user typed can never become a control token (see
`minillm.text.control_tokens`), and decoding goes through a table of bytes (see `minillm.text.detokenizer`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, normalizers

from minillm.errors import UsageError, WeightsError
from minillm.text.chat_template import ChatTemplate, check_messages
from minillm.text.control_tokens import BREAK, Spellings, admissible, is_control
from minillm.text.detokenizer import StreamingDetokenizer
from minillm.text.safe import clean_line
from minillm.weights.files import read_json

_REASONING_TAGS = ("<think>", "</think>")  # templates look for them in what the assistant said
_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
_MAX_VOCAB = 1 << 24


class Tokenizer:
    """A model's tokenizer. Made by `from_directory` or `from_gguf`."""

    def __init__(
        self, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str], chat_template: str | None
    ) -> None:
        self._backend = backend
        self.special_tokens = dict(special_tokens)
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        if self.vocab_size > _MAX_VOCAB:
            raise WeightsError(f"the tokenizer has a token id of {self.vocab_size - 1}, beyond any vocabulary")
        self._texts: list[str] = [""] * self.vocab_size
        for text, token_id in vocabulary.items():
            self._texts[token_id] = text
        self._added = backend.get_added_tokens_decoder()
        self.control_ids = frozenset(i for i, token in self._added.items() if is_control(token))
        self._user_spellings = Spellings(self._added[i].content for i in self.control_ids)
        self._assistant_spellings = Spellings(t for t in self._user_spellings.texts if t not in _REASONING_TAGS)
        self._decoding = _Decoding.of(backend)
        self._table = [self._bytes_of(token_id) for token_id in range(self.vocab_size)]
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_id = self._id_of("eos_token")
        self._own_normalizer = backend.normalizer
        self._drop_breaks()
        self._prefix, self._suffix = self._wrapping()
        self._template = None if chat_template is None else ChatTemplate(chat_template, self.special_tokens)

    def _drop_breaks(self) -> None:
        """Have the backend look for control tokens in the text as it comes, and drop our break only afterwards."""
        for token_id in self.control_ids:
            token = self._added[token_id]
            as_it_comes = AddedToken(
                token.content,
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=False,
                special=token.special,
            )
            (self._backend.add_special_tokens if token.special else self._backend.add_tokens)([as_it_comes])
        drop = normalizers.Replace(BREAK, "")
        own = self._own_normalizer
        self._backend.normalizer = drop if own is None else normalizers.Sequence([drop, own])

    # --- making one ---------------------------------------------------------------------------------------------------

    @classmethod
    def from_directory(cls, directory: Path) -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json and chat_template.jinja.

        Raises:
            WeightsError: tokenizer.json is missing or damaged, or decodes in a way that is not supported.
        """
        path = directory / "tokenizer.json"
        if not path.exists():
            raise WeightsError(f"{path} is missing: only fast tokenizers (tokenizer.json) are supported")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library raises nothing narrower, and where it panics not even an Exception
            raise WeightsError(f"{path}: {clean_line(str(error))}") from None
        backend.no_truncation()
        backend.no_padding()
        config = _optional_json(directory / "tokenizer_config.json")
        config = {**_optional_json(directory / "special_tokens_map.json"), **config}
        special = {name: text for name in _TOKEN_NAMES if (text := _token_text(config.get(name))) is not None}
        template_file = directory / "chat_template.jinja"
        if template_file.exists():
            template: str | None = template_file.read_text(encoding="utf-8", errors="replace")
        else:
            template = _named_template(config.get("chat_template"))
        return cls(backend, special, template)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Rebuild the tokenizer from a GGUF file's metadata.

        Raises:
            WeightsError: the metadata is damaged, or the tokenizer of a kind that is not supported.
        """
        from minillm.text.gguf_tokenizer import build

        backend, special = build(metadata)
        template = metadata.get("tokenizer.chat_template")
        if template is not None and not isinstance(template, str):
            raise WeightsError("tokenizer.chat_template is not text")
        return cls(backend, special, template)

    def save(self, directory: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, as `from_directory` and transformers read them."""
        ours = self._backend.normalizer
        self._backend.normalizer = self._own_normalizer
        self._backend.save(str(directory / "tokenizer.json"))
        self._backend.normalizer = ours
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **self.special_tokens,
        }
        if self._template is not None:
            config["chat_template"] = self._template.source
        (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")

    # --- text to ids --------------------------------------------------------------------------------------------------

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        """A user's text as ids. What looks like a control token in it becomes ordinary tokens.

        Args:
            add_special_tokens: with the tokens that the tokenizer puts around every text, usually BOS before it.
        """
        text = self._user_spellings.broken(admissible(text))
        ids = self._backend.encode(text, add_special_tokens=False).ids
        if self.control_ids.intersection(ids):
            # The model's own vocabulary spells a control token: keep the halves apart.
            pieces = text.split(BREAK)
            ids = [i for piece in pieces for i in self._backend.encode(piece, add_special_tokens=False).ids]
            if self.control_ids.intersection(ids):
                raise UsageError("the text cannot be encoded without control tokens of the model; rephrase it")
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[int]:
        """A conversation as ids: control tokens come from the template alone, never from a message.

        Args: see `ChatTemplate.render`.

        Raises:
            UsageError: the model has no chat template, or it refuses the conversation.
            WeightsError: the template is broken.
        """
        if self._template is None:
            raise UsageError("this model has no chat template; give plain prompts, or use an instruct model")
        check_messages(messages)
        text = self._template.render(
            [self._broken(message) for message in messages],
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        ids = self._backend.encode(text, add_special_tokens=False).ids
        meant = self._user_spellings.count(text)
        if sum(token_id in self.control_ids for token_id in ids) > meant:
            ids = [i for piece in text.split(BREAK) for i in self._backend.encode(piece, add_special_tokens=False).ids]
        return ids

    def _broken(self, message: Mapping[str, str]) -> dict[str, str]:
        """The message with every control token in its content broken."""
        spellings = self._assistant_spellings if message["role"] == "assistant" else self._user_spellings
        return {**message, "content": spellings.broken(admissible(message["content"]))}

    # --- ids to text --------------------------------------------------------------------------------------------------

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``; special tokens have none. What is no UTF-8 becomes U+FFFD."""
        stream = StreamingDetokenizer(self._table, strip_space=self._decoding.strips_space)
        return "".join(map(stream.push, ids)) + stream.finish()

    def detokenizer(self, prompt_ids: Sequence[int] = ()) -> StreamingDetokenizer:
        """A decoder for what follows ``prompt_ids``, token by token."""
        return StreamingDetokenizer(self._table, prompt_ids, strip_space=self._decoding.strips_space)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for; none for special tokens."""
        return self._table[token_id] if token_id < self.vocab_size else b""

    def token_text(self, token_id: int) -> str:
        """One token for a display: special tokens by name, bytes that are no UTF-8 as <0xE2>. Not cleaned."""
        if token_id >= self.vocab_size:
            return f"<{token_id}>"  # a row of the embedding that no token uses
        data = self._table[token_id]
        if not data:
            return self._texts[token_id]
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "".join(f"<0x{byte:02X}>" for byte in data)

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id in self._added:
            return b"" if self._added[token_id].special else self._added[token_id].content.encode()
        return self._decoding.bytes_of(self._texts[token_id])

    def _id_of(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)

    def _wrapping(self) -> tuple[list[int], list[int]]:
        """What the tokenizer puts before and behind every text."""
        try:
            bare = self._backend.encode("a", add_special_tokens=False).ids
            wrapped = self._backend.encode("a", add_special_tokens=True).ids
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            raise WeightsError(f"tokenizer.json: its post-processor is damaged: {clean_line(str(error))}") from None
        for start in range(len(wrapped) - len(bare) + 1):
            if wrapped[start : start + len(bare)] == bare:
                return wrapped[:start], wrapped[start + len(bare) :]
        raise WeightsError("tokenizer.json: its post-processor changes the text's own tokens, which is not supported")


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _token_text(value: Any) -> str | None:
    """A token in a config is text, or an object that has it as content."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _named_template(value: Any) -> str | None:
    """One template, or a list of named ones of which "default" is for chats."""
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


class _Decoding:
    """How the text of a vocabulary entry becomes bytes."""

    def __init__(self, byte_level: bool, space_mark: str | None, byte_fallback: bool, strips_space: bool) -> None:
        self._byte_level = byte_level
        self._space_mark = space_mark
        self._byte_fallback = byte_fallback
        self.strips_space = strips_space

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> _Decoding:
        """Read the backend's decoder.

        Raises:
            WeightsError: it is of a kind that is not supported.
        """
        decoder: Any = backend.decoder
        state: Any = json.loads(decoder.__getstate__()) if decoder is not None else {"type": "none"}
        parts = state["decoders"] if state["type"] == "Sequence" else [state]
        kinds = [part["type"] for part in parts]
        if kinds == ["ByteLevel"]:
            return cls(True, None, False, False)
        if kinds == ["Metaspace"]:
            first = parts[0].get("prepend_scheme", "always") != "never"
            return cls(False, parts[0]["replacement"], False, first)
        mark, fallback, strips = None, False, False
        for part in parts:
            if part["type"] == "Replace" and part.get("content") == " ":
                mark = part["pattern"].get("String")
            elif part["type"] == "ByteFallback":
                fallback = True
            elif part["type"] == "Strip" and part.get("content") == " ":
                strips = part.get("start", 0) > 0
            elif part["type"] != "Fuse":
                raise WeightsError(f"tokenizer.json: the decoder {part['type']} is not supported")
        if mark is None:
            raise WeightsError(f"tokenizer.json: the decoder {'+'.join(kinds)} is not supported")
        return cls(False, mark, fallback, strips)

    def bytes_of(self, text: str) -> bytes:
        if self._byte_level:
            try:
                return bytes(_UNICODE_TO_BYTE[character] for character in text)
            except KeyError:
                return text.encode()
        if self._byte_fallback and re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", text):
            return bytes([int(text[3:5], 16)])
        assert self._space_mark is not None
        return text.replace(self._space_mark, " ").encode()


def _unicode_to_byte() -> dict[str, int]:
    """The inverse of GPT-2's map of bytes to printable characters (Radford et al. 2019)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}


_UNICODE_TO_BYTE = _unicode_to_byte()
