"""The slash commands. They change the conversation through `ChatPane`, and do everything else through `EngineApp`."""

import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from textual.screen import ModalScreen

from minillm.errors import UsageError
from minillm.params import SamplingParams
from minillm.service.messages import Erase
from minillm.ui.bars import VIEWS
from minillm.ui.chat.candidates import CandidatesView
from minillm.ui.chat.chat_pane import ChatPane
from minillm.ui.chat.compact import Compaction
from minillm.ui.chat.compact import undo as undo_summary
from minillm.ui.chat.conversation import Conversation, Fork, Turn
from minillm.ui.chat.editor import edited
from minillm.ui.chat.engine_words import reason_to_wait
from minillm.ui.chat.export import export
from minillm.ui.chat.slash import CommandTable
from minillm.ui.kept import BUILT_IN
from minillm.ui.numbers import count, plural
from minillm.ui.settings import settings_summary, with_param

COMMANDS = CommandTable()
command = COMMANDS.command
_MOST_DEPTHS = 9  # because the keys 1 to 9 accept a candidate
_FENCE = re.compile(r"^(`{3,}|~{3,})[^\n]*\n(.*?)^\1", re.MULTILINE | re.DOTALL)


@command("help", "keys that work here; all keys and commands", "f1", label="Help", scope="everywhere")
async def show_help(talk: ChatPane, _: str) -> None:
    from minillm.ui.help import HelpScreen, keys_here
    from minillm.ui.keymap import bound_keys, named_bindings

    if not isinstance(talk.app.screen, HelpScreen):
        keys = bound_keys(talk.app.settings.keymap, named_bindings(*talk.screen.BINDINGS, *talk.app.BINDINGS))
        talk.app.push_screen(HelpScreen(COMMANDS, keys_here(talk.app.screen), keys))


@command("new", "start a new conversation; the old one is saved", "ctrl+n", label="New", also=("clear", "reset"))
async def begin_conversation(talk: ChatPane, _: str) -> None:
    talk.save()
    await talk.open_conversation(Conversation())


@command(
    "sessions", "saved conversations: search, resume, delete", "ctrl+o", argument="[words]", label="Open",
    also=("open", "load", "resume", "history"),
)  # fmt: skip
async def list_sessions(talk: ChatPane, words: str) -> None:
    from minillm.ui.dialogs import SessionsScreen

    _check_idle(talk)
    talk.save()

    async def chosen(path: Path | None) -> None:
        if path is None:
            return
        try:
            conversation = talk.store.load(path)
        except Exception as error:
            talk.notify(str(error))
            return
        _change(talk, system=conversation.system)
        await talk.open_conversation(conversation)

    talk.app.push_screen(SessionsScreen(talk.store, words), chosen)


@command("delete", "delete this conversation for good, with its blocks on disk", argument="yes")
async def delete_conversation(talk: ChatPane, answer: str) -> None:
    _check_idle(talk)
    if answer != "yes":
        raise UsageError("/delete yes deletes this conversation for good")
    owner = talk.store.delete(talk.store.path_of(talk.conversation))
    await talk.open_conversation(Conversation())
    talk.send(Erase(owner))
    talk.notify("the conversation is deleted")


@command("find", "search in the conversation", "ctrl+f", argument="[words]", also=("search",))
async def find(talk: ChatPane, words: str) -> None:
    talk.search.open(words)


@command("title", "name the conversation for the Ctrl+O list", argument="TEXT", also=("rename",))
async def name_conversation(talk: ChatPane, text: str) -> None:
    talk.conversation.title = text
    talk.save()
    talk.notify(f"conversation named “{talk.conversation.shown_title}”")


@command("compact", "summarize the older half to free context; or undo that", argument="[undo]")
async def compact(talk: ChatPane, what: str) -> None:
    _check_idle(talk)
    if what == "undo":
        undo_summary(talk.conversation)
        talk.save()
        talk.refresh_status()
        talk.notify("the model sees the whole conversation again")
    elif what:
        raise UsageError(f"use /compact or /compact undo, not {what!r}")
    elif talk.can_ask():
        await talk.accept_best()
        talk.compaction = Compaction.begin(talk.conversation, talk.app.settings.system, talk.send)
        talk.refresh_status()


@command("export", "write the conversation to a file, .md or .json", argument="FILE", also=("save",))
async def write_to_file(talk: ChatPane, name: str) -> None:
    if talk.conversation.leaf is None:
        raise UsageError("there is nothing to export yet")
    talk.notify(f"written to {export(talk.conversation, Path(name))}")


def _check_idle(talk: ChatPane) -> None:
    if reason := reason_to_wait(talk.run, talk.compaction):
        raise UsageError(reason)


def _turn(talk: ChatPane) -> Turn:
    """Return the selected turn, or the last one. Raises UsageError if there is no turn."""
    turn = talk.transcript.selected or talk.conversation.leaf
    if turn is None:
        raise UsageError("there is no question yet")
    return turn


@command("edit", "change the selected question and ask again, as a branch", "alt+e")
async def edit(talk: ChatPane, _: str) -> None:
    turn = _turn(talk)
    _check_idle(talk)
    talk.editing = turn
    talk.prompt.text = ""
    talk.prompt.put_back(turn.question)
    talk.prompt.focus()


@command("regenerate", "get another answer to the selected question, as a branch", "alt+r", also=("retry",))
async def regenerate(talk: ChatPane, _: str) -> None:
    turn = _turn(talk)
    if talk.can_ask():
        await talk.accept_best()
        talk.conversation.ask(turn.question, instead_of=turn)
        await talk.request_answer()


@command("continue", "continue the last answer", "alt+c")
async def go_on(talk: ChatPane, _: str) -> None:
    leaf = talk.conversation.leaf
    if leaf is None:
        raise UsageError("there is no question yet")
    if talk.can_ask():
        await talk.accept_best()
        _continue(talk, leaf)


def _continue(talk: ChatPane, turn: Turn) -> None:
    talk.begin(turn).go_on()
    talk.refresh_status()


async def _fork(talk: ChatPane, turn: Turn, fork: Fork) -> None:
    """Continue an answer from another token. The result is a new branch next to ``turn``."""
    if talk.can_ask():
        branch = talk.conversation.fork(turn, fork)
        await talk.transcript.show_path(talk.conversation)
        _continue(talk, branch)
        talk.save()


_BRANCH_KEYS: dict[str, Any] = {"keys": {"alt+left": "previous", "alt+right": "next"}, "shown_key": "Alt+← →"}


@command("branch", "show the next or previous branch", argument="[next|previous]", **_BRANCH_KEYS)
async def switch_branch(talk: ChatPane, direction: str) -> None:
    _check_idle(talk)
    conversation, turn = talk.conversation, _turn(talk)
    branching = next((t for t in [turn, *conversation.turns[::-1]] if len(conversation.siblings(t)) > 1), None)
    if branching is None:
        raise UsageError("there is only one branch; Alt+E or Alt+R starts another")
    await talk.accept_best()
    chosen = conversation.switch(branching, -1 if direction.startswith("p") else 1)
    await talk.transcript.show_path(conversation)
    await talk.transcript.go_to(chosen)
    talk.refresh_status()
    talk.save()


@command("accept", "accept candidate N; the others become branches", argument="N", shown_key="1 … 9")
async def accept(talk: ChatPane, number: str) -> None:
    turn = next((turn for turn in talk.conversation.turns[::-1] if turn.answer.candidates), None)
    if turn is None:
        return
    last = len(turn.answer.candidates)
    if not number.isdigit() or not 1 <= int(number) <= last:
        raise UsageError(f"give a candidate's number from 1 to {last}")
    if talk.run is not None and talk.run.turn is turn:
        talk.run.stop(chosen=int(number) - 1)  # the candidate is accepted when all others have stopped
        talk.refresh_status()
    else:
        await talk.accept(turn, int(number) - 1)


@command("undo", "undo the choice of a candidate", "alt+u")
async def undo(talk: ChatPane, _: str) -> None:
    _check_idle(talk)
    talk.prompt.forget_pick()
    await talk.show_again(talk.conversation.undo())


@command("copy", "copy the selected answer, or its last code block", "alt+y", argument="[code]")
async def copy(talk: ChatPane, part: str) -> None:
    turn = _turn(talk)
    text = turn.answer.text
    if candidates := turn.answer.candidates:
        view = talk.transcript.view_of(turn)
        shown = None if view is None else view.answer_view
        text = candidates[shown.focused_index if isinstance(shown, CandidatesView) else 0].text
    if part:
        blocks = [match.group(2) for match in _FENCE.finditer(text)]
        if not blocks:
            raise UsageError("the answer has no code block")
        text = blocks[-1]
    talk.app.copy_to_clipboard(text)
    talk.notify("code block copied" if part else "answer copied")


@command("probabilities", "show token probabilities; Enter continues from an alternative", "alt+p")
async def show_probabilities(talk: ChatPane, _: str) -> None:
    from minillm.ui.dialogs import ProbabilityScreen

    turn = _turn(talk)
    if turn.answer.candidates:
        raise UsageError("choose an answer first")
    if not turn.answer.tokens:
        raise UsageError("this answer has no probabilities: they are not known for beams and saved answers")
    _ask(talk, ProbabilityScreen(turn.answer.tokens), lambda fork: talk.call_later(_fork, talk, turn, fork))


def _change(talk: ChatPane, **changes: Any) -> None:
    talk.app.settings = replace(talk.app.settings, **changes)


def _ask(talk: ChatPane, dialog: ModalScreen[Any], act: Callable[[Any], Any]) -> None:
    """Open a dialog. If it returns a result, call ``act`` with it."""

    def chosen(result: Any) -> None:
        if result is not None:
            act(result)

    talk.app.push_screen(dialog, chosen)


@command("model", "choose another model", "f2", argument="[NAME]", label="Model")
async def choose_model(talk: ChatPane, name: str) -> None:
    from minillm.ui.dialogs import ModelScreen

    if name:
        talk.app.choose_model(name)
    else:
        loaded, pool = talk.engine.loaded, talk.pool
        use = None if pool is None or loaded is None or loaded.device == "cpu" else pool.use
        dialog = ModelScreen(talk.app.settings, 0 if use is None else use.total)
        _ask(talk, dialog, talk.app.choose_model)


@command("reload", "load the model again", "ctrl+r")
async def reload(talk: ChatPane, _: str) -> None:
    talk.app.load_model()


@command("sampling", "temperature, top-p, beams and more", "f3", label="Sampling")
async def choose_sampling(talk: ChatPane, _: str) -> None:
    from minillm.ui.dialogs import SamplingScreen

    _ask(talk, SamplingScreen(talk.app.settings), partial(setattr, talk.app, "settings"))


@command("set", "change one parameter", argument="NAME VALUE")
async def set_parameter(talk: ChatPane, words: str) -> None:
    name, _, value = words.partition(" ")
    talk.app.settings = with_param(talk.app.settings, name, value.strip())
    talk.notify(f"next question: {name} {value.strip() or 'off'}")


@command("preset", "use a sampling preset: precise, balanced, creative, your own", argument="[save|delete] [NAME]")
async def use_preset(talk: ChatPane, words: str) -> None:
    app, (verb, _, name) = talk.app, words.partition(" ")
    if not words:
        talk.notify(f"presets: {', '.join({**BUILT_IN, **app.kept.presets})}")
    elif verb in ("save", "delete"):
        app.keep(app.kept.with_preset(name.strip(), app.settings.sampling if verb == "save" else None))
        talk.notify(f"preset {name.strip()} {verb}d")
    else:
        _change(talk, sampling=dict(app.kept.preset(words)), beams={})
        talk.notify(f"next question: {words} ({settings_summary(app.settings)})")


@command("think", "thinking: on, off, or at most N tokens", argument="on|off|N")
async def choose_thinking(talk: ChatPane, word: str) -> None:
    if word not in ("on", "off") and not word.isdecimal():
        raise UsageError(f"use /think on, /think off or /think 512, not {word!r}")
    loaded, settings = talk.engine.loaded, talk.app.settings
    sampling = {name: value for name, value in settings.sampling.items() if name != "max_reasoning_tokens"}
    if word.isdecimal():
        _check_tags(talk)
        SamplingParams(max_reasoning_tokens=int(word))
        has_switch = loaded is not None and loaded.has_thinking_switch
        sampling["max_reasoning_tokens"] = int(word)
        _change(talk, sampling=sampling, thinks=True if has_switch else None)
        talk.notify(f"next question: at most {plural(int(word), 'token')} of thought")
        return
    if loaded is not None and not loaded.has_thinking_switch:
        if not loaded.has_reasoning_tags:
            raise UsageError("this model's template cannot turn thinking on or off")
        _change(talk, sampling={**sampling, "max_reasoning_tokens": 0} if word == "off" else sampling, thinks=None)
    else:
        _change(talk, sampling=sampling, thinks=word == "on")
    talk.notify(f"next question: thinking {word}")


def _check_tags(talk: ChatPane) -> None:
    loaded = talk.engine.loaded
    if loaded is not None and not loaded.has_reasoning_tags:
        raise UsageError("this model has no <think> tags, so its thinking cannot be limited")


@command("depths", "answers after several amounts of one thought", argument="N,N,…|off")
async def choose_depths(talk: ChatPane, words: str) -> None:
    if words == "off":
        _change(talk, depths=())
        talk.notify("next question: one answer")
        return
    numbers = words.replace(",", " ").split()
    if not all(number.isdecimal() for number in numbers):
        raise UsageError(f"use /depths 256,512,1024 or /depths off, not {words!r}")
    depths = tuple(sorted(set(map(int, numbers))))
    if not 2 <= len(depths) <= _MOST_DEPTHS:
        raise UsageError(f"give from 2 to {_MOST_DEPTHS} different depths; /think 512 limits one answer")
    _check_tags(talk)
    SamplingParams(max_reasoning_tokens=depths[-1], reasoning_depths=depths[:-1])
    _change(talk, depths=depths, thinks=talk.app.settings.thinks or None)
    talk.notify(f"next question: answers after {', '.join(map(count, depths))} tokens of thought")


@command("n", "get N answers to choose from", argument="N")
async def choose_n(talk: ChatPane, number: str) -> None:
    settings = replace(talk.app.settings, depths=())
    talk.app.settings = with_param(with_param(settings, "beam_width", "1"), "n", number)
    talk.notify(f"next question: {plural(talk.app.settings.num_candidates, 'answer')}")


@command("beams", "use beam search with N beams; 1: sample again", argument="N")
async def choose_beams(talk: ChatPane, number: str) -> None:
    _change(talk, depths=())
    await set_parameter(talk, f"beam_width {number}")


@command("system", "set the system prompt; its blocks are pinned", "f4", argument="[TEXT]", label="System")
async def choose_system(talk: ChatPane, text: str) -> None:
    from minillm.ui.dialogs import SystemScreen

    if text:
        _change(talk, system=text)
        talk.notify("next question: new system prompt")
    else:
        _ask(talk, SystemScreen(talk.app.settings.system), lambda system: _change(talk, system=system))


for _view in VIEWS:

    @command(_view.name, _view.summary, _view.key, label="Pool" if _view.name == "pool" else "")
    async def show_view(talk: ChatPane, _: str, name: str = _view.name) -> None:
        await talk.run_action(f"screen.view({name!r})")


@command("theme", "use a theme: light, dark, or one of Textual's", "ctrl+t", argument="[NAME]", scope="app")
async def choose_theme(talk: ChatPane, name: str) -> None:
    talk.app.set_theme(name)


@command("tour", "watch a fork and copy on write, in a minute")
async def tour(talk: ChatPane, _: str) -> None:
    from minillm.ui.chat.tour import give_tour

    _check_idle(talk)
    if talk.engine.phase == "loading":
        talk.waiting.put("/tour")
    elif talk.can_ask():
        if getattr(talk.screen, "memory_view", "") != "strands":
            await talk.run_action("screen.view('strands')")
        await begin_conversation(talk, "")
        talk.conversation.is_trial = True
        talk.run_worker(give_tour(talk), group="tour", exclusive=True)


@command("editor", "write the question in $VISUAL or $EDITOR", "alt+x")
async def write_in_editor(talk: ChatPane, _: str) -> None:
    talk.prompt.begin(edited(talk.app, talk.prompt.full_text))


@command("suspend", "return to the shell; `fg` resumes the chat", "ctrl+z", scope="everywhere")
async def suspend(talk: ChatPane, _: str) -> None:
    if os.getsid(os.getppid()) != os.getsid(0):
        raise UsageError("there is no shell to return to")
    talk.app.action_suspend_process()


@command("quit", "quit the chat", "ctrl+q", label="Quit", scope="everywhere", key_action="app.leave",
         also=("exit", "bye"))  # fmt: skip
async def leave(talk: ChatPane, _: str) -> None:
    talk.app.exit()
