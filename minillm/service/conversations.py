"""Run conversations on one engine, and keep the blocks of ended answers for later questions."""

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from minillm.beams.method import output_indices
from minillm.cache.runs import common_length
from minillm.engine import idle_sequences
from minillm.engine.driver import Driver
from minillm.engine.idle import shared_length
from minillm.errors import MinillmError, UsageError
from minillm.outputs import Delta, RequestOutput
from minillm.params import BeamSearchParams, Params, SamplingParams
from minillm.sequence import Sequence, SequenceGroup
from minillm.service import messages
from minillm.service.cache_view import Owner
from minillm.service.file_pins import FilePins
from minillm.service.reporting import Answer, Reporter, by_score
from minillm.text.reasoning import is_opened


@dataclass
class Conversations:
    """Runs the conversations of one app on an engine.

    When an answer has ended, its blocks stay in the pool. The conversation's next question and other branches fork from
    the answer's sequences.
    """

    driver: Driver
    send: Callable[[messages.Event], None]
    answers: dict[str, Answer] = field(default_factory=dict)  # running, by request
    kept: dict[str, Answer] = field(default_factory=dict)  # ended, with blocks still in the pool, by request
    others: Callable[[], Mapping[int, Owner]] = dict  # owners of other clients' sequences, by seq_id
    salt: str | None = None  # prefix cache salt of all prompts

    def __post_init__(self) -> None:
        self.engine = self.driver.engine
        self._files = FilePins(self.driver, self.engine.cache)
        self.reporter = Reporter(self.engine, self.send, self._owners)
        self._systems: dict[str, SequenceGroup] = {}  # requests that compute system prompts, by request
        self._pinning: SequenceGroup | None = None  # the one that computes the prompt to pin
        self._pinned: Sequence | None = None  # the pinned system prompt
        self._opened: dict[str, SequenceGroup] = {}  # by conversation: the request that reads its blocks ahead

    def handle(self, command: messages.Command) -> None:
        """Carry out a command. Report a failure as an event."""
        match command:
            case messages.Generate():
                try:
                    self._generate(command)
                except MinillmError as error:
                    self.send(messages.RequestFailed(command.request_id, str(error)))
            case messages.Abort(request_id):
                self.engine.abort(request_id)
            case messages.Keep(request_id, index):
                self._keep_only(request_id, index)
            case messages.Drop(request_id):
                self._drop(request_id)
            case messages.Forget(conversation):
                for answer in (*self.answers.values(), *self.kept.values()):
                    if answer.command.conversation == conversation:
                        self._drop(answer.command.request_id)
                self._files.release(conversation)
                if (opened := self._opened.pop(conversation, None)) is not None:
                    self.engine.abort(opened.request_id)
            case messages.ReadAhead():
                with suppress(MinillmError):  # the next question reports it
                    self._read_ahead(command)
            case messages.Erase(owner) if (disk := self.engine.requests.disk) is not None and owner:
                disk.erase(self._owner(owner))
            case messages.Pin(system):
                try:
                    self._pin(system)
                except MinillmError as error:
                    self.send(messages.Notice(f"the system prompt is not pinned: {error}"))
            case messages.Report(every):
                self.reporter.set_interval(every)
            case messages.Inspect(block) if 0 <= block < self.engine.cache.num_blocks:
                self.send(self.reporter.view.facts(block))

    # --- answers ------------------------------------------------------------------------------------------------------

    def _generate(self, command: messages.Generate) -> None:
        engine = self.engine
        if engine.tokenizer is None or not engine.tokenizer.has_chat_template:
            raise UsageError("this model has no chat template, so it cannot chat; use an instruct model")
        if any(answer.command.conversation == command.conversation for answer in self.answers.values()):
            raise UsageError("an answer of this conversation is still being generated; stop it first")
        params: Params = (BeamSearchParams if "beam_width" in command.params else SamplingParams)(**command.params)
        depths = params.reasoning_depths if isinstance(params, SamplingParams) else ()
        params = params if depths else engine.requests.reasoning.without_impossible(params)
        token_ids = engine.tokenizer.apply_chat_template(
            command.messages,
            add_generation_prompt=not command.continues,
            continue_final_message=command.continues,
            thinks=command.thinks,
        )
        if len(token_ids) + command.min_context_left > engine.max_model_len:
            self.send(messages.ContextFull(command.request_id, len(token_ids), engine.max_model_len))
            return
        self._files.begin(command.conversation, token_ids)
        fitting = partial(engine.scheduler.idle.tokens_that_fit, len(token_ids), params.num_sequences)
        if fitting() < command.min_context_left:
            self._files.release(command.conversation)
        most = max(1, min(params.max_tokens, fitting()))
        params = replace(params, max_tokens=most, min_tokens=min(params.min_tokens, most))  # shortened, not rejected
        if depths and params.max_tokens <= (params.max_reasoning_tokens or 0):
            raise UsageError(f"each answer may have {params.max_tokens} tokens here; give smaller depths, or fewer")
        parent = self._nearest(command.conversation, token_ids)
        options = {"parent": parent, "hold": True, "salt": self.salt, "owner": self._owner(command.owner)}
        group = engine.add_request(command.request_id, token_ids, params, **options)
        opened = is_opened(engine.tokenizer.decode, token_ids)
        answer = self.answers[command.request_id] = Answer(command, group, opened)
        answer.read_ahead = self._opened.pop(command.conversation, None)
        if command.num_pinned:
            first = command.messages[: command.num_pinned]
            text = engine.tokenizer.apply_chat_template(first, add_generation_prompt=False, thinks=command.thinks)
            answer.num_pinned_tokens = common_length(text, token_ids)

    def _read_ahead(self, command: messages.ReadAhead) -> None:
        """Read the blocks of a conversation from disk into the prefix cache, and compute one token after them."""
        engine, tokenizer, disk = self.engine, self.engine.tokenizer, self.engine.requests.disk
        if disk is None or not command.owner or tokenizer is None or not tokenizer.has_chat_template:
            return
        token_ids = tokenizer.apply_chat_template(command.messages, add_generation_prompt=False, thinks=command.thinks)
        num_cached = engine.cache.find_cached(token_ids, self.salt).num_tokens
        if (found := disk.find(token_ids, self.salt, num_cached)) is not None:
            name = f"read ahead {time.monotonic_ns()}"
            request = idle_sequences.prefix_request(token_ids[: found[1] + 1], self.salt, name)
            request = replace(request, hold=False, owner=self._owner(command.owner))
            self._opened[command.conversation] = engine.add(request)

    def _owner(self, name: str) -> str:
        """Return the owner of blocks on disk, given the app's ``name`` for the owner.

        If the session has a salt, the salt makes the name unique.
        """
        return f"{self.salt}\n{name}" if name and self.salt is not None else name

    def _nearest(self, conversation: str, token_ids: list[int]) -> Sequence | None:
        """Return the kept or pinned sequence that shares the most tokens with a prompt, so that it can be forked.

        Return None if no sequence is kept or pinned.
        """
        kept = [answer for answer in self.kept.values() if answer.command.conversation == conversation]
        sequences = [each for answer in kept for each in answer.sequences if each.table is not None]
        pinned = (self._pinned, self._files.pinned.get(conversation))
        sequences += [each for each in pinned if each is not None]
        return max(sequences, key=lambda sequence: shared_length(sequence, token_ids), default=None)

    def take(self, deltas: Iterable[Delta], finished: Iterable[RequestOutput]) -> None:
        """Send the results of an engine step to the app. Ignore results of other clients' requests.

        Args:
            deltas: the new texts.
            finished: the requests that have ended.
        """
        for delta in deltas:
            if (answer := self.answers.get(delta.request_id)) is not None:
                self.reporter.add_delta(answer, delta)
        self.reporter.end_step(self.answers.values())
        for output in finished:
            if (group := self._systems.pop(output.request_id, None)) is not None:
                self._finish_pin(group)
            elif (answer := self.answers.pop(output.request_id, None)) is not None:
                self._finish(answer, output)

    def close(self) -> None:
        """Free all blocks and abort all requests.

        Running answers end in the next step. Then `is_idle` is true.
        """
        for request_id in (*self.answers, *self.kept):
            self._drop(request_id)
        self._files.close()
        self._unpin()
        for group in self._opened.values():
            self.engine.abort(group.request_id)
        self.reporter.view.close()

    @property
    def is_idle(self) -> bool:
        """Return whether no request of this app is running."""
        reads = any(group.request_id in self.engine.requests.groups for group in self._opened.values())
        return not self.answers and not self._systems and not reads

    def _finish(self, answer: Answer, output: RequestOutput) -> None:
        if output.error is not None:
            for sequence in answer.group.sequences:
                self.reporter.send_text(output.request_id, sequence.index)
            self.send(messages.RequestFailed(output.request_id, output.error))
        elif answer.searches:
            self.reporter.end_beams(answer, output)
        else:
            self.reporter.end_copies(answer, output)
        answer.sequences = [sequence for sequence in answer.group.sequences if sequence.table is not None]
        answer.outputs = sorted(output.outputs, key=by_score) if answer.searches else output.outputs
        if answer.searches:
            self._keep_those_of_answers(answer)
        if answer.stays and answer.sequences:
            if answer.num_pinned_tokens:
                self._files.keep(answer.command.conversation, answer.sequences[0], answer.num_pinned_tokens)
            self.kept[output.request_id] = answer
        else:
            self._release(answer)

    def own(self) -> dict[int, Owner]:
        """Return the owners of this app's sequences, by seq_id."""
        owners: dict[int, Owner] = {}
        by_state: dict[messages.TableState, dict[str, Answer]] = {"idle": self.kept, "running": self.answers}
        for state, answers in by_state.items():
            for name, answer in answers.items():
                sequences = answer.sequences if state == "idle" else answer.group.sequences
                at = answer.output_indices or (output_indices(answer.group) if answer.searches else {})
                owners.update({e.seq_id: Owner(name, at.get(e.seq_id, e.index), state, e) for e in sequences})
        for pinned in self._files.pinned.values():
            owners[pinned.seq_id] = Owner(messages.FILES, 0, "pinned", pinned)
        if self._pinned is not None:
            owners[self._pinned.seq_id] = Owner(messages.SYSTEM_PROMPT, 0, "pinned", self._pinned)
        return owners

    def _owners(self) -> dict[int, Owner]:
        return {**self.others(), **self.own()}

    # --- blocks that stay ---------------------------------------------------------------------------------------------

    def _keep_only(self, request_id: str, index: int) -> None:
        kept = self.kept.get(request_id)
        if kept is None or not 0 <= index < len(kept.outputs):
            return
        best = _nearest_to(kept.outputs[index].token_ids, kept.sequences)
        self._release(kept, spared=best)
        kept.sequences, kept.output_indices = [best], {best.seq_id: index}

    def _keep_those_of_answers(self, answer: Answer) -> None:
        """After a beam search, keep the sequences from which the search's answers come, and free all other sequences.

        Assign each kept sequence to the answer that shares the most tokens with it. The better answer wins a tie.
        """
        spared: dict[int, Sequence] = {}
        most: dict[int, int] = {}  # by seq_id: the tokens that a sequence shares with its answer
        for index, output in enumerate(answer.outputs):
            if answer.sequences:
                nearest = _nearest_to(output.token_ids, answer.sequences)
                spared[nearest.seq_id] = nearest
                common = common_length(nearest.output_token_ids, output.token_ids)
                if common > most.get(nearest.seq_id, -1):
                    most[nearest.seq_id], answer.output_indices[nearest.seq_id] = common, index
        for sequence in answer.sequences:
            if sequence.seq_id not in spared:
                idle_sequences.release(self.driver, sequence)
        answer.sequences = list(spared.values())

    def _drop(self, request_id: str) -> None:
        if (answer := self.answers.get(request_id)) is not None:
            answer.stays = False
            self.engine.abort(request_id)
        if (kept := self.kept.pop(request_id, None)) is not None:
            self._release(kept)

    def _release(self, kept: Answer, spared: Sequence | None = None) -> None:
        for sequence in kept.sequences:
            if sequence is not spared:
                idle_sequences.release(self.driver, sequence)

    # --- the pinned system prompt -------------------------------------------------------------------------------------

    def _pin(self, system: str) -> None:
        engine = self.engine
        self._unpin()
        if not system or engine.tokenizer is None or not engine.tokenizer.has_chat_template:
            return
        # Pin the tokens that all conversations with this system prompt begin with, whatever the question is.
        first = {"role": "system", "content": system}
        one, other = (
            engine.tokenizer.apply_chat_template([first, {"role": "user", "content": question}]) for question in "ab"
        )
        common = common_length(one, other)
        if not 0 < common < min(len(one), len(other)):  # equal: the template leaves the question out
            return
        name = f"pin {time.monotonic_ns()}"
        # Blocks on disk belong to the conversations that begin with them.
        self._pinning = engine.add(replace(idle_sequences.prefix_request(one[:common], self.salt, name), owner=""))
        self._systems[name] = self._pinning

    def _unpin(self) -> None:
        if self._pinned is not None:
            idle_sequences.unpin(self.driver, self._pinned)
        if self._pinning is not None:
            self.engine.abort(self._pinning.request_id)
        self._pinned = self._pinning = None

    def _finish_pin(self, group: SequenceGroup) -> None:
        sequence = group.sequences[0]
        if group is not self._pinning:  # another prompt is pinned instead, or none
            idle_sequences.release(self.driver, sequence)
            return
        self._pinning = None  # it has ended, and must not be aborted
        if sequence.table is not None:
            try:
                idle_sequences.pin(self.driver, sequence)
                self._pinned = sequence
            except MinillmError as error:
                self.send(messages.Notice(f"the system prompt is not pinned: {error}"))


def _nearest_to(token_ids: list[int], sequences: list[Sequence]) -> Sequence:
    """Return the sequence that shares the most tokens with an answer's ``token_ids``.

    The sequence need not contain the whole answer, because a finished beam's own sequence may have been freed.
    """
    return max(sequences, key=lambda sequence: common_length(sequence.output_token_ids, token_ids))
