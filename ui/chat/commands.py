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
from minillm.ui.chat.engine_status import reason_to_wait
from minillm.ui.chat.export import export
from minillm.ui.chat.slash import CommandTable, first_word
from minillm.ui.numbers import count, is_number, plural
from minillm.ui.preferences import BUILT_IN
from minillm.ui.settings import settings_summary, with_param

COMMANDS = CommandTable()
command = COMMANDS.command
_MOST_DEPTHS = 9  # because the keys 1 to 9 accept a candidate
_FENCE = re.compile(r"^(`{3,}|~{3,})[^\n]*\n(.*?)^\1", re.MULTILINE | re.DOTALL)


@command("help", "keys that work here; all keys and commands", "f1", label="Help", scope="everywhere")
async def show_help(pane: ChatPane, _: str) -> None:
    from minillm.ui.help import HelpScreen, keys_here
    from minillm.ui.keymap import bound_keys, named_bindings

    if not isinstance(pane.app.screen, HelpScreen):
        bindings = named_bindings(*pane.screen.BINDINGS, *COMMANDS.bindings("app", "everywhere"))
        keys = bound_keys(pane.app.settings.keymap, bindings)
        pane.app.push_screen(HelpScreen(COMMANDS, keys_here(pane.app.screen), keys))


@command("new", "start a new conversation; the old one is saved", "ctrl+n", label="New", also=("clear", "reset"))
async def begin_conversation(pane: ChatPane, _: str) -> None:
    pane.save()
    await pane.open_conversation(Conversation())


@command(
    "sessions", "saved conversations: search, resume, delete", "ctrl+o", argument="[words]", label="Open",
    also=("open", "load", "resume", "history"),
)  # fmt: skip
async def list_sessions(pane: ChatPane, words: str) -> None:
    from minillm.ui.dialogs import SessionsScreen

    _check_idle(pane)
    pane.save()

    async def chosen(path: Path | None) -> None:
        if path is None:
            return
        try:
            conversation = pane.store.load(path)
        except Exception as error:
            pane.notify(str(error))
            return
        _change(pane, system=conversation.system)
        await pane.open_conversation(conversation)

    pane.app.push_screen(SessionsScreen(pane.store, words, pane.close_deleted), chosen)


@command("delete", "delete this conversation for good, with its blocks on disk", argument="yes")
async def delete_conversation(pane: ChatPane, answer: str) -> None:
    _check_idle(pane)
    if answer != "yes":
        raise UsageError("/delete yes deletes this conversation for good")
    owner = pane.store.delete(pane.store.path_of(pane.conversation))
    await pane.open_conversation(Conversation())
    pane.send(Erase(owner))
    pane.notify("the conversation is deleted")


@command("find", "search in the conversation", "ctrl+f", argument="[words]", also=("search",))
async def find(pane: ChatPane, words: str) -> None:
    pane.search.open(words)


@command("title", "name the conversation for the Ctrl+O list", argument="TEXT", also=("rename",))
async def name_conversation(pane: ChatPane, text: str) -> None:
    pane.conversation.title = text
    pane.save()
    pane.notify(f"conversation named “{pane.conversation.shown_title}”")


@command("compact", "summarize the older half to free context; or undo that", argument="[undo]")
async def compact(pane: ChatPane, what: str) -> None:
    _check_idle(pane)
    if what == "undo":
        undo_summary(pane.conversation)
        pane.save()
        pane.refresh_status()
        pane.notify("the model sees the whole conversation again")
    elif what:
        raise UsageError(f"use /compact or /compact undo, not {what!r}")
    elif pane.can_ask():
        await pane.accept_best()
        pane.compaction = Compaction.begin(pane.conversation, pane.app.settings.system, pane.send)
        pane.refresh_status()


@command("export", "write the conversation to a file, .md or .json", argument="FILE", also=("save",))
async def write_to_file(pane: ChatPane, name: str) -> None:
    if pane.conversation.leaf is None:
        raise UsageError("there is nothing to export yet")
    pane.notify(f"written to {export(pane.conversation, Path(name))}")


def _check_idle(pane: ChatPane) -> None:
    if reason := reason_to_wait(pane.run, pane.compaction):
        raise UsageError(reason)


def _turn(pane: ChatPane) -> Turn:
    """Return the selected turn, or the last one. Raises UsageError if there is no turn."""
    turn = pane.transcript.selected or pane.conversation.leaf
    if turn is None:
        raise UsageError("there is no question yet")
    return turn


@command("edit", "change the selected question and ask again, as a branch", "alt+e")
async def edit(pane: ChatPane, _: str) -> None:
    turn = _turn(pane)
    _check_idle(pane)
    if pane.editing is None:
        pane.waiting.set_aside()
    pane.editing = turn
    pane.prompt.text = ""
    pane.prompt.put_back(turn.question)
    pane.prompt.focus()


@command("regenerate", "get another answer to the selected question, as a branch", "alt+r", also=("retry",))
async def regenerate(pane: ChatPane, _: str) -> None:
    turn = _turn(pane)
    if pane.can_ask():
        await pane.ask(turn.question, instead_of=turn)


@command("continue", "continue the last answer", "alt+c")
async def go_on(pane: ChatPane, _: str) -> None:
    leaf = pane.conversation.leaf
    if leaf is None:
        raise UsageError("there is no question yet")
    if pane.can_ask():
        await pane.accept_best()
        pane.begin(leaf).go_on()
        pane.refresh_status()


async def _fork(pane: ChatPane, turn: Turn, fork: Fork) -> None:
    """Continue an answer from another token. The result is a new branch next to ``turn``."""
    if pane.can_ask():
        branch = pane.conversation.fork(turn, fork)
        await pane.transcript.show_path(pane.conversation)
        pane.begin(branch).go_on()
        pane.refresh_status()
        pane.save()


_BRANCH_KEYS: dict[str, Any] = {"keys": {"alt+left": "previous", "alt+right": "next"}, "shown_key": "Alt+← →"}


@command("branch", "show the next or previous branch", argument="[next|previous]", **_BRANCH_KEYS)
async def switch_branch(pane: ChatPane, direction: str) -> None:
    if not any(each.startswith(direction) for each in ("next", "previous")):
        raise UsageError(f"use /branch next or /branch previous, not {direction!r}")
    _check_idle(pane)
    conversation, turn = pane.conversation, _turn(pane)
    branching = next((t for t in [turn, *conversation.turns[::-1]] if len(conversation.siblings(t)) > 1), None)
    if branching is None:
        raise UsageError("there is only one branch; Alt+E or Alt+R starts another")
    await pane.accept_best()
    chosen = conversation.switch(branching, -1 if direction.startswith("p") else 1)
    await pane.transcript.show_path(conversation)
    await pane.transcript.go_to(chosen)
    pane.refresh_status()
    pane.save()


@command("accept", "accept candidate N; the others become branches", argument="N", shown_key="1 … 9")
async def accept(pane: ChatPane, number: str) -> None:
    turn = next((turn for turn in pane.conversation.turns[::-1] if turn.answer.candidates), None)
    if turn is None:
        raise UsageError("there are no answers to choose from; /n 3 asks for three")
    last = len(turn.answer.candidates)
    if not is_number(number) or not 1 <= int(number) <= last:
        raise UsageError(f"give a candidate's number from 1 to {last}")
    if pane.run is not None and pane.run.turn is turn:
        pane.run.stop(chosen=int(number) - 1)  # the candidate is accepted when all others have stopped
        pane.refresh_status()
    else:
        await pane.accept(turn, int(number) - 1)


@command("undo", "undo the choice of a candidate", "alt+u")
async def undo(pane: ChatPane, _: str) -> None:
    _check_idle(pane)
    pane.prompt.forget_pick()
    await pane.show_again(pane.conversation.undo())


@command("copy", "copy the selected answer, or its last code block", "alt+y", argument="[code]")
async def copy(pane: ChatPane, part: str) -> None:
    if part not in ("", "code"):
        raise UsageError(f"use /copy or /copy code, not {part!r}")
    turn = _turn(pane)
    text = turn.answer.text
    if candidates := turn.answer.candidates:
        view = pane.transcript.view_of(turn)
        shown = None if view is None else view.answer_view
        text = candidates[shown.focused_index if isinstance(shown, CandidatesView) else 0].text
    if part:
        blocks = [match.group(2) for match in _FENCE.finditer(text)]
        if not blocks:
            raise UsageError("the answer has no code block")
        text = blocks[-1]
    pane.app.copy_to_clipboard(text)
    pane.notify("code block copied" if part else "answer copied")


@command("probabilities", "show token probabilities; Enter continues from an alternative", "alt+p")
async def show_probabilities(pane: ChatPane, _: str) -> None:
    from minillm.ui.dialogs import ProbabilityScreen

    turn = _turn(pane)
    if turn.answer.candidates:
        raise UsageError("choose an answer first")
    if not turn.answer.tokens:
        raise UsageError("this answer has no probabilities: they are not known for beams and saved answers")
    _ask(pane, ProbabilityScreen(turn.answer.tokens), lambda fork: pane.call_later(_fork, pane, turn, fork))


def _change(pane: ChatPane, **changes: Any) -> None:
    pane.app.settings = replace(pane.app.settings, **changes)


def _ask(pane: ChatPane, dialog: ModalScreen[Any], act: Callable[[Any], Any]) -> None:
    """Open a dialog. If it returns a result, call ``act`` with it."""
    pane.app.push_screen(dialog, lambda result: None if result is None else act(result))


@command("model", "choose another model", "f2", argument="[NAME]", label="Model")
async def choose_model(pane: ChatPane, name: str) -> None:
    from minillm.ui.dialogs import ModelScreen

    if pane.engine.server:
        raise UsageError("the server chooses the model: quit and use `minillm chat --model NAME` for another")
    if name:
        pane.app.choose_model(name)
    else:
        loaded, pool = pane.engine.loaded, pane.pool
        use = None if pool is None or loaded is None or loaded.device == "cpu" else pool.use
        dialog = ModelScreen(pane.app.settings, 0 if use is None else use.total)
        _ask(pane, dialog, pane.app.choose_model)


@command("reload", "load the model again", "ctrl+r")
async def reload(pane: ChatPane, _: str) -> None:
    pane.app.load_model()


@command("sampling", "temperature, top-p, beams and more", "f3", label="Sampling")
async def choose_sampling(pane: ChatPane, _: str) -> None:
    from minillm.ui.dialogs import SamplingScreen

    _ask(pane, SamplingScreen(pane.app.settings), partial(setattr, pane.app, "settings"))


@command("set", "change one parameter", argument="NAME VALUE")
async def set_parameter(pane: ChatPane, words: str) -> None:
    name, value = first_word(words)
    pane.app.settings = with_param(pane.app.settings, name, value)
    pane.notify(f"next question: {name} {value or 'off'}")


@command("preset", "use a sampling preset: precise, balanced, creative, your own", argument="[save|delete] [NAME]")
async def use_preset(pane: ChatPane, words: str) -> None:
    app, (verb, name) = pane.app, first_word(words)
    if not words:
        pane.notify(f"presets: {', '.join({**BUILT_IN, **app.preferences.presets})}")
    elif verb in ("save", "delete"):
        sampling = app.settings.sampling if verb == "save" else None
        app.save_preferences(app.preferences.with_preset(name, sampling))
        pane.notify(f"preset {name} {verb}d")
    else:
        _change(pane, sampling=dict(app.preferences.preset(words)), beams={})
        pane.notify(f"next question: {words} ({settings_summary(app.settings)})")


@command("think", "thinking: on, off, or at most N tokens", argument="on|off|N")
async def choose_thinking(pane: ChatPane, word: str) -> None:
    if word not in ("on", "off") and not is_number(word):
        raise UsageError(f"use /think on, /think off or /think 512, not {word!r}")
    loaded, settings = pane.engine.loaded, pane.app.settings
    sampling = {name: value for name, value in settings.sampling.items() if name != "max_reasoning_tokens"}
    if is_number(word):
        _check_tags(pane)
        SamplingParams(max_reasoning_tokens=int(word))
        sampling["max_reasoning_tokens"] = int(word)
        _change(pane, sampling=sampling, thinks=True if loaded is not None and loaded.has_thinking_switch else None)
        pane.notify(f"next question: at most {plural(int(word), 'token')} of thought")
        return
    if loaded is not None and not loaded.has_thinking_switch:
        if not loaded.has_reasoning_tags:
            raise UsageError("this model's template cannot turn thinking on or off")
        _change(pane, sampling={**sampling, "max_reasoning_tokens": 0} if word == "off" else sampling, thinks=None)
    else:
        _change(pane, sampling=sampling, thinks=word == "on")
    pane.notify(f"next question: thinking {word}")


def _check_tags(pane: ChatPane) -> None:
    if (loaded := pane.engine.loaded) is not None and not loaded.has_reasoning_tags:
        raise UsageError("this model has no <think> tags, so its thinking cannot be limited")


@command("depths", "answers after several amounts of one thought", argument="N,N,…|off")
async def choose_depths(pane: ChatPane, words: str) -> None:
    if words == "off":
        _change(pane, depths=())
        pane.notify("next question: one answer")
        return
    numbers = words.replace(",", " ").split()
    if not all(map(is_number, numbers)):
        raise UsageError(f"use /depths 256,512,1024 or /depths off, not {words!r}")
    depths = tuple(sorted(set(map(int, numbers))))
    if not 2 <= len(depths) <= _MOST_DEPTHS:
        raise UsageError(f"give from 2 to {_MOST_DEPTHS} different depths; /think 512 limits one answer")
    _check_tags(pane)
    SamplingParams(max_reasoning_tokens=depths[-1], reasoning_depths=depths[:-1])
    _change(pane, depths=depths, thinks=pane.app.settings.thinks or None)
    pane.notify(f"next question: answers after {', '.join(map(count, depths))} tokens of thought")


@command("n", "get N answers to choose from", argument="N")
async def choose_n(pane: ChatPane, number: str) -> None:
    settings = replace(pane.app.settings, depths=())
    pane.app.settings = with_param(with_param(settings, "beam_width", "1"), "n", number)
    pane.notify(f"next question: {plural(pane.app.settings.num_candidates, 'answer')}")


@command("beams", "use beam search with N beams; 1: sample again", argument="N")
async def choose_beams(pane: ChatPane, number: str) -> None:
    _change(pane, depths=())
    await set_parameter(pane, f"beam_width {number}")


@command("system", "set the system prompt; its blocks are pinned", "f4", argument="[TEXT]", label="System")
async def choose_system(pane: ChatPane, text: str) -> None:
    from minillm.ui.dialogs import SystemScreen

    if text:
        _change(pane, system=text)
        pane.notify("next question: new system prompt")
    else:
        _ask(pane, SystemScreen(pane.app.settings.system), lambda system: _change(pane, system=system))


for _view in VIEWS:

    @command(_view.name, _view.summary, _view.key, label="Pool" if _view.name == "pool" else "")
    async def show_view(pane: ChatPane, _: str, name: str = _view.name) -> None:
        await pane.run_action(f"screen.view({name!r})")


@command("theme", "use a theme: light, dark, or one of Textual's", "ctrl+t", argument="[NAME]", scope="app")
async def choose_theme(pane: ChatPane, name: str) -> None:
    pane.app.set_theme(name)


@command("tour", "watch a fork and copy on write, in a minute")
async def tour(pane: ChatPane, _: str) -> None:
    from minillm.ui.chat.tour import give_tour

    _check_idle(pane)
    if pane.engine.phase == "loading":
        pane.waiting.put("/tour")
    elif pane.can_ask():
        if getattr(pane.screen, "memory_view", "") != "strands":
            await pane.run_action("screen.view('strands')")
        await begin_conversation(pane, "")
        pane.conversation.is_trial = True
        pane.run_worker(give_tour(pane), group="tour", exclusive=True)


@command("editor", "write the question in $VISUAL or $EDITOR", "alt+x")
async def write_in_editor(pane: ChatPane, _: str) -> None:
    pane.prompt.begin(edited(pane.app, pane.prompt.full_text))


@command("suspend", "return to the shell; `fg` resumes the chat", "ctrl+z", scope="everywhere")
async def suspend(pane: ChatPane, _: str) -> None:
    if os.getsid(os.getppid()) != os.getsid(0):
        raise UsageError("there is no shell to return to")
    pane.app.action_suspend_process()


@command("quit", "quit the chat", "ctrl+q", label="Quit", scope="everywhere", key_action="app.leave",
         also=("exit", "bye"))  # fmt: skip
async def leave(pane: ChatPane, _: str) -> None:
    pane.app.exit()
