"""Text to token ids and back.

The work is the ``tokenizers`` library's. What is ours: a user's text never becomes a control token
(`minillm.control_tokens`), chat templates run confined (`minillm.chat_template`), and decoding goes through a table of
bytes (`minillm.token_bytes`, `minillm.detokenizer`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, normalizers, processors

from minillm.chat_template import ChatTemplate
from minillm.control_tokens import BREAK, ControlTexts, admissible, is_control
from minillm.detokenizer import StreamingDetokenizer
from minillm.errors import UsageError, WeightsError
from minillm.gguf_tokenizer import build_tokenizer
from minillm.text import clean_line
from minillm.token_bytes import Spelling, shown, spelling_of

_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_REASONING_TAGS = ("<think>", "</think>")  # templates look for them in what the assistant said
_MAX_VOCABULARY = 1 << 22  # ids; the largest known vocabularies have 262,144


class Tokenizer:
    """A model's tokenizer. Made by `from_directory` or `from_gguf`.

    Attributes:
        vocab_size: the highest id + 1.
        control_ids: the tokens that no user's text becomes (`minillm.control_tokens.is_control`).
        special_tokens: by name (``bos_token``, …), as templates see them.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str], chat_template: str | None = None
    ) -> None:
        vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        if not 0 < self.vocab_size <= _MAX_VOCABULARY:
            raise WeightsError(f"the tokenizer's highest id is {self.vocab_size - 1}; 0 to {_MAX_VOCABULARY - 1} will do")
        self.special_tokens = dict(special_tokens)
        self.bos_token_id = self._id_of(vocabulary, "bos_token")
        self.eos_token_id = self._id_of(vocabulary, "eos_token")

        added: dict[int, AddedToken] = backend.get_added_tokens_decoder()
        controls = {token_id: token for token_id, token in added.items() if is_control(token)}
        self.control_ids = frozenset(controls)
        self._control_texts = ControlTexts.of(token.content for token in controls.values())
        self._answer_control_texts = ControlTexts.of(self._control_texts.texts - set(_REASONING_TAGS))
        # What stands for unknown characters is no threat: it comes out of text that does not spell it.
        unknown = vocabulary.get(getattr(backend.model, "unk_token", None) or "")
        self._guarded_ids = self.control_ids - {unknown}

        self._normalizer = backend.normalizer
        self._backend = _dropping_breaks(backend, list(controls.values()))
        self._prefix, self._suffix = _wrapping(backend)

        self._texts = [""] * self.vocab_size
        for text, token_id in vocabulary.items():
            self._texts[token_id] = text
        spelling = spelling_of(backend)
        self._trim_start = spelling.trim_start
        self._all_bytes = _all_bytes(self._texts, spelling, added)
        self._table = list(self._all_bytes)  # what is read aloud: special tokens are silent
        for token_id, token in added.items():
            if token.special:
                self._table[token_id] = b""
        self._template = None if chat_template is None else ChatTemplate(chat_template, self.special_tokens)

    # --- making one, and keeping it -----------------------------------------------------------------------------------

    @classmethod
    def from_directory(cls, directory: Path) -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json, special_tokens_map.json and chat_template.jinja.

        ``add_bos_token`` and ``add_eos_token``, where the configuration has them, decide over tokenizer.json, as they
        do in transformers.

        Raises:
            WeightsError: tokenizer.json is missing or damaged, or decodes in a way that is not supported.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise WeightsError(
                f"{clean_line(str(path))} is missing: only fast tokenizers are supported; save the model's with "
                "transformers' AutoTokenizer(...).save_pretrained"
            )
        config = {**_read_json(directory / "special_tokens_map.json"), **_read_json(directory / "tokenizer_config.json")}
        special = {name: text for name in _TOKEN_NAMES if (text := _content(config.get(name))) is not None}
        template_file = directory / "chat_template.jinja"
        template = _read_text(template_file) if template_file.is_file() else _default_template(config.get("chat_template"))
        with _library_errors(clean_line(str(path))):
            backend = tokenizers.Tokenizer.from_file(str(path))
            backend.no_truncation()
            backend.no_padding()
            _add_missing(backend, config.get("added_tokens_decoder"))
            _wrap(backend, special, config.get("add_bos_token"), config.get("add_eos_token"))
            return cls(backend, special, template)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Rebuild the tokenizer from a GGUF file's metadata, values as plain Python.

        Raises:
            WeightsError: the metadata is damaged, or the tokenizer of a kind that is not supported.
        """
        template = metadata.get("tokenizer.chat_template")
        if template is not None and not isinstance(template, str):
            raise WeightsError("tokenizer.chat_template in the GGUF metadata is not text")
        with _library_errors("the tokenizer in the GGUF metadata"):
            built = build_tokenizer(metadata)
            _wrap(built.backend, built.special_tokens, built.add_bos, built.add_eos)
            return cls(built.backend, built.special_tokens, template)

    def save(self, directory: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, which `from_directory` and transformers read.

        Raises:
            OSError: the directory cannot be written.
        """
        copy = tokenizers.Tokenizer.from_str(self._backend.to_str())
        copy.normalizer = self._normalizer
        (directory / "tokenizer.json").write_text(copy.to_str(), encoding="utf-8")
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **self.special_tokens,
        }
        if self._template is not None:
            config["chat_template"] = self._template.source
        text = json.dumps(config, indent=2, ensure_ascii=False)
        (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")

    # --- text to ids --------------------------------------------------------------------------------------------------

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """A user's text as ids. What spells a control token in it becomes ordinary tokens.

        Args:
            add_special_tokens: with what the tokenizer puts around every text: usually BOS before it, or nothing.
        """
        ids = self._encode(self._control_texts.break_in(admissible(text)), lambda token_id, spelled: False)
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
        """A conversation as ids. Control tokens come from the template alone, never from a message.

        The tokenizer's own BOS is not added: templates write theirs.

        Args: see `ChatTemplate.render`.

        Raises:
            UsageError: the model has no chat template, or it refuses the conversation.
            WeightsError: the template is broken, or takes too long, too much memory or too much text.
        """
        if self._template is None:
            raise UsageError("this model has no chat template: give plain prompts, or use an instruct model")
        text = self._template.render(
            [self._with_breaks(message) for message in messages],
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        return self._encode(text, lambda token_id, spelled: spelled.strip() == self._texts[token_id].strip())

    def _with_breaks(self, message: Mapping[str, str]) -> dict[str, Any]:
        controls = self._answer_control_texts if message.get("role") == "assistant" else self._control_texts
        return {
            key: controls.break_in(admissible(value)) if isinstance(value, str) and key != "role" else value
            for key, value in message.items()
        }

    def _encode(self, text: str, may_control: Callable[[int, str], bool]) -> list[int]:
        """Ids of a text with breaks; ``may_control`` judges each control token by its id and the text it came from.

        A vocabulary may hold the spelling of a control token, so that the model (not the search for control tokens)
        finds it: text is then cut inside that place, and its pieces are encoded apart.
        """
        encoding = self._backend.encode(text, add_special_tokens=False)
        ids: list[int] = encoding.ids
        if self._guarded_ids.isdisjoint(ids):
            return ids
        cuts = [0]
        for token_id, (start, end) in zip(ids, encoding.offsets, strict=True):
            if token_id in self._guarded_ids and not may_control(token_id, text[start:end]):
                if end - start < 2:
                    raise UsageError(f"{clean_line(text[start:end])!r} is a control token of this model; leave it out")
                cuts.append((start + end) // 2)
        if len(cuts) == 1:
            return ids
        return [i for start, end in pairwise([*cuts, len(text)]) for i in self._encode(text[start:end], may_control)]

    # --- ids to text --------------------------------------------------------------------------------------------------

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ``ids``. What is no UTF-8 becomes U+FFFD; an id outside the vocabulary has no text."""
        table = self._table if skip_special_tokens else self._all_bytes
        stream = StreamingDetokenizer(table, trim_start=self._trim_start)
        return "".join(map(stream.push, ids)) + stream.finish()

    def detokenizer(self, prompt_ids: Sequence[int] = ()) -> StreamingDetokenizer:
        """A decoder for what follows ``prompt_ids``, token by token; special tokens are silent."""
        return StreamingDetokenizer(self._table, prompt_ids, self._trim_start)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for: none for special tokens and for ids outside the vocabulary."""
        return self._table[token_id] if 0 <= token_id < self.vocab_size else b""

    def token_text(self, token_id: int) -> str:
        """One token for a display: special tokens by name, bytes that are no UTF-8 as ``<0xE2>``. Not cleaned."""
        if not 0 <= token_id < self.vocab_size:
            return f"<id {token_id}>"
        data = self._table[token_id]
        return shown(data) if data else self._texts[token_id]

    def _id_of(self, vocabulary: Mapping[str, int], name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else vocabulary.get(text)


def _dropping_breaks(backend: tokenizers.Tokenizer, controls: list[AddedToken]) -> tokenizers.Tokenizer:
    """``backend``, changed so that it finds ``controls`` in the text as it stands, then drops breaks from the rest."""
    for token in controls:
        if token.normalized:
            raw = AddedToken(
                token.content,
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=False,
                special=token.special,
            )
            (backend.add_special_tokens if token.special else backend.add_tokens)([raw])
    drop = normalizers.Replace(BREAK, "")
    backend.normalizer = drop if backend.normalizer is None else normalizers.Sequence([drop, backend.normalizer])
    return backend


def _all_bytes(texts: Sequence[str], spelling: Spelling, added: Mapping[int, AddedToken]) -> list[bytes]:
    """The bytes of each id, special tokens by their spelling. Added tokens are spelled as they are read."""
    return [
        added[token_id].content.encode("utf-8", errors="replace") if token_id in added else spelling.to_bytes(text)
        for token_id, text in enumerate(texts)
    ]


def _wrapping(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and behind every text."""
    encoding = backend.encode("a", add_special_tokens=True)
    own = [number for number, mask in enumerate(encoding.special_tokens_mask) if not mask]
    if not own:
        return encoding.ids, []
    return encoding.ids[: own[0]], encoding.ids[own[-1] + 1 :]


def _wrap(
    backend: tokenizers.Tokenizer, special: Mapping[str, str], add_bos: bool | None, add_eos: bool | None
) -> None:
    """Let ``backend`` put BOS before and EOS behind a text, or not; None leaves what it does."""
    if add_bos is None and add_eos is None:
        return
    before, behind = _wrapping(backend)
    for name, wanted, place in (("bos_token", add_bos, before), ("eos_token", add_eos, behind)):
        token_id = backend.token_to_id(special.get(name, ""))
        if wanted is not None:
            place[:] = [token_id] if wanted and token_id is not None else []
    ids = [*before, *behind]
    backend.post_processor = processors.TemplateProcessing(
        single=[*(f"T{token_id}" for token_id in before), "$A", *(f"T{token_id}" for token_id in behind)],
        pair=["$A", "$B"],
        # Under names of our own, because a token's spelling may hold the characters of the little language above.
        special_tokens=[
            {"id": f"T{token_id}", "ids": [token_id], "tokens": [backend.id_to_token(token_id)]}
            for token_id in dict.fromkeys(ids)
        ],
    )


def _add_missing(backend: tokenizers.Tokenizer, entries: Any) -> None:
    """Add the tokens of tokenizer_config.json that tokenizer.json does not have, at the ids that they must have."""
    if not isinstance(entries, dict):
        return
    for key, entry in sorted(entries.items(), key=lambda item: int(item[0])):
        content = _content(entry)
        if content is None or backend.token_to_id(content) is not None:
            continue
        special = entry.get("special") is True
        (backend.add_special_tokens if special else backend.add_tokens)([AddedToken(content, special=special)])
        if backend.token_to_id(content) != int(key):
            raise WeightsError(
                f"tokenizer_config.json: token {clean_line(content, 40)!r} must have the id {clean_line(key)}, "
                "and tokenizer.json leaves no room for it"
            )


@contextmanager
def _library_errors(what: str) -> Iterator[None]:
    """What the tokenizers library says of damaged data, as a WeightsError. It panics, too, which is no Exception."""
    try:
        yield
    except (UsageError, WeightsError, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise WeightsError(f"{what} is damaged: {clean_line(str(error))}") from None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise WeightsError(f"{clean_line(str(path))}: {clean_line(str(error))}") from None


def _read_json(path: Path) -> dict[str, Any]:
    """The object in an optional file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{clean_line(str(path))}: {clean_line(str(error))}") from None
    if not isinstance(value, dict):
        raise WeightsError(f"{clean_line(str(path))}: not a JSON object")
    return value


def _content(value: Any) -> str | None:
    """A token in a configuration is text, or an object that has it as content."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _default_template(value: Any) -> str | None:
    """One template, or a list of named ones, of which "default" is for chats."""
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None
