"""The chat's settings: the user's file under the command line."""

from __future__ import annotations

from minillm.config import EngineConfig
from minillm.params import BeamSearchParams, SamplingParams
from minillm.ui.settings import CHAT_SAMPLING, Settings
from minillm.user_config import UserConfig


def load_settings(file: UserConfig, flags: Settings) -> Settings:
    """The file's settings under those of the command line, which names the model.

    Raises:
        UsageError: they contradict each other.
    """
    settings = Settings(
        model=flags.model,
        engine={**file.engine, **flags.engine},
        sampling={**CHAT_SAMPLING, **file.sampling, **flags.sampling},
        beams={**file.beams, **flags.beams},
        system=flags.system or file.system,
        theme=flags.theme or file.theme,
    )
    EngineConfig(**settings.engine)
    SamplingParams(**settings.sampling)
    BeamSearchParams(**settings.beams)
    return settings
