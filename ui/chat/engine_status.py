"""Describe the state of the engine in words, for notes between the turns and for the status bar."""

from minillm.service.messages import Loaded
from minillm.ui.bars import FULL, Status
from minillm.ui.chat.answer_run import AnswerRun
from minillm.ui.chat.compact import Compaction
from minillm.ui.chat.conversation import Answer, Conversation
from minillm.ui.engine_app import EngineState
from minillm.ui.memory.pool import Pool
from minillm.ui.numbers import count, duration

_ADVICE = {
    "failed": (" (F2 chooses a model, /reload tries again)", "error"),
    "crashed": (" (/reload restarts it; the conversation is kept)", "error"),
    "off": ("loading was canceled (/reload loads again, F2 chooses a model)", "warning"),
}  # by the engine's phase: a note's text after the error, and its kind


def notes_of(engine: EngineState) -> list[tuple[str, str]]:
    """Return the notes to show when the engine has entered a new phase, each as (text, kind): see `Note`."""
    if (loaded := engine.loaded) is not None:
        source = f" from {loaded.source}" if loaded.source else ""
        notes = [(f"{loaded.model}{source}, ready in {duration(loaded.seconds)}", "info")]
        if not loaded.has_chat_template:
            notes.append(("this model has no chat template, so it cannot chat (F2: choose another)", "warning"))
        return notes
    if engine.phase in _ADVICE:
        advice, kind = _ADVICE[engine.phase]
        if engine.server and engine.error:
            advice = " (/reload connects again; the conversation is kept)"
        return [(engine.error + advice, kind)]
    return []


def reason_to_wait(run: AnswerRun | None, compaction: Compaction | None) -> str:
    """Return why nothing can be asked now: an answer or a summary is being generated. Otherwise return ""."""
    if run is not None:
        return "an answer is being generated; Escape stops it"
    return "the conversation is being summarized; Escape stops it" if compaction is not None else ""


def full_context(loaded: Loaded | None, answer: Answer) -> str:
    """Return a warning if the context is nearly full after an answer, else ""."""
    if loaded is None or answer.num_context_tokens < FULL * loaded.max_model_len:
        return ""
    return (
        f"the context is nearly full ({count(answer.num_context_tokens)} of {count(loaded.max_model_len)} tokens): "
        "when it is, the oldest half will be left out; /compact summarizes it, Ctrl+N starts a new one"
    )


def status_of(
    engine: EngineState, run: AnswerRun | None, conversation: Conversation, pool: Pool | None, *, sums_up: bool
) -> Status:
    """Return the content of the status bar.

    Args:
        run: the answer in progress.
        sums_up: a summary is in progress.
    """
    answer = conversation.leaf.answer if conversation.leaf is not None else Answer("")
    return Status(
        activity="summarizing" if sums_up else _activity(engine, run, answer, pool),
        tokens_per_second=answer.tokens_per_second,
        time_to_first_token=answer.time_to_first_token,
        context_used=conversation.num_known_tokens,
        context_size=engine.loaded.max_model_len if engine.loaded is not None else 0,
        blocks_used=pool.used_blocks if pool is not None else 0,
        blocks_total=pool.num_blocks if pool is not None else 0,
    )


def _activity(engine: EngineState, run: AnswerRun | None, answer: Answer, pool: Pool | None) -> str:
    if engine.phase != "ready":
        return {"loading": "loading", "off": "no model"}.get(engine.phase, "failed")
    if run is None:
        tables = pool.tables.values() if pool is not None else ()
        others_run = any(each.state == "running" and each.owner not in ("", answer.request_id) for each in tables)
        return "others running" if others_run else "ready"
    if run.is_stopping:
        return "stopping"
    return "reading" if answer.time_to_first_token is None else "generating"
