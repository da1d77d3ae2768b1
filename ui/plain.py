"""``minillm chat --plain``: a chat line by line, for pipes, screen readers and terminals without cursor movement.

Questions are lines of standard input. Answers go to standard output, everything else to standard error. On a terminal,
a prompt asks for each line. ctrl-c stops an answer. If no answer is running, pressing it twice ends the chat.
"""

import contextlib
import select
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from minillm.errors import MinillmError, UsageError
from minillm.llm import LLM
from minillm.params import BeamSearchParams, SamplingParams
from minillm.text.safe import clean, clean_line
from minillm.ui.chat.conversation import Candidate, Conversation, Turn
from minillm.ui.chat.export import export
from minillm.ui.chat.files import with_files
from minillm.ui.chat.sessions import COPY_NOTE, SessionStore
from minillm.ui.chat.slash import first_word, is_command
from minillm.ui.numbers import is_number
from minillm.ui.settings import Settings, with_param

END_OF_INPUT = r'"\C-d"'  # readline's notation of the key
HELP = """\
/new              start a new conversation
/set NAME VALUE   set temperature, top_p, max_tokens, seed, n, beam_width, …
/n N, /beams N    get N answers to choose from, sampled or by beam search
/system [TEXT]    set the system prompt; without a text, use none
/accept N         use answer N of several (else the first)
/regenerate       get another answer to the last question, as a branch
/export FILE      write the conversation to a file, .md or .json
/quit             quit; so does the end of the input"""


@dataclass
class PlainChat:
    """Runs one conversation at a time with a model in this process."""

    llm: LLM
    settings: Settings
    store: SessionStore
    output: TextIO
    notes: TextIO  # the stream for everything except answers
    conversation: Conversation = field(default_factory=Conversation)
    is_unsaved: bool = False  # whether the last attempt to save failed
    has_failed: bool = False  # whether the last line failed

    def handle(self, line: str) -> bool:
        """Handle one line of input, a question or a command. Return False if it ends the chat."""
        self.has_failed = False
        try:
            if is_command(line):
                return self._command(*first_word(line[1:]))
            self._answer(with_files(line.strip(), Path.cwd()))
        except MinillmError as error:
            self.note(str(error))
            self.has_failed = True
        return True

    def _command(self, name: str, argument: str) -> bool:
        if name == "quit":
            return False
        if name == "new":
            self.conversation = Conversation()
        elif name == "set":
            self.settings = with_param(self.settings, *first_word(argument))
        elif name == "n":
            self.settings = with_param(with_param(self.settings, "beam_width", "1"), "n", argument)
        elif name == "beams":
            self.settings = with_param(self.settings, "beam_width", argument)
        elif name == "regenerate":
            self._regenerate()
        elif name == "system":
            self.settings = replace(self.settings, system=argument)
        elif name == "accept":
            self._accept(argument)
        elif name == "export":
            if not argument or self.conversation.leaf is None:
                raise UsageError("/export needs a file name, and a conversation that is not empty")
            self.note(f"written to {export(self.conversation, Path(argument))}")
        elif name == "help":
            print(HELP, file=self.notes)
        else:
            raise UsageError(f"there is no /{name} here; /help lists the commands")
        return True

    def _accept(self, number: str) -> None:
        leaf = self.conversation.leaf
        candidates = leaf.answer.candidates if leaf is not None else []
        if not is_number(number) or not 1 <= int(number) <= len(candidates):
            known = f"/accept takes a number from 1 to {len(candidates)}"
            raise UsageError(known if candidates else "nothing to accept")
        assert leaf is not None
        self.conversation.accept(leaf, int(number) - 1)
        self._save()

    def _regenerate(self) -> None:
        leaf = self.conversation.leaf
        if leaf is None:
            raise UsageError("there is no question yet")
        self._answer(leaf.question, instead_of=leaf)

    def _answer(self, question: str, instead_of: Turn | None = None) -> None:
        conversation, settings = self.conversation, self.settings
        leaf = conversation.leaf
        if leaf is not None and leaf.answer.candidates:
            conversation.accept(leaf, 0)
        conversation.model, conversation.system = settings.model, settings.system
        answer = conversation.ask(question, instead_of)
        self.llm.engine.requests.owner = self.store.owner_of(conversation)
        try:
            prompt = self._prompt()
            values = {name: value for name, value in settings.request_params().items() if name != "logprobs"}
            kind = BeamSearchParams if settings.searches else SamplingParams
            params: Any = self.llm.engine.requests.reasoning.without_impossible(kind(**values))
            if settings.num_candidates > 1:
                [output] = self.llm.generate([prompt], params)
                answer.candidates = [Candidate(each.text, len(each.token_ids)) for each in output.outputs]
                for number, each in enumerate(output.outputs, 1):
                    print(f"{number}) {clean(each.text).strip()}\n", file=self.output, flush=True)
                answer.finish_reason = "stop"
                self.note("answer 1 is used; /accept N chooses another")
            else:
                for delta in self.llm.stream(prompt, params):
                    answer.text += delta.text
                    answer.finish_reason = delta.finish_reason
                    print(clean(delta.text), end="", file=self.output, flush=True)
                print("\n", file=self.output, flush=True)
        except KeyboardInterrupt:
            print(file=self.output, flush=True)
            self.note("stopped")
            answer.finish_reason = "abort"
        except MinillmError:
            conversation.withdraw()
            raise
        if answer.finish_reason == "abort" and not answer.text.strip():
            conversation.withdraw()
        self._save()

    def _prompt(self) -> list[int]:
        """Return the token ids of the conversation. If the context is full, leave out the oldest turns."""
        tokenizer, longest, settings = self.llm.tokenizer, self.llm.engine.max_model_len, self.settings
        min_context_left = min(256, longest // 8)
        while True:
            messages = self.conversation.messages(settings.system)
            prompt = tokenizer.apply_chat_template(messages, thinks=settings.thinks)
            if len(prompt) + min_context_left <= longest or not self.conversation.drop_oldest_half():
                return prompt
            self.note(f"the context is full: leaving out the oldest {self.conversation.num_dropped} turns")

    def _save(self) -> None:
        self.is_unsaved = True
        if self.store.save(self.conversation):
            self.note(COPY_NOTE)
        self.is_unsaved = False

    def note(self, text: str) -> None:
        print(f"minillm: {clean_line(text, 1000)}", file=self.notes, flush=True)


def _next_line(source: TextIO) -> str:
    """Return the next line of input with its line end, or "" at the end of input.

    On a terminal, show a prompt first.
    """
    if not source.isatty():
        return source.readline()
    with contextlib.suppress(ImportError):
        import readline  # gives input() line editing and a history

        # Ctrl+D typed during an answer arrives as NUL, because the terminal was in line mode and readline reads bytes.
        was_typed_early = bool(select.select([source], [], [], 0)[0])
        readline.parse_and_bind(f'"\\C-@": {END_OF_INPUT if was_typed_early else "set-mark"}')
    try:
        return input("> ") + "\n"
    except EOFError:
        return ""


def run(
    llm: LLM, settings: Settings, store: SessionStore, resumed: Conversation | None = None, question: str = ""
) -> int:
    """Chat until the input ends.

    Ask ``question`` first if it is not empty. Return the exit code: 1 if the last line or the last save failed.

    Raises:
        UsageError: the model has no chat template.
    """
    if not llm.tokenizer.has_chat_template:
        raise UsageError("this model has no chat template, so it cannot chat; use an instruct model")
    chat = PlainChat(llm, settings, store, sys.stdout, sys.stderr, resumed or Conversation())
    if sys.stdin.isatty():
        chat.note("type a question and press Enter; /help lists the commands; ctrl-d quits")
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="replace")
    waiting, interrupted = [question] * bool(question), False
    while True:
        try:
            line = waiting.pop() if waiting else _next_line(sys.stdin)
            if not line or (line.strip() and not chat.handle(line.rstrip())):
                return int(chat.is_unsaved or chat.has_failed)
            interrupted = False
        except KeyboardInterrupt:  # at the prompt, or just after the answer it should stop
            if interrupted or not sys.stdin.isatty():
                raise
            interrupted = True
            chat.note("press ctrl-c again to quit")
