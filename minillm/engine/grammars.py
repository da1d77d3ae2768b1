"""Compile the grammars of requests for the vocabulary of the engine's model."""

from collections.abc import Collection
from functools import cached_property, partial

from minillm.errors import UsageError
from minillm.grammar.compiler import Compiler
from minillm.grammar.matcher import Matcher
from minillm.grammar.vocabulary import Vocabulary
from minillm.params import Params
from minillm.text.tokenizer import Tokenizer


class Grammars:
    """Compiles the grammars of requests. The compiler is created for the first grammar, because that takes time."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos_token_ids = tokenizer, vocab_size, eos_token_ids

    @cached_property
    def compiler(self) -> Compiler:
        """The compiler for the model's tokens; raises UsageError if the model has no tokenizer."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise UsageError("grammar: this model has no tokenizer, so its tokens stand for no text")
        tokens = [tokenizer.token_bytes(token_id) for token_id in range(self._vocab_size)]
        for token_id in {*tokenizer.control_ids, *self._eos_token_ids}:
            if token_id < self._vocab_size:
                tokens[token_id] = b""
        return Compiler(Vocabulary(tokens, partial(tokenizer.encode, add_special_tokens=False)))

    def matcher(self, params: Params) -> Matcher | None:
        """Return a matcher at the start of a request's grammar, or None if the request has no grammar.

        Raises:
            UsageError: the model has no tokenizer, or cannot follow the grammar.
        """
        return None if params.grammar is None else self.compiler.matcher(params.grammar)
