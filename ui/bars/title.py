"""The line on top: which model, where it runs, how it samples."""

from __future__ import annotations

from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

from minillm.text.safe import clean_line
from minillm.ui.messages import EngineState
from minillm.ui.settings import Settings, settings_summary

_PHASES = {
    "off": "no model loaded",
    "loading": "loading",
    "ready": "",
    "failed": "not loaded",
    "crashed": "engine ended",
}


class TitleBar(Widget):
    """Left: the model. Right: sampling, and whether there is a system prompt. Parts that do not fit are left out."""

    engine_state: reactive[EngineState] = reactive(EngineState())
    settings: reactive[Settings] = reactive(Settings(""))

    def render(self) -> Content:
        left, right = self._left(), self._right()
        width = self.content_size.width
        while right and sum(map(len, left)) + 3 * len(left) + sum(map(len, right)) + 3 * len(right) > width:
            right.pop()
        text = Content(" · ").join([Content.styled(left[0], "$text bold"), *map(Content, left[1:])])
        end = Content(" · ").join(map(Content, right))
        gap = max(1, width - text.cell_length - end.cell_length)
        return Content.assemble(text, " " * gap, end)

    def _left(self) -> list[str]:
        state = self.engine_state
        words = [clean_line(state.model or self.settings.model, 60)]
        if state.loaded is not None:
            words += [clean_line(state.loaded.device, 20), clean_line(state.loaded.dtype, 20)]
        elif _PHASES[state.phase]:
            words.append(_PHASES[state.phase])
        return words

    def _right(self) -> list[str]:
        words = settings_summary(self.settings).split(" · ")
        if self.settings.system:
            words.append("system prompt")
        return words
