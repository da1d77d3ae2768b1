"""Convert text to token ids and back.

The ``tokenizers`` library does the work. minillm adds two things. Text typed by a user can never become a control token
(see `minillm.text.control_tokens`). Decoding uses a table of bytes (see `minillm.text.stop`).

Texts get the same ids as in the library and in transformers, and ids the same texts, with these differences:

- A control token spelled out in a text (``</s>``, ``<|im_end|>``) is ordinary text, unless ``parse_special`` is set.
- minillm searches for all control tokens before it normalizes a text. transformers searches for control tokens marked
  ``normalized`` in the normalized text. So it misses a ``</s>`` within a chat if the normalizer has put ``▁`` before
  the ``</s>``.
- transformers 5 drops the Prepend normalizer of a tokenizer.json with class LlamaTokenizer. minillm applies this
  normalizer, as transformers 4 and SentencePiece do. So a text's first word has other ids than in transformers 5.
- Decoding drops one leading space of a text, as SentencePiece does. If the decoder is Metaspace, transformers drops all
  leading spaces.
- If a run of byte tokens is not valid UTF-8, each invalid byte sequence becomes one U+FFFD, and valid sequences stay.
  transformers replaces the whole run. A stream could not do so, because it cannot know in time where the run ends.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import normalizers, pre_tokenizers

from minillm.checks import shown
from minillm.errors import ContextLengthError, UsageError, WeightsError
from minillm.text.chat_template import ChatTemplate, is_template, plain_messages
from minillm.text.control_tokens import BREAK, CONTINUES, ControlTokens, admissible
from minillm.text.dummy_prefix import with_removal
from minillm.text.gguf_tokenizer import rebuild
from minillm.text.hf_tokenizer import encoder_of, read_directory
from minillm.text.pieces import Pieces
from minillm.text.reading import is_there
from minillm.text.safe import clean_line
from minillm.text.sandbox import SECONDS, Sandbox
from minillm.text.stop import StreamingDetokenizer
from minillm.text.token_bytes import TokenBytes
from minillm.text.tools import plain_tools, with_texts

_MAX_VOCAB = 1 << 24
_DROP = {"type": "Replace", "pattern": {"String": BREAK}, "content": ""}
_MAX_CHARACTERS = 16 << 20  # maximum characters of a text, for any context length
_SLOWEST = 200_000  # characters per second: a lower bound of the encoder's speed
_NO_TOKENIZER = (None, "none", "no_vocab")  # kinds in GGUF files without a tokenizer
_MORE_THAN_ROWS = 1 << 10  # maximum ids of added tokens beyond the embedding


class Tokenizer:
    """A model's tokenizer, created by `load`, `from_directory` or `from_gguf`.

    Args:
        backend: the tokenizer of the ``tokenizers`` library.
        special_tokens: the texts of special tokens by name, such as ``eos_token``.
        chat_template: the Jinja source of the model's chat template, or None.
        steps: normalizer, pre-tokenizer and post-processor, as in tokenizer.json, if they are not trusted. The backend
            then lacks these steps, and the whole tokenizer runs in a separate process.
        num_rows: number of rows of the model's embedding; None: no limit. Added tokens may have larger ids, such as a
            ``<pad>`` that the model was never trained with. The model cannot produce these tokens, and a text that
            contains one is rejected.
        added_as_written: an added token is decoded to its text. Otherwise the tokenizer's decoder converts the text.

    Raises WeightsError if the decoder is not supported, or if the tokenizer belongs to another model.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str],
        chat_template: str | None,
        steps: Mapping[str, Any] | None = None,
        num_rows: int | None = None,
        *,
        added_as_written: bool = False,
    ) -> None:
        self._backend = backend
        self.special_tokens = dict(special_tokens)
        added = backend.get_added_tokens_decoder()
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self._num_rows = self.vocab_size if num_rows is None else num_rows
        _check_sizes(self.vocab_size, set(vocabulary.values()) - added.keys(), self._num_rows)
        self._controls = ControlTokens(added)
        self._decoding = TokenBytes.of(backend)
        self._texts = [""] * self.vocab_size
        for text, token_id in vocabulary.items():
            self._texts[token_id] = text
        self._longest = max(map(len, self._texts), default=0)
        self._table = self._decoding.table(self._texts)
        for token_id, token in added.items():
            if token.special or added_as_written:
                self._table[token_id] = b"" if token.special else token.content.encode()
        self.control_ids = self._controls.ids
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_id = self._id_of("eos_token")
        self._controls.search_first(backend)
        self._sandbox = self._obey_marks(steps)
        self._wrapping = _wrapping(self._whole_ids("a"), self._whole_ids("a", special=True), self._num_rows)
        self.use_template(chat_template)
        self._given: ChatTemplate | None = None  # the last template passed to `apply_chat_template`

    def use_template(self, chat_template: str | None) -> None:
        """Use this chat template from now on. None removes the chat template."""
        self._template = None if chat_template is None else ChatTemplate(chat_template, self.special_tokens)
        self.has_chat_template = chat_template is not None
        self.chat_template = chat_template or ""
        self.has_thinking_switch = self._template is not None and self._template.has_thinking_switch

    def _obey_marks(self, steps: Mapping[str, Any] | None) -> Sandbox | None:
        """Make the tokenizer remove the reserved characters `BREAK` and `CONTINUES` from texts.

        Also keep it from adding a prefix to a text that begins with `CONTINUES`. ``steps``: see the class. Return the
        sandbox in which the tokenizer runs, or None if it runs in this process.
        """
        backend, own = self._backend, steps
        if own is None:
            own = {"normalizer": _state(backend.normalizer), "pre_tokenizer": _state(backend.pre_tokenizer)}
        self._own_steps = own
        normalizer, prepends = with_removal(own["normalizer"], "normalizers")
        pre_tokenizer, puts_space = with_removal(own["pre_tokenizer"], "pretokenizers")
        self._adds_prefix = prepends or puts_space
        normalizer = {"type": "Sequence", "normalizers": [_DROP] if normalizer is None else [_DROP, normalizer]}
        self._pieces: Pieces | None = None
        if steps is not None:  # the whole tokenizer runs in a separate process
            marked = {**own, "normalizer": normalizer, "pre_tokenizer": pre_tokenizer}
            return encoder_of({**json.loads(backend.to_str()), **marked})
        self._pieces = Pieces.of(backend.get_added_tokens_decoder(), own, self._whole_ids)
        backend.normalizer = _with_state(normalizers.Sequence([]), normalizer)
        if puts_space:
            backend.pre_tokenizer = _with_state(pre_tokenizers.Sequence([]), pre_tokenizer)
        return None

    @classmethod
    def load(cls, source: Path | Mapping[str, Any], num_rows: int) -> Tokenizer | None:
        """Load the tokenizer of a model directory or of GGUF metadata. Return None if the model has no tokenizer."""
        if isinstance(source, Path):
            return cls.from_directory(source, num_rows) if is_there(source / "tokenizer.json") else None
        return None if source.get("tokenizer.ggml.model") in _NO_TOKENIZER else cls.from_gguf(source, num_rows)

    @classmethod
    def from_directory(cls, directory: Path, num_rows: int | None = None) -> Tokenizer:
        """Read tokenizer.json and the files next to it. Raises WeightsError if they are damaged or not supported."""
        return cls(*read_directory(directory), num_rows=num_rows)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], num_rows: int | None = None) -> Tokenizer:
        """Rebuild a tokenizer from a GGUF file's metadata.

        Raises WeightsError if the metadata is damaged, or if the tokenizer is not supported.
        """
        return cls(*rebuild(metadata), num_rows=num_rows, added_as_written=True)

    def save(self, directory: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json. `from_directory` and transformers can read them."""
        whole = {**json.loads(self._backend.to_str()), **self._own_steps}
        (directory / "tokenizer.json").write_text(json.dumps(whole, ensure_ascii=False), encoding="utf-8")
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        config |= self.special_tokens
        if self._template is not None:
            config["chat_template"] = self._template.source
        (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")

    @property
    def encodes_here(self) -> bool:
        """Return whether texts are encoded in this process, not in a sandbox.

        In this process, encoding takes time linear in the length of the text.
        """
        return self._sandbox is None

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False, continues: bool = False
    ) -> list[int]:
        """Encode a text as ids.

        Args:
            add_special_tokens: include the tokens that the tokenizer adds around every text, usually BOS before it.
            parse_special: parse spellings of control tokens as these tokens, as transformers does. Use it only with
                trusted text, because a text with ``<|im_end|>`` can forge a turn of a conversation. If the text
                contains its own BOS, unset ``add_special_tokens`` to avoid a second BOS.
            continues: the text continues another text, so it does not get SentencePiece's space before its first word.
                See `ends_in_text`.

        Raises UsageError if the text contains a token without an embedding, or cannot be encoded without control
        tokens.
        """
        if parse_special:
            ids = self._ids(admissible(text), continues)
        else:
            ids = self._plain_ids(self._controls.broken(text), continues)
        before, after = self._wrapping
        return [*before, *ids, *after] if add_special_tokens else ids

    def ends_in_text(self, ids: Sequence[int]) -> bool:
        """Return whether the last of ``ids`` has text. If so, encode the next text with ``continues=True``."""
        return bool(ids) and self.token_bytes(ids[-1]) != b""

    def check_length(self, text: str, max_tokens: int | None) -> None:
        """Raise ContextLengthError if ``text`` certainly has more than ``max_tokens`` tokens.

        A lower bound for the number of tokens is the number of characters, divided by the length of the longest token.
        Also raise the error if ``text`` is longer than a general maximum. Without ``max_tokens``, only the general
        maximum applies.
        """
        # Tokenizing takes seconds per million characters, and a hundred times the text's memory.
        most = _MAX_CHARACTERS if max_tokens is None else min(max_tokens * self._longest, _MAX_CHARACTERS)
        if len(text) > most:
            why = "" if max_tokens is None else f": the context holds {max_tokens} tokens"
            raise ContextLengthError(
                f"the prompt has {len(text):,} characters, but at most {most:,} are allowed{why}; shorten it"
            )

    def _whole_ids(self, text: str, special: bool = False) -> list[int]:
        """Encode ``text`` with the tokenizers library. ``special``: include the tokens that it adds around every text.

        Raises WeightsError if the tokenizer fails, or takes too long or too much memory.
        """
        if self._sandbox is not None:
            request = {"text": text, "special": special}
            ids: list[int] = self._sandbox.ask(request, SECONDS + len(text) / _SLOWEST)["ids"]
            return ids
        try:
            # `encode` would hold the GIL, so that other threads, such as the engine's, could not run.
            return self._backend.encode_batch_fast([text], add_special_tokens=special)[0].ids
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the library is not even an Exception
            raise WeightsError(f"the model's tokenizer: {clean_line(str(error))}") from None

    def _ids(self, text: str, continues: bool = False) -> list[int]:
        """Encode ``text``. Raises UsageError if an id has no embedding in the model."""
        return self._with_embeddings(self._whole_ids(CONTINUES + text if continues and self._adds_prefix else text))

    def _with_embeddings(self, ids: list[int]) -> list[int]:
        if self.vocab_size > self._num_rows and max(ids, default=0) >= self._num_rows:
            beyond = next(self._texts[i] for i in ids if i >= self._num_rows)
            raise UsageError(f"the model has no embedding for the token {clean_line(beyond, 60)!r}; leave it out")
        return ids

    def _plain_ids(self, broken: str, continues: bool) -> list[int]:
        """Encode ``broken``, a text in which `ControlTokens` has broken the spellings of control tokens.

        Raises UsageError if the ids still contain a control token.
        """
        ids = self._ids(broken, continues)
        if self.control_ids.intersection(ids):
            ids = self._ids_apart(broken, continues)
            if self.control_ids.intersection(ids):
                raise UsageError("the text cannot be encoded without control tokens of the model; rephrase it")
        return ids

    def _ids_apart(self, text: str, continues: bool = False) -> list[int]:
        """Encode a text piece by piece, split at each `BREAK`. Return the ids of all pieces.

        Encode separately because some vocabularies would merge adjacent pieces into a control token again.
        """
        ids: list[int] = []
        for piece in text.split(BREAK):
            ids += self._ids(piece, continues if not ids else self.ends_in_text(ids))
        return ids

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        thinks: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        num_known: int = 0,
        owner: str | None = None,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Encode a conversation. Control tokens come only from the template, never from a message or a tool.

        Args:
            chat_template: a Jinja template to use instead of the model's own.
            owner: a name. The ids of texts between control tokens are kept for later conversations of the same owner.
            max_tokens: reject text that is too long for this many tokens, see `check_length`.

        `ChatTemplate.render` describes the other arguments.

        Raises:
            UsageError: there is no template, or the template rejects the conversation.
            WeightsError: the template is broken.
        """
        template = self._template
        if chat_template is not None:
            if not isinstance(chat_template, str) or not is_template(chat_template):
                raise UsageError(f"chat_template must be the text of a Jinja template, not {shown(chat_template)}")
            if self._given is None or self._given.source != chat_template:
                self._given = ChatTemplate(chat_template, self.special_tokens)
            template = self._given
        if template is None:
            raise UsageError("this model has no chat template; give plain prompts, or use an instruct model")
        broken = [self._controls.broken_message(message) for message in plain_messages(messages)]
        text = template.render(
            broken,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            thinks=thinks,
            tools=None if tools is None else with_texts(plain_tools(tools), self._controls.broken),
            num_known=num_known,
        )
        if max_tokens is not None:
            self.check_length(text, max_tokens)
        if self._pieces is None or num_known:
            ids = self._ids(text, num_known > 0)
        else:
            ids = self._with_embeddings(self._pieces.ids(text, owner))
        meant = self._controls.count(text)
        if sum(map(self.control_ids.__contains__, ids)) > meant:
            ids = self._ids_apart(text, num_known > 0)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``. Special tokens have no text. Invalid UTF-8 becomes U+FFFD."""
        stream = self.detokenizer()
        return "".join(map(stream.push, ids)) + stream.finish()

    def detokenizer(self, prompt_ids: Sequence[int] = ()) -> StreamingDetokenizer:
        """Return a streaming decoder for the tokens after ``prompt_ids``."""
        return StreamingDetokenizer(self._table, prompt_ids, strips=self._decoding.strips)

    def difference(self, other: Tokenizer) -> str | None:
        """Describe the first id that stands for another text in the ``other`` tokenizer. Return None without one.

        The description is for a message to the user.
        """
        for token_id, (own, its) in enumerate(zip(self._texts, other._texts, strict=False)):
            if own != its:
                return f"token {token_id} is {clean_line(own, 40)!r} here and {clean_line(its, 40)!r} there"
        return None

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token; empty for special tokens."""
        return self._table[token_id] if token_id < self.vocab_size else b""

    def token_text(self, token_id: int) -> str:
        """Return the text of one token for a display. The text may contain terminal control characters.

        A special token is shown by its name, such as ``</s>``, and a byte that is not valid UTF-8 as ``<0xE2>``.
        """
        if token_id >= self.vocab_size:
            return f"<{token_id}>"  # a row of the embedding without a token
        data = self._table[token_id]
        if not data:
            return self._texts[token_id]
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "".join(f"<0x{byte:02X}>" for byte in data)

    def _id_of(self, name: str) -> int | None:
        """Return the id of a named token such as ``bos_token``.

        Return None if the token is missing or has no embedding in the model.
        """
        text = self.special_tokens.get(name)
        token_id = None if text is None else self._backend.token_to_id(text)
        return None if token_id is None or token_id >= self._num_rows else token_id


def _state(step: Any) -> dict[str, Any] | None:
    """Return a step of the backend as the JSON object that tokenizer.json would contain. None means no step."""
    return None if step is None else json.loads(step.__getstate__())


def _with_state(step: Any, state: Any) -> Any:
    """Load ``state``, a step as a JSON object, into ``step``, an empty Sequence of the library. Return ``step``."""
    step.__setstate__(json.dumps(state).encode())
    return step


def _check_sizes(size: int, own_ids: Set[int], num_rows: int) -> None:
    """Raise WeightsError if a tokenizer with ids below ``size`` is too large, or belongs to another model.

    Args:
        own_ids: the ids of the tokenizer's vocabulary without added tokens.
        num_rows: number of rows of the model's embedding.
    """
    if size > _MAX_VOCAB:
        raise WeightsError(f"the tokenizer has a token id of {size - 1}, beyond any vocabulary")
    own = max(own_ids, default=-1) + 1
    if own > num_rows or size > num_rows + _MORE_THAN_ROWS:
        raise WeightsError(
            f"the tokenizer has {max(own, size)} ids and the model's embedding {num_rows} rows: "
            "they belong to different models"
        )


def _wrapping(bare: list[int], wrapped: list[int], num_rows: int) -> tuple[list[int], list[int]]:
    """Return the ids that the tokenizer adds before every text, and the ids that it adds after every text.

    Args:
        bare: the ids of a text without added ids.
        wrapped: the ids of the same text with added ids.
        num_rows: number of rows of the model's embedding.
    """
    if max(wrapped, default=0) >= num_rows:
        raise WeightsError("the tokenizer adds a token to every text that the model has no embedding for")
    for start in range(len(wrapped) - len(bare) + 1):
        if wrapped[start : start + len(bare)] == bare:
            return wrapped[:start], wrapped[start + len(bare) :]
    raise WeightsError("tokenizer.json: its post-processor changes the text's own tokens, which is not supported")
