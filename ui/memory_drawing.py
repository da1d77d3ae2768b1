"""Draw the memory panel, at a rate of its own, and name the sequences that it shows."""

from textual.screen import Screen

from minillm.service.messages import FILES, SYSTEM_PROMPT, CacheChanged, MemoryUse, Stepped
from minillm.ui.chat.chat_pane import ChatPane
from minillm.ui.drawing import Drawing
from minillm.ui.memory.panel import MemoryPanel


def name_of_other_sequence(owner: str) -> str:
    """Return a name for a sequence that belongs to no turn of this conversation.

    On a server, it may belong to another client. ``owner`` is then a request's id such as ``chatcmpl-…``, or
    SESSION/REQUEST for another chat.
    """
    if "/" in owner:
        return f"chat {owner.partition('/')[0][1:5]}"
    kind, dash, number = owner.partition("-")
    known = {"chatcmpl": "client", "cmpl": "client", "prefix": "prefix", "request": "request"}
    return f"{known[kind]} {number[:4]}" if dash and kind in known else "another"


class MemoryDrawing:
    """Draws changes of the block pool, in the memory panel and next to the conversation's turns."""

    def __init__(self, screen: Screen[None], pane: ChatPane) -> None:
        self._screen, self._pane = screen, pane
        self.drawing = Drawing(screen, self._draw, share=0.008, longest=3.0)
        self._last_copier = ""  # the request that last copied a block
        self._earlier_names: dict[str, str] = {}  # request, also of earlier conversations -> its displayed name

    def take(self, event: CacheChanged | Stepped | MemoryUse) -> None:
        """Request a drawing of an event. The first copy on write of each answer is drawn at once.

        Other events wait for the usual interval, which may be seconds if the model computes on the app's CPU cores.
        """
        self.drawing.soon()
        if isinstance(event, CacheChanged):
            copier = next((entry.owner for entry in event.log if entry.kind == "copy"), self._last_copier)
            if copier != self._last_copier:
                self._last_copier = copier
                self.drawing.at_once()

    @property
    def _panel(self) -> MemoryPanel:
        return self._screen.query_one(MemoryPanel)

    async def _draw(self) -> None:
        if self._panel.display:
            self.show()
        self._pane.transcript.show_blocks(self._pane.pool)
        if self._pane.run is None:  # during an answer, new text refreshes the status
            self._pane.refresh_status()

    def show(self) -> None:
        """Show the latest changes in the memory panel."""
        panel, leaf, origins = self._panel, self._pane.conversation.leaf, self._pane.conversation.origins
        if leaf is None:
            panel.show_news(self.name_of, None)
            return
        current, beams = leaf.answer.request_id, [each for each in leaf.answer.candidates if each.score is not None]
        num_beams = 0 if leaf.answer.is_open else len(beams)
        panel.show_news(self.name_of, current, self.score_of, origins.get(current), num_beams)

    def score_of(self, owner: str, index: int) -> float | None:
        """Return the score of a beam of the last answer. Return None for any other sequence."""
        leaf = self._pane.conversation.leaf
        beams = leaf.answer.candidates if leaf is not None and leaf.answer.request_id == owner else []
        return beams[index].score if index < len(beams) else None

    def name_of(self, owner: str, index: int) -> str:
        """Return a sequence's name for display: ``turn 2 · answer 3`` is the third candidate of the second turn.

        ``owner`` is the sequence's request. A negative ``index`` stands for all sequences of the request.
        """
        summing, pool = self._pane.compaction, self._pane.pool
        if summing is not None and summing.request_id == owner:
            return "the summary"
        name = self._pane.conversation.name_of(owner)
        if name is None:
            known = owner if owner in (SYSTEM_PROMPT, FILES) else self._earlier_names.get(owner)
            return known or name_of_other_sequence(owner)
        self._earlier_names[owner] = name
        several = pool is not None and len(pool.tables_of(owner)) > 1
        if not several and (leaf := self._pane.conversation.leaf) is not None and leaf.answer.request_id == owner:
            several = bool(leaf.answer.candidates)
        if not several or index < 0:
            return name
        return f"{name.replace('answer', 'branch')} · answer {index + 1}"
